// The instructions of AVX-512 and AVX512_BF16 that the kernel uses, under the names of their intrinsics, on vectors of
// AVX2. They let the kernel's code for AVX-512 run on a CPU that has AVX2, FMA and F16C alone.
//
// Each does what Intel's manual says of it, to the last bit, with these exceptions: `_mm512_maskz_scalef_ps` wants a
// factor between 2^-32 and 2^32 or NaN, and NaN may have another payload. Rounding is to nearest even.
#pragma once

#if defined(__AVX512F__)
#error "compile this without AVX-512"
#endif

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define __AVX512F__ 1
#define __AVX512BF16__ 1

namespace distca::attention {
namespace {
namespace emulated {

#define DISTCA_EMULATED static inline __attribute__((always_inline))
// Of those that take many instructions: inlined, they would be most of the compiler's time and of the library.
#define DISTCA_OUTLINED static __attribute__((noinline))

typedef float Floats16 __attribute__((vector_size(64), may_alias));
typedef double Doubles8 __attribute__((vector_size(64), may_alias));
typedef int32_t Ints16 __attribute__((vector_size(64), may_alias));
typedef uint32_t Words16 __attribute__((vector_size(64), may_alias));
typedef uint16_t Halves16 __attribute__((vector_size(32), may_alias));
typedef uint16_t Halves32 __attribute__((vector_size(64), may_alias));
typedef long long Longs8 __attribute__((vector_size(64), may_alias));
typedef uint16_t Mask16;
typedef uint32_t Mask32;

DISTCA_EMULATED __m256 low(Floats16 x) { return (__m256)__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7); }
DISTCA_EMULATED __m256 high(Floats16 x) { return (__m256)__builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15); }
DISTCA_EMULATED Floats16 join(__m256 low, __m256 high) {
  return (Floats16)__builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

// ---- floats

DISTCA_EMULATED Floats16 set1(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return (Floats16)(Words16{} + bits);
}
DISTCA_EMULATED Floats16 loadu(const void* p) {
  Floats16 x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}
DISTCA_EMULATED void storeu(void* p, Floats16 x) { std::memcpy(p, &x, sizeof(x)); }
DISTCA_EMULATED Floats16 fmadd(Floats16 a, Floats16 b, Floats16 c) {
  return join(_mm256_fmadd_ps(low(a), low(b), low(c)), _mm256_fmadd_ps(high(a), high(b), high(c)));
}
DISTCA_EMULATED Floats16 larger(Floats16 a, Floats16 b) {
  return join(_mm256_max_ps(low(a), low(b)), _mm256_max_ps(high(a), high(b)));
}
DISTCA_EMULATED Floats16 smaller(Floats16 a, Floats16 b) {
  return join(_mm256_min_ps(low(a), low(b)), _mm256_min_ps(high(a), high(b)));
}
template <int kRounding>
DISTCA_EMULATED Floats16 round(Floats16 x) {
  return join(_mm256_round_ps(low(x), kRounding), _mm256_round_ps(high(x), kRounding));
}
/// x less what it is rounded down to, which is rounded down too: an exact zero is -0. It is +0 for infinity.
template <int kRounding>
DISTCA_OUTLINED Floats16 reduce(Floats16 x) {
  static_assert(kRounding == (_MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));
  const Floats16 whole = round<kRounding>(x), rest = x - whole;
  const Floats16 below = rest + whole > x ? (Floats16)((Words16)rest - 1u) : rest == 0.f ? set1(-0.f) : rest;
  return ((Words16)x & 0x7fffffffu) == 0x7f800000u ? Floats16{} : below;
}

template <int kOrder>
DISTCA_EMULATED Mask16 compare(Floats16 a, Floats16 b) {
  const int first = _mm256_movemask_ps(_mm256_cmp_ps(low(a), low(b), kOrder));
  const int second = _mm256_movemask_ps(_mm256_cmp_ps(high(a), high(b), kOrder));
  return static_cast<Mask16>(first | second << 8);
}
/// x where the mask has a bit, and zero elsewhere.
DISTCA_OUTLINED Floats16 where(Mask16 mask, Floats16 x) {
  Words16 bits = Words16{} + mask;
  bits >>= Words16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return (bits & 1u) != 0u ? x : Floats16{};
}
/// x * 2^floor(power). Infinite powers give inf and zero, also where x is NaN.
DISTCA_OUTLINED Floats16 scale(Floats16 x, Floats16 power) {
  const Floats16 floor = round<_MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC>(power);
  const Ints16 exponent = __builtin_convertvector(smaller(larger(floor, set1(-252.f)), set1(252.f)), Ints16);
  const Ints16 half = exponent >> 1;
  const Floats16 scaled = x * (Floats16)((half + 127) << 23) * (Floats16)((exponent - half + 127) << 23);
  const Floats16 ends = power > 0.f ? set1(__builtin_inff()) : Floats16{};
  return ((Words16)power & 0x7fffffffu) == 0x7f800000u ? ends : power == power ? scaled : power;
}

// ---- columns and rows

DISTCA_EMULATED Floats16 unpack_low(Floats16 a, Floats16 b) {
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
}
DISTCA_EMULATED Floats16 unpack_high(Floats16 a, Floats16 b) {
  return __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
}
DISTCA_EMULATED Doubles8 unpack_low(Doubles8 a, Doubles8 b) {
  return __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14);
}
DISTCA_EMULATED Doubles8 unpack_high(Doubles8 a, Doubles8 b) {
  return __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
}
template <int kParts>
DISTCA_EMULATED Floats16 shuffle_quads(Floats16 a, Floats16 b) {
  constexpr int kA = kParts % 4 * 2, kB = kParts / 4 % 4 * 2, kC = kParts / 16 % 4 * 2 + 8, kD = kParts / 64 * 2 + 8;
  const Longs8 parts = __builtin_shufflevector((Longs8)a, (Longs8)b, kA, kA + 1, kB, kB + 1, kC, kC + 1, kD, kD + 1);
  return (Floats16)parts;
}
DISTCA_EMULATED Longs8 unpack_low_halves(Halves32 a, Halves32 b) {
  return (Longs8)__builtin_shufflevector(a, b, 0, 32, 1, 33, 2, 34, 3, 35, 8, 40, 9, 41, 10, 42, 11, 43, 16, 48, 17, 49,
                                         18, 50, 19, 51, 24, 56, 25, 57, 26, 58, 27, 59);
}
DISTCA_EMULATED Longs8 unpack_high_halves(Halves32 a, Halves32 b) {
  return (Longs8)__builtin_shufflevector(a, b, 4, 36, 5, 37, 6, 38, 7, 39, 12, 44, 13, 45, 14, 46, 15, 47, 20, 52, 21,
                                         53, 22, 54, 23, 55, 28, 60, 29, 61, 30, 62, 31, 63);
}
DISTCA_OUTLINED Longs8 permute_halves(Longs8 order, Longs8 x) {
  const Halves32 from = (Halves32)order, in = (Halves32)x;
  Halves32 out{};
  for (int i = 0; i < 32; ++i) out[i] = in[from[i] % 32];
  return (Longs8)out;
}
/// The last argument is the first element.
template <class... Halves>
DISTCA_OUTLINED Longs8 set_halves(Halves... last_to_first) {
  static_assert(sizeof...(Halves) == 32);
  const uint16_t halves[32] = {static_cast<uint16_t>(last_to_first)...};
  Halves32 out{};
  for (int i = 0; i < 32; ++i) out[i] = halves[31 - i];
  return (Longs8)out;
}
DISTCA_OUTLINED void store_halves(void* p, Mask32 mask, Longs8 x) {
  const Halves32 halves = (Halves32)x;
  for (int i = 0; i < 32; ++i) {
    const uint16_t half = halves[i];
    if (mask >> i & 1) std::memcpy(static_cast<char*>(p) + 2 * i, &half, 2);
  }
}
DISTCA_OUTLINED Longs8 larger_halves(Longs8 a, Longs8 b) {
  return (Longs8)((Halves32)a > (Halves32)b ? (Halves32)a : (Halves32)b);
}
DISTCA_OUTLINED Mask32 at_least(Longs8 a, Longs8 b) {
  const Halves32 x = (Halves32)a, y = (Halves32)b;
  Mask32 mask = 0;
  for (int i = 0; i < 32; ++i) mask |= static_cast<Mask32>(x[i] >= y[i]) << i;
  return mask;
}

// ---- halves of floats

DISTCA_EMULATED Floats16 widen(__m256i x) {
  return join(_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1)));
}
template <int kRounding>
DISTCA_EMULATED __m256i narrow(Floats16 x) {
  return _mm256_set_m128i(_mm256_cvtps_ph(high(x), kRounding), _mm256_cvtps_ph(low(x), kRounding));
}

/// Zeros of the same sign for denormals.
DISTCA_EMULATED Floats16 without_denormals(Floats16 x) {
  const Words16 bits = (Words16)x;
  return (Floats16)((bits & 0x7f800000u) == 0u ? bits & 0x80000000u : bits);
}
DISTCA_EMULATED Halves16 narrow_to_bf16(Floats16 x) {
  const Words16 bits = (Words16)without_denormals(x);
  const Words16 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return __builtin_convertvector(x == x ? rounded : (bits >> 16 | 0x40u), Halves16);
}
DISTCA_OUTLINED Longs8 narrow_to_bf16(Floats16 last, Floats16 first) {
  return (Longs8)__builtin_shufflevector(narrow_to_bf16(first), narrow_to_bf16(last), 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10,
                                         11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30,
                                         31);
}
/// Adds the products of the second elements of pairs, then those of the first ones.
DISTCA_EMULATED Floats16 add_dots(Floats16 sum, Longs8 a, Longs8 b) {
  const Words16 left = (Words16)a, right = (Words16)b;
  const auto second = [](Words16 pairs) { return without_denormals((Floats16)(pairs & 0xffff0000u)); };
  const auto first = [](Words16 pairs) { return without_denormals((Floats16)(pairs << 16)); };
  sum = without_denormals(fmadd(second(left), second(right), without_denormals(sum)));
  return without_denormals(fmadd(first(left), first(right), sum));
}

}  // namespace emulated
}  // namespace
}  // namespace distca::attention

// Compilers offer these as macros too.
#undef _mm512_roundscale_ps
#undef _mm512_reduce_ps
#undef _mm512_cmp_ps_mask
#undef _mm512_shuffle_f32x4
#undef _mm512_cmpge_epu16_mask
#undef _mm512_cvtps_ph

// The names of types and intrinsics mean the above from here on.
#define DISTCA_OF(name) ::distca::attention::emulated::name
#define __m512 DISTCA_OF(Floats16)
#define __m512d DISTCA_OF(Doubles8)
#define __m512i DISTCA_OF(Longs8)
#define __m512bh DISTCA_OF(Longs8)
#define __mmask16 DISTCA_OF(Mask16)
#define __mmask32 DISTCA_OF(Mask32)

#define _mm512_set1_ps(x) DISTCA_OF(set1)(x)
#define _mm512_setzero_ps() (DISTCA_OF(Floats16){})
#define _mm512_loadu_ps(p) DISTCA_OF(loadu)(p)
#define _mm512_storeu_ps(p, x) DISTCA_OF(storeu)(p, x)
#define _mm512_add_ps(a, b) ((a) + (b))
#define _mm512_fmadd_ps(a, b, c) DISTCA_OF(fmadd)(a, b, c)
#define _mm512_maskz_fmadd_ps(mask, a, b, c) DISTCA_OF(where)(mask, DISTCA_OF(fmadd)(a, b, c))
#define _mm512_max_ps(a, b) DISTCA_OF(larger)(a, b)
#define _mm512_roundscale_ps(x, rounding) DISTCA_OF(round)<rounding>(x)
#define _mm512_reduce_ps(x, rounding) DISTCA_OF(reduce)<rounding>(x)
#define _mm512_cmp_ps_mask(a, b, order) DISTCA_OF(compare)<order>(a, b)
#define _mm512_maskz_scalef_ps(mask, x, power) DISTCA_OF(where)(mask, DISTCA_OF(scale)(x, power))

#define _mm512_unpacklo_ps(a, b) DISTCA_OF(unpack_low)(a, b)
#define _mm512_unpackhi_ps(a, b) DISTCA_OF(unpack_high)(a, b)
#define _mm512_unpacklo_pd(a, b) DISTCA_OF(unpack_low)(a, b)
#define _mm512_unpackhi_pd(a, b) DISTCA_OF(unpack_high)(a, b)
#define _mm512_shuffle_f32x4(a, b, parts) DISTCA_OF(shuffle_quads)<parts>(a, b)

#define _mm512_castsi512_ps(x) ((__m512)(x))
#define _mm512_setzero_si512() (__m512i{})
#define _mm512_set1_epi32(x) ((__m512i)(DISTCA_OF(Words16){} + static_cast<uint32_t>(x)))
#define _mm512_set1_epi16(x) ((__m512i)(DISTCA_OF(Halves32){} + static_cast<uint16_t>(x)))
#define _mm512_set_epi16(...) DISTCA_OF(set_halves)(__VA_ARGS__)
#define _mm512_loadu_si512(p) ((__m512i)DISTCA_OF(loadu)(p))
#define _mm512_load_si512(p) ((__m512i)DISTCA_OF(loadu)(p))
#define _mm512_and_si512(a, b) ((a) & (b))
#define _mm512_slli_epi32(x, bits) ((__m512i)((DISTCA_OF(Words16))(x) << (bits)))
#define _mm512_unpacklo_epi16(a, b) DISTCA_OF(unpack_low_halves)((DISTCA_OF(Halves32))(a), (DISTCA_OF(Halves32))(b))
#define _mm512_unpackhi_epi16(a, b) DISTCA_OF(unpack_high_halves)((DISTCA_OF(Halves32))(a), (DISTCA_OF(Halves32))(b))
#define _mm512_permutexvar_epi16(order, x) DISTCA_OF(permute_halves)(order, x)
#define _mm512_mask_storeu_epi16(p, mask, x) DISTCA_OF(store_halves)(p, mask, x)
#define _mm512_max_epu16(a, b) DISTCA_OF(larger_halves)(a, b)
#define _mm512_cmpge_epu16_mask(a, b) DISTCA_OF(at_least)(a, b)

#define _mm512_cvtph_ps(x) DISTCA_OF(widen)(x)
#define _mm512_cvtps_ph(x, rounding) DISTCA_OF(narrow)<rounding>(x)
#define _mm512_cvtne2ps_pbh(last, first) DISTCA_OF(narrow_to_bf16)(last, first)
#define _mm512_dpbf16_ps(sum, a, b) DISTCA_OF(add_dots)(sum, a, b)
