#include "transport/collective.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "transport/host_memory.h"

namespace distca::transport {
namespace {

/// The header of a put, whose rows follow it one after another, or of a signal.
struct Record {
  int64_t is_signal;
  int64_t target;  // heap offset, or signal word
  uint64_t value;  // the signal's
  int64_t row_stride, head_stride;
  RowExtent extent;
};
static_assert(std::is_trivially_copyable_v<Record> && sizeof(Record) == 64);

struct Published {
  int64_t word;
  uint64_t value;
};

/// The message of every rank to every other rank before any row moves.
struct Header {
  static constexpr size_t kMaxPublished = 64;  // enough for two calls and the descriptions of their plans

  int64_t bytes;            // for this peer
  int64_t bytes_to_anyone;  // if this is 0 on all ranks, nothing follows
  int64_t more;
  int64_t num_published;
  std::array<Published, kMaxPublished> published;
};
static_assert(std::is_trivially_copyable_v<Header>);

/// Grows the buffer where needed. It never shrinks.
void grow(std::vector<std::byte>& buffer, int64_t bytes) {
  if (static_cast<int64_t>(buffer.size()) < bytes) buffer.resize(static_cast<size_t>(bytes));
}

class CollectiveTransport final : public Transport {
 public:
  CollectiveTransport(int rank, int num_ranks, int64_t heap_bytes, int64_t num_signals, Collective collective)
      : rank_(rank),
        collective_(std::move(collective)),
        memory_(Mapping::anonymous(region_bytes(heap_bytes, num_signals))),
        region_(memory_.data(), heap_bytes, num_signals),
        generation_(fork_generation()),
        // Rows of one exchange do not overlap in the heap, and each has at least a byte.
        most_bytes_((heap_bytes + num_signals) * int64_t{sizeof(Record)} + heap_bytes),
        outgoing_(static_cast<size_t>(num_ranks)),
        incoming_(static_cast<size_t>(num_ranks)),
        header_bytes_(static_cast<size_t>(num_ranks), int64_t{sizeof(Header)}),
        send_bytes_(static_cast<size_t>(num_ranks)),
        receive_bytes_(static_cast<size_t>(num_ranks)),
        cursor_(static_cast<size_t>(num_ranks)),
        send_(sizeof(Record)),
        receive_(sizeof(Record)) {}

  const char* name() const override { return collective_.name; }
  int rank() const override { return rank_; }
  int num_ranks() const override { return static_cast<int>(outgoing_.size()); }
  bool is_collective() const override { return true; }
  std::span<std::byte> heap() override { return region_.heap(); }

  void put(int peer, int64_t heap_offset, int64_t dst_row_stride, int64_t dst_head_stride, const RowView& src,
           const RowExtent& extent) override {
    check_use(peer);
    check_put(peer, heap_bytes(), heap_offset, dst_row_stride, dst_head_stride, extent);
    if (extent.bytes() == 0) return;
    hold(peer, {0, heap_offset, 0, dst_row_stride, dst_head_stride, extent}, src);
  }

  void signal(int peer, int64_t word, uint64_t value) override {
    check_use(peer);
    static_cast<void>(region_.word(word));  // throws if there is no such word
    hold(peer, {1, word, value, 0, 0, {}}, {});
  }

  uint64_t load(int64_t word) const override { return region_.word(word).load(std::memory_order_relaxed); }

  // Peers get what was published since the previous exchange. If nothing was, they get the same words again.
  void publish(int64_t word, uint64_t value) override {
    check_use(rank_);
    region_.word(word).store(value, std::memory_order_relaxed);
    if (std::exchange(exchanged_, false)) num_published_ = 0;
    const auto end = published_.begin() + static_cast<std::ptrdiff_t>(num_published_);
    const auto known = std::find_if(published_.begin(), end, [&](const Published& p) { return p.word == word; });
    require(known != published_.end(), "more than ", published_.size(), " words published between two exchanges");
    if (known == end) ++num_published_;
    *known = {word, value};
  }

  uint64_t peek(int peer, int64_t word) const override {
    check_use(peer);
    if (peer == rank_) return load(word);
    const Header& header = incoming_[static_cast<size_t>(peer)];
    for (size_t i = 0; i < static_cast<size_t>(header.num_published); ++i)
      if (header.published[i].word == word) return header.published[i].value;
    return 0;
  }

  bool exchange(bool more, const std::function<void()>& agree) override {
    check_use(rank_);
    exchange_headers(more);
    agree();
    const auto any = [&](int64_t Header::* field) {
      return std::any_of(incoming_.begin(), incoming_.end(), [&](const Header& h) { return h.*field != 0; });
    };
    if (any(&Header::bytes_to_anyone)) {
      exchange_records();
      deliver();
    }
    held_.clear();
    return any(&Header::more);
  }

  void abandon(const Error& why) noexcept override {
    if (generation_ != fork_generation()) return;  // the group is the parent's
    try {
      collective_.abandon(why);
    } catch (...) {  // then ranks that wait for this one notice only at their timeout
    }
  }

  /// Does nothing, because all that was held back is delivered in an exchange, and a step ends with one.
  void quiet() override {}
  /// Always empty, because ranks notice in an exchange who is gone.
  std::optional<Departure> departed() const override { return std::nullopt; }
  std::optional<Departure> departed(int) const override { return std::nullopt; }

 protected:
  uint32_t doorbell() const override { return 0; }
  /// Just sleeps, because nothing can arrive meanwhile.
  void doze(uint32_t, std::chrono::microseconds at_most) const override { std::this_thread::sleep_for(at_most); }

 private:
  struct Item {
    size_t peer;
    Record record;
    RowView source;
  };

  int64_t heap_bytes() const { return static_cast<int64_t>(region_.heap().size()); }

  void check_use(int peer) const {
    if (generation_ != fork_generation()) [[unlikely]]
      throw InvalidArgumentError(message("the ", name(), " transport of rank ", rank_, " was made before this process ",
                                         "was forked; only the process that made it can use it"));
    if (peer < 0 || peer >= num_ranks()) [[unlikely]]
      throw InvalidArgumentError(message("rank ", peer, " is not one of ", num_ranks(), " ranks"));
  }

  void hold(int peer, const Record& record, const RowView& source) {
    held_.push_back({static_cast<size_t>(peer), record, source});
  }

  void exchange_headers(bool more) {
    std::fill(send_bytes_.begin(), send_bytes_.end(), 0);
    for (const Item& item : held_) send_bytes_[item.peer] += int64_t{sizeof(Record)} + item.record.extent.bytes();
    const int64_t total = std::accumulate(send_bytes_.begin(), send_bytes_.end(), int64_t{0});
    for (size_t p = 0; p < outgoing_.size(); ++p)
      outgoing_[p] = {send_bytes_[p], total, more, static_cast<int64_t>(num_published_), published_};
    exchanged_ = true;
    collective_.all_to_all(std::as_writable_bytes(std::span(outgoing_)), header_bytes_,
                           std::as_writable_bytes(std::span(incoming_)), header_bytes_);
    for (size_t p = 0; p < incoming_.size(); ++p) {
      const Header& h = incoming_[p];
      if (h.bytes < 0 || h.bytes > most_bytes_ || h.num_published < 0 ||
          h.num_published > static_cast<int64_t>(Header::kMaxPublished)) {
        throw OperatingSystemError(message("rank ", p, " announced ", h.bytes, " bytes and ", h.num_published,
                                           " words; at most ", most_bytes_, " and ", Header::kMaxPublished,
                                           " are possible: what came is not of this context"));
      }
      receive_bytes_[p] = h.bytes;
    }
  }

  /// Packs everything that was held back, rank by rank, and swaps it.
  void exchange_records() {
    std::exclusive_scan(send_bytes_.begin(), send_bytes_.end(), cursor_.begin(), int64_t{0});
    const int64_t to_send = cursor_.back() + send_bytes_.back();
    const int64_t to_receive = std::accumulate(receive_bytes_.begin(), receive_bytes_.end(), int64_t{0});
    grow(send_, to_send);
    grow(receive_, to_receive);
    for (const Item& item : held_) {
      std::byte* const at = send_.data() + cursor_[item.peer];
      std::memcpy(at, &item.record, sizeof(Record));
      const RowExtent& n = item.record.extent;
      if (n.bytes() > 0) copy_rows({at + sizeof(Record), n.num_heads * n.head_bytes, n.head_bytes}, item.source, n);
      cursor_[item.peer] += int64_t{sizeof(Record)} + n.bytes();
    }
    collective_.all_to_all(std::span(send_).first(static_cast<size_t>(to_send)), send_bytes_,
                           std::span(receive_).first(static_cast<size_t>(to_receive)), receive_bytes_);
  }

  /// Does what the records of all ranks say. They come from outside; therefore nothing in them is used unchecked.
  void deliver() {
    std::byte* next = receive_.data();
    for (size_t p = 0; p < receive_bytes_.size(); ++p) {
      std::byte* const end = next + receive_bytes_[p];
      while (next != end) {
        Record record;
        check_received(end - next >= static_cast<std::ptrdiff_t>(sizeof record), p);
        std::memcpy(&record, next, sizeof record);
        next += sizeof record;
        if (record.is_signal != 0) {
          region_.word(record.target).store(record.value, std::memory_order_relaxed);
          continue;
        }
        const RowExtent& n = record.extent;
        check_received(n.num_rows > 0 && n.num_heads > 0 && n.head_bytes > 0, p);
        check_put(rank_, heap_bytes(), record.target, record.row_stride, record.head_stride, n);
        check_received(n.bytes() <= end - next, p);
        copy_rows({region_.heap().data() + record.target, record.row_stride, record.head_stride},
                  {next, n.num_heads * n.head_bytes, n.head_bytes}, n);
        next += n.bytes();
      }
    }
  }

  static void check_received(bool whole, size_t peer) {
    if (!whole) throw OperatingSystemError(message("what rank ", peer, " sent is damaged"));
  }

  int rank_;
  Collective collective_;
  Mapping memory_;
  Region region_;
  uint32_t generation_;
  int64_t most_bytes_;

  std::array<Published, Header::kMaxPublished> published_ = {};
  size_t num_published_ = 0;
  bool exchanged_ = false;  // since a word was last published

  // Scratch that only grows, and the headers and records of the last exchange.
  std::vector<Item> held_;
  std::vector<Header> outgoing_, incoming_;
  std::vector<int64_t> header_bytes_, send_bytes_, receive_bytes_, cursor_;
  std::vector<std::byte> send_, receive_;
};

}  // namespace

std::unique_ptr<Transport> make_collective(int rank, int num_ranks, int64_t heap_bytes, int64_t num_signals,
                                           Collective collective) {
  require(num_ranks >= 1 && rank >= 0 && rank < num_ranks, "rank ", rank, " is not one of ", num_ranks, " ranks");
  check_region_sizes(heap_bytes, num_signals);
  return std::make_unique<CollectiveTransport>(rank, num_ranks, heap_bytes, num_signals, std::move(collective));
}

}  // namespace distca::transport
