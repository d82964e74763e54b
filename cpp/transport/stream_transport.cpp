#include "transport/stream_transport.h"

#include <utility>

#include "common/worker.h"
#include "transport/host_memory.h"

namespace distca::transport {
namespace {

using Stream = Streams::Stream;

// Points of the streams. Each slot has one for the end of its last use, one for what was sent of it last, and one for
// what was sent last that lies in the caller's tensors.
constexpr int end_of(int64_t slot) { return static_cast<int>(slot); }
constexpr int sent_of(int64_t slot) { return static_cast<int>(kNumSlots + slot); }
constexpr int read_of(int64_t slot) { return static_cast<int>(2 * kNumSlots + slot); }
constexpr int kWorkSoFar = 3 * kNumSlots, kSentSoFar = 3 * kNumSlots + 1;
static_assert(kSentSoFar < Streams::kNumPoints);

}  // namespace

DeviceHeaps allocate_heaps(int64_t heap_bytes, int64_t num_words, std::span<const std::shared_ptr<Streams>> streams) {
  check_region_sizes(heap_bytes, num_words);
  auto memory = std::make_shared<std::vector<std::shared_ptr<std::byte>>>();
  DeviceHeaps heaps{.ranks = {}, .heap_bytes = heap_bytes, .num_words = num_words, .owner = memory};
  for (const std::shared_ptr<Streams>& one : streams) {
    std::byte* const heap = memory->emplace_back(one->allocate(heap_bytes)).get();
    std::byte* const words = memory->emplace_back(one->allocate(num_words * 8)).get();
    heaps.ranks.push_back({heap, reinterpret_cast<uint64_t*>(words)});
  }
  return heaps;
}

/// A thread that calls `look` every 2 milliseconds, to see what only the host can see.
class StreamTransport::Watch {
 public:
  explicit Watch(std::function<void()> look) : look_(std::move(look)), thread_("distca watch", [this] { run(); }) {}

  bool is_forked() const { return thread_.is_forked(); }

 private:
  void run() {
    std::unique_lock lock(thread_.mutex());
    while (!thread_.posted().wait_for(lock, std::chrono::milliseconds(2), [&] { return thread_.is_stopping(); })) {
      lock.unlock();
      look_();
      lock.lock();
    }
  }

  std::function<void()> look_;
  Worker thread_;  // last: it ends before what it uses goes
};

StreamTransport::StreamTransport(const char* name, std::unique_ptr<Transport> control, std::shared_ptr<Streams> streams,
                                 DeviceHeaps heaps)
    : WrappingTransport(std::move(control)),
      name_(name),
      streams_(std::move(streams)),
      heaps_(std::move(heaps)),
      sends_(heaps_.send_arena) {
  require(static_cast<int>(heaps_.ranks.size()) == num_ranks(), name, ": heaps of ", heaps_.ranks.size(), " ranks, ",
          num_ranks(), " are there");
}

StreamTransport::~StreamTransport() {
  streams_->drain();
  watch_.reset();
  // After a fault nobody knows who still writes there. The memory is then kept until the process ends.
  if (stopped_ || streams_->fault()) static_cast<void>(new std::shared_ptr<void>(std::move(heaps_.owner)));
}

std::span<std::byte> StreamTransport::heap() {
  return {memory_of(rank()).heap, static_cast<size_t>(heaps_.heap_bytes)};
}

const DeviceMemory& StreamTransport::memory_of(int peer) const {
  inner_->check_peer(peer);
  return heaps_.ranks[static_cast<size_t>(peer)];
}

uint64_t* StreamTransport::word_of(int peer, int64_t word) const {
  require(word >= 0 && word < heaps_.num_words, "signal word ", word, " does not exist; there are ", heaps_.num_words);
  return (is_remote(peer) ? memory_of(rank()) : memory_of(peer)).words + word;
}

void StreamTransport::begin() {
  if (is_recording_) return;  // a replay comes after all work on its stream
  for (int64_t slot = 0; slot < kNumSlots; ++slot) streams_->wait_for(Stream::kWork, end_of(slot));
}

void StreamTransport::reuse(int64_t slot) {
  streams_->wait_for(Stream::kWork, sent_of(slot));
  has_sent_ = false;
}

void StreamTransport::end_reads(int64_t slot) {
  if (has_sent_ || is_recording_) streams_->record(read_of(slot), Stream::kTransfer);
}

void StreamTransport::await_reads(int64_t slot) { streams_->wait_for(Stream::kWork, read_of(slot)); }

void StreamTransport::await_credit(const StreamWait& wait) {
  next_ = {.peer = wait.peer,
           .num_chunks = 0,
           .credit = word_of(rank(), wait.word),
           .credit_value = wait.value,
           .signal = nullptr,
           .signal_value = 0,
           .round = wait.round};
  is_open_ = false;
}

void StreamTransport::put(int peer, int64_t heap_offset, int64_t dst_row_stride, int64_t dst_head_stride,
                          const RowView& src, const RowExtent& extent) {
  const Write write = checked_put(peer, heap_offset, dst_row_stride, dst_head_stride, src, extent);
  if (!is_open_ || next_.peer != peer) {
    if (next_.peer != peer) next_ = {.peer = peer};
    open_message(peer);
    is_open_ = true;
  }
  if (extent.bytes() == 0) return;
  std::byte* const to = is_remote(peer) ? pack(peer, write, extent) : memory_of(peer).heap + write.heap_offset;
  table_.add({to, dst_row_stride, dst_head_stride}, src, extent);
}

void StreamTransport::open_message(int peer) {
  if (!is_remote(peer)) return table_.open(next_);
  table_.open({.peer = peer});  // packing needs no credit
  sends_.open({.peer = peer,
               .first_piece = 0,
               .num_pieces = 0,
               .credit = next_.credit,
               .credit_value = next_.credit_value,
               .signal = nullptr,
               .signal_value = 0,
               .round = next_.round});
}

std::byte* StreamTransport::pack(int peer, const Write& write, const RowExtent& extent) {
  std::byte* const there = memory_of(rank()).heap + write.heap_offset;
  const auto packed = [&] { return sends_.add(there, write.dst_row_stride, write.dst_head_stride, extent); };
  if (std::byte* const to = packed()) return to;
  require<CapacityError>(!is_recording_, "plan sends more than the send arena of ", heaps_.send_arena.size(),
                         " bytes holds to ranks of other hosts in one call, which cannot be recorded");
  // What is packed next waits until all of this has left the arena.
  send(slot_);
  next_.credit = nullptr;  // what was sent has awaited it already
  open_message(peer);
  std::byte* const to = packed();
  require<CapacityError>(to != nullptr, "rows of ", extent.bytes(), " bytes for rank ", peer,
                         " do not fit into the send arena of ", heaps_.send_arena.size(), " bytes");
  return to;
}

void StreamTransport::announce(int peer, int64_t word, uint64_t value) {
  const bool has_rows = is_open_ && next_.peer == peer;
  if (is_remote(peer)) {
    if (!has_rows) sends_.open({.peer = peer});
    sends_.close(word_of(peer, word), value);
  } else if (has_rows) {
    table_.close(word_of(peer, word), value);
  } else {
    late_grants_.push_back({word_of(peer, word), value});
  }
  next_ = {.peer = -1};
  is_open_ = false;
}

void StreamTransport::grant(int peer, int64_t word, uint64_t value, int64_t slot, bool after_work) {
  slot_ = slot;
  uint64_t* const there = word_of(peer, word);
  if (!is_remote(peer)) return (after_work ? late_grants_ : early_grants_).push_back({there, value});
  SendTable& sends = after_work ? sends_ : early_sends_;
  sends.open({.peer = peer});
  sends.close(there, value);
}

void StreamTransport::send(int64_t slot) {
  require(slot >= 0 && slot < kNumSlots, "slot ", slot, "; there are ", kNumSlots);
  const bool sends_early = heaps_.sender && (!early_sends_.empty() || is_recording_);
  const bool sends_late = heaps_.sender && (!sends_.empty() || is_recording_);
  if (!early_grants_.empty() || sends_early || is_recording_) {
    streams_->wait_for(Stream::kTransfer, end_of(slot));
    if (!early_grants_.empty() || is_recording_) streams_->signal(early_grants_);
    if (sends_early) streams_->send(early_sends_, heaps_.sender);
    early_grants_.clear();
    early_sends_.clear();
  }
  if (late_grants_.empty() && table_.empty() && !sends_late && !is_recording_) return;
  streams_->record(kWorkSoFar, Stream::kWork);
  streams_->wait_for(Stream::kTransfer, kWorkSoFar);
  if (!late_grants_.empty() || is_recording_) streams_->signal(late_grants_);
  // Rows are packed where rows that were sent before lay. Those must have left first.
  if (sends_late) streams_->quiet(heaps_.sender);
  if (!table_.empty() || is_recording_) streams_->put(table_);
  if (sends_late) streams_->send(sends_, heaps_.sender);
  streams_->record(sent_of(slot), Stream::kTransfer);
  has_sent_ = true;
  late_grants_.clear();
  table_.clear();
  sends_.clear();
}

void StreamTransport::await_rows(std::span<const StreamWait> waits, int64_t slot) {
  if (waits.empty() && !is_recording_) return;
  // A graph may do on one stream what was queued on two, in any order that its edges allow. The wait must come after
  // what peers need before they can send what is awaited here.
  if (is_recording_) streams_->wait_for(Stream::kWork, sent_of(slot));
  awaited_.clear();
  for (const StreamWait& w : waits) awaited_.push_back({word_of(rank(), w.word), w.value, w.peer, w.what, w.round});
  streams_->await(awaited_);
}

void StreamTransport::join() {
  streams_->record(kSentSoFar, Stream::kTransfer);
  streams_->wait_for(Stream::kWork, kSentSoFar);
}

void StreamTransport::end(int64_t slot) {
  streams_->record(end_of(slot), Stream::kWork);
  streams_->join_host();
}

void StreamTransport::set_tape(std::shared_ptr<Tape> tape) {
  forget_unsent();
  is_recording_ = tape != nullptr;
  streams_->set_tape(std::move(tape));
}

void StreamTransport::quiet() {
  // Where the streams are done, what goes to other hosts has only been started. After a fault it may never end.
  try {
    if (heaps_.sender && !stopped_ && !streams_->fault()) streams_->quiet(heaps_.sender);
  } catch (const std::exception&) {
    // The device is gone, and with it all that was queued.
  }
  streams_->drain();
}

void StreamTransport::forget_unsent() {
  table_.clear();
  sends_.clear();
  early_sends_.clear();
  early_grants_.clear();
  late_grants_.clear();
  next_ = {.peer = -1};
  is_open_ = false;
}

void StreamTransport::cancel() noexcept {
  forget_unsent();
  inner_->cancel();
  stop();
  // The caller may free memory that the streams still read and write, once the work queued so far is done.
  try {
    join();
    streams_->join_host();
  } catch (const std::exception&) {
    // The fault that led here is the one to report.
  }
}

void StreamTransport::stop() noexcept {
  stopped_ = true;
  streams_->stop();
}

std::optional<Departure> StreamTransport::departed() const {
  if (watch_ && watch_->is_forked()) return inner_->departed();  // the parent's thread may have held the lock for ever
  const std::lock_guard lock(departures_);
  return inner_->departed();
}

std::optional<Departure> StreamTransport::departed(int peer) const {
  if (watch_ && watch_->is_forked()) return inner_->departed(peer);
  const std::lock_guard lock(departures_);
  return inner_->departed(peer);
}

void StreamTransport::watch(std::function<void()> look) {
  watch_.reset();
  if (look) watch_ = std::make_unique<Watch>(std::move(look));
}

}  // namespace distca::transport
