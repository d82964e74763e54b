// Breaks one rule of an instruction on the emulated machine, which has to stop the program and say why.
//
// misuse WHICH
#include <array>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>

#include "attention/ampere.h"
#include "attention/hopper.h"
#include "attention/work_list.h"
#include "machine.h"

namespace {

using namespace distca::attention::cuda;
using distca::attention::cuda::hopper::Barrier;

constexpr int kWarpgroup = 128;

/// One chunk of 64 rows and 64 columns, and a barrier.
struct Shared {
  alignas(1024) uint16_t tile[64][64];
  Barrier barrier;
};

alignas(16) std::array<uint16_t, 64 * 64> rows;
uint64_t signal = 1;

/// A map of `rows`, as the emulated machine has it.
const TensorMap& map_of_rows() {
  static const TensorMap map = [] {
    const MapSpec spec{reinterpret_cast<const std::byte*>(rows.data()), {64, 64, 1}, {128, 8192}, {64, 64, 1}};
    TensorMap made{};
    std::memcpy(static_cast<void*>(&made), &spec, sizeof(spec));
    return made;
  }();
  return map;
}

int thread() { return hopper::thread_of_cta(); }
bool is_first() { return thread() == 0; }

void init(Shared& s) {
  if (is_first()) s.barrier.init(1);
}
void init_and_fence(Shared& s) {
  init(s);
  if (is_first()) hopper::fence_barrier_init();
  hopper::sync_cta();
}
/// The first thread loads the tile.
void load(Shared& s) {
  if (!is_first()) return;
  s.barrier.expect_bytes(sizeof(s.tile));
  hopper::load_box(&map_of_rows(), &s.barrier, &s.tile, 0, 0, 0);
  s.barrier.arrive();
}
void acquire() {
  if (is_first()) hopper::acquire_map(&map_of_rows());
}
/// All threads of the warpgroup multiply the tile, or what begins `bytes` later, with itself.
void multiply(Shared& s, int bytes = 0) {
  const hopper::Operand a = hopper::make_operand(reinterpret_cast<std::byte*>(&s.tile) + bytes, 16);
  float sums[32];
  hopper::multiply<hopper::BFloat16, 64, hopper::Columns::kInner, hopper::Columns::kInner>(sums, a, a, false);
  hopper::end_group();
  hopper::wait_groups<0>();
}
void clear(Shared& s) {
  for (int i = thread(); i < 512; i += kWarpgroup) hopper::store_shared(&s.tile[i / 8][i % 8 * 8], hopper::Words4{});
}

/// All threads start copying a row of the tile.
void copy(Shared& s) {
  ampere::copy16(ampere::place_of(&s.tile[thread() % 64][thread() / 64 * 8]),
                 reinterpret_cast<const std::byte*>(&rows[static_cast<size_t>(thread()) * 8]), true);
}
/// Each warp loads four matrices, the first of which begins `bytes` after the tile, and multiplies them with
/// themselves.
void multiply_matrices(Shared& s, int bytes = 0) {
  uint32_t words[4];
  float sums[8] = {};
  ampere::load_matrices(words, ampere::place_of(&s.tile[thread() % 32]) + bytes);
  ampere::multiply<gpu::BFloat16>(sums, 0, 0, words, words);
  ampere::end_products();
}

struct Kernel {
  int threads;
  void (*run)(Shared& s);
};

const std::map<std::string, Kernel> kKernels = {
    {"nothing",
     {kWarpgroup,
      [](Shared& s) {
        hopper::lower_registers<24>();
        init_and_fence(s);
        acquire();
        if (thread() < 32 && hopper::load_signal(&signal) == 1) hopper::fence_all();
        load(s);
        s.barrier.wait(0);
        hopper::begin_products();
        multiply(s);
        clear(s);
        hopper::fence_shared();
        hopper::sync_named(7, kWarpgroup);
        hopper::begin_products();
        multiply(s);
        copy(s);
        ampere::end_copies();
        ampere::wait_copies<0>();
        gpu::sync_cta();
        multiply_matrices(s);
      }}},
    {"read_what_was_stored_without_a_fence",
     {kWarpgroup,
      [](Shared& s) {
        clear(s);
        hopper::sync_cta();
        hopper::begin_products();
        multiply(s);
      }}},
    {"load_over_what_was_stored_without_a_fence",
     {kWarpgroup,
      [](Shared& s) {
        init_and_fence(s);
        clear(s);
        hopper::sync_cta();
        acquire();
        load(s);
        s.barrier.wait(0);
      }}},
    {"fence_in_another_thread",
     {kWarpgroup,
      [](Shared& s) {
        if (is_first()) hopper::store_shared(&s.tile[0][0], 0u);
        hopper::sync_cta();
        if (!is_first()) hopper::fence_shared();
        hopper::sync_cta();
        hopper::begin_products();
        multiply(s);
      }}},
    {"load_with_an_unknown_barrier",
     {kWarpgroup,
      [](Shared& s) {
        init(s);
        hopper::sync_cta();
        acquire();
        load(s);
      }}},
    {"load_by_a_map_that_was_not_acquired",
     {kWarpgroup,
      [](Shared& s) {
        init_and_fence(s);
        load(s);
      }}},
    {"load_what_a_signal_announced_without_a_fence",
     {kWarpgroup,
      [](Shared& s) {
        init_and_fence(s);
        acquire();
        if (thread() == 5) hopper::load_signal(&signal);
        hopper::fence_shared();
        hopper::sync_cta();
        load(s);
      }}},
    {"end_before_a_copy",
     {kWarpgroup,
      [](Shared& s) {
        init_and_fence(s);
        acquire();
        load(s);
      }}},
    {"expect_too_many_bytes",
     {kWarpgroup,
      [](Shared& s) {
        init_and_fence(s);
        if (is_first()) s.barrier.expect_bytes(1 << 20);
      }}},
    {"disagree_about_a_named_barrier",
     {2 * kWarpgroup, [](Shared&) { hopper::sync_named(1, thread() < kWarpgroup ? 256 : 128); }}},
    {"come_to_a_named_barrier_with_half_a_warp",
     {kWarpgroup,
      [](Shared&) {
        if (thread() % 32 < 16) hopper::arrive_named(1, 64);
      }}},
    {"leave_a_named_barrier", {kWarpgroup, [](Shared&) { hopper::arrive_named(1, 256); }}},
    {"use_an_unknown_named_barrier", {kWarpgroup, [](Shared&) { hopper::sync_named(8, kWarpgroup); }}},
    {"multiply_before_products_are_begun", {kWarpgroup, [](Shared& s) { multiply(s); }}},
    {"multiply_again_after_a_group",
     {kWarpgroup,
      [](Shared& s) {
        hopper::begin_products();
        multiply(s);
        multiply(s);
      }}},
    {"multiply_what_is_not_aligned",
     {kWarpgroup,
      [](Shared& s) {
        hopper::begin_products();
        multiply(s, 512);
      }}},
    {"multiply_with_three_warps",
     {kWarpgroup,
      [](Shared& s) {
        hopper::begin_products();
        if (thread() < 96) multiply(s);
      }}},
    {"lower_the_registers_of_three_warps",
     {kWarpgroup,
      [](Shared&) {
        if (thread() < 96) hopper::lower_registers<24>();
      }}},
    {"raise_registers_beyond_what_there_is",
     {3 * kWarpgroup,
      [](Shared&) {
        if (thread() < kWarpgroup)
          hopper::lower_registers<56>();
        else
          hopper::raise_registers<232>();
      }}},
    {"end_before_a_group_of_copies",
     {kWarpgroup,
      [](Shared& s) {
        copy(s);
        ampere::end_copies();
      }}},
    {"end_before_copies_are_a_group", {kWarpgroup, [](Shared& s) { copy(s); }}},
    {"copy_to_what_is_not_aligned",
     {kWarpgroup,
      [](Shared& s) {
        ampere::copy16(ampere::place_of(&s.tile[0][4]), reinterpret_cast<const std::byte*>(rows.data()), true);
      }}},
    {"copy_from_what_is_not_aligned",
     {kWarpgroup,
      [](Shared& s) {
        ampere::copy16(ampere::place_of(&s.tile), reinterpret_cast<const std::byte*>(&rows[4]), true);
      }}},
    {"load_matrices_that_are_not_aligned", {kWarpgroup, [](Shared& s) { multiply_matrices(s, 8); }}},
    {"load_matrices_beyond_shared_memory", {kWarpgroup, [](Shared& s) { multiply_matrices(s, 1 << 20); }}},
    {"load_matrices_otherwise_in_a_lane",
     {kWarpgroup,
      [](Shared& s) {
        uint32_t words[4];
        if (thread() == 3)
          ampere::load_transposed(words, ampere::place_of(&s.tile));
        else
          ampere::load_matrices(words, ampere::place_of(&s.tile));
        ampere::end_products();
      }}},
    {"multiply_with_half_a_warp",
     {kWarpgroup,
      [](Shared& s) {
        if (thread() % 32 < 16) multiply_matrices(s);
      }}},
    {"come_to_a_barrier_before_the_end_of_products",
     {kWarpgroup,
      [](Shared& s) {
        uint32_t words[4];
        ampere::load_matrices(words, ampere::place_of(&s.tile));
        gpu::sync_cta();
        ampere::end_products();
      }}},
    {"end_before_the_end_of_products",
     {kWarpgroup,
      [](Shared& s) {
        uint32_t words[4];
        ampere::load_matrices(words, ampere::place_of(&s.tile));
      }}},
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 || kKernels.count(argv[1]) == 0) return 3;
  const Kernel& kernel = kKernels.at(argv[1]);
  emulation::Machine machine(1);
  machine.run(1, kernel.threads, sizeof(Shared),
              [&](std::byte* shared) { kernel.run(*reinterpret_cast<Shared*>(shared)); });
  std::puts("nothing was noticed");
  return 0;
}
