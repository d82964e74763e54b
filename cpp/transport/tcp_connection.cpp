#include "transport/tcp_connection.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>

namespace distca::transport::tcp {
namespace {

/// The number of bytes that may wait for a peer that does not read, beyond the system's own buffers.
constexpr size_t kMaxUnsent = size_t{1} << 20;

}  // namespace

void Connection::close() {
  socket_.reset();
  unsent_.clear();
  num_sent_ = 0;
}

size_t Connection::offer(const std::byte* data, size_t bytes) {
  size_t taken = 0;
  while (taken < bytes) {
    const ssize_t n = ::send(socket_.get(), data + taken, bytes - taken, MSG_NOSIGNAL);
    if (n >= 0)
      taken += static_cast<size_t>(n);
    else if (errno == EAGAIN || errno == EWOULDBLOCK)
      return taken;
    else if (errno != EINTR)
      return bytes;  // a hang-up, which `receive` will notice
  }
  return taken;
}

bool Connection::send(const Message& message) {
  const auto* const data = reinterpret_cast<const std::byte*>(&message);
  if (unsent_.size() - num_sent_ + sizeof(message) > kMaxUnsent) return false;
  const size_t sent = has_unsent() ? 0 : offer(data, sizeof(message));
  unsent_.insert(unsent_.end(), data + sent, data + sizeof(message));
  return true;
}

void Connection::flush() {
  num_sent_ += offer(unsent_.data() + num_sent_, unsent_.size() - num_sent_);
  if (has_unsent()) return;
  unsent_.clear();
  num_sent_ = 0;
}

bool Connection::receive(const std::function<bool(const Message&)>& take) {
  const ssize_t n = ::recv(socket_.get(), arrived_.data() + num_arrived_, arrived_.size() - num_arrived_, 0);
  if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
  if (n == 0) return false;
  num_arrived_ += static_cast<size_t>(n);
  size_t taken = 0;
  for (; num_arrived_ - taken >= sizeof(Message); taken += sizeof(Message)) {
    Message message;
    std::memcpy(&message, arrived_.data() + taken, sizeof(message));
    if (!take(message)) return false;
  }
  num_arrived_ -= taken;
  std::memmove(arrived_.data(), arrived_.data() + taken, num_arrived_);
  return true;
}

}  // namespace distca::transport::tcp
