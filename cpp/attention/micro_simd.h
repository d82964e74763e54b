// Vectors of one instruction set, for micro_kernel.cpp and its parts alone (see there).
#pragma once

#include <cstdint>

#if defined(DISTCA_EMULATED_VECTORS)
#include "emulation/vector_instructions.h"
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#endif

#include "attention/micro_kernel.h"

#define DISTCA_INLINE static inline __attribute__((always_inline))

namespace distca::attention {
namespace {

// A tile of a product is kTileM x kTileN registers of accumulators.
#if defined(__AVX512F__)
constexpr int kWidth = 16;  // floats of a vector
constexpr int kTileM = 8;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int kWidth = 8;
constexpr int kTileM = 6;
#else
constexpr int kWidth = 4;
constexpr int kTileM = 4;
#endif
constexpr int kTileN = 2;

/// Outer elements of a product are computed in multiples of this many.
constexpr int64_t kRowUnit = 8;

typedef float Floats __attribute__((vector_size(kWidth * 4)));
typedef int32_t Ints __attribute__((vector_size(kWidth * 4)));
typedef uint32_t Words __attribute__((vector_size(kWidth * 4)));
typedef uint16_t Halves __attribute__((vector_size(kWidth * 2)));
typedef float FloatsInMemory __attribute__((vector_size(kWidth * 4), aligned(4), may_alias));
typedef uint16_t HalvesInMemory __attribute__((vector_size(kWidth * 2), aligned(2), may_alias));
typedef float Quad __attribute__((vector_size(16)));
typedef float QuadInMemory __attribute__((vector_size(16), aligned(4), may_alias));
typedef float FloatInMemory __attribute__((may_alias));

constexpr float kInfinity = __builtin_inff();

DISTCA_INLINE int64_t smaller_of(int64_t a, int64_t b) { return a < b ? a : b; }
DISTCA_INLINE int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }

DISTCA_INLINE int64_t row_units(int64_t n) { return (n + kRowUnit - 1) / kRowUnit * kRowUnit; }

DISTCA_INLINE Floats load(const float* p) { return *reinterpret_cast<const FloatsInMemory*>(p); }
DISTCA_INLINE void store(float* p, Floats x) { *reinterpret_cast<FloatsInMemory*>(p) = x; }

/// All lanes are x, to the last bit (a word need not be a float).
DISTCA_INLINE Floats broadcast(float x) {
#if defined(__AVX512F__)
  return _mm512_set1_ps(x);
#elif defined(__AVX2__) && defined(__FMA__)
  return _mm256_set1_ps(x);
#else
  return Floats{x, x, x, x};
#endif
}
DISTCA_INLINE Floats broadcast_word(const float* p) { return broadcast(*reinterpret_cast<const FloatInMemory*>(p)); }

/// a * b + c, with one rounding where the instruction set has that.
DISTCA_INLINE Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__) && defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

DISTCA_INLINE Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

#if !defined(__AVX512F__)
/// The smaller one; b if one of them is NaN.
DISTCA_INLINE Floats smaller(Floats a, Floats b) {
#if defined(__AVX2__) && defined(__FMA__)
  return _mm256_min_ps(a, b);  // GCC makes two instructions of the other form
#else
  return a < b ? a : b;
#endif
}
#endif

DISTCA_INLINE Ints lane_numbers() {
  Ints lanes{};
  for (int i = 0; i < kWidth; ++i) lanes[i] = i;
  return lanes;
}

constexpr float kLog2E = 1.44269504f;
constexpr float kLn2High = 0.693359375f;  // few enough bits that its multiples by an exponent are exact
constexpr float kLn2Low = -2.12194440e-4f;
/// Below it exp would be denormal, or nearly.
constexpr float kSmallest = -87.3f;
/// Coefficients of exp(r) on [-ln2/2, ln2/2], the highest power first: a minimax fit of the relative error (3e-9).
constexpr float kPowers[] = {1.3814320554956794e-3f,
                             8.368851616978645e-3f,
                             4.1668400168418884e-2f,
                             1.666651964187622e-1f,
                             4.999999403953552e-1f,
                             1.f,
                             1.f};

// exponential(x) is exp(x) within 0.9 ulp, or 1.2 where multiply and add are not fused
// (tests/attention/test_exponential.py). It is exactly 0 for -inf and wherever the result would be denormal, exactly 1
// for 0, inf where it overflows (without AVX-512 from 88.4 on), NaN for NaN. exponentials replaces each x by
// exponential(x).
#if defined(__AVX512F__)
DISTCA_INLINE Floats exponential(Floats x) {
  const Floats n = _mm512_roundscale_ps(x * kLog2E, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  Floats r = fused(n, broadcast(-kLn2High), x);
  r = fused(n, broadcast(-kLn2Low), r);
  Floats p = broadcast(kPowers[0]);
#pragma GCC unroll 8
  for (int i = 1; i < 7; ++i) p = fused(p, r, broadcast(kPowers[i]));
  const __mmask16 is_normal = _mm512_cmp_ps_mask(x, broadcast(kSmallest), _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(is_normal, p, n);
}
template <int kN>
DISTCA_INLINE void exponentials(Floats (&x)[kN]) {
#pragma GCC unroll 4
  for (int u = 0; u < kN; ++u) x[u] = exponential(x[u]);
}
#else
/// The vectors take each step together, because a step of one waits for the step before it.
template <int kN>
DISTCA_INLINE void exponentials(Floats (&x)[kN]) {
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
  constexpr float kLargest = 89.f;      // its power of two, 128, is inf
  Floats shifted[kN], r[kN], p[kN];
#pragma GCC unroll 4
  for (int u = 0; u < kN; ++u) {
    x[u] = smaller(broadcast(kLargest), x[u]);
    shifted[u] = fused(x[u], broadcast(kLog2E), broadcast(kRound));
  }
#pragma GCC unroll 4
  for (int u = 0; u < kN; ++u) r[u] = fused(shifted[u] - kRound, broadcast(-kLn2High), x[u]);
#pragma GCC unroll 4
  for (int u = 0; u < kN; ++u) {
    r[u] = fused(shifted[u] - kRound, broadcast(-kLn2Low), r[u]);
    p[u] = broadcast(kPowers[0]);
  }
#pragma GCC unroll 8
  for (int i = 1; i < 7; ++i) {
#pragma GCC unroll 4
    for (int u = 0; u < kN; ++u) p[u] = fused(p[u], r[u], broadcast(kPowers[i]));
  }
#pragma GCC unroll 4
  for (int u = 0; u < kN; ++u) {
    const Words power = ((Words)shifted[u] << 23) + 0x3f800000u;  // 2^n
    p[u] = p[u] * (Floats)power;
    x[u] = x[u] < kSmallest ? Floats{} : p[u];
  }
}
DISTCA_INLINE Floats exponential(Floats x) {
  Floats one[1] = {x};
  exponentials(one);
  return one[0];
}
#endif

#if defined(__AVX512F__)
/// 2^x with a relative error of 3e-6, for values that are rounded to bf16 afterwards. It is exactly 1 for 0, exactly 0
/// for -inf and wherever the result would be denormal, NaN for NaN.
DISTCA_INLINE Floats rough_power_of_two(Floats x) {
  const Floats r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x)
  // 2^r on [0, 1], minimax fit of the relative error (2.9e-6).
  Floats p = broadcast(1.3426684e-2f);
  p = fused(p, r, broadcast(5.2242473e-2f));
  p = fused(p, r, broadcast(2.412802e-1f));
  p = fused(p, r, broadcast(6.9304484e-1f));
  p = fused(p, r, broadcast(1.f));
  // The instruction takes floor(x) itself. A denormal result would take it a hundred times as long.
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, broadcast(-126.f), _CMP_NLT_UQ), p, x);
}
#endif

/// Coefficients of (log(1 + r) - r + r^2 / 2) / r^3 on [sqrt(1/2) - 1, sqrt(2) - 1], the highest power first: a minimax
/// fit of the logarithm's relative error (6e-9).
constexpr float kLogarithm[] = {-7.634496688842773e-2f, 1.276157647371292e-1f,   -1.3160182535648346e-1f,
                                1.4201757311820984e-1f, -1.6623356938362122e-1f, 2.0001226663589478e-1f,
                                -2.500081956386566e-1f, 3.333333134651184e-1f};

/// log(x) within 0.9 ulp (tests/attention/test_exponential.py), for positive x that are not denormal. It is
/// exactly 0 for 1, inf for inf, NaN for NaN.
DISTCA_INLINE Floats logarithm(Floats x) {
  // x = m * 2^n, with m from sqrt(1/2) to sqrt(2), whose bits are subtracted.
  const Ints exponent = (Ints)((Words)x - 0x3f3504f3u) >> 23;
  const Floats n = __builtin_convertvector(exponent, Floats);
  const Floats r = (Floats)((Words)x - ((Words)exponent << 23)) - 1.f;
  const Floats square = r * r;
  Floats p = broadcast(kLogarithm[0]);
#pragma GCC unroll 8
  for (int i = 1; i < 8; ++i) p = fused(p, r, broadcast(kLogarithm[i]));
  p = fused(n, broadcast(kLn2Low), p * (square * r));
  p = r + fused(square, broadcast(-0.5f), p);
  const Floats result = fused(n, broadcast(kLn2High), p);
  return x < kInfinity ? result : x;
}

/// The keys that each query row of a vector sees.
struct LaneVisibility {
  Ints from;  // first key that each lane sees
  Ints upto;  // the one past the last key that it sees
};

DISTCA_INLINE Ints load_ints(const int32_t* p) {
  Ints x;
  __builtin_memcpy(&x, p, sizeof(x));
  return x;
}

DISTCA_INLINE LaneVisibility lane_visibility(Visible visible, int64_t first_lane) {
  return {load_ints(visible.from + first_lane), load_ints(visible.upto + first_lane)};
}
DISTCA_INLINE Ints sees(const LaneVisibility& lane, int32_t key) { return (lane.from <= key) & (lane.upto > key); }

/// Whether some row of the tile does not see some key of it.
DISTCA_INLINE bool is_edge(const ScoreTile& tile) {
  return tile.visible.from[tile.lanes - 1] > tile.begin || tile.visible.upto[0] < tile.end;
}

// ---- operands

/// Operands are floats.
struct FloatOperands {
  static constexpr int kElements = 1;
  DISTCA_INLINE Floats multiply_add(Floats left, Floats right, Floats sum) { return fused(left, right, sum); }
  /// Replaces each score by exp(scale * score - base). The product is fused, because a rounded scale * score would be
  /// off by as much as everything else together.
  template <int kN>
  DISTCA_INLINE void make_weights(Floats (&scores)[kN], float scale, Floats base) {
#pragma GCC unroll 4
    for (int u = 0; u < kN; ++u) scores[u] = fused(scores[u], broadcast(scale), -base);
    exponentials(scores);
  }
};

#if defined(__AVX512BF16__)
/// Operands are pairs of bf16; products of pairs are added up in fp32.
struct PairOperands {
  static constexpr int kElements = 2;
  DISTCA_INLINE Floats multiply_add(Floats left, Floats right, Floats sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)right, (__m512bh)left);
  }
  /// Replaces each score by exp(scale * score - base), as exact as the rounding to bf16 that follows can show.
  template <int kN>
  DISTCA_INLINE void make_weights(Floats (&scores)[kN], float scale, Floats base) {
#pragma GCC unroll 4
    for (int u = 0; u < kN; ++u)
      scores[u] = rough_power_of_two(fused(scores[u], broadcast(scale * kLog2E), base * -kLog2E));
  }
  /// The pairs (first[i], second[i]), rounded.
  DISTCA_INLINE Floats pairs_of(Floats first, Floats second) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (Floats)_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(second, first));
  }
  /// The lanes of `low`, then those of `high`, rounded.
  DISTCA_INLINE Floats halves_of(Floats low, Floats high) { return (Floats)_mm512_cvtne2ps_pbh(high, low); }
};
#endif

}  // namespace
}  // namespace distca::attention
