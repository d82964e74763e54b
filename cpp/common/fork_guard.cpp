#include "common/fork_guard.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <mutex>
#include <vector>

namespace distca {
namespace {

// Global, because fork is: the handlers get no argument. Never destroyed, since a fork may come during exit.
struct Watch {
  std::mutex mutex;
  std::vector<int> open;
};

Watch& watch() {
  static Watch* const instance = new Watch;
  return *instance;
}

std::atomic<uint32_t> generation{0};

}  // namespace

void watch_forks() {
  static const bool installed = [] {
    watch();
    pthread_atfork([] { watch().mutex.lock(); }, [] { watch().mutex.unlock(); },
                   [] {
                     for (const int fd : watch().open) ::close(fd);
                     watch().open.clear();
                     generation.fetch_add(1, std::memory_order_relaxed);
                     watch().mutex.unlock();
                   });
    return true;
  }();
  static_cast<void>(installed);
}

uint32_t fork_generation() { return generation.load(std::memory_order_relaxed); }

Descriptor::Descriptor(const std::function<int()>& make) {
  watch_forks();
  const std::lock_guard lock(watch().mutex);
  generation_ = fork_generation();
  watch().open.reserve(watch().open.size() + 1);  // so that push_back cannot throw with the descriptor in hand
  fd_ = make();
  if (fd_ >= 0) {
    const int saved = errno;
    watch().open.push_back(fd_);
    errno = saved;
  }
}

void Descriptor::reset() noexcept {
  const int fd = std::exchange(fd_, -1);
  if (fd < 0) return;
  const std::lock_guard lock(watch().mutex);
  if (generation_ != fork_generation()) return;  // closed by the handler; the number may be somebody else's by now
  std::erase(watch().open, fd);
  ::close(fd);
}

}  // namespace distca
