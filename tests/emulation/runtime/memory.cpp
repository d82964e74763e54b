// Memory of the emulated device, and page-locked memory.
#include <sys/mman.h>

#include <cstring>
#include <map>
#include <utility>

#include "streams.h"

namespace emulated_gpu {
namespace {

constexpr size_t kPage = 4096, kAlignment = 256;

struct Allocation {
  size_t bytes;
  bool is_page_locked;
  bool is_alive;
};

/// By address. What is freed stays here, and its addresses are not used again, so that later use is noticed.
struct Memory {
  std::mutex lock;
  std::map<const std::byte*, Allocation> allocations;

  /// Null if that address lies in none.
  std::pair<const std::byte* const, Allocation>* find(const void* p) {
    const auto* const at = static_cast<const std::byte*>(p);
    auto after = allocations.upper_bound(at);
    if (after == allocations.begin()) return nullptr;
    auto& found = *--after;
    return at < found.first + found.second.bytes ? &found : nullptr;
  }
};

Memory& memory() {
  static auto* const one = new Memory;
  return *one;
}

/// The end lies as near as its alignment allows to a page that cannot be touched.
cudaError_t allocate(void** result, size_t bytes, bool is_page_locked) {
  *result = nullptr;
  if (bytes == 0) return cudaSuccess;
  const size_t room = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  const size_t pages = (room + kPage - 1) / kPage * kPage;
  void* const base = mmap(nullptr, pages + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) fail("there is no memory");
  mprotect(static_cast<std::byte*>(base) + pages, kPage, PROT_NONE);
  auto* const data = static_cast<std::byte*>(base) + (pages - room);
  std::memset(data, 0xff, room);
  const std::lock_guard guard(memory().lock);
  memory().allocations[data] = {bytes, is_page_locked, true};
  *result = data;
  return cudaSuccess;
}

void release(void* p, bool is_page_locked) {
  const std::lock_guard guard(memory().lock);
  const auto found = memory().allocations.find(static_cast<std::byte*>(p));
  if (found == memory().allocations.end() || !found->second.is_alive || found->second.is_page_locked != is_page_locked)
    fail("memory is freed that was not allocated, or freed before, or by the wrong function");
  found->second.is_alive = false;
  const size_t room = (found->second.bytes + kAlignment - 1) / kAlignment * kAlignment;
  const size_t pages = (room + kPage - 1) / kPage * kPage;
  void* const base = static_cast<std::byte*>(p) - (pages - room);
  if (mmap(base, pages, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) == MAP_FAILED)
    fail("memory cannot be given back");
}

/// As the driver does, waits for the device; who relies on that is wrong all the same, for nothing promises it.
cudaError_t free_now(void* p, bool is_page_locked) {
  if (const cudaError_t error = forbidden_by_capture(); error != cudaSuccess) return error;
  if (p == nullptr) return cudaSuccess;
  check_unused(p);
  finish_all();
  release(p, is_page_locked);
  return cudaSuccess;
}

}  // namespace

void check_alive(const Operation& operation) {
  const std::lock_guard guard(memory().lock);
  for (const void* word : operation.words) {
    const auto* const found = memory().find(word);
    if (found != nullptr && !found->second.is_alive) fail(operation.name + " uses memory that was freed");
  }
}

void check_bounds(const char* what, const void* p, size_t bytes) {
  if (bytes == 0) return;
  const std::lock_guard guard(memory().lock);
  const auto* const end = static_cast<const std::byte*>(p) + bytes;
  const auto* const first = memory().find(p);
  if (first != memory().find(end - 1) || (first != nullptr && !first->second.is_alive))
    fail(std::string(what) + " goes beyond an allocation, or to memory that was freed");
}

bool is_page_locked(const void* p) {
  const std::lock_guard guard(memory().lock);
  const auto* const found = memory().find(p);
  return found != nullptr && found->second.is_page_locked;
}

bool uses(const Operation& operation, const void* p) {
  const std::lock_guard guard(memory().lock);
  for (const void* word : operation.words) {
    const auto* const found = memory().find(word);
    if (found != nullptr && found->first == p) return true;
  }
  return false;
}

void free_in_order(void* p, cudaStream_t stream) {
  if (is_capturing(stream)) return;
  queue(stream, {"free", {}, [p](uint32_t) { release(p, false); }});
}

}  // namespace emulated_gpu

using emulated_gpu::report;

cudaError_t cudaMalloc(void** p, size_t bytes) {
  if (const cudaError_t error = emulated_gpu::forbidden_by_capture(); error != cudaSuccess) return report(error);
  return emulated_gpu::allocate(p, bytes, false);
}
cudaError_t cudaFree(void* p) { return report(emulated_gpu::free_now(p, false)); }
cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) {
  if (const cudaError_t error = emulated_gpu::forbidden_by_capture(); error != cudaSuccess) return report(error);
  if (!emulated_gpu::has_page_locked_memory) return report(cudaErrorMemoryAllocation);
  emulated_gpu::finish_all();  // as the driver may
  return emulated_gpu::allocate(p, bytes, true);
}
cudaError_t cudaFreeHost(void* p) { return report(emulated_gpu::free_now(p, true)); }

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  using namespace emulated_gpu;
  check_bounds("a copy", to, bytes);
  check_bounds("a copy", from, bytes);
  if (kind == cudaMemcpyHostToDevice && !is_page_locked(from) && !is_capturing(stream)) {
    // From memory that is not page-locked CUDA has read all when it returns.
    std::vector<std::byte> staged(bytes);
    if (bytes > 0) std::memcpy(staged.data(), from, bytes);
    return report(queue(stream, {"copy", {to}, [to, staged = std::move(staged)](uint32_t) {
                                   check_bounds("a copy", to, staged.size());
                                   if (!staged.empty()) std::memcpy(to, staged.data(), staged.size());
                                 }}));
  }
  return report(queue(stream, {"copy", {to, from}, [=](uint32_t) {
                                 check_bounds("a copy", to, bytes);
                                 check_bounds("a copy", from, bytes);
                                 if (bytes > 0) std::memcpy(to, from, bytes);
                               }}));
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  if (const cudaError_t error = emulated_gpu::forbidden_by_capture(); error != cudaSuccess) return report(error);
  cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  return cudaStreamSynchronize(nullptr);
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  using namespace emulated_gpu;
  check_bounds("a fill", to, bytes);
  return report(queue(stream, {"fill", {to}, [=](uint32_t) {
                                 check_bounds("a fill", to, bytes);
                                 if (bytes > 0) std::memset(to, value, bytes);
                               }}));
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  if (const cudaError_t error = emulated_gpu::forbidden_by_capture(); error != cudaSuccess) return report(error);
  return cudaMemsetAsync(to, value, bytes, nullptr);
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) { return report(cudaErrorNotSupported); }
cudaError_t cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned) { return report(cudaErrorNotSupported); }
cudaError_t cudaIpcCloseMemHandle(void*) { return report(cudaErrorNotSupported); }
