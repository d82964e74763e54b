#include <nvshmem.h>
#include <nvshmemx.h>

#include "runtime/check.h"
#include "transport/nvshmem/send.h"

namespace distca::cuda {
namespace {

constexpr int kThreads = 256;

/// One block: the network does the rest. Nothing here waits for a put to complete.
__global__ void __launch_bounds__(kThreads) send_kernel(RemoteMessage m, Guard guard) {
  if (transport::is_stopped(guard)) return;
  for (int32_t i = 0; i < m.num_pieces; ++i) {
    const SendPiece& piece = m.pieces[i];
    const auto bytes = static_cast<size_t>(piece.bytes);
    if (m.num_pieces == 1 && m.signal != nullptr)
      nvshmemx_putmem_signal_nbi_block(m.to + piece.to, m.from + piece.from, bytes, m.signal, m.signal_value,
                                       NVSHMEM_SIGNAL_SET, m.peer);
    else
      nvshmemx_putmem_nbi_block(m.to + piece.to, m.from + piece.from, bytes, m.peer);
  }
  if (m.num_pieces == 1 || m.signal == nullptr) return;
  __syncthreads();
  if (threadIdx.x == 0) {
    nvshmem_fence();  // the pieces before the signal
    nvshmemx_signal_op(m.signal, m.signal_value, NVSHMEM_SIGNAL_SET, m.peer);
  }
}

}  // namespace

void send(const RemoteMessage& message, const Guard& guard, cudaStream_t stream) {
  send_kernel<<<1, kThreads, 0, stream>>>(message, guard);
  check(cudaGetLastError(), "the kernel that sends a message");
}

}  // namespace distca::cuda
