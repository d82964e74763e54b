// Tests of the emulator itself: wrong use that it has to notice, and captures whose outcome is known. Each part is
// called by test_emulated_gpu.py by its name.
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <string>
#include <thread>

#include "streams.h"

namespace {

/// Lets go on what waits for it.
struct Gate {
  std::atomic<bool> is_open{false};

  void hold(cudaStream_t stream) {
    emulated_gpu::queue(stream, {"gate", {}, [this](uint32_t) { is_open.wait(false); }});
  }
  void open() {
    is_open = true;
    is_open.notify_all();
  }
};

cudaStream_t make_stream() {
  cudaStream_t stream;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  return stream;
}
cudaEvent_t make_event() {
  cudaEvent_t event;
  cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  return event;
}
int* device_ints(size_t n = 1) {
  void* p;
  cudaMalloc(&p, n * sizeof(int));
  return static_cast<int*>(p);
}
int* page_locked_int(int value) {
  void* p;
  cudaHostAlloc(&p, sizeof(int), cudaHostAllocDefault);
  return &(*static_cast<int*>(p) = value);
}

// ---- kernels

__global__ void add_kernel(int* to, const int* a, const int* b) { *to = *a + *b; }
__global__ void set_kernel(int* to, int value) { *to = value; }
__global__ void spin_kernel(int* word) {
  while (std::atomic_ref(*word).load() == 0) std::this_thread::yield();
}
__global__ void uneven_kernel() {
  if (threadIdx.x < 100) __syncthreads();
}
__global__ void broadcast_kernel(int* to, bool with_barrier) {
  __shared__ int value;
  if (threadIdx.x == 0) value = static_cast<int>(blockIdx.x);
  if (with_barrier) __syncthreads();
  to[blockIdx.x * blockDim.x + threadIdx.x] = value;
}

// ---- misuse: each ends the program

void free_what_a_kernel_reads() {
  const cudaStream_t stream = make_stream();
  emulated_gpu::load(reinterpret_cast<const void*>(add_kernel));
  Gate gate;
  gate.hold(stream);
  int* const table = device_ints();
  add_kernel<<<1, 1, 0, stream>>>(device_ints(), table, table);
  cudaFree(table);
}
void free_the_source_of_a_copy() {
  const cudaStream_t stream = make_stream();
  int* const source = page_locked_int(1);
  Gate gate;
  gate.hold(stream);
  cudaMemcpyAsync(device_ints(), source, sizeof(int), cudaMemcpyHostToDevice, stream);
  cudaFreeHost(source);
}
void free_twice() {
  int* const p = device_ints();
  cudaFree(p);
  cudaFree(p);
}
void launch_a_graph_over_freed_memory() {
  const cudaStream_t stream = make_stream();
  int* const p = device_ints();
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
  set_kernel<<<1, 1, 0, stream>>>(p, 1);
  cudaStreamEndCapture(stream, &graph);
  cudaGraphInstantiate(&exec, graph);
  cudaFree(p);
  cudaGraphLaunch(exec, stream);
  cudaStreamSynchronize(stream);
}
void read_freed_memory() {
  int* const p = device_ints();
  cudaFree(p);
  set_kernel<<<1, 1, 0, make_stream()>>>(p, 1);
  cudaDeviceSynchronize();
}
void write_beyond_the_end() {
  const cudaStream_t stream = make_stream();
  int* const p = device_ints(64);
  set_kernel<<<1, 1, 0, stream>>>(p + 64, 1);
  cudaStreamSynchronize(stream);
}
void copy_beyond_the_end() {
  cudaMemcpyAsync(device_ints(1), device_ints(2), 2 * sizeof(int), cudaMemcpyDeviceToDevice, make_stream());
}
void use_a_destroyed_event() {
  const cudaEvent_t event = make_event();
  cudaEventDestroy(event);
  cudaEventRecord(event, make_stream());
}
void use_a_destroyed_stream() {
  const cudaStream_t stream = make_stream();
  cudaStreamDestroy(stream);
  set_kernel<<<1, 1, 0, stream>>>(device_ints(), 1);
}
void launch_no_block() { set_kernel<<<0, 1, 0, make_stream()>>>(device_ints(), 1); }
void launch_too_many_threads() { set_kernel<<<1, 1025, 0, make_stream()>>>(device_ints(), 1); }
void leave_threads_at_a_barrier() {
  const cudaStream_t stream = make_stream();
  uneven_kernel<<<1, 128, 0, stream>>>();
  cudaStreamSynchronize(stream);
}

// ---- races

int reuse_a_source_too_early() {
  const cudaStream_t stream = make_stream();
  int *const source = page_locked_int(1), *const to = device_ints();
  Gate gate;
  gate.hold(stream);
  cudaMemcpyAsync(to, source, sizeof(int), cudaMemcpyHostToDevice, stream);
  *source = 2;
  gate.open();
  cudaStreamSynchronize(stream);
  return *to;
}
/// Whether a call returns only after work that takes a while, on any stream.
template <class Call>
int waits_for_the_device(const Call& call) {
  std::atomic<bool> is_done{false};
  emulated_gpu::queue(make_stream(), {"long work", {}, [&](uint32_t) {
                                        std::this_thread::sleep_for(std::chrono::milliseconds(20));
                                        is_done = true;
                                      }});
  call();
  const bool waited = is_done;
  cudaDeviceSynchronize();
  return waited ? 1 : 0;
}
__global__ void new_kernel() {}

int free_something() {
  int* const p = device_ints();
  return waits_for_the_device([&] { cudaFree(p); });
}
int start_a_kernel_for_the_first_time() {
  const cudaStream_t stream = make_stream();
  const auto start = [&] { new_kernel<<<1, 1, 0, stream>>>(); };
  const int first = waits_for_the_device(start);
  return 10 * first + waits_for_the_device(start);
}

int wrong_values(bool with_barrier) {
  constexpr int kBlocks = 16, kThreads = 64;
  const cudaStream_t stream = make_stream();
  int* const values = device_ints(kBlocks * kThreads);
  broadcast_kernel<<<kBlocks, kThreads, 0, stream>>>(values, with_barrier);
  cudaStreamSynchronize(stream);
  int wrong = 0;
  for (int i = 0; i < kBlocks * kThreads; ++i) wrong += values[i] != i / kThreads ? 1 : 0;
  return wrong;
}

const std::map<std::string, void (*)()> kMisuse = {
    {"free_what_a_kernel_reads", free_what_a_kernel_reads},
    {"free_the_source_of_a_copy", free_the_source_of_a_copy},
    {"free_twice", free_twice},
    {"launch_a_graph_over_freed_memory", launch_a_graph_over_freed_memory},
    {"read_freed_memory", read_freed_memory},
    {"write_beyond_the_end", write_beyond_the_end},
    {"copy_beyond_the_end", copy_beyond_the_end},
    {"use_a_destroyed_event", use_a_destroyed_event},
    {"use_a_destroyed_stream", use_a_destroyed_stream},
    {"launch_no_block", launch_no_block},
    {"launch_too_many_threads", launch_too_many_threads},
    {"leave_threads_at_a_barrier", leave_threads_at_a_barrier},
};

// ---- captures

struct Captured {
  cudaStream_t stream = make_stream();
  cudaError_t begun;

  explicit Captured(cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal)
      : begun(cudaStreamBeginCapture(stream, mode)) {}
  cudaError_t end() {
    cudaGraph_t graph = nullptr;
    return cudaStreamEndCapture(stream, &graph);
  }
  cudaGraphExec_t instantiate() {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    if (cudaStreamEndCapture(stream, &graph) != cudaSuccess) return exec;
    cudaGraphInstantiate(&exec, graph);
    cudaGraphDestroy(graph);
    return exec;
  }
};

void order(cudaStream_t before, cudaStream_t after) {
  const cudaEvent_t event = make_event();
  cudaEventRecord(event, before);
  cudaStreamWaitEvent(after, event);
  cudaEventDestroy(event);
}

/// What two replays of a graph with two branches leave: with a source of 5 and then of 7.
int replay_a_fork_and_join() {
  int *const source = page_locked_int(5), *const ints = device_ints(4);
  const cudaStream_t other = make_stream();
  int one = 1;
  Captured capture;
  cudaMemcpyAsync(ints, source, sizeof(int), cudaMemcpyHostToDevice, capture.stream);
  order(capture.stream, other);
  add_kernel<<<1, 1, 0, other>>>(ints + 1, ints, ints);
  set_kernel<<<1, 1, 0, capture.stream>>>(ints + 2, one);
  order(other, capture.stream);
  add_kernel<<<1, 1, 0, capture.stream>>>(ints + 3, ints + 1, ints + 2);
  one = 1000;  // arguments are those of the call
  const cudaGraphExec_t graph = capture.instantiate();
  if (ints[3] != -1) return -1;  // nothing was done as yet
  int results[2];
  for (int& result : results) {
    cudaGraphLaunch(graph, capture.stream);
    cudaStreamSynchronize(capture.stream);
    result = ints[3];
    *source = 7;
  }
  return 100 * results[0] + results[1];
}

/// Ends only if branches of a graph go on side by side.
int replay_branches_that_wait_for_each_other() {
  int* const words = device_ints(2);
  std::memset(words, 0, 2 * sizeof(int));
  const cudaStream_t other = make_stream();
  Captured capture;
  order(capture.stream, other);
  spin_kernel<<<1, 1, 0, capture.stream>>>(words);
  set_kernel<<<1, 1, 0, capture.stream>>>(words + 1, 1);
  set_kernel<<<1, 1, 0, other>>>(words, 1);
  spin_kernel<<<1, 1, 0, other>>>(words + 1);
  order(other, capture.stream);
  const cudaGraphExec_t graph = capture.instantiate();
  cudaGraphLaunch(graph, capture.stream);
  return cudaStreamSynchronize(capture.stream);
}

// Each of these returns the error that something wrong gives times 1000, plus that of the end of the capture.

int both(cudaError_t error, cudaError_t end) { return 1000 * error + end; }

int wait_for_an_event_from_outside() {
  const cudaEvent_t event = make_event();
  cudaEventRecord(event, make_stream());
  Captured capture;
  const cudaError_t error = cudaStreamWaitEvent(capture.stream, event);
  return both(error, capture.end());
}
int wait_outside_for_an_event_of_a_capture() {
  const cudaEvent_t event = make_event();
  Captured capture;
  cudaEventRecord(event, capture.stream);
  const cudaError_t end = capture.end();
  return both(cudaStreamWaitEvent(make_stream(), event), end);
}
int leave_a_stream_unjoined() {
  const cudaStream_t other = make_stream();
  Captured capture;
  order(capture.stream, other);
  set_kernel<<<1, 1, 0, other>>>(nullptr, 1);
  return both(cudaSuccess, capture.end());
}
int synchronise_a_capturing_stream() {
  Captured capture(cudaStreamCaptureModeRelaxed);
  const cudaError_t error = cudaStreamSynchronize(capture.stream);
  return both(error, capture.end());
}
int synchronise_the_device() {
  Captured capture(cudaStreamCaptureModeRelaxed);
  const cudaError_t error = cudaDeviceSynchronize();
  return both(error, capture.end());
}
int query_a_captured_event() {
  const cudaEvent_t event = make_event();
  Captured capture(cudaStreamCaptureModeRelaxed);
  cudaEventRecord(event, capture.stream);
  const cudaError_t error = cudaEventQuery(event);
  return both(error, capture.end());
}
int query_another_event() {
  const cudaEvent_t event = make_event();
  Captured capture;
  const cudaError_t error = cudaEventQuery(event);
  return both(error, capture.end());
}
int allocate_in(cudaStreamCaptureMode of_capture, cudaStreamCaptureMode of_thread, bool elsewhere) {
  Captured capture(of_capture);
  cudaError_t error = cudaSuccess;
  const auto allocate = [&] {
    cudaStreamCaptureMode mode = of_thread;
    cudaThreadExchangeStreamCaptureMode(&mode);
    void* p;
    error = cudaMalloc(&p, 1);
    cudaThreadExchangeStreamCaptureMode(&mode);
  };
  if (elsewhere)
    std::thread(allocate).join();
  else
    allocate();
  return both(error, capture.end());
}
int merge_two_captures() {
  Captured first, second;
  const cudaEvent_t event = make_event();
  cudaEventRecord(event, first.stream);
  const cudaError_t error = cudaStreamWaitEvent(second.stream, event);
  first.end();
  return both(error, second.end());
}
int end_in_another_thread() {
  Captured capture;
  cudaError_t error = cudaSuccess;
  std::thread([&] { error = capture.end(); }).join();
  return both(error, capture.end());
}
int end_another_stream() {
  Captured capture;
  const cudaStream_t other = make_stream();
  order(capture.stream, other);
  cudaGraph_t graph;
  const cudaError_t error = cudaStreamEndCapture(other, &graph);
  return both(error, capture.end());
}
int begin_twice() {
  Captured capture;
  const cudaError_t error = cudaStreamBeginCapture(capture.stream, cudaStreamCaptureModeGlobal);
  return both(error, capture.end());
}

constexpr auto kGlobal = cudaStreamCaptureModeGlobal, kThreadLocal = cudaStreamCaptureModeThreadLocal,
               kRelaxed = cudaStreamCaptureModeRelaxed;

const std::map<std::string, int (*)()> kOutcomes = {
    {"reuse_a_source_too_early", reuse_a_source_too_early},
    {"free_something", free_something},
    {"allocate_page_locked_memory", [] { return waits_for_the_device([] { page_locked_int(1); }); }},
    {"allocate_memory_of_the_device", [] { return waits_for_the_device([] { device_ints(); }); }},
    {"start_a_kernel_for_the_first_time", start_a_kernel_for_the_first_time},
    {"values_with_a_barrier", [] { return wrong_values(true); }},
    {"values_without_a_barrier", [] { return wrong_values(false); }},
    {"replay_a_fork_and_join", replay_a_fork_and_join},
    {"replay_branches_that_wait_for_each_other", replay_branches_that_wait_for_each_other},
    {"wait_for_an_event_from_outside", wait_for_an_event_from_outside},
    {"wait_outside_for_an_event_of_a_capture", wait_outside_for_an_event_of_a_capture},
    {"leave_a_stream_unjoined", leave_a_stream_unjoined},
    {"synchronise_a_capturing_stream", synchronise_a_capturing_stream},
    {"synchronise_the_device", synchronise_the_device},
    {"query_a_captured_event", query_a_captured_event},
    {"query_another_event", query_another_event},
    {"allocate", [] { return allocate_in(kGlobal, kGlobal, false); }},
    {"allocate_relaxed", [] { return allocate_in(kGlobal, kRelaxed, false); }},
    {"allocate_in_a_relaxed_capture", [] { return allocate_in(kRelaxed, kGlobal, false); }},
    {"allocate_elsewhere", [] { return allocate_in(kGlobal, kGlobal, true); }},
    {"allocate_elsewhere_thread_local", [] { return allocate_in(kGlobal, kThreadLocal, true); }},
    {"allocate_elsewhere_of_a_thread_local_capture", [] { return allocate_in(kThreadLocal, kGlobal, true); }},
    {"merge_two_captures", merge_two_captures},
    {"end_in_another_thread", end_in_another_thread},
    {"end_another_stream", end_another_stream},
    {"begin_twice", begin_twice},
};

}  // namespace

extern "C" {

/// Returns only if nothing is noticed.
__attribute__((visibility("default"))) void misuse(const char* which) { kMisuse.at(which)(); }
__attribute__((visibility("default"))) int outcome(const char* which) {
  const int result = kOutcomes.at(which)();
  cudaGetLastError();  // else it would be that of a later call
  return result;
}
}
