// The inner loops of the CPU kernel, as a table of functions for one instruction set and one kind of operand.
//
// micro_kernel.cpp is compiled once for each instruction set, each time with its own compiler flags. It yields one
// table for operands that are floats and, where the CPU multiplies bf16, one for operands that are pairs of bf16. All
// matrices are packed in scratch memory; only the pack and store functions see strides and dtypes of the caller.
//
// A packed matrix is a row of panels, each kPanelWords 32-bit words wide: word (r, c) is at
// panels + c / kPanelWords * panel_stride + r * kPanelWords + c % kPanelWords.
// A word of an operand is one float, or a pair of bf16 that are neighbours along the inner dimension of the product.
// The two are of one row ("pairs of columns") or of one column ("pairs of rows"). For floats both forms are the same.
//
// Scores are kept transposed, [keys, kTileRows query rows]: query rows are the lanes of a vector. Therefore softmax
// needs no operation across lanes, and keys and values are multiplied as they are, element by element.
//
// Sums over keys (out and dq) lie in memory as add_values leaves them, and the values that it sums up as pack_values
// does. Both forms are the table's own.
//
// Every element of a product is one chain over the inner dimension, in ascending order, and only over what the mask
// lets it see. Therefore a row comes out bitwise the same however many rows are computed beside it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "common/dtype.h"

namespace distca::attention {

/// Words of a panel's row.
inline constexpr int64_t kPanelWords = 32;
/// Query rows of a tile. They are the columns of a matrix of scores, which is one panel.
inline constexpr int64_t kTileRows = 32;
/// Columns of a product are computed in multiples of this many.
inline constexpr int64_t kColumnUnit = 16;

/// Keys that are packed together. Packed steps start at multiples of this many rows of the document.
inline constexpr int64_t kStepKeys = 128;

static_assert(kTileRows == kPanelWords);

/// Element m of an outer dimension sees inner elements [from[m], upto[m]), or none if that range is empty. Neither end
/// falls from one m to the next. There are numbers for as many m as are computed, those past the last one included,
/// whose numbers repeat the last one's.
struct Visible {
  const int32_t* from;
  const int32_t* upto;
};

struct Panels {
  float* data;
  int64_t panel_stride;
};

/// How far scores of a row may exceed its base before the base is raised, and the sums of the row multiplied. Weights
/// are up to e^kSlack. Those of pairs are rounded relative to their size; only the largest one, which is 1 without
/// slack, is rounded once more. Without slack the maximum of most tiles would still rise now and then after thousands
/// of keys.
inline constexpr float kSlack = 5.f;

/// The state of the online softmax, for each query row of a tile.
struct SoftmaxState {
  float* row_base;  // what exponents are relative to: a score of the row, at most kSlack below its maximum so far
  float* row_sum;
  float* row_max;  // the row's largest score so far
  float* rescale;  // output: the factor on the sums of earlier keys
};

/// Keys [begin, end) of a step, both multiples of MicroKernel::row_unit, for `lanes` query rows (a multiple of
/// kColumnUnit).
struct ScoreTile {
  int64_t begin;
  int64_t end;
  int64_t lanes;
  Visible visible;  // what query rows see
};

/// The product of the keys of a tile and its queries.
struct ScoreProduct {
  ScoreTile tile;
  int64_t words;
  const float* keys;
  int64_t panel_stride;
  const float* queries;  // [words, kTileRows], from transpose_rows
  float* scores;         // output: [keys, kTileRows]
};

/// Sums over keys of a tile's rows, as add_values leaves them.
struct SumsOverKeys {
  float* data;
  const float* rescale;  // the factor on each row's sums so far; may be null (ones)
  bool are_new;          // nothing is summed up yet: what lies there is not read
};

/// Where the backward pass puts P and dS of a tile.
struct GradientOutputs {
  float* probs;        // [keys] rows of a panel; words are pairs of query rows
  float* dscores;      // the same
  float* dscore_rows;  // [pairs of keys, kTileRows]; only where words are pairs, otherwise dscores serves
};

/// What a thread has to have put back when it stops using a table's functions.
struct FoundState {
  alignas(64) std::byte bytes[64];
};

struct MicroKernel {
  /// How products are made: "floats", "pairs" (a dot instruction on pairs of bf16) or "tiles" (matrices of them).
  const char* operands;
  /// Elements of a word: 1 (floats) or 2 (bf16).
  int64_t word_elements;
  /// Rows and keys that form a dimension of a product are computed in multiples of this many. Packed rows and keys up
  /// to the next multiple are zero.
  int64_t row_unit;
  /// Keys of a step of the online softmax, a divisor of kStepKeys. This is part of the numerics.
  int64_t softmax_keys;

  /// Before its first call of the other functions a thread calls begin_work, and after its last one end_work, which
  /// puts back what the former found. Both are null where there is nothing to do.
  void (*begin_work)(FoundState& found);
  void (*end_work)(const FoundState& found);

  /// Packs `rows` rows of `dim` elements (byte stride src_stride) and converts them; words are pairs of columns. Words
  /// past `dim`, up to the next multiple of kColumnUnit, become zero.
  void (*pack_rows)(DType dtype, int64_t rows, int64_t dim, const std::byte* src, int64_t src_stride, Panels dst);
  /// Like pack_rows, but words are pairs of rows. The missing half of a pair becomes zero.
  void (*pack_row_pairs)(DType dtype, int64_t rows, int64_t dim, const std::byte* src, int64_t src_stride, Panels dst);
  /// Packs rows of values, the first of which is key `key` of dst. Rows before and after them, up to multiples of
  /// row_unit, may become zero; the ones after them do.
  void (*pack_values)(DType dtype, int64_t key, int64_t rows, int64_t dim, const std::byte* src, int64_t src_stride,
                      Panels dst);
  /// Sets dst [words, kTileRows], one panel, to `sign` times the transpose of up to kTileRows packed rows (pairs of
  /// columns); sign is 1, -1 or 0. Columns past `rows`, up to the next multiple of kColumnUnit, become zero.
  void (*transpose_rows)(int64_t rows, int64_t words, int sign, const float* panels, int64_t panel_stride, float* dst);

  /// Sets scores = keys * queries for the tile's keys. Scores of keys that no row of a vector sees may stay as they
  /// are.
  void (*multiply_scores)(const ScoreProduct& product);
  /// Sets sums [rows, columns] = rescale[row] * sums + weights * values, each row over the keys of the tile that it
  /// sees. `weights` are operands [pairs of keys, kTileRows]. `values` come from pack_values; the tile's first key is
  /// their key `key`. `columns` is a multiple of kColumnUnit.
  void (*add_values)(const ScoreTile& tile, int64_t rows, int64_t columns, const float* weights, Panels values,
                     int64_t key, const SumsOverKeys& sums);
  /// Adds left [m, inner] * right [inner, columns] to c [m, columns], each row m over what it sees. Words of `left` are
  /// pairs of columns, those of `right` pairs of rows; `columns` is a multiple of kColumnUnit. Rows up to the next
  /// multiple of row_unit are computed too.
  void (*multiply_visible)(int64_t m, int64_t columns, Visible visible, Panels left, Panels right, Panels c);

  /// Sets scores = cap * tanh(scale / cap * scores).
  void (*cap_scores)(const ScoreTile& tile, float scale, float cap, float* scores);
  /// Makes one step of the online softmax. The tile's scores become exp(scale * score - new base), as operands [pairs
  /// of keys, kTileRows], and zero where a row sees no key. A row whose base is still -inf keeps a sum of zero.
  /// scale > 0.
  void (*softmax_step)(const ScoreTile& tile, float scale, float* scores, const SoftmaxState& state);
  /// Sets lse = base + log(sum), the natural logarithm, of each row of a tile; -inf where the sum is zero.
  void (*log_sum_exp)(const float* row_base, const float* row_sum, float* lse);
  /// Computes P = exp(scale * score - lse) and dS = P * (dprob - delta). Both are zero where a row sees no key, in rows
  /// whose lse is -inf and in lanes past the tile's. With cap != 0 the scores are capped already, and dS is multiplied
  /// by the derivative of the cap. scale > 0.
  void (*softmax_gradient)(const ScoreTile& tile, float scale, float cap, const float* lse, const float* delta,
                           const float* scores, const float* dprobs, const GradientOutputs& outputs);

  /// Writes factor * src / divisor[row] in `dtype`; zero where the divisor is zero. A null divisor means ones. bf16 and
  /// fp16 are multiplied by the reciprocal. fp32 is divided: a row that sees one key has its value to the last bit.
  void (*store_rows)(DType dtype, int64_t rows, int64_t dim, float factor, const float* divisor, Panels src,
                     std::byte* dst, int64_t dst_stride);
  /// Like store_rows, for up to kTileRows rows of sums from add_values.
  void (*store_sums)(DType dtype, int64_t rows, int64_t dim, float factor, const float* divisor, const float* sums,
                     std::byte* dst, int64_t dst_stride);

  /// See micro_peak.h.
  double (*multiply_registers)(int64_t rounds, float* sink);
};

/// Lets a thread use a table's functions while it lives.
class KernelThread {
 public:
  explicit KernelThread(const MicroKernel& micro) : micro_(micro) {
    if (micro_.begin_work != nullptr) micro_.begin_work(found_);
  }
  ~KernelThread() {
    if (micro_.end_work != nullptr) micro_.end_work(found_);
  }
  KernelThread(const KernelThread&) = delete;
  KernelThread& operator=(const KernelThread&) = delete;

 private:
  const MicroKernel& micro_;
  FoundState found_;
};

/// The tables of one instruction set.
struct InstructionSet {
  const char* name;
  const MicroKernel* floats;
  const MicroKernel* pairs;  // for bf16 inputs; null where the CPU has no such products

  const MicroKernel& kernel_for(DType dtype) const {
    return dtype == DType::kBFloat16 && pairs != nullptr ? *pairs : *floats;
  }
};

/// The tables of "avx512_bf16" and "amx" in which functions stand for instructions that AVX2 lacks.
struct EmulatedKernels {
  const InstructionSet* pairs;
  const InstructionSet* tiles;
};
/// Null if the library that has them is missing.
const EmulatedKernels* emulated_kernels();

/// The tables for `isa` ("amx", "avx512_bf16", "avx512", "avx2", "plain", or an emulated one: "avx512_bf16_emulated",
/// "amx_emulated"). If it is empty, the environment variable DISTCA_CPU_ISA names them. If that is unset or empty, they
/// are the best ones for this CPU, never emulated ones. Throws InvalidArgumentError for a name that is unknown or that
/// this CPU lacks.
const InstructionSet& select_instruction_set(std::string_view isa);

}  // namespace distca::attention
