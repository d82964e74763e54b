// Element types and the shape of attention heads.
#pragma once

#include <bit>
#include <cstdint>

namespace distca {

enum class DType : int64_t { kFloat32 = 0, kBFloat16 = 1 };

constexpr int64_t dtype_bytes(DType t) { return t == DType::kFloat32 ? 4 : 2; }
constexpr const char* dtype_name(DType t) { return t == DType::kFloat32 ? "float32" : "bfloat16"; }

/// Heads of one attention layer: q [T, q_heads, dim], k [T, kv_heads, dim], v [T, kv_heads, v_dim].
struct HeadShape {
  int64_t q_heads = 0;
  int64_t kv_heads = 0;
  int64_t dim = 0;
  int64_t v_dim = 0;
  DType dtype = DType::kFloat32;

  constexpr int64_t element_bytes() const { return dtype_bytes(dtype); }
  bool operator==(const HeadShape&) const = default;
};

/// Which keys a row of a document may see.
enum class Mask : int64_t { kCausal = 0 };

inline float bf16_to_float(uint16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }

/// Rounds to nearest even; NaN stays NaN.
inline uint16_t float_to_bf16(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40u);
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

}  // namespace distca
