// Groups of two loopback ranks, of which the first has a hard time, or whose streams do nothing but keep what is queued
// after what. Loaded into a process (test_told_faults.py, test_stream_order.py, test_kept_memory.py), it puts their
// contexts, NAME/0 and NAME/1, into the registry.
#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>

#include "emulation/queued_backend.h"
#include "emulation/wrapping_backend.h"
#include "plan/cost.h"
#include "runtime/context.h"
#include "runtime/signals.h"
#include "transport/host_memory.h"
#include "transport/loopback.h"
#include "transport/stream_transport.h"
#include "transport/wrapper.h"

namespace distca {
namespace {

using runtime::Signals;

/// What peers tell of their faults and publish of their calls arrives as late as it may: the rank's own thread sees it
/// once it has been told that the peer has left.
class LateNews final : public transport::WrappingTransport {
 public:
  explicit LateNews(std::unique_ptr<Transport> inner) : WrappingTransport(std::move(inner)) {}

  void put(int peer, int64_t heap_offset, int64_t dst_row_stride, int64_t dst_head_stride, const RowView& src,
           const RowExtent& extent) override {
    inner_->put(peer, heap_offset, dst_row_stride, dst_head_stride, src, extent);
  }
  void signal(int peer, int64_t word, uint64_t value) override { inner_->signal(peer, word, value); }
  void quiet() override { inner_->quiet(); }
  void publish(int64_t word, uint64_t value) override {
    own_thread_ = std::this_thread::get_id();
    inner_->publish(word, value);
  }
  uint64_t load(int64_t word) const override {
    return is_late() && word == Signals(num_ranks()).fault_code(1) ? 0 : inner_->load(word);
  }
  uint64_t peek(int peer, int64_t word) const override {
    return is_late() && word == Signals(num_ranks()).call(1) ? 0 : inner_->peek(peer, word);
  }
  std::optional<transport::Departure> departed() const override { return inner_->departed(); }
  std::optional<transport::Departure> departed(int peer) const override {
    const auto gone = inner_->departed(peer);
    if (gone && std::this_thread::get_id() == own_thread_) has_asked_ = true;
    return gone;
  }

 private:
  bool is_late() const { return std::this_thread::get_id() == own_thread_ && !has_asked_; }

  std::atomic<std::thread::id> own_thread_;
  mutable std::atomic<bool> has_asked_{false};
};

/// Has no memory for one of the two passes.
class WithoutMemory final : public emulation::WrappingBackend {
 public:
  explicit WithoutMemory(bool backward) : WrappingBackend(runtime::make_backend("cpu", "auto")), backward_(backward) {}
  void forward(const attention::Problem& problem, const Parallel& parallel) override {
    if (!backward_) throw std::bad_alloc();
    WrappingBackend::forward(problem, parallel);
  }
  void backward(const attention::Problem& problem, const Parallel& parallel) override {
    if (backward_) throw std::bad_alloc();
    WrappingBackend::backward(problem, parallel);
  }

 private:
  bool backward_;
};

/// Counts what it allocates and what of that is given back.
class CountedMemory final : public emulation::WrappingBackend {
 public:
  static inline std::atomic<int> allocated = 0, given_back = 0;

  CountedMemory() : WrappingBackend(runtime::make_backend("cpu", "auto")) { allocated = given_back = 0; }
  std::shared_ptr<std::byte> allocate(int64_t bytes) override {
    ++allocated;
    std::shared_ptr<std::byte> memory = WrappingBackend::allocate(bytes);
    std::byte* const data = memory.get();
    return {data, [kept = std::move(memory)](std::byte*) { ++given_back; }};
  }
};

/// Sends nothing.
class NoSender final : public transport::Sender {
  void send(const Tables&, const transport::Guard&, void*) override {}
  void quiet(void*) override {}
};

/// Streams on which nothing happens. Each stream knows the calls whose puts or grants everything comes after that is
/// queued on it next.
class Order final : public transport::Streams {
 public:
  static inline std::string call;  // the name of the call that ranks make

  bool work_comes_after(const std::string& put) const { return queued_[0].contains("put in " + put); }
  /// Whether credit was granted in the call `grant`, and after what was put in the call `put`.
  bool grant_comes_after(const std::string& grant, const std::string& put) const {
    return granted_after_.contains(grant) && granted_after_.at(grant).contains("put in " + put);
  }

  /// How often something was queued, other than on a tape.
  int num_queued() const { return num_queued_; }
  /// Whether all that goes to other hosts is waited for.
  bool awaits_all_sent() const { return awaits_all_sent_; }

  void record(int point, Stream stream) override {
    if (is_queued()) points_[static_cast<size_t>(point)] = of(stream);
  }
  void wait_for(Stream stream, int point) override {
    if (is_queued()) of(stream).merge(Names(points_[static_cast<size_t>(point)]));
  }
  void put(const transport::PutTable&) override {
    if (is_queued()) of(Stream::kTransfer).insert("put in " + call);
  }
  void signal(std::span<const transport::SignalTo>) override {
    if (is_queued()) granted_after_[call] = of(Stream::kTransfer);
  }
  void send(const transport::SendTable&, const std::shared_ptr<transport::Sender>&) override {
    if (is_queued()) awaits_all_sent_ = false;
  }
  void quiet(const std::shared_ptr<transport::Sender>&) override {
    if (is_queued()) awaits_all_sent_ = true;
  }

  std::shared_ptr<std::byte> allocate(int64_t bytes) override { return zeroed_host_memory(bytes); }
  Shared allocate_shared(int64_t bytes) override { return {allocate(bytes), {}}; }
  std::shared_ptr<std::byte> open(const IpcHandle&, int64_t bytes) override { return allocate(bytes); }
  void join_host() override {}
  void drain() noexcept override {}
  void await(std::span<const transport::AwaitedMessage>) override {}
  void fill_nan_if_stopped(const RowView&, const RowExtent&) override {}
  bool is_captured() const override { return false; }
  void set_tape(std::shared_ptr<transport::Tape> tape) override { is_taped_ = tape != nullptr; }
  void replay(const transport::Tape&) override {}
  std::optional<transport::StreamFault> fault() const override { return std::nullopt; }
  void stop() noexcept override {}

 private:
  using Names = std::set<std::string>;
  Names& of(Stream stream) { return queued_[static_cast<size_t>(stream)]; }
  bool is_queued() {
    num_queued_ += !is_taped_;
    return !is_taped_;
  }

  bool is_taped_ = false;  // what is queued on a tape happens later
  int num_queued_ = 0;
  bool awaits_all_sent_ = false;
  std::array<Names, 2> queued_;
  std::array<Names, kNumPoints> points_;
  std::map<std::string, Names> granted_after_;
};

constexpr int kRanks = 2;
std::array<std::shared_ptr<Order>, kRanks> orders;
constexpr std::chrono::milliseconds kTimeout{20'000};

void add(const std::string& name, int rank, int64_t slot_bytes, std::unique_ptr<transport::Transport> transport,
         std::shared_ptr<runtime::Backend> backend) {
  runtime::ContextOptions options{.name = name + "/" + std::to_string(rank), .slot_bytes = slot_bytes};
  options.cost_digest = plan::CostModel().digest();
  options.timeout = kTimeout;
  runtime::add_context(std::make_shared<runtime::Context>(std::move(transport), options, std::move(backend)));
}

}  // namespace
}  // namespace distca

extern "C" {

void late_news(const char* name, int64_t slot_bytes) {
  using namespace distca;
  const runtime::HeapNeeds needs = runtime::heap_needs(kRanks, slot_bytes);
  auto ranks = transport::make_loopback(kRanks, needs.heap_bytes, needs.num_signals);
  add(name, 0, slot_bytes, std::make_unique<LateNews>(std::move(ranks[0])), nullptr);
  add(name, 1, slot_bytes, std::move(ranks[1]), nullptr);
}

void late_news_of_queued_steps(const char* name, int64_t slot_bytes) {
  using namespace distca;
  const runtime::HeapNeeds needs = runtime::heap_needs(kRanks, slot_bytes);
  auto control = transport::make_loopback(kRanks, 0, needs.num_signals);
  control[0] = std::make_unique<LateNews>(std::move(control[0]));
  const std::array devices = {emulation::make_host_device(kTimeout), emulation::make_host_device(kTimeout)};
  const std::array streams = {devices[0].streams, devices[1].streams};
  const transport::DeviceHeaps heaps = transport::allocate_heaps(needs.heap_bytes, needs.num_signals, streams);
  for (int rank = 0; rank < kRanks; ++rank) {
    const auto i = static_cast<size_t>(rank);
    auto one = std::make_unique<transport::StreamTransport>("loopback", std::move(control[i]), streams[i], heaps);
    add(name, rank, slot_bytes, std::move(one), devices[i].backend);
  }
}

/// With `apart` the ranks are on two hosts.
void only_order(const char* name, int64_t slot_bytes, bool apart) {
  using namespace distca;
  const runtime::HeapNeeds needs = runtime::heap_needs(kRanks, slot_bytes);
  auto control = transport::make_loopback(kRanks, 0, needs.num_signals);
  for (auto& one : orders) one = std::make_shared<Order>();
  const std::array<std::shared_ptr<transport::Streams>, kRanks> streams = {orders[0], orders[1]};
  const transport::DeviceHeaps both = transport::allocate_heaps(needs.heap_bytes, needs.num_signals, streams);
  const std::shared_ptr<std::byte> arena = zeroed_host_memory(slot_bytes);
  for (int rank = 0; rank < kRanks; ++rank) {
    const auto i = static_cast<size_t>(rank);
    transport::DeviceHeaps heaps = both;
    if (apart) {
      heaps.ranks[1 - i] = {};
      heaps.owner = std::make_shared<std::pair<std::shared_ptr<void>, std::shared_ptr<void>>>(both.owner, arena);
      heaps.sender = std::make_shared<NoSender>();
      heaps.send_arena = {arena.get(), static_cast<size_t>(slot_bytes)};
    }
    auto one = std::make_unique<transport::StreamTransport>("loopback", std::move(control[i]), streams[i], heaps);
    add(name, rank, slot_bytes, std::move(one), nullptr);
  }
}

void name_call(const char* name) { distca::Order::call = name; }

bool work_comes_after(int rank, const char* put) {
  return distca::orders.at(static_cast<size_t>(rank))->work_comes_after(put);
}

bool grant_comes_after(int rank, const char* grant, const char* put) {
  return distca::orders.at(static_cast<size_t>(rank))->grant_comes_after(grant, put);
}

int num_queued(int rank) { return distca::orders.at(static_cast<size_t>(rank))->num_queued(); }

bool awaits_all_sent(int rank) { return distca::orders.at(static_cast<size_t>(rank))->awaits_all_sent(); }

void counted_memory(const char* name, int64_t slot_bytes) {
  using namespace distca;
  const runtime::HeapNeeds needs = runtime::heap_needs(kRanks, slot_bytes);
  auto ranks = transport::make_loopback(kRanks, needs.heap_bytes, needs.num_signals);
  add(name, 0, slot_bytes, std::move(ranks[0]), std::make_shared<CountedMemory>());
  add(name, 1, slot_bytes, std::move(ranks[1]), nullptr);
}

int num_allocated() { return distca::CountedMemory::allocated; }
int num_given_back() { return distca::CountedMemory::given_back; }

void without_memory(const char* name, int64_t slot_bytes, bool backward) {
  using namespace distca;
  const runtime::HeapNeeds needs = runtime::heap_needs(kRanks, slot_bytes);
  auto ranks = transport::make_loopback(kRanks, needs.heap_bytes, needs.num_signals);
  add(name, 0, slot_bytes, std::move(ranks[0]), std::make_shared<WithoutMemory>(backward));
  add(name, 1, slot_bytes, std::move(ranks[1]), nullptr);
}
}
