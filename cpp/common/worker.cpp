#include "common/worker.h"

#include <pthread.h>

#include <csignal>

#include "common/fork_guard.h"

namespace distca {

Worker::Worker(const char* name, std::function<void()> body) : shared_(std::make_unique<Shared>()) {
  watch_forks();
  generation_ = fork_generation();
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  shared_->thread = std::thread(std::move(body));
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
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
