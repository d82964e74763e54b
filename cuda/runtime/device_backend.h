// The work of a rank on one GPU: rows by this library's kernels, attention by those it has for the GPU and the heads,
// else by ATen.
#pragma once

#include <memory>

#include "runtime/cuda_library.h"

namespace distca::cuda {

/// `aten` brings memory, and attention where this library has none or `own_attention` is false. Work is queued on
/// `streams`, those of make_cuda_streams, or where they are null on the stream that PyTorch has current in the calling
/// thread.
std::shared_ptr<runtime::Backend> make_device_backend(std::shared_ptr<runtime::Backend> aten, int device,
                                                      runtime::CurrentStream current_stream, bool own_attention,
                                                      const std::shared_ptr<transport::Streams>& streams);

}  // namespace distca::cuda
