// Streams that are captured, and the graphs that come of it. The rules are those of the CUDA Runtime API's manual
// (stream management, cudaThreadExchangeStreamCaptureMode) and of the chapter on graphs of the programming guide.
#include <algorithm>
#include <atomic>
#include <map>
#include <numeric>
#include <random>
#include <utility>

#include "streams.h"

namespace emulated_gpu {
namespace {

thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

/// Those under way.
std::vector<std::shared_ptr<Capture>>& captures() {
  static auto* const all = new std::vector<std::shared_ptr<Capture>>;
  return *all;
}

/// With the lock.
cudaError_t forbidden() {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  cudaError_t error = cudaSuccess;
  for (const auto& capture : captures()) {
    const bool is_mine = capture->thread == std::this_thread::get_id() && capture->mode != cudaStreamCaptureModeRelaxed;
    const bool is_everybodys =
        capture->mode == cudaStreamCaptureModeGlobal && thread_mode == cudaStreamCaptureModeGlobal;
    if (!is_mine && !is_everybodys) continue;
    capture->is_invalid = true;
    error = cudaErrorStreamCaptureUnsupported;
  }
  return error;
}

/// Whether all that the streams of a capture did comes before the end of its origin.
bool is_joined(const Capture& capture) {
  std::vector<bool> before(capture.nodes.size(), false);
  std::vector<size_t> reached = capture.origin->last;
  while (!reached.empty()) {
    const size_t node = reached.back();
    reached.pop_back();
    if (before[node]) continue;
    before[node] = true;
    reached.insert(reached.end(), capture.nodes[node].after.begin(), capture.nodes[node].after.end());
  }
  return std::all_of(capture.streams.begin(), capture.streams.end(), [&](cudaStream_t stream) {
    return std::all_of(stream->last.begin(), stream->last.end(), [&](size_t node) { return before[node]; });
  });
}

/// Nodes that are done one after another by one thread: each is the first to come after the one before it.
std::vector<std::vector<size_t>> branches(const std::vector<Node>& nodes) {
  std::vector<std::vector<size_t>> all;
  std::map<size_t, size_t> branch_that_ends_with;
  for (size_t node = 0; node < nodes.size(); ++node) {
    size_t branch = all.size();
    for (const size_t before : nodes[node].after) {
      const auto found = branch_that_ends_with.find(before);
      if (found == branch_that_ends_with.end()) continue;
      branch = found->second;
      branch_that_ends_with.erase(found);
      break;
    }
    if (branch == all.size()) all.emplace_back();
    all[branch].push_back(node);
    branch_that_ends_with[node] = branch;
  }
  return all;
}

}  // namespace

cudaError_t forbidden_by_capture() {
  const std::lock_guard guard(lock);
  return forbidden();
}

cudaError_t refuse_while_capturing() {
  const std::lock_guard guard(lock);
  for (const auto& capture : captures()) capture->is_invalid = true;
  return captures().empty() ? cudaSuccess : cudaErrorStreamCaptureUnsupported;
}

cudaError_t refuse_captured(const CUstream_st& stream) {
  const std::lock_guard guard(lock);
  if (stream.capture == nullptr) return forbidden();
  stream.capture->is_invalid = true;
  return cudaErrorStreamCaptureUnsupported;
}

cudaError_t refuse_captured(const CUevent_st& event) {
  const std::lock_guard guard(lock);
  if (event.capture == nullptr) return forbidden();
  event.capture->is_invalid = true;
  return cudaErrorCapturedEvent;
}

cudaError_t add_node(CUstream_st& stream, Operation operation) {
  if (stream.capture->is_invalid) return cudaErrorStreamCaptureInvalidated;
  stream.capture->nodes.push_back({std::move(operation), stream.last});
  stream.last = {stream.capture->nodes.size() - 1};
  return cudaSuccess;
}

cudaError_t wait_in_capture(cudaStream_t stream, const CUevent_st& event) {
  if (event.capture == nullptr) {  // strict: also where the event was never recorded
    stream->capture->is_invalid = true;
    return cudaErrorStreamCaptureIsolation;
  }
  if (event.capture->is_over) {
    if (stream->capture != nullptr) stream->capture->is_invalid = true;
    return cudaErrorCapturedEvent;
  }
  if (stream->capture != nullptr && stream->capture != event.capture) {
    stream->capture->is_invalid = event.capture->is_invalid = true;
    return cudaErrorStreamCaptureMerge;
  }
  if (event.capture->is_invalid) return cudaErrorStreamCaptureInvalidated;
  if (stream->capture == nullptr) {
    stream->capture = event.capture;
    stream->last.clear();
    event.capture->streams.push_back(stream);
  }
  stream->last.insert(stream->last.end(), event.last.begin(), event.last.end());
  return cudaSuccess;
}

std::atomic<bool> one_by_one{false};

/// CUDA promises no two branches of a graph at once, and of nodes that may come next no order.
static void run_one_by_one(const std::vector<Node>& nodes, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<bool> is_done(nodes.size(), false);
  std::vector<size_t> left(nodes.size());
  std::iota(left.begin(), left.end(), size_t{0});
  while (!left.empty()) {
    const auto is_ready = [&](size_t node) {
      return std::all_of(nodes[node].after.begin(), nodes[node].after.end(), [&](size_t n) { return is_done[n]; });
    };
    const auto end = std::partition(left.begin(), left.end(), is_ready);
    const auto pick = left.begin() + static_cast<std::ptrdiff_t>(random() % static_cast<size_t>(end - left.begin()));
    perform(nodes[*pick].operation, seed + static_cast<uint32_t>(*pick));
    is_done[*pick] = true;
    left.erase(pick);
  }
}

void run_graph(const std::vector<Node>& nodes, uint32_t seed) {
  if (one_by_one) return run_one_by_one(nodes, seed);
  std::vector<bool> is_done(nodes.size(), false);
  const auto run_branch = [&](const std::vector<size_t>& branch) {
    for (const size_t node : branch) {
      {
        std::unique_lock guard(lock);
        progress.wait(guard, [&] {
          return std::all_of(nodes[node].after.begin(), nodes[node].after.end(), [&](size_t n) { return is_done[n]; });
        });
      }
      perform(nodes[node].operation, seed + static_cast<uint32_t>(node));
      const std::lock_guard guard(lock);
      is_done[node] = true;
      progress.notify_all();
    }
  };
  const std::vector<std::vector<size_t>> all = branches(nodes);
  std::vector<std::thread> threads;
  for (size_t i = 1; i < all.size(); ++i) threads.emplace_back(run_branch, all[i]);
  if (!all.empty()) run_branch(all[0]);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace emulated_gpu

using namespace emulated_gpu;

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  if (stream == nullptr) return report(cudaErrorStreamCaptureUnsupported);
  alive(stream);
  const std::lock_guard guard(lock);
  if (stream->capture != nullptr) return report(cudaErrorIllegalState);
  stream->capture = std::make_shared<Capture>();
  stream->capture->mode = mode;
  stream->capture->thread = std::this_thread::get_id();
  stream->capture->origin = stream;
  stream->capture->streams = {stream};
  stream->last.clear();
  captures().push_back(stream->capture);
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = nullptr;
  stream = alive(stream);
  const std::lock_guard guard(lock);
  const std::shared_ptr<Capture> capture = stream->capture;
  if (capture == nullptr) return report(cudaErrorIllegalState);
  if (capture->origin != stream) return report(cudaErrorStreamCaptureUnmatched);
  if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id())
    return report(cudaErrorStreamCaptureWrongThread);
  const bool joined = is_joined(*capture);
  for (const cudaStream_t member : capture->streams) member->capture = nullptr;
  std::erase(captures(), capture);
  capture->is_over = true;
  if (capture->is_invalid) return report(cudaErrorStreamCaptureInvalidated);
  if (!joined) return report(cudaErrorStreamCaptureUnjoined);
  *graph = new CUgraph_st{.nodes = std::move(capture->nodes)};
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  stream = alive(stream);
  const std::lock_guard guard(lock);
  *status = stream->capture == nullptr    ? cudaStreamCaptureStatusNone
            : stream->capture->is_invalid ? cudaStreamCaptureStatusInvalidated
                                          : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(thread_mode, *mode);
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  if (graph == nullptr || !graph->is_alive) fail("a graph is used that was destroyed, or never made");
  *exec = new CUgraphExec_st{.nodes = std::make_shared<const std::vector<Node>>(graph->nodes)};
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  if (exec == nullptr || !exec->is_alive) fail("a graph is used that was destroyed, or never made");
  if (is_capturing(stream)) fail("a graph within a graph is not emulated");
  std::vector<const void*> words;
  for (const Node& node : *exec->nodes)
    words.insert(words.end(), node.operation.words.begin(), node.operation.words.end());
  return report(
      queue(stream, {"graph", std::move(words), [nodes = exec->nodes, running = exec->running](uint32_t seed) {
                       const std::lock_guard one_at_a_time(*running);
                       run_graph(*nodes, seed);
                     }}));
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  if (graph == nullptr || !graph->is_alive) fail("a graph is destroyed twice, or never made");
  graph->is_alive = false;
  graph->nodes.clear();
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  if (exec == nullptr || !exec->is_alive) fail("a graph is destroyed twice, or never made");
  exec->is_alive = false;
  exec->nodes = nullptr;
  return cudaSuccess;
}
