#include "transport/tcp_address.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <optional>
#include <sstream>
#include <vector>

#include "common/error.h"

namespace distca::transport::tcp {
namespace {

constexpr char kScheme[] = "distca-tcp-1";

/// The two kinds of addresses, which have their parts in different places.
sockaddr_in& v4(sockaddr_storage& s) { return reinterpret_cast<sockaddr_in&>(s); }
sockaddr_in6& v6(sockaddr_storage& s) { return reinterpret_cast<sockaddr_in6&>(s); }
const sockaddr_in& v4(const sockaddr_storage& s) { return reinterpret_cast<const sockaddr_in&>(s); }
const sockaddr_in6& v6(const sockaddr_storage& s) { return reinterpret_cast<const sockaddr_in6&>(s); }

std::optional<Endpoint> read_endpoint(const std::string& host, uint16_t port) {
  Endpoint e;
  if (in_addr address; ::inet_pton(AF_INET, host.c_str(), &address) == 1) {
    if (address.s_addr == htonl(INADDR_ANY)) return std::nullopt;
    v4(e.storage) = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr = address, .sin_zero = {}};
    e.bytes = sizeof(sockaddr_in);
    return e;
  }
  if (in6_addr address; ::inet_pton(AF_INET6, host.c_str(), &address) == 1) {
    if (std::memcmp(&address, &in6addr_any, sizeof(address)) == 0) return std::nullopt;
    v6(e.storage) = {.sin6_family = AF_INET6,
                     .sin6_port = htons(port),
                     .sin6_flowinfo = 0,
                     .sin6_addr = address,
                     .sin6_scope_id = 0};
    e.bytes = sizeof(sockaddr_in6);
    return e;
  }
  return std::nullopt;
}

}  // namespace

Endpoint Endpoint::of(const std::string& host, uint16_t port) {
  const std::optional<Endpoint> endpoint = read_endpoint(host, port);
  require(endpoint.has_value(), "\"", host.substr(0, 60),
          "\" is not the numeric IPv4 or IPv6 address of one host, such as 10.0.0.1 or fd00::1");
  return *endpoint;
}

std::string Endpoint::host() const {
  char text[INET6_ADDRSTRLEN] = {};
  const void* const address = family() == AF_INET ? static_cast<const void*>(&v4(storage).sin_addr)
                                                  : static_cast<const void*>(&v6(storage).sin6_addr);
  ::inet_ntop(family(), address, text, sizeof(text));
  return text;
}

uint16_t Endpoint::port() const { return ntohs(family() == AF_INET ? v4(storage).sin_port : v6(storage).sin6_port); }

std::string Endpoint::name() const {
  return family() == AF_INET ? message(host(), ":", port()) : message("[", host(), "]:", port());
}

std::string Address::to_string() const {
  return message(kScheme, "/", endpoint.host(), "/", endpoint.port(), "/", to_hex(token));
}

Address Address::parse(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, '/');) parts.push_back(part);
  const auto read = [&]() -> std::optional<Address> {
    if (parts.size() != 4 || parts[0] != kScheme) return std::nullopt;
    const std::string& digits = parts[2];
    uint16_t port = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), port);
    if (error != std::errc{} || end != digits.data() + digits.size() || port == 0) return std::nullopt;
    const std::optional<Endpoint> endpoint = read_endpoint(parts[1], port);
    const std::optional<Key> token = key_from_hex(parts[3]);
    if (!endpoint || !token) return std::nullopt;
    return Address{.endpoint = *endpoint, .token = *token};
  };
  const std::optional<Address> address = read();
  require(address.has_value(), "not an address of a TCP listener: \"", text.substr(0, 60), "\"");
  return *address;
}

}  // namespace distca::transport::tcp
