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
/// Rows and keys that form the outer dimension of a product are computed in multiples of this many.
inline constexpr int64_t kRowUnit = 8;
/// Columns of a product are computed in multiples of this many.
inline constexpr int64_t kColumnUnit = 16;

static_assert(kTileRows == kPanelWords);

/// Element m of an outer dimension sees inner elements [max(0, from + m), min(limit, upto + m)), or none if that range
/// is empty.
struct Visible {
  int64_t from;
  int64_t upto;
  int64_t limit;
};

/// The left factor of a product of visible elements.
enum class LeftForm {
  kInnerColumns,  // element (m, p) is word (m, p) of panels: the inner dimension runs along a row
  kInnerRows,     // element (m, p) is word (p, m) of one panel
};

struct LeftFactor {
  LeftForm form;
  const float* panels;
  int64_t panel_stride;
};

struct Panels {
  float* data;
  int64_t panel_stride;
};

/// The state of the online softmax, for each query row of a tile.
struct SoftmaxState {
  float* row_max;
  float* row_sum;
  float* rescale;  // output: the factor on the sums of earlier keys
};

/// Keys [begin, end) of a step, both multiples of kRowUnit, for `lanes` query rows (a multiple of kColumnUnit).
struct ScoreTile {
  int64_t begin;
  int64_t end;
  int64_t lanes;
  Visible visible;  // what query rows see
};

/// Where the backward pass puts P and dS of a tile.
struct GradientOutputs {
  float* probs;        // [keys] rows of a panel; words are pairs of query rows
  float* dscores;      // the same
  float* dscore_rows;  // [pairs of keys, kTileRows]; only where words are pairs, otherwise dscores serves
};

struct MicroKernel {
  /// Elements of a word: 1 (floats) or 2 (bf16).
  int64_t word_elements;

  /// Packs `rows` rows of `dim` elements (byte stride src_stride) and converts them; words are pairs of columns. Words
  /// past `dim`, up to the next multiple of kColumnUnit, become zero.
  void (*pack_rows)(DType dtype, int64_t rows, int64_t dim, const std::byte* src, int64_t src_stride, Panels dst);
  /// Like pack_rows, but words are pairs of rows, and the first row comes after `skipped` rows (0 or 1) of its pair.
  /// The missing half of a pair becomes zero.
  void (*pack_row_pairs)(DType dtype, int64_t skipped, int64_t rows, int64_t dim, const std::byte* src,
                         int64_t src_stride, Panels dst);
  /// Sets dst [words, kTileRows], one panel, to `sign` times the transpose of up to kTileRows packed rows (pairs of
  /// columns); sign is 1, -1 or 0. Columns past `rows`, up to the next multiple of kColumnUnit, become zero.
  void (*transpose_rows)(int64_t rows, int64_t words, int sign, const float* panels, int64_t panel_stride, float* dst);

  /// Sets scores [keys, kTileRows] = keys * queries for the tile's keys. `queries` [words, kTileRows] comes from
  /// transpose_rows.
  void (*multiply_scores)(const ScoreTile& tile, int64_t words, const float* keys, int64_t panel_stride,
                          const float* queries, float* scores);
  /// Sets c [m, columns] = rescale[m] * c + left [m, inner] * right [inner, columns], each row m over what it sees.
  /// `right` has pairs of rows; `columns` is a multiple of kColumnUnit. Rows up to the next multiple of kRowUnit are
  /// computed too. `rescale` may be null (ones).
  void (*multiply_visible)(int64_t m, int64_t columns, Visible visible, LeftFactor left, const float* right,
                           int64_t right_stride, const float* rescale, Panels c);

  /// Sets scores = cap * tanh(scale / cap * scores).
  void (*cap_scores)(const ScoreTile& tile, float scale, float cap, float* scores);
  /// Makes one step of the online softmax. The tile's scores become exp(scale * score - new maximum), as operands
  /// [pairs of keys, kTileRows], and zero where a row sees no key. A row whose maximum is still -inf keeps a sum of
  /// zero. scale > 0.
  void (*softmax_step)(const ScoreTile& tile, float scale, float* scores, const SoftmaxState& state);
  /// Computes P = exp(scale * score - lse) and dS = P * (dprob - delta). Both are zero where a row sees no key, in rows
  /// whose lse is -inf and in lanes past the tile's. With cap != 0 the scores are capped already, and dS is multiplied
  /// by the derivative of the cap. scale > 0.
  void (*softmax_gradient)(const ScoreTile& tile, float scale, float cap, const float* lse, const float* delta,
                           const float* scores, const float* dprobs, const GradientOutputs& outputs);

  /// Writes factor * src / divisor[row], rounded once to `dtype`; zero where the divisor is zero. A null divisor means
  /// ones.
  void (*store_rows)(DType dtype, int64_t rows, int64_t dim, float factor, const float* divisor, Panels src,
                     std::byte* dst, int64_t dst_stride);

  /// See micro_peak.h.
  double (*multiply_registers)(int64_t rounds, float* sink);
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

/// The tables for `isa` ("avx512_bf16", "avx512", "avx2", "plain"). If it is empty, the environment variable
/// DISTCA_CPU_ISA names them. If that is unset or empty, they are the best ones that this CPU has. Throws
/// InvalidArgumentError for a name that is unknown or that this CPU lacks.
const InstructionSet& select_instruction_set(std::string_view isa);

}  // namespace distca::attention
