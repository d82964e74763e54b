// What cuda/attention/hopper.h declares, for the emulated machine.
#pragma once

#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention/gpu.h"

namespace distca::attention::cuda::hopper {

using namespace gpu;

// ---- threads

template <int kRegisters>
inline constexpr bool kIsNumberOfRegisters = kRegisters % 8 == 0 && 24 <= kRegisters && kRegisters <= 256;
template <int kRegisters>
void raise_registers() {
  static_assert(kIsNumberOfRegisters<kRegisters>);
  machine->set_registers(kRegisters, true);
}
template <int kRegisters>
void lower_registers() {
  static_assert(kIsNumberOfRegisters<kRegisters>);
  machine->set_registers(kRegisters, false);
}

// ---- barriers in shared memory

struct Barrier {
  int expected;
  int missing;
  int bytes;
  int phase;

  void init(int arrivals) {
    machine->check_shared(machine->cta(), this, sizeof(*this));
    machine->cta().new_barriers[this] = thread_of_cta();
    expected = missing = arrivals;
    bytes = phase = 0;
  }
  void complete_if_done() {
    if (missing != 0 || bytes != 0) return;
    missing = expected;
    ++phase;
  }
  void arrive() {
    if (missing-- <= 0) fail("more arrivals at a barrier than it was made for");
    complete_if_done();
  }
  void expect_bytes(int n) {
    if ((bytes += n) >= 1 << 20) fail("more bytes than a barrier can count");
  }
  void receive_bytes(int n) {
    if ((bytes -= n) < 0) fail("more bytes at a barrier than were announced");
    complete_if_done();
  }
  void wait(int parity) {
    machine->await("a barrier in shared memory", [this, parity] { return phase % 2 != parity; });
  }
};

inline void fence_barrier_init() {
  std::erase_if(machine->cta().new_barriers, [](const auto& b) { return b.second == thread_of_cta(); });
}

// ---- the asynchronous proxy

inline void fence_shared() { machine->fence(); }
inline void fence_all() {
  machine->fence();
  news() &= ~(1u << thread_of_cta() % 32);
}
inline void acquire_map(const TensorMap* map) { machine->cta().acquired_maps.insert(map); }

inline void load_box(const TensorMap* map, Barrier* barrier, void* shared, int column, int row, int plane) {
  emulation::Cta& cta = machine->cta();
  if (cta.acquired_maps.count(map) == 0) fail("a map is used that was not acquired");
  MapSpec spec;
  std::memcpy(static_cast<void*>(&spec), map, sizeof(spec));
  if (spec.data == nullptr) fail("a box is loaded through a map of nothing");
  if (reinterpret_cast<uintptr_t>(shared) % 1024 != 0) fail("a box is loaded to an address off 1024");
  if (cta.new_barriers.count(barrier) != 0) fail("a copy reports to a barrier that no fence has made known");
  if (news() != 0) fail("a box is loaded after a look at a signal that no fence of all memory has followed");
  ++cta.copies;
  machine->later([=, &cta] {
    auto* dst = static_cast<std::byte*>(shared);
    for (int z = 0; z < spec.box[2]; ++z) {
      for (int y = 0; y < spec.box[1]; ++y) {
        for (int x = 0; x < spec.box[0]; ++x, dst += 2) {
          auto address = reinterpret_cast<uintptr_t>(dst);
          address ^= (address >> 3) & 0x70;
          machine->check_fenced(cta, reinterpret_cast<void*>(address), 2);
          const int64_t at[3] = {column + x, row + y, plane + z};
          bool inside = true;
          for (int d = 0; d < 3; ++d) inside &= at[d] >= 0 && at[d] < spec.sizes[d];
          if (inside)
            std::memcpy(reinterpret_cast<void*>(address),
                        spec.data + at[0] * 2 + at[1] * spec.strides[0] + at[2] * spec.strides[1], 2);
          else
            std::memset(reinterpret_cast<void*>(address), 0, 2);
        }
      }
    }
    --cta.copies;
    barrier->receive_bytes(spec.box[0] * spec.box[1] * spec.box[2] * 2);
  });
}

// ---- products

enum class Columns { kInner, kOuter };
struct Operand {
  uint64_t address;
  int chunk_bytes;
};
inline Operand make_operand(const void* shared, int chunk_bytes) {
  if (reinterpret_cast<uintptr_t>(shared) % 1024 != 0) fail("an operand at an address off 1024");
  return {reinterpret_cast<uint64_t>(shared), chunk_bytes};
}
inline Operand advance(Operand operand, int bytes) {
  return {operand.address + static_cast<uint64_t>(bytes), operand.chunk_bytes};
}

inline void start_product(const emulation::Product& mine, float* sums, const uint32_t* registers) {
  emulation::Fiber& fiber = machine->fiber();
  if (!fiber.may_multiply) fail("a product is started before products are begun");
  emulation::ProductQueue& queue = machine->cta().queues[static_cast<size_t>(fiber.thread / 128)];
  const size_t index = fiber.started++;
  if (index == queue.products.size()) queue.products.push_back(std::make_unique<emulation::Product>(mine));
  emulation::Product& p = *queue.products[index];
  if (p.columns != mine.columns || p.group != mine.group || p.add != mine.add || p.a_outer != mine.a_outer ||
      p.b_outer != mine.b_outer || p.a != mine.a || p.b != mine.b || p.a_chunk != mine.a_chunk ||
      p.b_chunk != mine.b_chunk)
    fail("threads of a warpgroup start different products");
  p.sums[fiber.thread % 128] = sums;
  p.registers[fiber.thread % 128] = registers;
  ++p.threads;
}

template <class Element, int kColumnsB, Columns kA, Columns kB>
void multiply(float (&sums)[kColumnsB / 2], Operand a, Operand b, bool add) {
  start_product({.columns = kColumnsB,
                 .group = machine->fiber().ended_groups,
                 .add = add,
                 .bfloat16 = std::is_same_v<Element, BFloat16>,
                 .a_outer = kA == Columns::kOuter,
                 .b_outer = kB == Columns::kOuter,
                 .a = a.address,
                 .b = b.address,
                 .a_chunk = a.chunk_bytes,
                 .b_chunk = b.chunk_bytes},
                sums, nullptr);
}
template <class Element, int kColumnsB, Columns kB>
void multiply(float (&sums)[kColumnsB / 2], const uint32_t (&a)[4], Operand b, bool add) {
  start_product({.columns = kColumnsB,
                 .group = machine->fiber().ended_groups,
                 .add = add,
                 .bfloat16 = std::is_same_v<Element, BFloat16>,
                 .b_outer = kB == Columns::kOuter,
                 .b = b.address,
                 .b_chunk = b.chunk_bytes},
                sums, a);
}
inline void begin_products() { machine->fiber().may_multiply = true; }
inline void end_group() {
  machine->fiber().may_multiply = false;
  ++machine->fiber().ended_groups;
}
template <int kGroups>
void wait_groups() {
  emulation::Fiber& fiber = machine->fiber();
  emulation::ProductQueue& queue = machine->cta().queues[static_cast<size_t>(fiber.thread / 128)];
  const int needed = fiber.ended_groups - kGroups;
  const size_t started = fiber.started;
  machine->await("its products", [&queue, needed, started] {
    return queue.done >= started || queue.products[queue.done]->group >= needed;
  });
}
template <int kNumber>
void stay_behind(const float (&)[kNumber], uint32_t*) {}
template <class T>
void pin(T&) {}

// ---- memory

inline void store_shared(void* shared, const Words4& words) {
  check_aligned(shared, 16);
  machine->mark_unfenced(shared, 16);
  std::memcpy(shared, &words, 16);
}
inline void store_shared(float* shared, float a, float b, float c, float d) {
  check_aligned(shared, 16);
  machine->mark_unfenced(shared, 16);
  shared[0] = a, shared[1] = b, shared[2] = c, shared[3] = d;
}
inline void store_shared(void* shared, uint32_t word) {
  check_aligned(shared, 4);
  machine->mark_unfenced(shared, 4);
  std::memcpy(shared, &word, 4);
}
inline void add_global(float* p, float a, float b, float c, float d) {
  check_aligned(p, 16);
  p[0] += a, p[1] += b, p[2] += c, p[3] += d;
}
/// A copy reads shared memory some time later, and adds later still.
inline void add_shared(float* p, const float* shared, int n) {
  check_aligned(p, 16);
  check_aligned(shared, 16);
  emulation::Cta& cta = machine->cta();
  emulation::Fiber& fiber = machine->fiber();
  ++cta.copies;
  ++fiber.adds_to_read;
  ++fiber.adds_to_do;
  machine->later([=, &cta, &fiber] {
    machine->check_fenced(cta, shared, static_cast<size_t>(n) * sizeof(float));
    const std::vector<float> read(shared, shared + n);
    --fiber.adds_to_read;
    machine->later([=, &cta, &fiber] {
      for (int i = 0; i < n; ++i) p[i] += read[static_cast<size_t>(i)];
      --fiber.adds_to_do;
      --cta.copies;
    });
  });
}
inline void wait_read() {
  machine->await("a copy that reads", [&fiber = machine->fiber()] { return fiber.adds_to_read == 0; });
}
inline void wait_added() {
  machine->await("a copy that adds", [&fiber = machine->fiber()] { return fiber.adds_to_do == 0; });
}
}  // namespace distca::attention::cuda::hopper
