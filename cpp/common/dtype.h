// Element types and the shape of attention heads.
#pragma once

#include <bit>
#include <cstdint>

namespace distca {

enum class DType : int64_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };
inline constexpr int64_t kNumDTypes = 3;

constexpr int64_t dtype_bytes(DType t) { return t == DType::kFloat32 ? 4 : 2; }
constexpr const char* dtype_name(DType t) {
  return t == DType::kFloat32 ? "float32" : t == DType::kBFloat16 ? "bfloat16" : "float16";
}

/// The heads of one attention layer: q [T, q_heads, dim], k [T, kv_heads, dim], v [T, kv_heads, v_dim].
struct HeadShape {
  int64_t q_heads = 0;
  int64_t kv_heads = 0;
  int64_t dim = 0;
  int64_t v_dim = 0;
  DType dtype = DType::kFloat32;

  constexpr int64_t element_bytes() const { return dtype_bytes(dtype); }
  /// Query heads that share a key/value head.
  constexpr int64_t group_heads() const { return q_heads / kv_heads; }
  /// The shape of `n` of the key/value heads, with the query heads that share them.
  constexpr HeadShape with_kv_heads(int64_t n) const { return {n * group_heads(), n, dim, v_dim, dtype}; }
  bool operator==(const HeadShape&) const = default;
};

/// The largest dimension of a head. Some kernels take less, and say so.
inline constexpr int64_t kMostHeadDim = 512;
constexpr bool is_head_dim(int64_t dim) { return dim >= 8 && dim <= kMostHeadDim && dim % 8 == 0; }

/// The most different masks, windows, scales and softcaps of a problem, and of a plan. The CUDA kernels have all of
/// them in their parameters.
inline constexpr int64_t kMostScores = 32;

inline float bf16_to_float(uint16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }

/// Rounds to nearest even; NaN stays NaN.
inline uint16_t float_to_bf16(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40u);
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

// Conversions of halves are written by hand, because the compiler's own call functions that older systems' libgcc
// lacks.
inline float fp16_to_float(uint16_t x) {
  const uint32_t sign = static_cast<uint32_t>(x & 0x8000u) << 16, magnitude = x & 0x7fffu;
  if (magnitude >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  if (magnitude >= 0x400u) return std::bit_cast<float>(sign | ((magnitude + 0x1c000u) << 13));
  const float denormal = static_cast<float>(magnitude) * 0x1p-24f;
  return sign != 0 ? -denormal : denormal;
}

/// Rounds to nearest even; NaN stays NaN.
inline uint16_t float_to_fp16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65536 and more
  if (magnitude < 0x38800000u) {  // below 2^-14 halves are multiples of 2^-24, which is the last place of 0.5f
    const float rounded = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(rounded) - 0x3f000000u));
  }
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
}

}  // namespace distca
