// Runs a kernel: blocks one after another, the threads of a block one after another too, in an order of chance. A
// thread that has to wait for others stops in the middle, on a stack of its own, and others go on.
#include <algorithm>
#include <array>
#include <memory>
#include <numeric>
#include <random>
#include <string>

#include "device.h"
#include "stack.h"
#include "streams.h"

namespace emulated_gpu {

thread_local Place place;

namespace {

constexpr unsigned kWarp = 32;
constexpr size_t kStack = 64 << 10, kMaxShared = 232448;  // 227 KB, of compute capability 9.0
constexpr size_t kLeastShared = 101376;                   // 99 KB, of 8.6 and 8.9

enum class State { kIdle, kRunning, kAtBarrier, kInExchange };

/// A stack on which threads run, one after another as long as none stops.
struct Fiber {
  State state = State::kIdle;
  unsigned thread = 0;  // its number in the block
  uint64_t word = 0;    // that it gives to its warp, then what it has got
  unsigned lane_mask = 0;
  std::unique_ptr<emulation::Stack> stack;
};

/// The blocks that one host thread runs.
class Runner {
 public:
  void run(const char* name, const Launch& how, const std::function<void()>& thread, uint32_t seed);

  void stop(State why) {
    Fiber& self = *current_;
    self.state = why;
    self.stack->stop();
    set_place(self.thread);
  }
  void* shared_of_line(int line, size_t bytes) {
    for (const auto& [of, offset] : lines_)
      if (of == line) return shared_.data() + offset;
    lines_.push_back({line, used_});
    used_ += (bytes + 15) / 16 * 16;
    if (used_ > kMaxShared) fail(std::string(name_) + " has too much shared memory");
    return std::memset(shared_.data() + lines_.back().second, 0xff, bytes);
  }
  Fiber& current() { return *current_; }

 private:
  void run_block();
  void resume(Fiber& fiber);
  void run_threads();
  void set_place(unsigned number);
  Fiber& idle_fiber();
  bool release_barrier();
  bool release_warps();

  const char* name_ = "";
  const Launch* how_ = nullptr;
  const std::function<void()>* thread_ = nullptr;
  std::minstd_rand random_;
  unsigned num_threads_ = 0;
  std::vector<unsigned> order_;  // of the threads
  size_t next_ = 0;              // that has not begun, of the order
  unsigned num_ended_ = 0;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> idle_;
  Fiber* current_ = nullptr;
  alignas(16) std::array<std::byte, kMaxShared> shared_;
  std::vector<std::pair<int, size_t>> lines_;
  size_t used_ = 0;
};

Runner& runner() {
  static thread_local const auto one = std::make_unique<Runner>();
  return *one;
}

void Runner::set_place(unsigned number) {
  const dim3& size = how_->block;
  place.thread = {number % size.x, number / size.x % size.y, number / size.x / size.y};
}

void Runner::run_threads() {
  while (true) {
    while (next_ < order_.size()) {
      current_->thread = order_[next_++];
      set_place(current_->thread);
      (*thread_)();
      ++num_ended_;
    }
    idle_.push_back(current_);
    stop(State::kIdle);
  }
}

void Runner::resume(Fiber& fiber) {
  current_ = &fiber;
  fiber.state = State::kRunning;
  fiber.stack->resume();
}

Fiber& Runner::idle_fiber() {
  if (!idle_.empty()) {
    Fiber& fiber = *idle_.back();
    idle_.pop_back();
    return fiber;
  }
  Fiber& fiber = *fibers_.emplace_back(std::make_unique<Fiber>());
  fiber.stack = std::make_unique<emulation::Stack>(kStack, [this] { run_threads(); });
  return fiber;
}

/// Whether all threads had come to the barrier and may go on.
bool Runner::release_barrier() {
  unsigned waiting = 0;
  for (const auto& fiber : fibers_) waiting += fiber->state == State::kAtBarrier ? 1 : 0;
  if (waiting != num_threads_) return false;
  for (const auto& fiber : fibers_)
    if (fiber->state == State::kAtBarrier) fiber->state = State::kRunning;
  return true;
}

/// Whether the lanes of some warp had all given their words and may go on.
bool Runner::release_warps() {
  std::vector<std::array<Fiber*, kWarp>> warps((num_threads_ + kWarp - 1) / kWarp);
  for (const auto& fiber : fibers_)
    if (fiber->state == State::kInExchange) warps[fiber->thread / kWarp][fiber->thread % kWarp] = fiber.get();
  bool any = false;
  for (const auto& lanes : warps) {
    if (std::find(lanes.begin(), lanes.end(), nullptr) != lanes.end()) continue;
    std::array<uint64_t, kWarp> words;
    for (unsigned lane = 0; lane < kWarp; ++lane) words[lane] = lanes[lane]->word;
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      lanes[lane]->word = words[(lane ^ lanes[lane]->lane_mask) % kWarp];
      lanes[lane]->state = State::kRunning;
    }
    any = true;
  }
  return any;
}

void Runner::run_block() {
  std::memset(shared_.data(), 0xff, how_->shared_bytes);
  lines_.clear();
  used_ = how_->shared_bytes;
  next_ = 0;
  num_ended_ = 0;
  while (next_ < order_.size()) resume(idle_fiber());
  while (num_ended_ < num_threads_) {
    if (!release_barrier() && !release_warps())
      fail(std::string("of the ") + std::to_string(num_threads_) + " threads of a block of " + name_ + " " +
           std::to_string(num_ended_) + " have ended, and the others wait for them at a barrier or in a shuffle");
    std::vector<Fiber*> ready;
    for (const auto& fiber : fibers_)
      if (fiber->state == State::kRunning) ready.push_back(fiber.get());
    if (random_() % 2 == 0) std::reverse(ready.begin(), ready.end());
    for (Fiber* fiber : ready) resume(*fiber);
  }
}

void Runner::run(const char* name, const Launch& how, const std::function<void()>& thread, uint32_t seed) {
  name_ = name;
  how_ = &how;
  thread_ = &thread;
  random_.seed(seed);
  num_threads_ = how.block.x * how.block.y * how.block.z;
  place.block_size = how.block;
  place.grid_size = how.grid;
  const unsigned num_blocks = how.grid.x * how.grid.y * how.grid.z;
  std::vector<unsigned> blocks(num_blocks);
  std::iota(blocks.begin(), blocks.end(), 0u);
  std::shuffle(blocks.begin(), blocks.end(), random_);
  order_.resize(num_threads_);
  std::iota(order_.begin(), order_.end(), 0u);
  for (const unsigned block : blocks) {
    place.block = {block % how.grid.x, block / how.grid.x % how.grid.y, block / how.grid.x / how.grid.y};
    std::rotate(order_.begin(), order_.begin() + static_cast<long>(random_() % num_threads_), order_.end());
    if (random_() % 2 == 0) std::reverse(order_.begin(), order_.end());
    run_block();
  }
}

}  // namespace

void* shared_of_line(int line, size_t bytes) { return runner().shared_of_line(line, bytes); }
void meet_block() { runner().stop(State::kAtBarrier); }
uint64_t exchange(uint64_t word, unsigned lane_mask) {
  Fiber& self = runner().current();
  self.word = word;
  self.lane_mask = lane_mask;
  runner().stop(State::kInExchange);
  return self.word;
}

void start_kernel(const Launch& how, Kernel kernel) {
  check_launch(how, kernel);
  auto run = [how, name = kernel.name, thread = std::move(kernel.thread)](uint32_t seed) {
    runner().run(name, how, thread, seed);
  };
  report(queue(how.stream, {kernel.name, std::move(kernel.words), std::move(run)}));
}

void check_launch(const Launch& how, const Kernel& kernel) {
  const auto size = [](const dim3& d) { return uint64_t{d.x} * d.y * d.z; };
  const auto must = [&](bool good, const char* what) {
    if (!good) fail(std::string(kernel.name) + " is launched with " + what);
  };
  must(size(how.grid) > 0 && how.grid.x <= 0x7fffffffu && how.grid.y < 65536 && how.grid.z < 65536, "a wrong grid");
  must(size(how.block) > 0 && size(how.block) <= 1024, "0 or more than 1024 threads a block");
  const size_t most = compute_capability_major == 8 ? kLeastShared : kMaxShared;
  must(how.shared_bytes <= most, "too much shared memory");
  load(kernel.address, kernel.name);
  note_blocks(kernel.name, static_cast<int64_t>(size(how.grid)));
}

}  // namespace emulated_gpu
