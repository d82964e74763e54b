// The layer of a call in one word, which ranks compare. They know layers by the names that their callers give.
#pragma once

#include <charconv>
#include <cstdint>
#include <string>
#include <string_view>

#include "common/digest.h"
#include "common/error.h"

namespace distca::runtime {

/// No name was given.
inline constexpr uint64_t kUnknownLayer = 0;

/// The word of a layer. It is odd for a name that is a number, or a number with a blank and more text after it:
/// "3", "3 (LlamaAttention)". It is even for any other name.
inline uint64_t layer_word(std::string_view name) {
  if (name.empty()) return kUnknownLayer;
  uint32_t number = 0;
  const auto [rest, error] = std::from_chars(name.data(), name.data() + name.size(), number);
  if (error == std::errc() && (rest == name.data() + name.size() || *rest == ' ')) return uint64_t{number} << 1 | 1;
  Digest d(name.size());
  for (const char c : name) d.add(c);
  return (d.value() | uint64_t{1} << 63) & ~uint64_t{1};  // even, and never kUnknownLayer
}

/// Whether two ranks may be in one layer: unless both have numbers, or both have other names, and these differ.
inline bool may_be_one_layer(uint64_t a, uint64_t b) {
  return a == b || a == kUnknownLayer || b == kUnknownLayer || (a & 1) != (b & 1);
}

/// "layer 3 on rank 1, layer 2 on rank 0", or that the names differ where they are not numbers.
inline std::string describe_layers(uint64_t a, int64_t rank_a, uint64_t b, int64_t rank_b) {
  if ((a & 1) == 0) return message("the layers of ranks ", rank_a, " and ", rank_b, " have different names");
  return message("layer ", a >> 1, " on rank ", rank_a, ", layer ", b >> 1, " on rank ", rank_b);
}

}  // namespace distca::runtime
