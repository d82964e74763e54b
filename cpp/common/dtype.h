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

enum class MaskKind : int64_t { kCausal = 0, kFull = 1 };
inline constexpr int64_t kNumMaskKinds = 2;

/// Which keys row i of a document of `length` rows may see: causal [0, i], with a window W (i - W, i], full [0, length).
struct Mask {
  MaskKind kind = MaskKind::kCausal;
  int64_t window = 0;  // 0: none; causal only

  bool operator==(const Mask&) const = default;

  constexpr int64_t first_key(int64_t row) const {
    return kind == MaskKind::kFull || window == 0 || row < window ? 0 : row - window + 1;
  }
  constexpr int64_t end_key(int64_t row, int64_t length) const { return kind == MaskKind::kFull ? length : row + 1; }
};

inline float bf16_to_float(uint16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }

/// Rounds to nearest even; NaN stays NaN.
inline uint16_t float_to_bf16(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40u);
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

inline float fp16_to_float(uint16_t x) { return static_cast<float>(std::bit_cast<_Float16>(x)); }
inline uint16_t float_to_fp16(float x) { return std::bit_cast<uint16_t>(static_cast<_Float16>(x)); }

}  // namespace distca
