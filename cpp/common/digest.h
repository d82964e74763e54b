// A 64-bit digest of integer words: the same on every machine, good against accidents and stale data, not
// cryptographic.
#pragma once

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

inline uint64_t digest(std::span<const int64_t> words) {
  Digest d(words.size());
  d.add(words);
  return d.value();
}

}  // namespace distca
