// The address at which a rank can be reached over the network, as a string that any channel can carry.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>

#include "transport/key.h"

namespace distca::transport::tcp {

/// One end of a connection as the system writes it: a numeric IPv4 or IPv6 address and a port.
struct Endpoint {
  sockaddr_storage storage{};
  socklen_t bytes = 0;

  /// Takes only a numeric address of one host: no name and no "any address". Throws InvalidArgumentError.
  static Endpoint of(const std::string& host, uint16_t port);

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  int family() const { return storage.ss_family; }
  std::string host() const;
  uint16_t port() const;
  /// For messages: "10.0.0.1:80", "[fd00::1]:80".
  std::string name() const;
};

/// The contents of an address string.
struct Address {
  Endpoint endpoint;
  Key token{};  // shows that a caller was given the address

  std::string to_string() const;
  /// Throws InvalidArgumentError.
  static Address parse(const std::string& text);
};

}  // namespace distca::transport::tcp
