// Streams and events.
#include "streams.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <utility>

namespace emulated_gpu {

std::mutex lock;
std::condition_variable progress;

namespace {

/// All that there ever were: a handle is not used again, so that one of what was destroyed is noticed.
std::vector<cudaStream_t>& streams() {
  static auto* const all = new std::vector<cudaStream_t>;
  return *all;
}

std::map<std::string, int64_t>& counts() {
  static auto* const all = new std::map<std::string, int64_t>;
  return *all;
}

std::map<std::string, int64_t>& most_blocks() {
  static auto* const all = new std::map<std::string, int64_t>;
  return *all;
}

thread_local cudaError_t last_error = cudaSuccess;

void run_stream(cudaStream_t stream, uint32_t seed) {
  std::minstd_rand random(seed);
  std::unique_lock guard(lock);
  while (true) {
    stream->posted.wait(guard, [&] { return !stream->queue.empty() || !stream->is_alive; });
    if (stream->queue.empty()) return;
    const Operation& first = stream->queue.front();  // stays where it is: others are only added behind it
    guard.unlock();
    perform(first, static_cast<uint32_t>(random()));
    guard.lock();
    stream->queue.pop_front();
    progress.notify_all();
  }
}

cudaStream_t make_stream() {
  auto* const stream = new CUstream_st;
  uint32_t seed;
  {
    const std::lock_guard guard(lock);
    streams().push_back(stream);
    seed = static_cast<uint32_t>(streams().size());
  }
  std::thread(run_stream, stream, seed).detach();
  return stream;
}

/// What is done when the point is reached.
Operation reaching(std::shared_ptr<Point> point) {
  return {"point", {}, [point = std::move(point)](uint32_t) {
            const std::lock_guard guard(lock);
            point->is_reached = true;
            progress.notify_all();
          }};
}

void await(std::unique_lock<std::mutex>& guard, const Point& point) {
  progress.wait(guard, [&] { return point.is_reached; });
}

cudaEvent_t alive(cudaEvent_t event) {
  if (event == nullptr || !event->is_alive) fail("an event is used that was destroyed");
  return event;
}

}  // namespace

cudaStream_t alive(cudaStream_t stream) {
  static const cudaStream_t legacy = make_stream();
  if (stream == nullptr) return legacy;
  if (!stream->is_alive) fail("a stream is used that was destroyed");
  return stream;
}

void fail(const std::string& what) {
  std::fprintf(stderr, "emulated GPU: %s\n", what.c_str());
  std::abort();
}

cudaError_t report(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

cudaError_t queue(cudaStream_t stream, Operation operation) {
  stream = alive(stream);
  const std::lock_guard guard(lock);
  if (stream->capture == nullptr) {
    stream->queue.push_back(std::move(operation));
    stream->posted.notify_one();
    return cudaSuccess;
  }
  return add_node(*stream, std::move(operation));
}

void perform(const Operation& operation, uint32_t seed) {
  if (seed % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(seed / 4 % 64));
  check_alive(operation);
  operation.run(seed);
  const std::lock_guard guard(lock);
  ++counts()[operation.name];
}

int64_t num_done(const std::string& name) {
  const std::lock_guard guard(lock);
  return counts()[name];
}

int64_t take_most_blocks(const std::string& kernel) {
  const std::lock_guard guard(lock);
  return std::exchange(most_blocks()[kernel], 0);
}

void note_blocks(const std::string& kernel, int64_t blocks) {
  const std::lock_guard guard(lock);
  int64_t& most = most_blocks()[kernel];
  most = std::max(most, blocks);
}

bool is_capturing(cudaStream_t stream) {
  stream = alive(stream);
  const std::lock_guard guard(lock);
  return stream->capture != nullptr;
}

void finish_all() {
  std::unique_lock guard(lock);
  for (size_t i = 0; i < streams().size(); ++i)  // there may be more of them meanwhile
    progress.wait(guard, [stream = streams()[i]] { return stream->queue.empty(); });
}

/// Those that were loaded by a launch.
static std::set<std::string>& loaded_late() {
  static auto* const names = new std::set<std::string>;
  return *names;
}

void load(const void* kernel, const char* launched_as) {
  {
    const std::lock_guard guard(lock);
    static auto* const loaded = new std::set<const void*>;
    if (!loaded->insert(kernel).second) return;
    if (launched_as != nullptr) loaded_late().insert(launched_as);
  }
  finish_all();
}

bool was_loaded_by_a_launch(const std::string& kernel) {
  const std::lock_guard guard(lock);
  return loaded_late().contains(kernel);
}

void check_unused(const void* memory) {
  const std::lock_guard guard(lock);
  for (const cudaStream_t stream : streams())
    for (const Operation& operation : stream->queue)
      if (uses(operation, memory)) fail("memory is freed that is still to be used by " + operation.name);
}

}  // namespace emulated_gpu

using namespace emulated_gpu;

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

cudaError_t cudaDeviceSynchronize() {
  if (const cudaError_t error = refuse_while_capturing(); error != cudaSuccess) return report(error);
  finish_all();
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void* kernel) {
  if (!compiled_for_device) return report(cudaErrorNoKernelImageForDevice);
  load(kernel);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  *lowest = 0;
  *highest = -5;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  if (flags != cudaStreamNonBlocking) fail("streams that wait for the legacy one are not emulated");
  *stream = make_stream();
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  if (stream == nullptr) return report(cudaErrorInvalidResourceHandle);
  alive(stream);
  if (stream->capture != nullptr) return report(refuse_captured(*stream));
  const std::lock_guard guard(lock);
  stream->is_alive = false;
  stream->posted.notify_one();
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  stream = alive(stream);
  if (const cudaError_t error = refuse_captured(*stream); error != cudaSuccess) return report(error);
  std::unique_lock guard(lock);
  auto last = std::make_shared<Point>();
  stream->queue.push_back(reaching(last));
  stream->posted.notify_one();
  await(guard, *last);
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  stream = alive(stream);
  if (const cudaError_t error = refuse_captured(*stream); error != cudaSuccess) return report(error);
  const std::lock_guard guard(lock);
  return report(stream->queue.empty() ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new CUevent_st;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  alive(event)->is_alive = false;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  alive(event);
  stream = alive(stream);
  const std::lock_guard guard(lock);
  if (stream->capture != nullptr) {
    if (stream->capture->is_invalid) return report(cudaErrorStreamCaptureInvalidated);
    event->capture = stream->capture;
    event->last = stream->last;
    event->point = nullptr;
    return cudaSuccess;
  }
  event->capture = nullptr;
  event->point = std::make_shared<Point>();
  stream->queue.push_back(reaching(event->point));
  stream->posted.notify_one();
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (const cudaError_t error = refuse_captured(*alive(event)); error != cudaSuccess) return report(error);
  const std::lock_guard guard(lock);
  return report(event->point == nullptr || event->point->is_reached ? cudaSuccess : cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (const cudaError_t error = refuse_captured(*alive(event)); error != cudaSuccess) return report(error);
  std::unique_lock guard(lock);
  const std::shared_ptr<Point> point = event->point;
  if (point != nullptr) await(guard, *point);
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  alive(event);
  stream = alive(stream);
  const std::lock_guard guard(lock);
  if (stream->capture != nullptr || event->capture != nullptr) return report(wait_in_capture(stream, *event));
  if (event->point == nullptr) return cudaSuccess;
  stream->queue.push_back({"wait", {}, [point = event->point](uint32_t) {
                             std::unique_lock inner(lock);
                             await(inner, *point);
                           }});
  stream->posted.notify_one();
  return cudaSuccess;
}
