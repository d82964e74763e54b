#include "runtime/check.h"
#include "runtime/mark.h"
#include "transport/guard.h"

namespace distca::cuda {
namespace {

__global__ void mark_kernel(const uint64_t* from, uint64_t* to, uint64_t* repeats) {
  const uint64_t turn = transport::load_acquire(from);
  if (transport::load_acquire(to) == turn) transport::store_release(repeats, transport::load_acquire(repeats) + 1);
  transport::store_release(to, turn);
}

}  // namespace

void load_mark_kernel() { load_kernel(mark_kernel); }

void mark(const uint64_t* from, uint64_t* to, uint64_t* repeats, cudaStream_t stream) {
  mark_kernel<<<1, 1, 0, stream>>>(from, to, repeats);
  check(cudaGetLastError(), "the kernel that says how far a stream has come");
}

}  // namespace distca::cuda
