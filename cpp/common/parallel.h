// A reference to somebody else's thread pool. The kernels start no threads of their own.
#pragma once

#include <cstdint>
#include <functional>

namespace distca {

/// `run` calls `body(worker)` for worker = 0 .. num_workers-1, concurrently where threads allow, and returns when all
/// are done.
struct Parallel {
  int num_workers = 1;
  std::function<void(int num_workers, const std::function<void(int)>& body)> run =
      [](int n, const std::function<void(int)>& body) {
        for (int i = 0; i < n; ++i) body(i);
      };
};

}  // namespace distca
