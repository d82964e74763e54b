// A word of the host that says how far a stream has come.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace distca::cuda {

/// Sets *to = *from when the stream comes to it, and adds 1 to *repeats if *to had that value already. The words lie in
/// page-locked memory that the device addresses.
void mark(const uint64_t* from, uint64_t* to, uint64_t* repeats, cudaStream_t stream);
void load_mark_kernel();

}  // namespace distca::cuda
