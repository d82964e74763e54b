// Register-blocked products of packed operands, for micro_kernel.cpp alone (see there).
//
// A tile is kTileM elements of the outer dimension times kTileN vectors of columns. The left factor is broadcast
// element by element, and the right one is loaded as vectors. Both lie in a few consecutive cache lines.
#pragma once

#include "attention/micro_simd.h"

namespace distca::attention {
namespace {

enum class LeftForm {
  kInnerColumns,  // element (m, p) is word (m, p) of panels: the inner dimension runs along a row
  kInnerRows,     // element (m, p) is word (p, m) of one panel
};

/// Longer chains over the words of a row are added up from chains of this length, which makes errors smaller.
constexpr int64_t kScoreChain = 64;

/// Adds left * right over inner words [begin, end), which every row of the tile sees, to `sum`.
template <class Operands, LeftForm kForm, int kM, int kN>
DISTCA_INLINE void add_products(int64_t begin, int64_t end, const float* left, int64_t left_stride, const float* right,
                                Floats (&sum)[kM][kN]) {
  constexpr int64_t kStepP = kForm == LeftForm::kInnerColumns ? 1 : kPanelWords;
  constexpr int64_t kStepM = kForm == LeftForm::kInnerColumns ? kPanelWords : 1;
  right += begin * kPanelWords;
  while (begin < end) {
    int64_t stop = end;
    const float* a = left + begin * kPanelWords;
    if constexpr (kForm == LeftForm::kInnerColumns) {
      stop = smaller_of(end, (begin / kPanelWords + 1) * kPanelWords);
      a = left + begin / kPanelWords * left_stride + begin % kPanelWords;
    }
#pragma GCC unroll 4
    for (; begin < stop; ++begin, a += kStepP, right += kPanelWords) {
      Floats vectors[kN];
#pragma GCC unroll 4
      for (int j = 0; j < kN; ++j) vectors[j] = load(right + j * kWidth);
#pragma GCC unroll 8
      for (int i = 0; i < kM; ++i) {
        const Floats element = broadcast_word(a + i * kStepM);
#pragma GCC unroll 4
        for (int j = 0; j < kN; ++j) sum[i][j] = Operands::multiply_add(element, vectors[j], sum[i][j]);
      }
    }
  }
}

/// Like add_products where rows differ in what they see.
template <class Operands, LeftForm kForm, int kM, int kN>
DISTCA_INLINE void add_edge_products(int64_t begin, int64_t end, Visible visible, const float* left,
                                     int64_t left_stride, const float* right, Floats (&sum)[kM][kN]) {
  for (; begin < end; ++begin) {
    const float* a = kForm == LeftForm::kInnerColumns ? left + begin / kPanelWords * left_stride + begin % kPanelWords
                                                      : left + begin * kPanelWords;
    Floats vectors[kN];
#pragma GCC unroll 4
    for (int j = 0; j < kN; ++j) vectors[j] = load(right + begin * kPanelWords + j * kWidth);
#pragma GCC unroll 8
    for (int i = 0; i < kM; ++i) {
      const int64_t from = visible.from[i], upto = visible.upto[i];
      const Floats element = broadcast_word(a + i * (kForm == LeftForm::kInnerColumns ? kPanelWords : 1));
      if constexpr (Operands::kElements == 1) {
        if (begin < from || begin >= upto) continue;
#pragma GCC unroll 4
        for (int j = 0; j < kN; ++j) sum[i][j] = Operands::multiply_add(element, vectors[j], sum[i][j]);
      } else {
        const bool first = 2 * begin >= from && 2 * begin < upto;
        const bool second = 2 * begin + 1 >= from && 2 * begin + 1 < upto;
        if (!first && !second) continue;
        // An element that is not seen becomes zero itself, and not only its weight: it may be NaN.
        const uint32_t seen = (first ? 0xffffu : 0u) | (second ? 0xffff0000u : 0u);
#pragma GCC unroll 4
        for (int j = 0; j < kN; ++j)
          sum[i][j] = Operands::multiply_add(element, (Floats)((Words)vectors[j] & seen), sum[i][j]);
      }
    }
  }
}

/// Calls tile.operator()<kM>(i) for tiles [i, i + kM) that together are [begin, end), which are multiples of kRowUnit
/// elements.
template <class Tile>
DISTCA_INLINE void for_each_tile(int64_t begin, int64_t end, const Tile& tile) {
  static_assert(kRowUnit % kTileM == 0 || (kRowUnit == 8 && kTileM == 6));
  if constexpr (kRowUnit % kTileM == 0) {
    for (; begin < end; begin += kTileM) tile.template operator()<kTileM>(begin);
  } else {
    // A multiple of eight is some sixes, and none, one or two fours.
    for (; end - begin > 8 || end - begin == 6; begin += 6) tile.template operator()<6>(begin);
    for (; begin < end; begin += 4) tile.template operator()<4>(begin);
  }
}

template <class Operands, int kN>
DISTCA_INLINE void score_panel(const ScoreTile& tile, int64_t words, const float* keys, int64_t panel_stride,
                               const float* queries, float* scores) {
  for_each_tile(tile.begin, tile.end, [&]<int kM>(int64_t key) __attribute__((always_inline)) {
    for (int64_t begin = 0; begin < words; begin += kScoreChain) {
      Floats sum[kM][kN] = {};
      add_products<Operands, LeftForm::kInnerColumns, kM, kN>(begin, smaller_of(begin + kScoreChain, words),
                                                              keys + key * kPanelWords, panel_stride, queries, sum);
#pragma GCC unroll 8
      for (int i = 0; i < kM; ++i) {
#pragma GCC unroll 4
        for (int j = 0; j < kN; ++j) {
          float* at = scores + (key + i) * kTileRows + j * kWidth;
          store(at, begin == 0 ? sum[i][j] : load(at) + sum[i][j]);
        }
      }
    }
  });
}

template <class Operands>
void multiply_scores(const ScoreProduct& p) {
  // The tile without the keys that no lane of [lane, lane + lanes) sees.
  const auto seen_by = [&](int64_t lane, int64_t lanes) {
    const int64_t upto = larger_of(p.tile.visible.upto[lane + lanes - 1], p.tile.begin);
    ScoreTile seen = p.tile;
    seen.end = smaller_of(row_units(upto), p.tile.end);
    return seen;
  };
  int64_t lane = 0;
  for (; lane + kTileN * kWidth <= p.tile.lanes; lane += kTileN * kWidth)
    score_panel<Operands, kTileN>(seen_by(lane, kTileN * kWidth), p.words, p.keys, p.panel_stride, p.queries + lane,
                                  p.scores + lane);
  for (; lane < p.tile.lanes; lane += kWidth)
    score_panel<Operands, 1>(seen_by(lane, kWidth), p.words, p.keys, p.panel_stride, p.queries + lane, p.scores + lane);
}

template <class Operands, LeftForm kForm, int kN>
DISTCA_INLINE void multiply_column(int64_t m, Visible visible, Panels left, const float* right, const SumsOverKeys& c) {
  constexpr int64_t kElements = Operands::kElements;
  for_each_tile(0, row_units(m), [&]<int kM>(int64_t row) __attribute__((always_inline)) {
    const Visible rows{visible.from + row, visible.upto + row};
    const int64_t begin = rows.from[0], end = rows.upto[kM - 1];
    // All rows of the tile see [whole_begin, whole_end).
    const int64_t begin_word = begin / kElements;
    const int64_t end_word = larger_of((end + kElements - 1) / kElements, begin_word);
    const int64_t whole_begin = smaller_of((rows.from[kM - 1] + kElements - 1) / kElements, end_word);
    const int64_t whole_end = larger_of(rows.upto[0] / kElements, whole_begin);
    const float* a = left.data + row * (kForm == LeftForm::kInnerColumns ? kPanelWords : 1);
    Floats sum[kM][kN] = {};
    if (begin_word < whole_begin)
      add_edge_products<Operands, kForm, kM, kN>(begin_word, whole_begin, rows, a, left.panel_stride, right, sum);
    add_products<Operands, kForm, kM, kN>(whole_begin, whole_end, a, left.panel_stride, right, sum);
    if (whole_end < end_word)
      add_edge_products<Operands, kForm, kM, kN>(whole_end, end_word, rows, a, left.panel_stride, right, sum);
#pragma GCC unroll 8
    for (int i = 0; i < kM; ++i) {
      const Floats factor = broadcast(c.rescale == nullptr ? 1.f : c.rescale[row + i]);
#pragma GCC unroll 4
      for (int j = 0; j < kN; ++j) {
        float* at = c.data + (row + i) * kPanelWords + j * kWidth;
        // Adding zero makes +0 of -0, as adding a sum to it does.
        store(at, c.are_new ? sum[i][j] + Floats{} : fused(load(at), factor, sum[i][j]));
      }
    }
  });
}

template <class Operands, LeftForm kForm>
DISTCA_INLINE void multiply_columns(int64_t m, int64_t columns, Visible visible, Panels left, Panels right,
                                    const SumsOverKeys& c, int64_t c_stride) {
  int64_t column = 0;
  const auto at = [](int64_t i, int64_t stride) { return i / kPanelWords * stride + i % kPanelWords; };
  const auto sums = [&] { return SumsOverKeys{c.data + at(column, c_stride), c.rescale, c.are_new}; };
  for (; column + kTileN * kWidth <= columns; column += kTileN * kWidth)
    multiply_column<Operands, kForm, kTileN>(m, visible, left, right.data + at(column, right.panel_stride), sums());
  for (; column < columns; column += kWidth)
    multiply_column<Operands, kForm, 1>(m, visible, left, right.data + at(column, right.panel_stride), sums());
}

template <class Operands>
void multiply_visible(int64_t m, int64_t columns, Visible visible, Panels left, Panels right, Panels c) {
  multiply_columns<Operands, LeftForm::kInnerColumns>(m, columns, visible, left, right, {c.data, nullptr, false},
                                                      c.panel_stride);
}

/// Values are packed as pairs of rows. Sums are the packed matrix [kTileRows, columns].
template <class Operands>
void add_values(const ScoreTile& tile, int64_t rows, int64_t columns, const float* weights, Panels values, int64_t key,
                const SumsOverKeys& sums) {
  // Only the left factor is const, and only for reading.
  const Panels left{const_cast<float*>(weights), 0};
  const Panels right{values.data + key / Operands::kElements * kPanelWords, values.panel_stride};
  multiply_columns<Operands, LeftForm::kInnerRows>(rows, columns, tile.visible, left, right, sums,
                                                   kTileRows * kPanelWords);
}

}  // namespace
}  // namespace distca::attention
