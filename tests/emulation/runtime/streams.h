// What the emulated CUDA runtime is made of. A stream is a thread of the host with a queue; device memory is memory of
// the host that is full of ones (not a number in any dtype) until somebody writes there, and that nobody can touch once
// it is freed. What is queued happens a little later than it could.
//
// Wrong use that CUDA reports is reported in the same way; wrong use that it leaves undefined ends the program with a
// message: memory that is freed while something that is queued has its address, handles of what was destroyed, copies
// beyond an allocation, launches that no GPU takes, threads of a block that do not all come to a barrier.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace emulated_gpu {

[[noreturn]] void fail(const std::string& what);

/// Something that is queued. `words` are those of its arguments: some of them are addresses that it uses.
struct Operation {
  std::string name;
  std::vector<const void*> words;
  std::function<void(uint32_t seed)> run;
};

/// A place in the order of a stream that was reached or not.
struct Point {
  bool is_reached = false;
};

/// An operation of a graph, and which have to be done before it.
struct Node {
  Operation operation;
  std::vector<size_t> after;
};

/// What streams that are being captured add to.
struct Capture {
  std::vector<Node> nodes;
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  cudaStream_t origin;
  std::vector<cudaStream_t> streams;
  bool is_invalid = false;
  bool is_over = false;
};

/// Of all that follows but memory, which has a lock of its own.
extern std::mutex lock;
/// Something was reached, or done.
extern std::condition_variable progress;

/// Adds an operation to a stream, or to the capture that it takes part in.
cudaError_t queue(cudaStream_t stream, Operation operation);
/// Does the nodes of a graph, branches of it side by side.
void run_graph(const std::vector<Node>& nodes, uint32_t seed);
/// Graphs that start from here on do their nodes one after another, in a random order that their edges allow.
extern std::atomic<bool> one_by_one;
/// Counts and does it, after a while.
void perform(const Operation& operation, uint32_t seed);
/// How many kernels of that name were done.
int64_t num_done(const std::string& name);
/// The thread blocks of the largest launch of that kernel since the last question.
int64_t take_most_blocks(const std::string& kernel);
void note_blocks(const std::string& kernel, int64_t blocks);

/// Returns what is the thread's last error from here on, unless it is none.
cudaError_t report(cudaError_t error);
/// The stream itself, or the legacy one for null. Ends the program if it was destroyed.
cudaStream_t alive(cudaStream_t stream);

// Each of these returns the error of a call that is not allowed because of a capture, which it invalidates.
/// Of calls that may wait for what is captured: allowed or not by the mode of the capture and that of the thread.
cudaError_t forbidden_by_capture();
/// Of calls that are about the whole device.
cudaError_t refuse_while_capturing();
/// Of questions how far a stream or an event is.
cudaError_t refuse_captured(const CUstream_st& stream);
cudaError_t refuse_captured(const CUevent_st& event);

// With the lock.
cudaError_t add_node(CUstream_st& stream, Operation operation);
cudaError_t wait_in_capture(cudaStream_t stream, const CUevent_st& event);

bool is_capturing(cudaStream_t stream);
/// Returns once all is done that was queued on any stream.
void finish_all();
/// Waits for the device, as the driver may, unless this kernel was loaded before. A launch says the kernel's name.
void load(const void* kernel, const char* launched_as = nullptr);
bool was_loaded_by_a_launch(const std::string& kernel);
inline std::atomic<bool> compiled_for_device = true;  // whether there are kernels of this GPU
inline std::atomic<bool> has_page_locked_memory = true;

// ---- memory

/// Ends the program if one of the words is an address of memory that was freed.
void check_alive(const Operation& operation);
/// Ends the program unless those bytes lie within one allocation, or outside of all.
void check_bounds(const char* what, const void* p, size_t bytes);
bool is_page_locked(const void* p);
/// Ends the program if an operation that is queued has an address of the allocation that begins at `memory`.
void check_unused(const void* memory);
bool uses(const Operation& operation, const void* memory);
/// Frees device memory after all that was queued on the stream; in a capture it is kept.
void free_in_order(void* memory, cudaStream_t stream);

}  // namespace emulated_gpu

struct CUstream_st {
  bool is_alive = true;
  std::deque<emulated_gpu::Operation> queue;  // the first one is being done
  std::condition_variable posted;
  std::shared_ptr<emulated_gpu::Capture> capture;
  std::vector<size_t> last;  // of the capture's nodes: what the next one comes after
};

struct CUevent_st {
  bool is_alive = true;
  std::shared_ptr<emulated_gpu::Point> point;  // null: was never recorded, or in a capture
  std::shared_ptr<emulated_gpu::Capture> capture;
  std::vector<size_t> last;
};

struct CUgraph_st {
  bool is_alive = true;
  std::vector<emulated_gpu::Node> nodes;
};

struct CUgraphExec_st {
  bool is_alive = true;
  std::shared_ptr<const std::vector<emulated_gpu::Node>> nodes;
  std::shared_ptr<std::mutex> running = std::make_shared<std::mutex>();  // of two launches one is first
};
