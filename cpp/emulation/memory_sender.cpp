#include "emulation/memory_sender.h"

#include <cstring>
#include <thread>
#include <utility>

#include "common/worker.h"

namespace distca::emulation {

using namespace transport;

namespace {

class MemorySender final : public Sender {
 public:
  MemorySender(int rank, std::vector<DeviceMemory> ranks)
      : own_(ranks[static_cast<size_t>(rank)]),
        ranks_(std::move(ranks)),
        queue_("distca network", [this](const Sent& sent) { deliver(sent); }) {}

  void send(const Tables& tables, const Guard& guard, void* /*stream*/) override {
    for (uint64_t i = 0; i < *tables.num_messages; ++i) {
      const SendMessage& m = tables.messages[i];
      if (is_stopped(guard)) return;
      if (m.credit != nullptr && !await(guard, {m.credit, m.credit_value, m.peer, Awaited::kCredit, m.round})) return;
      const SendPiece* const pieces = tables.pieces + m.first_piece;
      queue_.post({m, {pieces, pieces + m.num_pieces}});
    }
  }
  void quiet(void* /*stream*/) override { queue_.drain(); }

 private:
  struct Sent {
    SendMessage message;
    std::vector<SendPiece> pieces;
  };

  void deliver(const Sent& sent) {
    const DeviceMemory& peer = ranks_[static_cast<size_t>(sent.message.peer)];
    for (const SendPiece& p : sent.pieces) {
      std::this_thread::yield();  // delivers late: the stream that packed the piece may be far ahead
      std::memcpy(peer.heap + (p.to - own_.heap), p.from, static_cast<size_t>(p.bytes));
    }
    const SendMessage& m = sent.message;
    if (m.signal != nullptr) store_release(peer.words + (m.signal - own_.words), m.signal_value);
  }

  DeviceMemory own_;
  std::vector<DeviceMemory> ranks_;
  WorkQueue<Sent> queue_;  // last: it ends before what it uses goes
};

}  // namespace

std::shared_ptr<Sender> make_memory_sender(int rank, std::vector<DeviceMemory> ranks) {
  return std::make_shared<MemorySender>(rank, std::move(ranks));
}

}  // namespace distca::emulation
