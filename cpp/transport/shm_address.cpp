#include "transport/shm_address.h"

#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <optional>
#include <sstream>
#include <utility>
#include <vector>

#include "common/error.h"

namespace distca::transport::shm {
namespace {

constexpr char kScheme[] = "distca-shm-1";

[[noreturn]] void fail(const std::string& what) { throw OperatingSystemError(what + ": " + std::strerror(errno)); }

std::string read_boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  require<OperatingSystemError>(static_cast<bool>(file >> id), "could not read /proc/sys/kernel/random/boot_id");
  return id;
}

std::string read_network() {
  char text[64];
  const ssize_t n = ::readlink("/proc/self/ns/net", text, sizeof(text));
  if (n <= 0) fail("could not read /proc/self/ns/net");
  return std::string(text, static_cast<size_t>(n));
}

}  // namespace

Address Address::random() {
  return {.boot_id = read_boot_id(),
          .network = read_network(),
          .pid = ::getpid(),
          .name = random_key(),
          .token = random_key()};
}

std::string Address::to_string() const {
  return message(kScheme, "/", boot_id, "/", network, "/", pid, "/", to_hex(name), "/", to_hex(token));
}

Address Address::parse(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, '/');) parts.push_back(part);
  const auto read = [&]() -> std::optional<Address> {
    if (parts.size() != 6 || parts[0] != kScheme || parts[1].empty() || parts[2].empty()) return std::nullopt;
    const std::string& digits = parts[3];
    int pid = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), pid);
    const std::optional<Key> name = key_from_hex(parts[4]);
    const std::optional<Key> token = key_from_hex(parts[5]);
    if (error != std::errc{} || end != digits.data() + digits.size() || !name || !token) return std::nullopt;
    return Address{.boot_id = parts[1], .network = parts[2], .pid = pid, .name = *name, .token = *token};
  };
  std::optional<Address> address = read();
  require(address.has_value(), "not an address of an shm listener: \"", text.substr(0, 60), "\"");
  return *std::move(address);
}

}  // namespace distca::transport::shm
