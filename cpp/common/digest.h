// A 64-bit digest of integer words. It is the same on every machine and detects accidents and stale data. It is not
// cryptographic.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

namespace distca {

class Digest {
 public:
  explicit Digest(uint64_t seed = 0) : state_(seed ^ 0x9e3779b97f4a7c15ull) {}

  void add(int64_t word) {
    // Each word takes one round of a multiply-xorshift mixer: every input bit reaches every output bit.
    uint64_t x = state_ ^ static_cast<uint64_t>(word);
    x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93ull;
    x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93ull;
    state_ = (x ^ (x >> 32)) + 0x9e3779b97f4a7c15ull;
  }
  void add(std::span<const int64_t> words) {
    for (int64_t w : words) add(w);
  }
  uint64_t value() const { return state_; }

 private:
  uint64_t state_;
};

/// A faster digest of lists of many words. Word i of a list is in chain i % 8, and a processor makes steps of all
/// chains at the same time. Every step is reversible; therefore one changed word always changes the digest.
class ListDigest {
 public:
  void add(std::span<const int64_t> words) {
    step<0>(static_cast<int64_t>(words.size()));
    const int64_t* const end = words.data() + words.size() / kChains * kChains;
    for (const int64_t* w = words.data(); w != end; w += kChains)
      add_row(w, kChains, std::make_index_sequence<kChains>());
    add_row(end, words.size() % kChains, std::make_index_sequence<kChains>());
  }
  uint64_t value() const {
    Digest d;
    for (const uint64_t chain : chains_) d.add(static_cast<int64_t>(chain));
    return d.value();
  }

 private:
  static constexpr size_t kChains = 8;

  template <size_t kChain>
  void step(int64_t word) {
    chains_[kChain] = std::rotl(chains_[kChain] ^ static_cast<uint64_t>(word), 29) * 0xd6e8feb86659fd93ull;
  }
  /// Chains are numbered at compile time; therefore they stay in registers.
  template <size_t... kChain>
  void add_row(const int64_t* words, size_t size, std::index_sequence<kChain...>) {
    ((kChain < size ? step<kChain>(words[kChain]) : void()), ...);
  }

  std::array<uint64_t, kChains> chains_ = {0, 1, 2, 3, 4, 5, 6, 7};
};

inline uint64_t digest(std::span<const int64_t> words) {
  ListDigest d;
  d.add(words);
  return d.value();
}

}  // namespace distca
