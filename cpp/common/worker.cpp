#include "common/worker.h"

#include <pthread.h>

#include <csignal>
#include <system_error>

#include "common/error.h"
#include "common/fork_guard.h"

namespace distca {
namespace {

/// Blocks all signals of this thread, and those of a thread that it starts, while it lives.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

Worker::Worker(const char* name, std::function<void()> body) : shared_(std::make_unique<Shared>()) {
  watch_forks();
  generation_ = fork_generation();
  try {
    const BlockedSignals blocked;
    shared_->thread = std::thread(std::move(body));
  } catch (const std::system_error& error) {
    throw OperatingSystemError(message("could not start a thread: ", error.what()));
  }
  pthread_setname_np(shared_->thread.native_handle(), name);
}

Worker::~Worker() {
  if (is_forked()) {
    static_cast<void>(shared_.release());
    return;
  }
  stop();
  shared_->thread.join();
}

bool Worker::is_forked() const { return generation_ != fork_generation(); }

void Worker::stop() {
  {
    const std::lock_guard lock(mutex());
    shared_->is_stopping = true;
  }
  posted().notify_one();
}

}  // namespace distca
