// Numbers rounded up to multiples, and arrays carved out of one piece of memory.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace distca {

/// The least number of units that hold `n`, which is not negative.
template <std::integral T>
constexpr T ceil_div(T n, std::type_identity_t<T> unit) {
  return (n + unit - 1) / unit;
}

/// The least multiple of `unit` that is not below `n`, which is not negative.
template <std::integral T>
constexpr T round_up(T n, std::type_identity_t<T> unit) {
  return ceil_div(n, unit) * unit;
}

inline constexpr int64_t kPageBytes = 4096;

/// Carves arrays out of memory that is aligned to `kAlignment` bytes, each aligned likewise. From null it only counts.
template <size_t kAlignment>
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<std::byte*>(base)) {}

  template <class T>
  T* take(std::integral auto n) {
    static_assert(alignof(T) <= kAlignment);
    T* const result = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += round_up(static_cast<size_t>(n) * sizeof(T), kAlignment);
    return result;
  }
  /// Bytes.
  size_t used() const { return used_; }

 private:
  std::byte* base_;
  size_t used_ = 0;
};

}  // namespace distca
