// Products of pairs of bf16 on tiles (AMX), for micro_kernel.cpp alone (see there).
//
// A tile is 16 rows of 16 words. All tiles have this shape: a thread is configured once. A product is made of blocks of
// up to 2 x 2 tiles of sums. The left factor of an instruction has pairs of columns and the right one pairs of rows, as
// operands are packed for the dot instruction too. Only what is multiplied by weights over keys differs: values are
// packed transposed, tile by tile, and sums over keys are transposed, [columns, kTileRows]. Then weights are the right
// factor as softmax leaves them.
//
// Sums of an instruction are over 32 elements, aligned to the start of the step, whoever sees them: what a row does not
// see has the weight zero. Zero times a finite number adds nothing, to the last bit but for the sign of a zero. Only
// where a row does not see an element that is not finite, rows are computed one by one, from copies in which such
// elements are zero.
//
// Softmax does not run beside products. Where this was measured (Granite Rapids, 2 cores of a virtual machine), tile
// instructions and 512-bit vectors took the same ports: four products took 74 cycles, 96 multiply-adds 51, both 111;
// four loads of tiles 36, with the multiply-adds 102; four stores 70, and 108. A first form of this file that made
// products between exponentials was slower than this one.
#pragma once

#include "attention/micro_tile_blocks.h"

namespace distca::attention {
namespace {

// ---- scores

template <int kN>
DISTCA_INLINE void multiply_score_blocks(const ScoreProduct& p) {
  finish_stores();
  for (int64_t key = p.tile.begin; key < p.tile.end; key += kBlock) {
    zero_block<2, kN>();
    for (int64_t word = 0; word < p.words; word += kTileWords) {
      const float* keys = p.keys + word / kPanelWords * p.panel_stride + key * kPanelWords + word % kPanelWords;
      add_tiles<2, kN>({keys, kPanelWords, kTileWords * kPanelWords}, p.queries + word * kTileRows);
    }
    store_block<2, kN>(p.scores + key * kTileRows);
  }
}

void multiply_scores_on_tiles(const ScoreProduct& p) {
  if (p.tile.lanes > kTileWords)
    multiply_score_blocks<2>(p);
  else
    multiply_score_blocks<1>(p);
}

// ---- sums over keys

/// Where the values of key block `key` (a multiple of kTileElements) and column `column` lie.
DISTCA_INLINE float* value_tile(Panels values, int64_t columns, int64_t key, int64_t column) {
  return values.data + key / kTileElements * columns * kTileWords + column / kTileWords * kTileFloats;
}

/// Packs 32 keys and 32 columns, which are all there. Instructions interleave two rows within each 16 bytes. Therefore
/// `low` has words of columns 0 to 3, 8 to 11, ..., and `high` those between them.
DISTCA_INLINE void pack_value_block(const std::byte* src, int64_t src_stride, float* dst) {
  Floats low[kSquare], high[kSquare];
#pragma GCC unroll 16
  for (int p = 0; p < kSquare; ++p) {
    const __m512i first = _mm512_loadu_si512(src + 2 * p * src_stride);
    const __m512i second = _mm512_loadu_si512(src + (2 * p + 1) * src_stride);
    low[p] = (Floats)_mm512_unpacklo_epi16(first, second);
    high[p] = (Floats)_mm512_unpackhi_epi16(first, second);
  }
  const auto row_of = [](int c) { return (c / 4 * 8 + c % 4) * kTileWords; };
  transpose_square(low, [&](int c) { return dst + row_of(c); });
  transpose_square(high, [&](int c) { return dst + row_of(c) + 4 * kTileWords; });
}

void pack_value_tiles(DType, int64_t key, int64_t rows, int64_t dim, const std::byte* src, int64_t src_stride,
                      Panels dst) {
  const int64_t columns = column_units(dim), end = key + rows;
  const auto row_at = [&](int64_t i, int64_t j) {
    if (i < key || i >= end) return Words{};
    return (Words)load_elements(DType::kBFloat16, src + (i - key) * src_stride + j * 2, dim - j);
  };
  for (int64_t block = key / kTileElements * kTileElements; block < end; block += kTileElements) {
    int64_t j = 0;
    if (block >= key && block + kTileElements <= end) {
      for (; j + kBlock <= dim; j += kBlock)
        pack_value_block(src + (block - key) * src_stride + j * 2, src_stride, value_tile(dst, columns, block, j));
    }
    for (; j < columns; j += kTileWords) {
      Floats pairs[kSquare];
      for (int p = 0; p < kSquare; ++p)
        pairs[p] = (Floats)(row_at(block + 2 * p, j) >> 16 | row_at(block + 2 * p + 1, j));
      transpose_square(pairs, value_tile(dst, columns, block, j), kTileWords);
    }
  }
}

/// What add_values is given.
struct ValueSums {
  const ScoreTile& tile;
  int64_t rows;
  int64_t columns;
  const float* weights;
  Panels values;  // of the tile's step
  bool are_new;   // the sums, see SumsOverKeys
  float* sums;
};

template <int kM, int kN>
DISTCA_INLINE void begin_block(const ValueSums& v, const float* sums) {
  if (v.are_new)
    zero_block<kM, kN>();
  else
    load_block<kM, kN>(sums);
}

template <int kM, int kN>
DISTCA_INLINE void add_value_block(const ValueSums& v, int64_t column) {
  begin_block<kM, kN>(v, v.sums + column * kTileRows);
  for (int64_t key = v.tile.begin; key < v.tile.end; key += kTileElements)
    add_tiles<kM, kN>({value_tile(v.values, v.columns, key, column), kTileWords, kTileFloats},
                      v.weights + key / 2 * kTileRows);
  store_block<kM, kN>(v.sums + column * kTileRows);
}

/// Like add_value_block, lane by lane.
template <int kM, int kN>
void add_seen_values(const ValueSums& v, int64_t column) {
  alignas(64) float block[kBlock * kPanelWords], seen[kM * kTileFloats];
  float* const sums = v.sums + column * kTileRows;
  for (int64_t lane = 0; lane < v.rows; ++lane) {
    const Visible& visible = v.tile.visible;
    const int32_t from = visible.from[lane], upto = visible.upto[lane];
    begin_block<kM, kN>(v, sums);
    for (int64_t key = v.tile.begin; key < v.tile.end; key += kTileElements) {
      const float* values = value_tile(v.values, v.columns, key, column);
      const Words mask = seen_pairs(key / 2, from, upto);
      for (int64_t i = 0; i < kM * kTileFloats; i += kWidth) store(seen + i, (Floats)((Words)load(values + i) & mask));
      finish_stores();
      add_tiles<kM, kN>({seen, kTileWords, kTileFloats}, v.weights + key / 2 * kTileRows);
    }
    store_block<kM, kN>(block);
    for (int64_t i = 0; i < kM * kTileWords; ++i) sums[i * kTileRows + lane] = block[i * kPanelWords + lane];
  }
}

template <int kM, int kN>
DISTCA_INLINE void add_value_columns(const ValueSums& v, int64_t column, bool lane_by_lane) {
  if (lane_by_lane)
    add_seen_values<kM, kN>(v, column);
  else
    add_value_block<kM, kN>(v, column);
}

/// Most factors are exactly 1, which changes no bit. Where all of them are, there is nothing to do.
DISTCA_INLINE void rescale_sums(int64_t lanes, int64_t columns, const float* rescale, float* sums) {
  for (int64_t lane = 0; lane < lanes; lane += kWidth) {
    const Floats factor = load(rescale + lane);
    if (_mm512_cmp_ps_mask(factor, broadcast(1.f), _CMP_NEQ_UQ) == 0) continue;
    for (int64_t i = 0; i < columns; ++i)
      store(sums + i * kTileRows + lane, load(sums + i * kTileRows + lane) * factor);
  }
}

/// Whether the values of all keys of the tile are finite that some row does not see, and those packed beside them.
DISTCA_INLINE bool unseen_values_are_finite(const ValueSums& v) {
  const Visible& visible = v.tile.visible;
  const auto are_finite = [&](int64_t begin, int64_t end) {
    begin = begin / kTileElements * kTileElements;
    end = (end + kTileElements - 1) / kTileElements * kTileElements;
    return begin >= end || all_finite(value_tile(v.values, v.columns, begin, 0), 1,
                                      (end - begin) / kTileElements * v.columns * kTileWords, 0);
  };
  // All rows see the keys between these two ranges.
  return are_finite(v.tile.begin, smaller_of(visible.from[v.rows - 1], v.tile.end)) &&
         are_finite(larger_of(visible.upto[0], v.tile.begin), v.tile.end);
}

void add_values_on_tiles(const ScoreTile& tile, int64_t rows, int64_t columns, const float* weights, Panels values,
                         int64_t key, const SumsOverKeys& sums) {
  const ValueSums v{tile, rows, columns, weights, {value_tile(values, columns, key, 0), 0}, sums.are_new, sums.data};
  const bool lane_by_lane = !unseen_values_are_finite(v);
  if (!sums.are_new && sums.rescale != nullptr) rescale_sums(tile.lanes, columns, sums.rescale, sums.data);
  finish_stores();
  int64_t column = 0;
  for (; column + kBlock <= columns; column += kBlock) {
    if (tile.lanes > kTileWords)
      add_value_columns<2, 2>(v, column, lane_by_lane);
    else
      add_value_columns<2, 1>(v, column, lane_by_lane);
  }
  if (column == columns) return;
  if (tile.lanes > kTileWords)
    add_value_columns<1, 2>(v, column, lane_by_lane);
  else
    add_value_columns<1, 1>(v, column, lane_by_lane);
}

/// Rounds to bf16 and makes pairs, the first of which is the lower half of a word. Denormals become zero.
DISTCA_INLINE Floats narrow_to_pairs(Floats first, Floats second) {
  alignas(64) static constexpr uint16_t kOrder[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(second, first);
  return (Floats)_mm512_permutexvar_epi16(_mm512_load_si512(kOrder), halves);
}

/// The inputs of a kernel on tiles, and with them `dtype`, are bf16.
void store_transposed_sums(DType, int64_t rows, int64_t dim, float factor, const float* divisor, const float* sums,
                           std::byte* dst, int64_t dst_stride) {
  alignas(64) float square[kTileFloats];
  for (int64_t lane = 0; lane < rows; lane += kTileWords) {
    const Floats by = divisor == nullptr ? broadcast(1.f) : load(divisor + lane);
    const Floats factors = broadcast(factor) / by;
    const __mmask16 wanted = _mm512_cmp_ps_mask(by, Floats{}, _CMP_NEQ_UQ);
    // Adding zero makes +0 of -0: which of them a sum that underflows becomes depends on the rows beside.
    const auto column_of = [&](int64_t column) {
      return _mm512_maskz_fmadd_ps(wanted, load(sums + column * kTileRows + lane), factors, Floats{});
    };
    for (int64_t column = 0; column < dim; column += kTileElements) {
      Floats pairs[kSquare];
#pragma GCC unroll 16
      for (int i = 0; i < kSquare; ++i)
        pairs[i] = narrow_to_pairs(column_of(column + 2 * i), column_of(column + 2 * i + 1));
      transpose_square(pairs, square, kTileWords);
      const auto stored =
          static_cast<__mmask32>(~uint32_t{0} >> (kTileElements - smaller_of(dim - column, kTileElements)));
      std::byte* const to = dst + lane * dst_stride + column * 2;
      for (int64_t i = 0; i < smaller_of(rows - lane, kTileWords); ++i)
        _mm512_mask_storeu_epi16(to + i * dst_stride, stored, (__m512i)load(square + i * kTileWords));
    }
  }
}

// ---- sums over query rows

/// Keys `key` to key + kBlock, times rows `row` to row + kBlock of a strip.
struct KeyRowBlock {
  int64_t key;
  int64_t row;
};

/// Whether softmax_gradient has written the block's weights, because some key of it is seen by some row of it.
DISTCA_INLINE bool is_touched(int64_t m, Visible visible, const KeyRowBlock& at) {
  for (int64_t key = at.key; key < smaller_of(at.key + kBlock, m); ++key)
    if (visible.upto[key] > at.row)  // later keys are seen from later rows on
      return visible.from[key] < smaller_of(at.row + kBlock, visible.upto[key]);
  return false;
}

/// Whether some key of the block is not seen by some row of it.
DISTCA_INLINE bool is_edge_block(int64_t m, Visible visible, const KeyRowBlock& at) {
  const int64_t last_key = smaller_of(at.key + kBlock, m) - 1;
  return visible.from[last_key] > at.row || visible.upto[at.key] < at.row + kBlock;
}

template <int kN>
DISTCA_INLINE void add_row_block(const float* left, const float* right) {
  add_tiles<2, kN>({left, kPanelWords, kTileWords * kPanelWords}, right);
}

/// Like add_row_block, key by key, from copies of the rows that are seen.
template <int kN>
void add_seen_rows(int64_t m, Visible visible, const KeyRowBlock& at, const float* left, const float* right, float* c) {
  alignas(64) float block[kBlock * kPanelWords], seen[kTileWords * kPanelWords];
  for (int64_t i = 0; i < smaller_of(kBlock, m - at.key); ++i) {
    const int64_t from = visible.from[at.key + i], upto = visible.upto[at.key + i];
    for (int64_t p = 0; p < kTileWords; ++p) {
      const int64_t row = at.row + 2 * p;
      const uint32_t mask =
          (row >= from && row < upto ? 0xffffu : 0u) | (row + 1 >= from && row + 1 < upto ? 0xffff0000u : 0u);
      for (int64_t j = 0; j < kN * kTileWords; j += kWidth)
        store(seen + p * kPanelWords + j, (Floats)((Words)load(right + p * kPanelWords + j) & mask));
    }
    load_block<2, kN>(c);
    add_row_block<kN>(left, seen);
    store_block<2, kN>(block);
    for (int64_t j = 0; j < kN * kTileWords; j += kWidth)
      store(c + i * kPanelWords + j, load(block + i * kPanelWords + j));
  }
}

template <int kN>
DISTCA_INLINE void add_rows(int64_t m, Visible visible, Panels left, const float* right, float* c) {
  for (int64_t key = 0; key < m; key += kBlock) {
    float* const sums = c + key * kPanelWords;
    load_block<2, kN>(sums);
    for (int64_t row = 0; row < visible.upto[m - 1]; row += kBlock) {
      const KeyRowBlock at{key, row};
      if (!is_touched(m, visible, at)) continue;
      const float* const a = left.data + key * kPanelWords + row / 2;
      const float* const b = right + row / 2 * kPanelWords;
      if (is_edge_block(m, visible, at) && !all_finite(b, kTileWords, kN * kTileWords, kPanelWords)) {
        store_block<2, kN>(sums);
        add_seen_rows<kN>(m, visible, at, a, b, sums);
        load_block<2, kN>(sums);
      } else {
        add_row_block<kN>(a, b);
      }
    }
    store_block<2, kN>(sums);
  }
}

/// The inner dimension is the rows of a strip, at most one panel of pairs.
void multiply_visible_on_tiles(int64_t m, int64_t columns, Visible visible, Panels left, Panels right, Panels c) {
  for (int64_t column = 0; column < columns; column += kPanelWords) {
    const int64_t panel = column / kPanelWords;
    const float* const b = right.data + panel * right.panel_stride;
    float* const sums = c.data + panel * c.panel_stride;
    if (columns - column > kTileWords)
      add_rows<2>(m, visible, left, b, sums);
    else
      add_rows<1>(m, visible, left, b, sums);
  }
}

/// See micro_peak.h. Products are made on tiles alone.
double multiply_tiles(int64_t rounds, float* sink) {
  alignas(64) float block[kBlock * kPanelWords] = {};
  load_block<2, 2>(block);
  _tile_loadd(4, block, kPanelBytes);
  _tile_loadd(5, block, kPanelBytes);
  _tile_loadd(6, block, kPanelBytes);
  _tile_loadd(7, block, kPanelBytes);
  for (int64_t round = 0; round < rounds; ++round) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  store_block<2, 2>(block);
  store(sink + 2 * kWidth, load(block));
  return static_cast<double>(rounds) * 4 * kTileFloats * kTileElements * 2;
}

}  // namespace
}  // namespace distca::attention
