// Random keys by which the ranks of a group know each other: names that nobody can guess, and secrets.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

namespace distca::transport {

using Key = std::array<uint8_t, 16>;

/// Throws OperatingSystemError.
Key random_key();
std::string to_hex(const Key& key);
/// The key that the text spells in hexadecimal digits. Empty if the text is no key.
std::optional<Key> key_from_hex(const std::string& text);

}  // namespace distca::transport
