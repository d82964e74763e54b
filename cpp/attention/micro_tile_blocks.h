// Blocks of tiles and the state of tiles, for micro_tiles.h alone (see there).
#pragma once

#include "attention/micro_softmax.h"

#if defined(DISTCA_EMULATED_TILES)
#include "emulation/tile_instructions.h"
#endif

namespace distca::attention {
namespace {

constexpr int64_t kTileWords = 16;  // rows of a tile, and words of its rows
constexpr int64_t kTileFloats = kTileWords * kTileWords;
constexpr int64_t kTileElements = 2 * kTileWords;  // elements of the inner dimension in a tile
constexpr int64_t kBlock = 2 * kTileWords;         // rows, and columns, of a block of sums
constexpr int64_t kPanelBytes = kPanelWords * 4;
static_assert(kBlock == kTileRows && kBlock == kPanelWords && kBlock == kTileElements);

struct TileConfig {
  uint8_t palette = 1, start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == sizeof(FoundState));
alignas(64) constexpr TileConfig kTileConfig;

/// The compiler takes loads of tiles for operations that read no memory. This keeps stores before them.
DISTCA_INLINE void finish_stores() { asm volatile("" ::: "memory"); }

/// Whoever used tiles in this thread before finds them configured as he left them, with other contents.
void begin_tiles(FoundState& found) {
  _tile_storeconfig(&found);
  _tile_loadconfig(&kTileConfig);
}
void end_tiles(const FoundState& found) {
  const bool was_configured = found.bytes[0] != std::byte{0};
  finish_stores();
  if (was_configured)
    _tile_loadconfig(&found);
  else
    _tile_release();
}

// ---- blocks: sums are tiles 0 and 1, and below them 2 and 3; left factors are tiles 4 and 5, right ones 6 and 7

template <int kM, int kN>
DISTCA_INLINE void zero_block() {
  _tile_zero(0);
  if constexpr (kN > 1) _tile_zero(1);
  if constexpr (kM > 1) _tile_zero(2);
  if constexpr (kM > 1 && kN > 1) _tile_zero(3);
}

/// Rows of `c` are rows of a panel.
template <int kM, int kN>
DISTCA_INLINE void load_block(const float* c) {
  finish_stores();
  _tile_loadd(0, c, kPanelBytes);
  if constexpr (kN > 1) _tile_loadd(1, c + kTileWords, kPanelBytes);
  if constexpr (kM > 1) _tile_loadd(2, c + kTileWords * kPanelWords, kPanelBytes);
  if constexpr (kM > 1 && kN > 1) _tile_loadd(3, c + kTileWords * kPanelWords + kTileWords, kPanelBytes);
}

template <int kM, int kN>
DISTCA_INLINE void store_block(float* c) {
  _tile_stored(0, c, kPanelBytes);
  if constexpr (kN > 1) _tile_stored(1, c + kTileWords, kPanelBytes);
  if constexpr (kM > 1) _tile_stored(2, c + kTileWords * kPanelWords, kPanelBytes);
  if constexpr (kM > 1 && kN > 1) _tile_stored(3, c + kTileWords * kPanelWords + kTileWords, kPanelBytes);
}

/// Where the tiles of a left factor lie.
struct LeftTiles {
  const float* data;
  int64_t row_words;  // from row to row
  int64_t next;       // from the first tile to the one below it
};

/// Adds the product of the tiles at `left` and `right`; rows of the latter are rows of a panel.
template <int kM, int kN>
DISTCA_INLINE void add_tiles(const LeftTiles& left, const float* right) {
  const int64_t left_bytes = left.row_words * 4;
  _tile_loadd(4, left.data, left_bytes);
  _tile_loadd(6, right, kPanelBytes);
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (kM > 1) {
    _tile_loadd(5, left.data + left.next, left_bytes);
    _tile_dpbf16ps(2, 5, 6);
  }
  if constexpr (kN > 1) {
    _tile_loadd(7, right + kTileWords, kPanelBytes);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kM > 1) _tile_dpbf16ps(3, 5, 7);
  }
}

/// Whether all bf16 of `rows` rows of `words` words (multiples of kWidth) are finite.
DISTCA_INLINE bool all_finite(const float* p, int64_t rows, int64_t words, int64_t row_words) {
  const __m512i sizes = _mm512_set1_epi16(0x7fff), infinity = _mm512_set1_epi16(0x7f80);
  __m512i largest = _mm512_setzero_si512();
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < words; j += kWidth)
      largest = _mm512_max_epu16(largest, _mm512_and_si512((__m512i)load(p + i * row_words + j), sizes));
  }
  return _mm512_cmpge_epu16_mask(largest, infinity) == 0;
}

/// The words of pairs `first` on, with zero for each element outside [from, upto).
DISTCA_INLINE Words seen_pairs(int64_t first, int32_t from, int32_t upto) {
  const Ints low = 2 * (lane_numbers() + static_cast<int32_t>(first)), high = low + 1;
  const Ints begin = Ints{} + from, end = Ints{} + upto;
  return ((Words)((low >= begin) & (low < end)) & 0xffffu) | ((Words)((high >= begin) & (high < end)) & 0xffff0000u);
}

}  // namespace
}  // namespace distca::attention
