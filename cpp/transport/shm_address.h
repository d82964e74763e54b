// How a process says where it can be reached on its host, as a string that any channel can carry.
#pragma once

#include <string>

#include "transport/key.h"

namespace distca::transport::shm {

/// What an address string says.
struct Address {
  std::string boot_id;  // of the kernel: tells hosts apart
  std::string network;  // the network namespace, within which abstract socket names are known
  int pid = 0;          // for messages only
  Key name{};           // of the socket; public, the system lists it
  Key token{};          // shows that who connects was given the address

  /// One of this process, with a new name and token. Throws OperatingSystemError.
  static Address random();
  std::string to_string() const;
  /// Throws InvalidArgumentError.
  static Address parse(const std::string& text);
};

}  // namespace distca::transport::shm
