// The backend of a rank on one GPU. This library's kernels move and sum rows; they or ATen compute attention, as the
// caller chooses.
#pragma once

#include <memory>

#include "runtime/cuda_library.h"

namespace distca::cuda {

/// Makes the backend. `aten` provides memory, and attention unless `own_attention` is set. Work is queued on `streams`,
/// which make_cuda_streams has made. Where they are null, it is queued on the stream that PyTorch has current in the
/// calling thread.
std::shared_ptr<runtime::Backend> make_device_backend(std::shared_ptr<runtime::Backend> aten, int device,
                                                      runtime::CurrentStream current_stream, bool own_attention,
                                                      const std::shared_ptr<transport::Streams>& streams);

}  // namespace distca::cuda
