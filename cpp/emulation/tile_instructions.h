// The tile instructions of AMX that the kernel uses, under the names of their intrinsics, on memory of the thread. They
// let micro_tiles.h run on a CPU that has no tiles. After vector_instructions.h they need AVX2 alone, and AVX-512
// without it.
//
// _tile_dpbf16ps does what Intel's manual says of TDPBF16PS: for each element of the sums, the first elements of all
// pairs are one chain of fused multiply-adds from zero in ascending order, the second ones are another; the two are
// added, and the result is added to the sums. Denormals count as zero and become zero, and rounding is to nearest even,
// whatever MXCSR says. A tile that is not configured, which the instructions refuse, ends the process.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

// Compilers offer these as macros, also where the instructions are not allowed.
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps

namespace distca::attention {
namespace {

struct EmulatedTiles {
  alignas(64) uint8_t config[64] = {};  // palette, 15 other bytes, 16 x 2 of bytes a row, 16 of rows
  alignas(64) float data[8][16][16] = {};

  int rows(int tile) const { return config[48 + tile]; }
  int row_bytes(int tile) const { return config[16 + 2 * tile] | config[17 + 2 * tile] << 8; }
  void require(int tile) const {
    if (config[0] != 1 || rows(tile) == 0 || rows(tile) > 16 || row_bytes(tile) == 0 || row_bytes(tile) > 64)
      std::abort();
  }
};

inline EmulatedTiles& emulated_tiles() {
  static thread_local EmulatedTiles tiles;
  return tiles;
}

/// Rounds to nearest even and takes denormals for zero, both ways, while it lives.
class FlushedDenormals {
 public:
  FlushedDenormals() : found_(_mm_getcsr()) { set(0x9fc0); }
  ~FlushedDenormals() { set(found_); }

 private:
  static void set(unsigned value) { asm volatile("ldmxcsr %0" ::"m"(value) : "memory"); }
  unsigned found_;
};

inline void _tile_loadconfig(const void* config) {
  EmulatedTiles& tiles = emulated_tiles();
  tiles = {};
  std::memcpy(tiles.config, config, sizeof(tiles.config));
}
inline void _tile_storeconfig(void* config) { std::memcpy(config, emulated_tiles().config, 64); }
inline void _tile_release() { emulated_tiles() = {}; }

inline void _tile_zero(int tile) {
  EmulatedTiles& tiles = emulated_tiles();
  tiles.require(tile);
  std::memset(tiles.data[tile], 0, sizeof(tiles.data[tile]));
}
inline void _tile_loadd(int tile, const void* from, int64_t stride) {
  _tile_zero(tile);
  EmulatedTiles& tiles = emulated_tiles();
  for (int i = 0; i < tiles.rows(tile); ++i)
    std::memcpy(tiles.data[tile][i], static_cast<const char*>(from) + i * stride,
                static_cast<size_t>(tiles.row_bytes(tile)));
}
inline void _tile_stored(int tile, void* to, int64_t stride) {
  const EmulatedTiles& tiles = emulated_tiles();
  tiles.require(tile);
  for (int i = 0; i < tiles.rows(tile); ++i)
    std::memcpy(static_cast<char*>(to) + i * stride, tiles.data[tile][i], static_cast<size_t>(tiles.row_bytes(tile)));
}

inline void _tile_dpbf16ps(int sums, int left, int right) {
  EmulatedTiles& tiles = emulated_tiles();
  tiles.require(sums);
  tiles.require(left);
  tiles.require(right);
  const FlushedDenormals flushed;
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  for (int m = 0; m < tiles.rows(sums); ++m) {
    __m512 first = _mm512_setzero_ps(), second = _mm512_setzero_ps();
    for (int k = 0; k < tiles.row_bytes(left) / 4; ++k) {
      uint32_t pair;
      std::memcpy(&pair, &tiles.data[left][m][k], 4);
      const __m512i pairs = _mm512_loadu_si512(tiles.data[right][k]);
      first = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(pair << 16))),
                              _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)), first);
      second = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(pair & 0xffff0000u))),
                               _mm512_castsi512_ps(_mm512_and_si512(pairs, high)), second);
    }
    float* const row = tiles.data[sums][m];
    _mm512_storeu_ps(row, _mm512_add_ps(_mm512_loadu_ps(row), _mm512_add_ps(first, second)));
  }
}

}  // namespace
}  // namespace distca::attention
