// The inner loops of the CPU kernel, written once with vector extensions and compiled once for each instruction set.
//
// DISTCA_ISA names the instruction set (amx, avx512_bf16, avx512, avx2, plain). With DISTCA_EMULATED_VECTORS and
// DISTCA_EMULATED_TILES, functions stand for instructions that the CPU lacks (cpp/emulation). Everything but the tables
// has internal linkage, and no inline function or template of a header outside these parts is used. Otherwise a copy of
// one that was compiled here for AVX-512 could become the only one in the library and run on a CPU that lacks it.
// Products are fused explicitly where the instruction set can. The compiler must not contract others
// (-ffp-contract=off); then all code paths round alike.
#include "attention/micro_kernel.h"

#include "attention/micro_pack.h"
#include "attention/micro_peak.h"
#include "attention/micro_products.h"
#include "attention/micro_softmax.h"
#if defined(__AMX_BF16__) || defined(DISTCA_EMULATED_TILES)
#define DISTCA_TILES
#include "attention/micro_tiles.h"
#endif

#define DISTCA_JOIN_(a, b) a##b
#define DISTCA_JOIN(a, b) DISTCA_JOIN_(a, b)
#define DISTCA_TEXT_(a) #a
#define DISTCA_TEXT(a) DISTCA_TEXT_(a)

namespace distca::attention {
namespace {

/// Products on registers.
template <class Operands>
constexpr MicroKernel table(const char* operands, decltype(MicroKernel::pack_rows) rows,
                            decltype(MicroKernel::pack_row_pairs) row_pairs,
                            decltype(MicroKernel::pack_values) values) {
  return {.operands = operands,
          .word_elements = Operands::kElements,
          .row_unit = kRowUnit,
          .softmax_keys = kStepKeys,
          .begin_work = nullptr,
          .end_work = nullptr,
          .pack_rows = rows,
          .pack_row_pairs = row_pairs,
          .pack_values = values,
          .transpose_rows = transpose_rows<Operands>,
          .multiply_scores = multiply_scores<Operands>,
          .add_values = add_values<Operands>,
          .multiply_visible = multiply_visible<Operands>,
          .cap_scores = cap_scores,
          .softmax_step = softmax_step<Operands>,
          .log_sum_exp = log_sum_exp,
          .softmax_gradient = softmax_gradient<Operands>,
          .store_rows = store_rows,
          .store_sums = store_row_sums,
          .multiply_registers = multiply_registers<Operands>};
}

constexpr MicroKernel kFloats = table<FloatOperands>("floats", pack_floats, pack_floats, pack_float_values);
#if defined(__AVX512BF16__)
constexpr MicroKernel kPairs = table<PairOperands>("pairs", pack_pairs, pack_pair_rows, pack_pair_values);
#endif
#if defined(DISTCA_TILES)
constexpr MicroKernel tile_table() {
  MicroKernel tiles = kPairs;
  tiles.operands = "tiles";
  tiles.pack_values = pack_value_tiles;
  tiles.row_unit = kBlock;
  tiles.softmax_keys = kStepKeys / 2;
  tiles.begin_work = begin_tiles;
  tiles.end_work = end_tiles;
  tiles.multiply_scores = multiply_scores_on_tiles;
  tiles.add_values = add_values_on_tiles;
  tiles.multiply_visible = multiply_visible_on_tiles;
  tiles.store_sums = store_transposed_sums;
  tiles.multiply_registers = multiply_tiles;
  return tiles;
}
constexpr MicroKernel kTiles = tile_table();
constexpr const MicroKernel* kPairTable = &kTiles;
#elif defined(__AVX512BF16__)
constexpr const MicroKernel* kPairTable = &kPairs;
#else
constexpr const MicroKernel* kPairTable = nullptr;
#endif

}  // namespace

extern const InstructionSet DISTCA_JOIN(kInstructionSet_, DISTCA_ISA);
const InstructionSet DISTCA_JOIN(kInstructionSet_, DISTCA_ISA) = {DISTCA_TEXT(DISTCA_ISA), &kFloats, kPairTable};

}  // namespace distca::attention
