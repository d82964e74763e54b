// What operators need in every step. Without it they would allocate, or leak, in every step.
#pragma once

#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/stable/stableivalue_conversions.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

namespace distca::ops {

/// A string argument of an operator, which is freed with this object. Operators take its handle, because LibTorch's own
/// conversion to std::string (torch 2.10 to 2.13) never frees the copy that it makes: 48 bytes in every call.
class Text {
 public:
  explicit Text(StringHandle handle) : handle_(handle) {}
  ~Text() { torch_delete_string(handle_); }
  Text(const Text&) = delete;
  Text& operator=(const Text&) = delete;

  operator std::string_view() const {
    const char* data = nullptr;
    size_t length = 0;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle_, &data));
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_length(handle_, &length));
    return {data, length};
  }

 private:
  StringHandle handle_;
};

/// An allocator that keeps the memory of single objects, when they go, for the next ones.
template <class T>
class Reusing {
 public:
  using value_type = T;

  Reusing() = default;
  template <class U>
  Reusing(const Reusing<U>&) {}

  T* allocate(size_t count) {
    if (count == 1) {
      const std::lock_guard lock(spare().mutex);
      if (!spare().memory.empty()) {
        T* const found = spare().memory.back();
        spare().memory.pop_back();
        return found;
      }
    }
    return std::allocator<T>().allocate(count);
  }
  void deallocate(T* memory, size_t count) {
    if (count != 1) return std::allocator<T>().deallocate(memory, count);
    const std::lock_guard lock(spare().mutex);
    spare().memory.push_back(memory);
  }
  bool operator==(const Reusing&) const = default;

 private:
  struct Spare {
    std::mutex mutex;
    std::vector<T*> memory;
  };
  /// It is never destroyed, because a step may outlive everything else while the process exits.
  static Spare& spare() {
    static auto* instance = new Spare;
    return *instance;
  }
};

/// Like `std::make_shared`, with memory that is used again.
template <class T, class... Args>
std::shared_ptr<T> make_reused(Args&&... args) {
  return std::allocate_shared<T>(Reusing<T>(), std::forward<Args>(args)...);
}

}  // namespace distca::ops
