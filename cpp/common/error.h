// Every error that distca reports: one exception type for each kind of fault.
//
// A message says what was wrong, the value, what is allowed, and where (rank, peer, document, rows).
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace distca {

#define DISTCA_EXPORT __attribute__((visibility("default")))

/// Base of all errors of the library. `kind()` is the name of the Python exception it becomes.
class DISTCA_EXPORT Error : public std::runtime_error {
 public:
  Error(const char* kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  const char* kind() const noexcept { return kind_; }

 private:
  const char* kind_;
};

/// An argument is wrong: a length, a shape, a dtype, a name.
class DISTCA_EXPORT InvalidArgumentError : public Error {
 public:
  explicit InvalidArgumentError(const std::string& m) : Error("InvalidArgumentError", m) {}
};
/// A plan does not fit into the arenas it was made for.
class DISTCA_EXPORT CapacityError : public Error {
 public:
  explicit CapacityError(const std::string& m) : Error("CapacityError", m) {}
};
/// A plan tensor is damaged, truncated, or of another format.
class DISTCA_EXPORT PlanFormatError : public Error {
 public:
  explicit PlanFormatError(const std::string& m) : Error("PlanFormatError", m) {}
};
/// Ranks of one context came to the same step with different plans, calls, scores or layers.
class DISTCA_EXPORT PlanMismatchError : public Error {
 public:
  explicit PlanMismatchError(const std::string& m) : Error("PlanMismatchError", m) {}
};
/// A peer process ended while it was still needed.
class DISTCA_EXPORT PeerDiedError : public Error {
 public:
  explicit PeerDiedError(const std::string& m) : Error("PeerDiedError", m) {}
};
/// A peer that lives is no longer with this rank: it closed its context, refused a call, left a step unfinished, or
/// gave up after an error of its own.
class DISTCA_EXPORT PeerLeftError : public Error {
 public:
  explicit PeerLeftError(const std::string& m) : Error("PeerLeftError", m) {}
};
/// A peer is alive but did not answer within the timeout.
class DISTCA_EXPORT PeerTimeoutError : public Error {
 public:
  explicit PeerTimeoutError(const std::string& m) : Error("PeerTimeoutError", m) {}
};
/// The context is poisoned: it had a fault earlier.
class DISTCA_EXPORT ContextPoisonedError : public Error {
 public:
  explicit ContextPoisonedError(const std::string& m) : Error("ContextPoisonedError", m) {}
};
/// The operating system refused something (memory, sockets).
class DISTCA_EXPORT OperatingSystemError : public Error {
 public:
  explicit OperatingSystemError(const std::string& m) : Error("OperatingSystemError", m) {}
};
/// A GPU or its driver refused something, or there is none where one is needed.
class DISTCA_EXPORT DeviceError : public Error {
 public:
  explicit DeviceError(const std::string& m) : Error("DeviceError", m) {}
};

/// Joins its arguments to one message: `message("rank ", 3, " holds ", 7, " rows")`.
template <class... Args>
std::string message(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return out.str();
}

/// Throws `E` with the joined arguments unless `condition` holds.
template <class E = InvalidArgumentError, class... Args>
void require(bool condition, const Args&... args) {
  if (!condition) [[unlikely]]
    throw E(message(args...));
}

}  // namespace distca
