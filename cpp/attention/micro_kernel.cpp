// The inner loops of the CPU kernel, written once with vector extensions and compiled once for each instruction set.
//
// DISTCA_ISA names the instruction set (avx512, avx2, plain). Everything but the table has internal linkage, and no
// inline function or template of another header is used: a copy of one that was compiled here for AVX-512 could
// otherwise become the only one in the library and run on a CPU that lacks it. Products are fused explicitly where the
// instruction set can; the compiler must not contract others (-ffp-contract=off), so that all code paths round alike.
#include "attention/micro_kernel.h"

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#endif

#define DISTCA_INLINE static inline __attribute__((always_inline))
#define DISTCA_JOIN_(a, b) a##b
#define DISTCA_JOIN(a, b) DISTCA_JOIN_(a, b)
#define DISTCA_TEXT_(a) #a
#define DISTCA_TEXT(a) DISTCA_TEXT_(a)

namespace distca::attention {
namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;       // floats of a vector
constexpr int kTileVectors = 4;  // a tile of a product is kTileRows x kTileVectors registers of accumulators
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int kWidth = 8;
constexpr int kTileVectors = 2;
#else
constexpr int kWidth = 4;
constexpr int kTileVectors = 2;
#endif
constexpr int kTileRows = 4;
constexpr int kSingleVectors = 8;  // the same for one row alone

typedef float Floats __attribute__((vector_size(kWidth * 4)));
typedef int32_t Ints __attribute__((vector_size(kWidth * 4)));
typedef uint32_t Words __attribute__((vector_size(kWidth * 4)));
typedef uint16_t Halves __attribute__((vector_size(kWidth * 2)));
typedef float FloatsInMemory __attribute__((vector_size(kWidth * 4), aligned(4), may_alias));
typedef uint16_t HalvesInMemory __attribute__((vector_size(kWidth * 2), aligned(2), may_alias));
typedef float Quad __attribute__((vector_size(16)));
typedef float QuadInMemory __attribute__((vector_size(16), aligned(4), may_alias));

constexpr int64_t kChainLength =
    64;  // longer sums are added up from chains: smaller errors, and panels that fit the cache
constexpr float kInfinity = __builtin_inff();

DISTCA_INLINE Floats load(const float* p) { return *reinterpret_cast<const FloatsInMemory*>(p); }
DISTCA_INLINE void store(float* p, Floats x) { *reinterpret_cast<FloatsInMemory*>(p) = x; }
DISTCA_INLINE Floats broadcast(float x) { return x - Floats{}; }

/// a * b + c, with one rounding where the instruction set has it.
DISTCA_INLINE Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__) && defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

DISTCA_INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }

/// Lane i of the result is lane (i + kBy) % kWidth of x.
template <int kBy>
DISTCA_INLINE Floats rotated(Floats x) {
#if defined(__AVX512F__)
  return __builtin_shufflevector(x, x, kBy, kBy + 1, kBy + 2, kBy + 3, kBy + 4, kBy + 5, kBy + 6, kBy + 7, kBy + 8,
                                 kBy + 9, kBy + 10, kBy + 11, kBy + 12, kBy + 13, kBy + 14, kBy + 15);
#elif defined(__AVX2__) && defined(__FMA__)
  return __builtin_shufflevector(x, x, kBy, kBy + 1, kBy + 2, kBy + 3, kBy + 4, kBy + 5, kBy + 6, kBy + 7);
#else
  return __builtin_shufflevector(x, x, kBy, kBy + 1, kBy + 2, kBy + 3);
#endif
}

DISTCA_INLINE float sum_of_lanes(Floats x) {
  if constexpr (kWidth >= 16) x = x + rotated<kWidth >= 16 ? 8 : 0>(x);
  if constexpr (kWidth >= 8) x = x + rotated<kWidth >= 8 ? 4 : 0>(x);
  x = x + rotated<2>(x);
  x = x + rotated<1>(x);
  return x[0];
}

DISTCA_INLINE float largest_lane(Floats x) {
  if constexpr (kWidth >= 16) x = larger(x, rotated<kWidth >= 16 ? 8 : 0>(x));
  if constexpr (kWidth >= 8) x = larger(x, rotated<kWidth >= 8 ? 4 : 0>(x));
  x = larger(x, rotated<2>(x));
  x = larger(x, rotated<1>(x));
  return x[0];
}

/// exp(x) within about one ulp: exactly 0 for -inf and wherever the result would be denormal, exactly 1 for 0, inf from
/// 88.4 on, NaN for NaN.
DISTCA_INLINE Floats exponential(Floats x) {
  constexpr float kLog2E = 1.44269504f;
  constexpr float kLn2High = 0.693359375f;  // few enough bits that its multiples by an exponent are exact
  constexpr float kLn2Low = -2.12194440e-4f;
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
  const Floats shifted = fused(x, broadcast(kLog2E), broadcast(kRound));
  const Floats n = shifted - kRound;
  Floats r = fused(n, broadcast(-kLn2High), x);
  r = fused(n, broadcast(-kLn2Low), r);
  // (exp(r) - 1 - r) / r^2 on [-ln2/2, ln2/2], minimax fit of the relative error of exp (3e-9).
  Floats p = broadcast(1.3814320554956794e-3f);
  p = fused(p, r, broadcast(8.368851616978645e-3f));
  p = fused(p, r, broadcast(4.1668400168418884e-2f));
  p = fused(p, r, broadcast(1.666651964187622e-1f));
  p = fused(p, r, broadcast(4.999999403953552e-1f));
  p = fused(p, r * r, r) + 1.f;
  const Words power = ((Words)shifted << 23) + 0x3f800000u;  // 2^n
  p = p * (Floats)power;
  p = x < -87.3f ? Floats{} : p;
  return x > 88.7f ? broadcast(kInfinity) : p;
}

DISTCA_INLINE Ints lane_numbers() {
  Ints lanes{};
  for (int i = 0; i < kWidth; ++i) lanes[i] = i;
  return lanes;
}

struct KeyRange {
  int32_t begin;
  int32_t end;
};

DISTCA_INLINE KeyRange visible_to(VisibleKeys visible, int64_t row) {
  const int64_t from = visible.from + row;
  const int64_t upto = visible.upto + row;
  const int64_t begin = from > 0 ? from : 0;
  const int64_t end = upto < visible.limit ? upto : visible.limit;
  return end > begin ? KeyRange{static_cast<int32_t>(begin), static_cast<int32_t>(end)} : KeyRange{0, 0};
}

/// Which of the kWidth keys from `key` on are in the range.
DISTCA_INLINE Ints in_range(Ints lanes, int32_t key, KeyRange range) {
  return (lanes >= range.begin - key) & (lanes < range.end - key);
}

// ---- products

template <int kRows, int kVectors>
DISTCA_INLINE void multiply_tile(int64_t k, LeftFactor a, const float* b, int64_t b_stride, float* c,
                                 int64_t c_stride) {
  Floats sum[kRows][kVectors] = {};
  for (int64_t p = 0; p < k; ++p) {
    Floats right[kVectors];
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) right[j] = load(b + j * kWidth);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const Floats left = broadcast(a.data[i * a.row_stride]);
#pragma GCC unroll 8
      for (int j = 0; j < kVectors; ++j) sum[i][j] = fused(left, right[j], sum[i][j]);
    }
    a.data += a.column_stride;
    b += b_stride;
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) {
      float* at = c + i * c_stride + j * kWidth;
      store(at, load(at) + sum[i][j]);
    }
  }
}

/// All columns for m rows, a multiple of kRows; columns outside, so that a panel of b stays in the first cache.
template <int kRows, int kVectors>
void multiply_panels(int64_t m, int64_t n, int64_t k, LeftFactor a, const float* b, int64_t b_stride, float* c,
                     int64_t c_stride) {
  constexpr int64_t kColumns = kVectors * kWidth;
  int64_t column = 0;
  for (; column + kColumns <= n; column += kColumns) {
    for (int64_t i = 0; i < m; i += kRows) {
      const LeftFactor rows{a.data + i * a.row_stride, a.row_stride, a.column_stride};
      multiply_tile<kRows, kVectors>(k, rows, b + column, b_stride, c + i * c_stride + column, c_stride);
    }
  }
  if constexpr (kVectors > 1) {
    if (column < n)
      multiply_panels<kRows, kVectors / 2>(m, n - column, k, a, b + column, b_stride, c + column, c_stride);
  }
}

void multiply_add(int64_t m, int64_t n, int64_t k, LeftFactor a, const float* b, int64_t b_stride, float* c,
                  int64_t c_stride) {
  const int64_t tiled = m - m % kTileRows;
  for (int64_t p = 0; p < k; p += kChainLength) {
    const int64_t length = k - p < kChainLength ? k - p : kChainLength;
    const LeftFactor left{a.data + p * a.column_stride, a.row_stride, a.column_stride};
    const LeftFactor rest{left.data + tiled * a.row_stride, a.row_stride, a.column_stride};
    const float* right = b + p * b_stride;
    if (tiled > 0) multiply_panels<kTileRows, kTileVectors>(tiled, n, length, left, right, b_stride, c, c_stride);
    if (tiled < m)
      multiply_panels<1, kSingleVectors>(m - tiled, n, length, rest, right, b_stride, c + tiled * c_stride, c_stride);
  }
}

// ---- packing

DISTCA_INLINE Floats widen(Halves x) { return (Floats)(__builtin_convertvector(x, Words) << 16); }

/// Rounds to nearest even; NaN stays NaN.
DISTCA_INLINE Halves narrow(Floats x) {
  const Words bits = (Words)x;
  const Words rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return __builtin_convertvector((x == x ? rounded : (bits | 0x400000u)) >> 16, Halves);
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

template <Floats (*kWiden)(Halves)>
DISTCA_INLINE int64_t load_half_row(int64_t dim, const uint16_t* row, float* dst) {
  int64_t j = 0;
  for (; j + kWidth <= dim; j += kWidth) store(dst + j, kWiden(*reinterpret_cast<const HalvesInMemory*>(row + j)));
  for (; j < dim; ++j) dst[j] = kWiden(Halves{row[j]})[0];
  return j;
}

template <Halves (*kNarrow)(Floats)>
DISTCA_INLINE void store_half_row(int64_t dim, float factor, const float* src, uint16_t* row) {
  int64_t j = 0;
  for (; j + kWidth <= dim; j += kWidth) *reinterpret_cast<HalvesInMemory*>(row + j) = kNarrow(load(src + j) * factor);
  for (; j < dim; ++j) row[j] = kNarrow(Floats{src[j] * factor})[0];
}

void load_rows(DType dtype, int64_t rows, int64_t dim, const std::byte* src, int64_t src_stride, float* dst,
               int64_t dst_stride) {
  for (int64_t i = 0; i < rows; ++i, src += src_stride, dst += dst_stride) {
    int64_t j = 0;
    if (dtype == DType::kFloat32) {
      const float* row = reinterpret_cast<const float*>(src);
      for (; j + kWidth <= dim; j += kWidth) store(dst + j, load(row + j));
      for (; j < dim; ++j) dst[j] = row[j];
    } else {
      const uint16_t* row = reinterpret_cast<const uint16_t*>(src);
      j = dtype == DType::kBFloat16 ? load_half_row<widen>(dim, row, dst) : load_half_row<widen_fp16>(dim, row, dst);
    }
    for (; j < dst_stride; ++j) dst[j] = 0.f;
  }
}

void store_rows(DType dtype, int64_t rows, int64_t dim, float factor, const float* src, int64_t src_stride,
                std::byte* dst, int64_t dst_stride) {
  for (int64_t i = 0; i < rows; ++i, src += src_stride, dst += dst_stride) {
    if (dtype == DType::kFloat32) {
      float* row = reinterpret_cast<float*>(dst);
      int64_t j = 0;
      for (; j + kWidth <= dim; j += kWidth) store(row + j, load(src + j) * factor);
      for (; j < dim; ++j) row[j] = src[j] * factor;
    } else {
      uint16_t* row = reinterpret_cast<uint16_t*>(dst);
      if (dtype == DType::kBFloat16)
        store_half_row<narrow>(dim, factor, src, row);
      else
        store_half_row<narrow_fp16>(dim, factor, src, row);
    }
  }
}

void transpose(int64_t rows, int64_t columns, const float* src, int64_t src_stride, float* dst, int64_t dst_stride) {
  for (int64_t j = 0; j < columns; j += 4) {
    for (int64_t i = 0; i < rows; i += 4) {
      Quad in[4];
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) in[r] = *reinterpret_cast<const QuadInMemory*>(src + (i + r) * src_stride + j);
      const Quad low01 = __builtin_shufflevector(in[0], in[1], 0, 4, 1, 5);
      const Quad low23 = __builtin_shufflevector(in[2], in[3], 0, 4, 1, 5);
      const Quad high01 = __builtin_shufflevector(in[0], in[1], 2, 6, 3, 7);
      const Quad high23 = __builtin_shufflevector(in[2], in[3], 2, 6, 3, 7);
      const Quad out[4] = {
          __builtin_shufflevector(low01, low23, 0, 1, 4, 5), __builtin_shufflevector(low01, low23, 2, 3, 6, 7),
          __builtin_shufflevector(high01, high23, 0, 1, 4, 5), __builtin_shufflevector(high01, high23, 2, 3, 6, 7)};
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) *reinterpret_cast<QuadInMemory*>(dst + (j + r) * dst_stride + i) = out[r];
    }
  }
}

// ---- softmax

void softmax_step(int64_t rows, VisibleKeys visible, float scale, float* scores, float* row_max, float* row_sum,
                  float* out, int64_t out_columns) {
  const Ints lanes = lane_numbers();
  for (int64_t i = 0; i < rows; ++i, scores += kScoreColumns, out += out_columns) {
    const KeyRange seen = visible_to(visible, i);
    Floats block_max = broadcast(-kInfinity);
    for (int32_t j = 0; j < seen.end; j += kWidth)
      block_max = larger(block_max, in_range(lanes, j, seen) ? load(scores + j) * scale : broadcast(-kInfinity));
    const float old_max = row_max[i];
    const float found = largest_lane(block_max);
    const float new_max = found > old_max ? found : old_max;
    const float base = new_max == -kInfinity ? 0.f : new_max;  // -inf - -inf would be NaN
    const float rescale = exponential(broadcast(old_max - base))[0];
    Floats sum{};
    for (int32_t j = 0; j < kScoreColumns; j += kWidth) {
      Floats p{};
      if (j < seen.end) {
        // Fused: a rounded scale * score would be off by as much as all else together.
        const Floats exponent = fused(load(scores + j), broadcast(scale), broadcast(-base));
        p = in_range(lanes, j, seen) ? exponential(exponent) : Floats{};
        sum = sum + p;
      }
      store(scores + j, p);
    }
    row_max[i] = new_max;
    row_sum[i] = row_sum[i] * rescale + sum_of_lanes(sum);
    if (rescale != 1.f) {
      for (int64_t j = 0; j < out_columns; j += kWidth) store(out + j, load(out + j) * rescale);
    }
  }
}

void divide_rows(int64_t rows, int64_t columns, const float* row_sum, float* out) {
  for (int64_t i = 0; i < rows; ++i, out += columns) {
    const float sum = row_sum[i];
    for (int64_t j = 0; j < columns; j += kWidth) store(out + j, sum == 0.f ? Floats{} : load(out + j) / sum);
  }
}

void softmax_gradient(int64_t rows, VisibleKeys visible, float scale, const float* lse, const float* delta,
                      float* scores, float* dprobs, float* prob_sum) {
  const Ints lanes = lane_numbers();
  for (int64_t i = 0; i < rows; ++i, scores += kScoreColumns, dprobs += kScoreColumns) {
    const KeyRange range = lse[i] == -kInfinity ? KeyRange{0, 0} : visible_to(visible, i);
    Floats sum{};
    for (int32_t j = 0; j < kScoreColumns; j += kWidth) {
      Floats p{};
      Floats ds{};
      if (j < range.end) {
        const Ints seen = in_range(lanes, j, range);
        p = seen ? exponential(fused(load(scores + j), broadcast(scale), broadcast(-lse[i]))) : Floats{};
        ds = seen ? p * (load(dprobs + j) - delta[i]) : Floats{};
      }
      store(scores + j, p);
      store(dprobs + j, ds);
      sum = sum + p;
    }
    if (prob_sum != nullptr) prob_sum[i] += sum_of_lanes(sum);
  }
}

}  // namespace

extern const MicroKernel DISTCA_JOIN(kMicroKernel_, DISTCA_ISA);
const MicroKernel DISTCA_JOIN(kMicroKernel_, DISTCA_ISA) = {
    DISTCA_TEXT(DISTCA_ISA), multiply_add, load_rows, store_rows, transpose, softmax_step, divide_rows,
    softmax_gradient,
};

}  // namespace distca::attention
