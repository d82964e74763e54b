#include "transport/key.h"

#include <sys/random.h>

#include <cerrno>
#include <charconv>
#include <cstring>

#include "common/error.h"

namespace distca::transport {

Key random_key() {
  Key key;
  const ssize_t n = ::getrandom(key.data(), key.size(), 0);
  require<OperatingSystemError>(n == static_cast<ssize_t>(key.size()),
                                "could not get random bytes: ", std::strerror(errno));
  return key;
}

std::string to_hex(const Key& key) {
  constexpr char digits[] = "0123456789abcdef";
  std::string text;
  for (const uint8_t byte : key) text += {digits[byte >> 4], digits[byte & 15]};
  return text;
}

std::optional<Key> key_from_hex(const std::string& text) {
  Key key;
  if (text.size() != 2 * key.size()) return std::nullopt;
  for (size_t i = 0; i < key.size(); ++i) {
    const char* const at = text.data() + 2 * i;
    if (std::from_chars(at, at + 2, key[i], 16).ptr != at + 2) return std::nullopt;
  }
  return key;
}

}  // namespace distca::transport
