#include "machine.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <utility>

#include "common/dtype.h"

namespace emulation {

thread_local Machine* machine = nullptr;

void fail(const std::string& what) {
  std::fprintf(stderr, "emulated machine: %s\n", what.c_str());
  std::exit(2);
}

void Machine::run_thread() {
  (*body_)(current_->cta->shared);
  current_->finished = true;
  if (!current_->instructions.empty()) fail("a thread ended before the end of its warp's products");
  if (!current_->copies.empty()) fail("a thread ended before it had made its copies a group");
  if (--current_->cta->alive == 0 && current_->cta->copies != 0) fail("a CTA ended before its copies did");
  current_->stack->stop();
}

void Machine::run(int num_ctas, int num_threads, size_t shared_bytes, const std::function<void(std::byte*)>& body) {
  constexpr size_t kStack = 128 << 10, kAlignment = 1024;
  constexpr int kMostMisses = 7;
  shared_bytes = (shared_bytes + kAlignment - 1) / kAlignment * kAlignment;
  machine = this;
  body_ = &body;
  ctas_.clear();
  fibers_.clear();
  for (int c = 0; c < num_ctas; ++c) {
    Cta& cta = *ctas_.emplace_back(std::make_unique<Cta>());
    cta.index = c;
    cta.alive = num_threads;
    cta.shared = static_cast<std::byte*>(std::aligned_alloc(kAlignment, shared_bytes));
    cta.shared_bytes = shared_bytes;
    std::memset(cta.shared, 0xff, shared_bytes);
    cta.unfenced.assign(shared_bytes / 16, 0);
    cta.queues.resize(static_cast<size_t>(num_threads / kGroupThreads));
    cta.exchanges.resize(static_cast<size_t>(num_threads / kWarpThreads));
    cta.instructions.resize(static_cast<size_t>(num_threads / kWarpThreads));
    cta.news.resize(static_cast<size_t>(num_threads / kWarpThreads));
    cta.registers.resize(static_cast<size_t>(num_threads / kGroupThreads));
    for (Registers& r : cta.registers) r.now = std::min(65536 / num_threads, 255) / 8 * 8;
    for (int t = 0; t < num_threads; ++t) {
      Fiber& fiber = *fibers_.emplace_back(std::make_unique<Fiber>());
      fiber.cta = &cta;
      fiber.thread = t;
      fiber.stack = std::make_unique<Stack>(kStack, [this] { run_thread(); });
    }
  }
  // What a fiber waits for is looked at less often the longer it waits.
  struct Alive {
    Fiber* fiber;
    int rounds;  // until it is looked at
    int misses;
  };
  std::vector<Alive> alive;
  for (auto& fiber : fibers_) alive.push_back({fiber.get(), 0, 0});
  while (!alive.empty()) {
    bool moved = false, skipped = false, finished = false;
    // From a random one on, so that no order of warps is the only one that is tried.
    const size_t first = random() % alive.size();
    for (size_t i = 0; i < alive.size(); ++i) {
      Alive& one = alive[first + i < alive.size() ? first + i : first + i - alive.size()];
      if (one.rounds > 0) {
        --one.rounds;
        skipped = true;
        continue;
      }
      Fiber* const fiber = one.fiber;
      if (fiber->ready && !fiber->ready()) {
        one.misses = one.rounds = std::min(2 * one.misses + 1, kMostMisses);
        continue;
      }
      fiber->ready = nullptr;
      current_ = fiber;
      moved = true;
      fiber->stack->resume();
      one.misses = 0;
      one.rounds = std::exchange(fiber->nap, 0);
      finished |= fiber->finished;
    }
    if (finished) std::erase_if(alive, [](const Alive& one) { return one.fiber->finished; });
    moved |= run_pending(false);
    for (auto& cta : ctas_) moved |= run_products(*cta, false);
    if (moved) continue;
    if (skipped) {
      for (Alive& one : alive) one.rounds = 0;
      continue;
    }
    moved = run_pending(true);
    for (auto& cta : ctas_) moved |= run_products(*cta, true);
    if (moved || alive.empty()) continue;
    std::set<std::string> waits;  // lanes of a warp may wait for different things
    for (const auto& [fiber, rounds, misses] : alive)
      waits.insert("\n  " + std::to_string(fiber->cta->index) + "." + std::to_string(fiber->thread / kWarpThreads) +
                   " " + fiber->awaited);
    std::string waiting = "nothing can go on; of CTA.warp wait for";
    for (const std::string& wait : waits) waiting += wait;
    fail(waiting);
  }
  if (!pending_.empty()) fail("a kernel ended before what was to come later");
  for (auto& cta : ctas_) {
    for (const NamedBarrier& barrier : cta->named)
      if (barrier.arrived != 0) fail("a kernel ended with threads that had arrived at a named barrier");
    for (const Registers& r : cta->registers)
      if (r.asked != 0) fail("a kernel ended with a part of a warpgroup that had asked for registers");
    for (const ProductQueue& queue : cta->queues)
      if (queue.done != queue.products.size()) fail("a kernel ended before its products did");
    std::free(cta->shared);
  }
}

void Machine::await(const char* what, std::function<bool()> ready) {
  // Now and then others go first, once in a while by far.
  const auto chance = random() % 1024;
  if (chance == 0) current_->nap = 100 + static_cast<int>(random() % 1000);
  if (chance % 8 != 0 && ready()) return;
  current_->ready = std::move(ready);
  current_->awaited = what;
  current_->stack->stop();
}

void Machine::set_registers(int registers, bool is_raise) {
  Cta& c = cta();
  Registers& r = c.registers[static_cast<size_t>(fiber().thread / kGroupThreads)];
  if (is_raise ? registers < r.now : registers > r.now) fail("registers are raised to fewer or lowered to more");
  if (r.asked != 0 && r.wanted != registers) fail("threads of a warpgroup ask for different numbers of registers");
  r.wanted = registers;
  const uint64_t generation = r.generation;
  if (++r.asked < kGroupThreads) {
    await("the registers of its warpgroup", [&r, generation] { return r.generation != generation; });
    return;
  }
  const int more = registers - r.now;
  await("registers that others give back", [&c, more] { return more <= c.free_registers; });
  c.free_registers -= more;
  r.now = registers;
  r.asked = 0;
  ++r.generation;
}

bool Machine::run_pending(bool all) {
  bool moved = false;
  for (size_t i = 0; i < pending_.size();) {
    if (!all && random() % 4 != 0) {
      ++i;
      continue;
    }
    auto action = std::move(pending_[i]);
    pending_.erase(pending_.begin() + static_cast<long>(i));
    action();
    moved = true;
  }
  return moved;
}

bool Machine::run_products(Cta& cta, bool all) {
  bool moved = false;
  for (ProductQueue& queue : cta.queues) {
    while (queue.done < queue.products.size() && queue.products[queue.done]->threads == kGroupThreads &&
           (all || random() % 4 != 0)) {
      execute(*this, cta, *queue.products[queue.done]);
      queue.products[queue.done++].reset();
      moved = true;
    }
  }
  return moved;
}

void Machine::check_shared(const Cta& cta, const void* p, size_t bytes) const {
  const auto* at = static_cast<const std::byte*>(p);
  if (at < cta.shared || at + bytes > cta.shared + cta.shared_bytes) fail("an access beyond shared memory");
}

void Machine::mark_unfenced(const void* p, size_t bytes) {
  Cta& c = cta();
  check_shared(c, p, bytes);
  const auto first = static_cast<size_t>(static_cast<const std::byte*>(p) - c.shared);
  for (size_t i = first / 16; i <= (first + bytes - 1) / 16; ++i) {
    c.unfenced[i] = 1 + fiber().thread;
    fiber().marks.push_back(i);
  }
}

void Machine::fence() {
  for (const size_t i : fiber().marks)
    if (cta().unfenced[i] == 1 + fiber().thread) cta().unfenced[i] = 0;
  fiber().marks.clear();
}

void Machine::check_fenced(const Cta& cta, const void* p, size_t bytes) const {
  check_shared(cta, p, bytes);
  const auto first = static_cast<size_t>(static_cast<const std::byte*>(p) - cta.shared);
  for (size_t i = first / 16; i <= (first + bytes - 1) / 16; ++i)
    if (cta.unfenced[i] != 0) fail("the asynchronous proxy met a store that no fence had followed");
}

namespace {

constexpr int kInner = 16;    // elements of a product in the direction of its sum
constexpr int kTogether = 8;  // elements in the 16 bytes that a swizzle leaves together

/// Reads elements that lie one after another, to places that are `stride` apart.
void read(const Machine& machine, const Cta& cta, bool bfloat16, uint64_t address, float* to, int stride) {
  // Swizzle of 128 bytes: bits 4 to 6 of an address are exclusive-ored with bits 7 to 9.
  address ^= (address >> 3) & 0x70;
  const auto* p = reinterpret_cast<const std::byte*>(address);
  uint16_t bits[kTogether];
  machine.check_fenced(cta, p, sizeof(bits));
  std::memcpy(bits, p, sizeof(bits));
  for (int i = 0; i < kTogether; ++i)
    to[i * stride] = bfloat16 ? distca::bf16_to_float(bits[i]) : distca::fp16_to_float(bits[i]);
}

/// Element (outer, inner) of an operand, by the canonical layouts of the PTX manual for a swizzle of 128 bytes.
uint64_t operand_address(uint64_t start, bool outer_columns, int chunk, int outer, int inner) {
  constexpr int kEightRows = 1024;
  if (!outer_columns) return start + static_cast<uint64_t>(outer / 8 * kEightRows + outer % 8 * 128 + inner * 2);
  return start + static_cast<uint64_t>(outer / 64 * chunk + outer % 64 * 2 + inner / 8 * kEightRows + inner % 8 * 128);
}

/// Reads an operand of `outer` x 16 elements; element (m, k) goes to `to[m * outer_stride + k * inner_stride]`.
void read_operand(const Machine& machine, const Cta& cta, const Product& product, bool is_a, int outer, float* to,
                  int outer_stride, int inner_stride) {
  const uint64_t start = is_a ? product.a : product.b;
  const bool outer_columns = is_a ? product.a_outer : product.b_outer;
  const int chunk = is_a ? product.a_chunk : product.b_chunk;
  const int outer_step = outer_columns ? kTogether : 1, inner_step = outer_columns ? 1 : kTogether;
  for (int m = 0; m < outer; m += outer_step)
    for (int k = 0; k < kInner; k += inner_step)
      read(machine, cta, product.bfloat16, operand_address(start, outer_columns, chunk, m, k),
           to + m * outer_stride + k * inner_stride, outer_columns ? outer_stride : inner_stride);
}

}  // namespace

void execute(const Machine& machine, const Cta& cta, const Product& product) {
  constexpr int kRows = 64, kMostColumns = 256;
  static thread_local float a[kRows][kInner], b[kInner][kMostColumns];
  if (product.a != 0) {
    read_operand(machine, cta, product, true, kRows, a[0], kInner, 1);
  } else {
    for (int row = 0; row < kRows; ++row) {
      for (int k = 0; k < kInner; ++k) {
        // Register i + 2 j of a thread: its row + 8 i, columns 8 j + twice its number in the quad.
        const int thread = row / 16 * 32 + row % 8 * 4 + k % 8 / 2;
        const uint32_t word = product.registers[thread][row % 16 / 8 + 2 * (k / 8)];
        const auto bits = static_cast<uint16_t>(k % 2 == 0 ? word : word >> 16);
        a[row][k] = product.bfloat16 ? distca::bf16_to_float(bits) : distca::fp16_to_float(bits);
      }
    }
  }
  read_operand(machine, cta, product, false, product.columns, b[0], 1, kMostColumns);
  for (int row = 0; row < kRows; ++row) {
    float sums[kMostColumns] = {};
    for (int k = 0; k < kInner; ++k)
      for (int column = 0; column < product.columns; ++column) sums[column] += a[row][k] * b[k][column];
    for (int column = 0; column < product.columns; ++column) {
      const int thread = row / 16 * 32 + row % 8 * 4 + column % 8 / 2;
      float& sum = product.sums[thread][column / 8 * 4 + row % 16 / 8 * 2 + column % 2];
      sum = product.add ? sum + sums[column] : sums[column];
    }
  }
}

namespace {

uint16_t half_of(uint32_t word, int which) { return static_cast<uint16_t>(word >> 16 * which); }

using Lanes = const LaneInstruction* [kWarpThreads];

/// ldmatrix.m8n8.x4.b16.
void load_matrices(const Lanes& lanes) {
  for (int matrix = 0; matrix < 4; ++matrix) {
    uint16_t elements[8][8];
    for (int row = 0; row < 8; ++row) std::memcpy(elements[row], lanes[8 * matrix + row]->row, sizeof(elements[row]));
    for (int lane = 0; lane < kWarpThreads; ++lane) {
      const int row = lane / 4, column = lane % 4 * 2;
      const bool transposed = lanes[lane]->kind == LaneInstruction::kLoadTransposed;
      const uint16_t low = transposed ? elements[column][row] : elements[row][column];
      const uint16_t high = transposed ? elements[column + 1][row] : elements[row][column + 1];
      lanes[lane]->words[matrix] = low | static_cast<uint32_t>(high) << 16;
    }
  }
}

/// mma.m16n8k16 with fp32 sums.
template <float (*value)(uint16_t)>
void multiply(const Lanes& lanes) {
  float a[16][16], b[16][8], sums[16][8];
  for (int lane = 0; lane < kWarpThreads; ++lane) {
    const LaneInstruction& x = *lanes[lane];
    const int group = lane / 4, pair = lane % 4 * 2;
    for (int i = 0; i < 8; ++i)
      a[group + (i / 2 % 2) * 8][pair + i % 2 + i / 4 * 8] = value(half_of(x.a[i / 2], i % 2));
    for (int i = 0; i < 4; ++i) {
      b[pair + i % 2 + i / 2 * 8][group] = value(half_of(x.b[i / 2], i % 2));
      sums[group + i / 2 * 8][pair + i % 2] = x.sums[i];
    }
  }
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < 16; ++k)
#pragma omp simd
      for (int column = 0; column < 8; ++column) sums[row][column] += a[row][k] * b[k][column];
  for (int lane = 0; lane < kWarpThreads; ++lane)
    for (int i = 0; i < 4; ++i) lanes[lane]->sums[i] = sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
}

}  // namespace

void execute(const WarpInstructions& warp) {
  const size_t number = warp.lanes[0]->size();
  for (const auto* lane : warp.lanes)
    if (lane->size() != number) fail("the lanes of a warp execute different instructions");
  for (size_t i = 0; i < number; ++i) {
    Lanes lanes;
    for (int lane = 0; lane < kWarpThreads; ++lane) {
      lanes[lane] = &(*warp.lanes[lane])[i];
      if (lanes[lane]->kind != lanes[0]->kind) fail("the lanes of a warp execute different instructions");
    }
    if (lanes[0]->kind == LaneInstruction::kMultiply)
      lanes[0]->bfloat16 ? multiply<distca::bf16_to_float>(lanes) : multiply<distca::fp16_to_float>(lanes);
    else
      load_matrices(lanes);
  }
}

}  // namespace emulation
