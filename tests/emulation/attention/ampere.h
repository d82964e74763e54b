// What cuda/attention/ampere.h declares, for the emulated machine.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention/gpu.h"

namespace distca::attention::cuda::ampere {

using namespace gpu;

struct Place {
  uint64_t address;

  Place operator+(int bytes) const { return {address + static_cast<uint64_t>(bytes)}; }
  Place operator^(int bits) const { return {address ^ static_cast<uint64_t>(bits)}; }
};
inline Place place_of(const void* shared) { return {reinterpret_cast<uint64_t>(shared)}; }

/// The bytes at a place, which have to be in shared memory and aligned.
inline std::byte* at(Place place, size_t bytes) {
  auto* p = reinterpret_cast<std::byte*>(place.address);
  machine->check_shared(machine->cta(), p, bytes);
  check_aligned(p, bytes);
  return p;
}

// ---- copies into shared memory

inline void copy(Place to, const std::byte* from, size_t bytes, bool valid) {
  check_aligned(from, bytes);
  machine->fiber().copies.push_back({at(to, bytes), valid ? from : nullptr, bytes});
}
inline void copy16(Place to, const std::byte* from, bool valid) { copy(to, from, 16, valid); }
inline void copy4(Place to, const std::byte* from, bool valid) { copy(to, from, 4, valid); }
/// The copies of a group are done some time after its end, at once.
inline void end_copies() {
  emulation::Cta& cta = machine->cta();
  emulation::Fiber& fiber = machine->fiber();
  const size_t group = fiber.groups_of_copies.size();
  fiber.groups_of_copies.push_back(true);
  ++cta.copies;
  machine->later([&cta, &fiber, group, copies = std::exchange(fiber.copies, {})] {
    for (const emulation::Copy& copy : copies) {
      if (copy.from != nullptr)
        std::memcpy(copy.to, copy.from, copy.bytes);
      else
        std::memset(copy.to, 0, copy.bytes);
    }
    fiber.groups_of_copies[group] = false;
    --cta.copies;
  });
}
template <int kGroups>
void wait_copies() {
  emulation::Fiber& fiber = machine->fiber();
  const auto groups = static_cast<long>(fiber.groups_of_copies.size());
  machine->await("its copies", [&fiber, waited = std::max(groups - kGroups, 0l)] {
    const auto begin = fiber.groups_of_copies.begin();
    return std::find(begin, begin + waited, true) == begin + waited;
  });
}

// ---- products of a warp

inline std::vector<emulation::LaneInstruction>& instructions() { return machine->fiber().instructions; }

inline void load_matrices(uint32_t (&words)[4], Place row) {
  instructions().push_back({.kind = emulation::LaneInstruction::kLoad, .row = at(row, 16), .words = words});
}
inline void load_transposed(uint32_t (&words)[4], Place row) {
  instructions().push_back({.kind = emulation::LaneInstruction::kLoadTransposed, .row = at(row, 16), .words = words});
}

template <class Element, int kSums>
void multiply(float (&sums)[kSums], int j, int i, const uint32_t (&a)[4], const uint32_t (&b)[4]) {
  const int first = 4 * (2 * j + i);
  if (first < 0 || first + 4 > kSums || i < 0 || i > 1) fail("a product of columns that a thread has no sums for");
  instructions().push_back({.kind = emulation::LaneInstruction::kMultiply,
                            .bfloat16 = std::is_same_v<Element, BFloat16>,
                            .sums = sums + first,
                            .a = a,
                            .b = b + 2 * i});
}

/// The last lane to come does the work of all.
inline void end_products() {
  const auto thread = static_cast<size_t>(thread_of_cta());
  emulation::WarpInstructions& warp = machine->cta().instructions[thread / 32];
  warp.lanes[thread % 32] = &instructions();
  const uint64_t generation = warp.generation;
  if (++warp.arrived == 32) {
    emulation::execute(warp);
    warp.arrived = 0;
    ++warp.generation;
  } else {
    machine->await("the lanes of its warp", [&warp, generation] { return warp.generation != generation; });
  }
  instructions().clear();
}

inline void store_shared(Place to, uint32_t word) { std::memcpy(at(to, 4), &word, 4); }

}  // namespace distca::attention::cuda::ampere
