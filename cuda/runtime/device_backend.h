// The work of a rank on one GPU: rows by this library's kernels, attention by them or by ATen, as is asked.
#pragma once

#include <memory>

#include "runtime/cuda_library.h"

namespace distca::cuda {

/// `aten` brings memory, and attention unless `own_attention`. Work is queued on `streams`, those of make_cuda_streams,
/// or where they are null on the stream that PyTorch has current in the calling thread.
std::shared_ptr<runtime::Backend> make_device_backend(std::shared_ptr<runtime::Backend> aten, int device,
                                                      runtime::CurrentStream current_stream, bool own_attention,
                                                      const std::shared_ptr<transport::Streams>& streams);

}  // namespace distca::cuda
