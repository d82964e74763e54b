// A 64-bit digest of integer words: the same on every machine, good against accidents and stale data, not
// cryptographic.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

namespace distca {

class Digest {
 public:
  explicit Digest(uint64_t seed = 0) : state_(seed ^ 0x9e3779b97f4a7c15ull) {}

  void add(int64_t word) {
    // One round of a multiply-xorshift mixer a word: every input bit reaches every output bit.
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

/// Of many words, faster: in four chains, of which a processor computes steps at the same time. Word i is in chain i
/// % 4. Every step is reversible, so one changed word always changes the digest.
inline uint64_t digest(std::span<const int64_t> words) {
  std::array<uint64_t, 4> chains = {0, 1, 2, 3};
  const auto step = [&](size_t chain, int64_t word) {
    chains[chain] = std::rotl(chains[chain] ^ static_cast<uint64_t>(word), 29) * 0xd6e8feb86659fd93ull;
  };
  size_t i = 0;
  for (; i + 4 <= words.size(); i += 4)
    for (size_t c = 0; c < 4; ++c) step(c, words[i + c]);
  for (; i < words.size(); ++i) step(i % 4, words[i]);
  Digest d(words.size());
  for (const uint64_t chain : chains) d.add(static_cast<int64_t>(chain));
  return d.value();
}

}  // namespace distca
