// The transport between devices that write into each other's memory. Rows travel by streams, and everything else by way
// of the hosts.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "common/error.h"
#include "transport/put_table.h"
#include "transport/stream_order.h"
#include "transport/streams.h"
#include "transport/wrapper.h"

namespace distca::transport {

/// A rank's memory on its device, as this rank addresses it: its heap, and the words that streams signal. Both are null
/// if load and store do not reach it.
struct DeviceMemory {
  std::byte* heap = nullptr;
  uint64_t* words = nullptr;
};

/// The heaps and words of all ranks, and the owner that keeps them allocated. After a fault the owner is not released,
/// because a peer may still write.
struct DeviceHeaps {
  std::vector<DeviceMemory> ranks;
  int64_t heap_bytes = 0;
  int64_t num_words = 0;
  std::shared_ptr<void> owner;
  // Set if load and store do not reach all ranks:
  std::shared_ptr<Sender> sender = nullptr;
  std::span<std::byte> send_arena = {};
};

/// Allocates those of ranks of one process, on the devices of these streams.
DISTCA_EXPORT DeviceHeaps allocate_heaps(int64_t heap_bytes, int64_t num_words,
                                         std::span<const std::shared_ptr<Streams>> streams);

/// Queues puts, grants and announcements on the streams of a rank. `control` is a transport between the hosts whose
/// heap is not used. It carries what ranks publish, their faults, and the news of who is gone. Its signal words are not
/// those of the streams, although they have the same numbers.
class DISTCA_EXPORT StreamTransport final : public WrappingTransport, public StreamOrder {
 public:
  StreamTransport(const char* name, std::unique_ptr<Transport> control, std::shared_ptr<Streams> streams,
                  DeviceHeaps heaps);
  ~StreamTransport() override;

  const char* name() const override { return name_; }
  std::span<std::byte> heap() override;
  void put(int peer, int64_t heap_offset, int64_t dst_row_stride, int64_t dst_head_stride, const RowView& src,
           const RowExtent& extent) override;
  void signal(int peer, int64_t word, uint64_t value) override { inner_->signal(peer, word, value); }
  void quiet() override;
  void cancel() noexcept override;
  // Also called by the thread that watches.
  std::optional<Departure> departed() const override;
  std::optional<Departure> departed(int peer) const override;
  StreamOrder* stream_order() override { return this; }

  void begin() override;
  void reuse(int64_t slot) override;
  void grant(int peer, int64_t word, uint64_t value, int64_t slot, bool after_work) override;
  void await_credit(const StreamWait& wait) override;
  void announce(int peer, int64_t word, uint64_t value) override;
  void send(int64_t slot) override;
  void end_reads(int64_t slot) override;
  void await_reads(int64_t slot) override;
  void await_rows(std::span<const StreamWait> waits, int64_t slot) override;
  void poison(const RowView& rows, const RowExtent& n) override { streams_->fill_nan_if_stopped(rows, n); }
  void end(int64_t slot) override;
  void join() override;
  bool is_captured() const override { return streams_->is_captured(); }
  void set_tape(std::shared_ptr<Tape> tape) override;
  void replay(const Tape& tape) override { streams_->replay(tape); }
  std::optional<StreamFault> fault() const override { return streams_->fault(); }
  void stop() noexcept override;
  void watch(std::function<void()> look) override;

 private:
  class Watch;

  void forget_unsent();
  const DeviceMemory& memory_of(int peer) const;
  bool is_remote(int peer) const { return memory_of(peer).heap == nullptr; }
  /// A peer's word as this rank addresses it. For a remote peer that is the word at the same place in this rank's own
  /// memory.
  uint64_t* word_of(int peer, int64_t word) const;
  void open_message(int peer);
  /// Returns where to pack rows that go to that place in a remote peer's heap. If the send arena is full, what it holds
  /// is sent first.
  std::byte* pack(int peer, const Write& write, const RowExtent& extent);

  const char* name_;
  std::shared_ptr<Streams> streams_;
  DeviceHeaps heaps_;
  std::atomic<bool> stopped_{false};
  mutable std::mutex departures_;
  std::unique_ptr<Watch> watch_;

  // The next `send` starts these.
  PutTable table_;
  SendTable sends_, early_sends_;
  PutMessage next_ = {};  // the message that the next put to its peer opens
  bool is_open_ = false;
  std::vector<SignalTo> early_grants_, late_grants_;
  int64_t slot_ = 0;           // the slot that the grants are for
  bool has_sent_ = false;      // rows or words since `reuse`
  bool is_recording_ = false;  // then each call queues the same operations, even with nothing to do
  std::vector<AwaitedMessage> awaited_;
};

}  // namespace distca::transport
