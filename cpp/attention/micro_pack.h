// Turns the caller's rows into packed operands and back, for micro_kernel.cpp alone (see there).
#pragma once

#include "attention/micro_simd.h"

namespace distca::attention {
namespace {

DISTCA_INLINE Floats widen(Halves x) {
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
  return (Floats)((Words)_mm256_cvtepu16_epi32((__m128i)x) << 16);
#else
  return (Floats)(__builtin_convertvector(x, Words) << 16);
#endif
}

/// Rounds to nearest even; NaN stays NaN.
DISTCA_INLINE Halves narrow(Floats x) {
  const Words bits = (Words)x;
  const Words rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const Words high = (x == x ? rounded : (bits | 0x400000u)) >> 16;
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
  const __m256i packed = _mm256_packus_epi32((__m256i)high, (__m256i)high);
  return (Halves)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
#else
  return __builtin_convertvector(high, Halves);
#endif
}

#if defined(__AVX512F__)
DISTCA_INLINE Floats widen_fp16(Halves x) { return _mm512_cvtph_ps((__m256i)x); }
DISTCA_INLINE Halves narrow_fp16(Floats x) { return (Halves)_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }
#elif defined(__AVX2__) && defined(__FMA__)
DISTCA_INLINE Floats widen_fp16(Halves x) { return _mm256_cvtph_ps((__m128i)x); }
DISTCA_INLINE Halves narrow_fp16(Floats x) { return (Halves)_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }
#else
DISTCA_INLINE Floats widen_fp16(Halves x) {
  Floats y{};
  for (int i = 0; i < kWidth; ++i) y[i] = fp16_to_float(x[i]);
  return y;
}
DISTCA_INLINE Halves narrow_fp16(Floats x) {
  Halves y{};
  for (int i = 0; i < kWidth; ++i) y[i] = float_to_fp16(x[i]);
  return y;
}
#endif

/// Loads the first `count` of kWidth elements from p on, followed by zeros.
DISTCA_INLINE Floats load_elements(DType dtype, const std::byte* p, int64_t count) {
  if (dtype == DType::kFloat32) {
    const float* from = reinterpret_cast<const float*>(p);
    if (count >= kWidth) return load(from);
    Floats x{};
    for (int64_t i = 0; i < count; ++i) x[i] = from[i];
    return x;
  }
  const uint16_t* from = reinterpret_cast<const uint16_t*>(p);
  Halves x{};
  if (count >= kWidth) {
    x = *reinterpret_cast<const HalvesInMemory*>(from);
  } else {
    for (int64_t i = 0; i < count; ++i) x[i] = from[i];
  }
  return dtype == DType::kBFloat16 ? widen(x) : widen_fp16(x);
}

DISTCA_INLINE void store_elements(DType dtype, Floats x, std::byte* p, int64_t count) {
  if (dtype == DType::kFloat32) {
    float* to = reinterpret_cast<float*>(p);
    if (count >= kWidth) return store(to, x);
    for (int64_t i = 0; i < count; ++i) to[i] = x[i];
    return;
  }
  uint16_t* to = reinterpret_cast<uint16_t*>(p);
  const Halves halves = dtype == DType::kBFloat16 ? narrow(x) : narrow_fp16(x);
  if (count >= kWidth) {
    *reinterpret_cast<HalvesInMemory*>(to) = halves;
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = halves[i];
  }
}

DISTCA_INLINE int64_t column_units(int64_t n) { return (n + kColumnUnit - 1) / kColumnUnit * kColumnUnit; }
DISTCA_INLINE float* panel_at(Panels panels, int64_t row, int64_t column) {
  return panels.data + column / kPanelWords * panels.panel_stride + row * kPanelWords + column % kPanelWords;
}

/// Packs rows of `num_words` words, of `word_bytes` bytes each. load_words(p, count) loads the first `count` of kWidth
/// words, followed by zeros.
template <class LoadWords>
DISTCA_INLINE void pack_words(int64_t rows, int64_t num_words, const std::byte* src, int64_t src_stride,
                              int64_t word_bytes, Panels dst, const LoadWords& load_words) {
  int64_t first = 0;
  for (; first + kPanelWords <= num_words; first += kPanelWords) {
    float* to = panel_at(dst, 0, first);
    const std::byte* from = src + first * word_bytes;
    for (int64_t i = 0; i < rows; ++i, from += src_stride, to += kPanelWords) {
#pragma GCC unroll 8
      for (int j = 0; j < kPanelWords; j += kWidth) store(to + j, load_words(from + j * word_bytes, kWidth));
    }
  }
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = first; j < column_units(num_words); j += kWidth)
      store(panel_at(dst, i, j), load_words(src + i * src_stride + j * word_bytes, num_words - j));
  }
}

/// Packs rows of one dtype. It is compiled for each dtype, because then no row asks for it.
template <DType kType>
DISTCA_INLINE void pack_float_rows(int64_t rows, int64_t dim, const std::byte* src, int64_t src_stride, Panels dst) {
  constexpr int64_t kBytes = kType == DType::kFloat32 ? 4 : 2;
  pack_words(rows, dim, src, src_stride, kBytes, dst,
             [](const std::byte* p, int64_t count) { return load_elements(kType, p, count); });
}

void pack_floats(DType dtype, int64_t rows, int64_t dim, const std::byte* src, int64_t src_stride, Panels dst) {
  if (dtype == DType::kFloat32)
    pack_float_rows<DType::kFloat32>(rows, dim, src, src_stride, dst);
  else if (dtype == DType::kBFloat16)
    pack_float_rows<DType::kBFloat16>(rows, dim, src, src_stride, dst);
  else
    pack_float_rows<DType::kFloat16>(rows, dim, src, src_stride, dst);
}

/// Zeroes rows [begin, end) of a packed matrix.
DISTCA_INLINE void clear_packed(int64_t begin, int64_t end, int64_t columns, Panels dst) {
  for (int64_t i = begin; i < end; ++i) {
    for (int64_t j = 0; j < columns; j += kWidth) store(panel_at(dst, i, j), Floats{});
  }
}

/// Values are packed as rows.
void pack_float_values(DType dtype, int64_t key, int64_t rows, int64_t dim, const std::byte* src, int64_t src_stride,
                       Panels dst) {
  pack_floats(dtype, rows, dim, src, src_stride, {dst.data + key * kPanelWords, dst.panel_stride});
  clear_packed(key + rows, row_units(key + rows), column_units(dim), dst);
}

#if defined(__AVX512BF16__)
/// Loads the first `count` of kWidth pairs from p on, followed by zeros. p may be aligned for bf16 alone.
DISTCA_INLINE Floats load_pairs(const std::byte* p, int64_t count) {
  typedef float PairsInMemory __attribute__((vector_size(kWidth * 4), aligned(2), may_alias));
  if (count >= kWidth) return *reinterpret_cast<const PairsInMemory*>(p);
  const uint16_t* from = reinterpret_cast<const uint16_t*>(p);
  Words x{};
  for (int64_t i = 0; i < count; ++i) x[i] = from[2 * i] | static_cast<uint32_t>(from[2 * i + 1]) << 16;
  return (Floats)x;
}

/// Packs pairs of columns, which are the row as it is.
void pack_pairs(DType, int64_t rows, int64_t dim, const std::byte* src, int64_t src_stride, Panels dst) {
  pack_words(rows, dim / 2, src, src_stride, 4, dst,
             [](const std::byte* p, int64_t count) { return load_pairs(p, count); });
}

/// Packs pairs of rows. The first row comes after `skipped` rows (0 or 1) of its pair.
DISTCA_INLINE void pack_pairs_of_rows(int64_t skipped, int64_t rows, int64_t dim, const std::byte* src,
                                      int64_t src_stride, Panels dst) {
  const int64_t columns = column_units(dim);
  src -= skipped * src_stride;
  const auto row_at = [&](int64_t i, int64_t j) {
    if (i < skipped || i >= skipped + rows) return Words{};
    return (Words)load_elements(DType::kBFloat16, src + i * src_stride + j * 2, dim - j);
  };
  for (int64_t i = 0; i < skipped + rows; i += 2) {
    for (int64_t j = 0; j < columns; j += kWidth)
      store(panel_at(dst, i / 2, j), (Floats)(row_at(i, j) >> 16 | row_at(i + 1, j)));
  }
}

void pack_pair_rows(DType, int64_t rows, int64_t dim, const std::byte* src, int64_t src_stride, Panels dst) {
  pack_pairs_of_rows(0, rows, dim, src, src_stride, dst);
}

/// Values are packed as pairs of rows.
void pack_pair_values(DType, int64_t key, int64_t rows, int64_t dim, const std::byte* src, int64_t src_stride,
                      Panels dst) {
  pack_pairs_of_rows(key % 2, rows, dim, src, src_stride, {dst.data + key / 2 * kPanelWords, dst.panel_stride});
  clear_packed((key + rows + 1) / 2, row_units(key + rows) / 2, column_units(dim), dst);
}
#endif

#if defined(__AVX512F__)
constexpr int kSquare = 16;
/// Writes column j of a square of words to row_at(j), for each j.
template <class RowAt>
DISTCA_INLINE void transpose_square(const Floats (&in)[kSquare], const RowAt& row_at) {
  Floats a[16], b[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_ps(in[i], in[i + 1]);
    a[i + 1] = _mm512_unpackhi_ps(in[i], in[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    const __m512d a0 = (__m512d)a[i], a1 = (__m512d)a[i + 1], a2 = (__m512d)a[i + 2], a3 = (__m512d)a[i + 3];
    b[i] = (Floats)_mm512_unpacklo_pd(a0, a2);
    b[i + 1] = (Floats)_mm512_unpackhi_pd(a0, a2);
    b[i + 2] = (Floats)_mm512_unpacklo_pd(a1, a3);
    b[i + 3] = (Floats)_mm512_unpackhi_pd(a1, a3);
  }
  // b[4 * r + c] has columns c, c + 4, c + 8, c + 12 of rows 4 r .. 4 r + 3.
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const Floats low01 = _mm512_shuffle_f32x4(b[c], b[4 + c], 0x88),
                 low23 = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0x88);
    const Floats high01 = _mm512_shuffle_f32x4(b[c], b[4 + c], 0xdd),
                 high23 = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0xdd);
    store(row_at(c), _mm512_shuffle_f32x4(low01, low23, 0x88));
    store(row_at(c + 8), _mm512_shuffle_f32x4(low01, low23, 0xdd));
    store(row_at(c + 4), _mm512_shuffle_f32x4(high01, high23, 0x88));
    store(row_at(c + 12), _mm512_shuffle_f32x4(high01, high23, 0xdd));
  }
}
/// Sets dst[j, i] = in[i, j]; `stride` is that of dst in words.
DISTCA_INLINE void transpose_square(const Floats (&in)[kSquare], float* dst, int64_t stride = kTileRows) {
  transpose_square(in, [&](int column) { return dst + column * stride; });
}
typedef Floats SquareRow;
#else
constexpr int kSquare = 4;
typedef Quad SquareRow;
DISTCA_INLINE void transpose_square(const Quad (&in)[kSquare], float* dst) {
  const Quad low01 = __builtin_shufflevector(in[0], in[1], 0, 4, 1, 5);
  const Quad low23 = __builtin_shufflevector(in[2], in[3], 0, 4, 1, 5);
  const Quad high01 = __builtin_shufflevector(in[0], in[1], 2, 6, 3, 7);
  const Quad high23 = __builtin_shufflevector(in[2], in[3], 2, 6, 3, 7);
  const Quad out[4] = {
      __builtin_shufflevector(low01, low23, 0, 1, 4, 5), __builtin_shufflevector(low01, low23, 2, 3, 6, 7),
      __builtin_shufflevector(high01, high23, 0, 1, 4, 5), __builtin_shufflevector(high01, high23, 2, 3, 6, 7)};
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) *reinterpret_cast<QuadInMemory*>(dst + r * kTileRows) = out[r];
}
#endif

/// `sign` (1, -1 or 0) times x, in both halves of a pair.
template <class Operands>
DISTCA_INLINE SquareRow with_sign(SquareRow x, int sign) {
  typedef uint32_t Bits __attribute__((vector_size(sizeof(SquareRow))));
  constexpr uint32_t kSigns = Operands::kElements == 1 ? 0x80000000u : 0x80008000u;
  if (sign == 0) return SquareRow{};
  return sign > 0 ? x : (SquareRow)((Bits)x ^ kSigns);
}

template <class Operands>
void transpose_rows(int64_t rows, int64_t words, int sign, const float* panels, int64_t panel_stride, float* dst) {
  typedef float RowInMemory __attribute__((vector_size(kSquare * 4), aligned(4), may_alias));
  const int64_t lanes = column_units(rows);
  for (int64_t word = 0; word < words; word += kSquare) {
    const float* panel = panels + word / kPanelWords * panel_stride + word % kPanelWords;
    for (int64_t row = 0; row < lanes; row += kSquare) {
      SquareRow in[kSquare] = {};
#pragma GCC unroll 16
      for (int r = 0; r < kSquare; ++r) {
        if (row + r < rows)
          in[r] = with_sign<Operands>(*reinterpret_cast<const RowInMemory*>(panel + (row + r) * kPanelWords), sign);
      }
      transpose_square(in, dst + word * kTileRows + row);
    }
  }
}

/// Stores rows of one dtype. It is compiled for each dtype, because then no vector asks for it.
template <DType kType>
DISTCA_INLINE void store_rows_as(int64_t rows, int64_t dim, float factor, const float* divisor, Panels src,
                                 std::byte* dst, int64_t dst_stride) {
  constexpr int64_t kBytes = kType == DType::kFloat32 ? 4 : 2;
  for (int64_t i = 0; i < rows; ++i, dst += dst_stride) {
    const bool is_zero = divisor != nullptr && divisor[i] == 0.f;
    const bool is_quotient = divisor != nullptr && kType == DType::kFloat32;
    const Floats by = broadcast(divisor == nullptr ? factor : is_quotient ? divisor[i] : factor / divisor[i]);
    const auto result = [&](int64_t column) {
      const Floats x = load(panel_at(src, i, column));
      const Floats y = is_quotient ? x / by * factor : x * by;
      return is_zero ? Floats{} : y;
    };
    int64_t j = 0;
    for (; j + kWidth <= dim; j += kWidth) store_elements(kType, result(j), dst + j * kBytes, kWidth);
    if (j < dim) store_elements(kType, result(j), dst + j * kBytes, dim - j);
  }
}

void store_rows(DType dtype, int64_t rows, int64_t dim, float factor, const float* divisor, Panels src, std::byte* dst,
                int64_t dst_stride) {
  if (dtype == DType::kFloat32)
    store_rows_as<DType::kFloat32>(rows, dim, factor, divisor, src, dst, dst_stride);
  else if (dtype == DType::kBFloat16)
    store_rows_as<DType::kBFloat16>(rows, dim, factor, divisor, src, dst, dst_stride);
  else
    store_rows_as<DType::kFloat16>(rows, dim, factor, divisor, src, dst, dst_stride);
}

void store_row_sums(DType dtype, int64_t rows, int64_t dim, float factor, const float* divisor, const float* sums,
                    std::byte* dst, int64_t dst_stride) {
  const Panels panels{const_cast<float*>(sums), kTileRows * kPanelWords};
  store_rows(dtype, rows, dim, factor, divisor, panels, dst, dst_stride);
}

}  // namespace
}  // namespace distca::attention
