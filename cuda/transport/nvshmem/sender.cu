#include <nvshmem.h>
#include <nvshmemx.h>

#include <algorithm>

#include "runtime/check.h"
#include "transport/guard.h"
#include "transport/nvshmem/sender.h"

namespace distca::cuda {
namespace {

using transport::Awaited;
using transport::Guard;
using transport::Sender;
using transport::SendMessage;
using transport::SendPiece;

constexpr int kThreads = 256;
/// The most thread blocks. Each sends one message at a time, and most of the work is the network's.
constexpr size_t kMostBlocks = 16;

/// Sends messages. Nothing here waits for a put to complete.
__global__ void __launch_bounds__(kThreads) send_kernel(Sender::Tables tables, Guard guard) {
  __shared__ bool may_send;
  for (uint64_t i = blockIdx.x; i < *tables.num_messages; i += gridDim.x) {
    const SendMessage& m = tables.messages[i];
    if (threadIdx.x == 0) {
      may_send = !is_stopped(guard);
      if (may_send && m.credit != nullptr)
        may_send = transport::await(guard, {m.credit, m.credit_value, m.peer, Awaited::kCredit, m.round});
    }
    __syncthreads();
    if (!may_send) return;
    const bool in_one = m.num_pieces == 1 && m.signal != nullptr;
    for (int32_t piece = m.first_piece; piece < m.first_piece + m.num_pieces; ++piece) {
      const SendPiece& p = tables.pieces[piece];
      const auto bytes = static_cast<size_t>(p.bytes);
      if (in_one)
        nvshmemx_putmem_signal_nbi_block(p.to, p.from, bytes, m.signal, m.signal_value, NVSHMEM_SIGNAL_SET, m.peer);
      else
        nvshmemx_putmem_nbi_block(p.to, p.from, bytes, m.peer);
    }
    __syncthreads();
    if (!in_one && m.signal != nullptr && threadIdx.x == 0) {
      nvshmem_fence();  // orders the pieces before the signal
      nvshmemx_signal_op(m.signal, m.signal_value, NVSHMEM_SIGNAL_SET, m.peer);
    }
  }
}

class NvshmemSender final : public Sender {
 public:
  NvshmemSender() { load_kernel(send_kernel); }

  void send(const Tables& tables, const Guard& guard, void* stream) override {
    const auto blocks = static_cast<unsigned>(std::clamp<size_t>(tables.most_messages, 1, kMostBlocks));
    send_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(tables, guard);
    check(cudaGetLastError(), "the kernel that sends messages");
  }
  void quiet(void* stream) override { nvshmemx_quiet_on_stream(static_cast<cudaStream_t>(stream)); }
};

}  // namespace

std::shared_ptr<Sender> make_nvshmem_sender() { return std::make_shared<NvshmemSender>(); }

}  // namespace distca::cuda
