// The address at which a process can be reached on its host, as a string that any channel can carry.
#pragma once

#include <string>

#include "transport/key.h"

namespace distca::transport::shm {

/// The contents of an address string.
struct Address {
  std::string boot_id;  // the kernel's; it tells hosts apart
  std::string network;  // the network namespace, within which abstract socket names are known
  int pid = 0;          // for messages only
  Key name{};           // the socket's; public, because the system lists it
  Key token{};          // shows that a caller was given the address

  /// Makes an address of this process, with a new name and token. Throws OperatingSystemError.
  static Address random();
  std::string to_string() const;
  /// Throws InvalidArgumentError.
  static Address parse(const std::string& text);
};

}  // namespace distca::transport::shm
