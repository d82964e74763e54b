// Contexts on the emulated GPU: in a process that has called `use_emulated_gpu`, those with device="cpu",
// attention="flash" and streams queue their steps on the streams of the library for CUDA, with its backend. So does
// distca.attention on the CPU with attention="flash", in threads that have not called it before.
#include <array>
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "emulation/problem_table.h"
#include "emulation/wrapping_backend.h"
#include "runtime/check.h"
#include "runtime/cuda_library.h"
#include "streams.h"
#include "transport/cuda_streams.h"

namespace distca::cuda {

/// The library's own entry.
extern "C" const runtime::CudaLibrary* distca_cuda_library();

namespace {

/// A stream of the calling thread, as PyTorch would have it: it goes to another thread when this one ends. One of them
/// is current, number 0 at first.
class CurrentStream {
 public:
  CurrentStream() {
    const std::lock_guard guard(lock());
    if (free().empty()) {
      check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "a stream for a thread");
    } else {
      stream_ = free().back();
      free().pop_back();
    }
  }
  ~CurrentStream() {
    const std::lock_guard guard(lock());
    free().push_back(stream_);
  }
  CurrentStream(const CurrentStream&) = delete;

  static cudaStream_t get() {
    static thread_local std::map<int, CurrentStream> mine;
    return mine[number()].stream_;
  }
  static int& number() {
    static thread_local int current = 0;
    return current;
  }

 private:
  static std::mutex& lock() {
    static auto* const one = new std::mutex;
    return *one;
  }
  static std::vector<cudaStream_t>& free() {
    static auto* const all = new std::vector<cudaStream_t>;
    return *all;
  }

  cudaStream_t stream_ = nullptr;
};

void* current_stream(int) { return CurrentStream::get(); }

/// Stands for ATen's backend on a GPU, of which DeviceBackend wants memory, and attention where there are no kernels.
class AtenInPlace final : public emulation::WrappingBackend {
 public:
  AtenInPlace() : WrappingBackend(runtime::make_backend("cpu", "auto")) {}

  std::shared_ptr<std::byte> allocate(int64_t bytes) override {
    std::shared_ptr<std::byte> data = scratch(bytes);
    cuda::check(cudaMemsetAsync(data.get(), 0, static_cast<size_t>(bytes), CurrentStream::get()), "clearing memory");
    return data;
  }
  std::shared_ptr<std::byte> scratch(int64_t bytes) override {
    void* data = nullptr;
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;  // PyTorch allocates in captures too
    cudaThreadExchangeStreamCaptureMode(&mode);
    cuda::check(cudaMalloc(&data, static_cast<size_t>(bytes)), "memory of the device");
    cudaThreadExchangeStreamCaptureMode(&mode);
    const cudaStream_t stream = CurrentStream::get();
    return {static_cast<std::byte*>(data), [stream](std::byte* p) { emulated_gpu::free_in_order(p, stream); }};
  }
  void check(const HeadShape&, float softcap) const override {
    require(softcap == 0, "softcap = ", softcap, "; what stands for flash attention has none");
  }
  void forward(const attention::Problem&, const Parallel&) override { emulated_gpu::fail("attention without kernels"); }
  void backward(const attention::Problem&, const Parallel&) override {
    emulated_gpu::fail("attention without kernels");
  }
};

/// DeviceBackend with attention by the CPU's kernel, in the order of the stream: with the bits of the host, and soon.
/// That kernel takes one call at a time, and two streams may come to one each.
class HostAttention final : public emulation::WrappingBackend {
 public:
  HostAttention(std::shared_ptr<Backend> device, std::shared_ptr<DeviceQueue> queue)
      : WrappingBackend(std::move(device)), queue_(std::move(queue)) {}

  std::string attention(const HeadShape&) const override { return "the CPU's kernel on an emulated GPU"; }
  bool plan_independent(const HeadShape&) const override { return true; }
  bool finds_max_logits() const override { return true; }
  void check(const HeadShape&, float) const override {}
  void forward(const attention::Problem& problem, const Parallel&) override {
    queue("host forward", problem, &Backend::forward);
  }
  void backward(const attention::Problem& problem, const Parallel&) override {
    queue("host backward", problem, &Backend::backward);
  }

 private:
  using Attention = void (Backend::*)(const attention::Problem&, const Parallel&);

  void queue(const char* name, const attention::Problem& problem, Attention attention) {
    queue_->run(transport::Streams::Stream::kWork, name, parts_.of(problem),
                [name, cpu = cpu_, one = one_, attention](const DeviceTable& t, cudaStream_t stream) {
                  auto compute = [cpu, one, attention, memory = t.memory, layout = *t.layout](uint32_t) {
                    const emulation::KeptProblem kept(layout, memory);
                    const std::lock_guard one_at_a_time(*one);
                    if (!kept.problem.groups.empty()) ((*cpu).*attention)(kept.problem, Parallel());
                  };
                  cuda::check(emulated_gpu::queue(stream, {name, {t.memory}, std::move(compute)}), name);
                });
  }

  std::shared_ptr<Backend> cpu_ = runtime::make_backend("cpu", "auto");
  std::shared_ptr<std::mutex> one_ = std::make_shared<std::mutex>();
  std::shared_ptr<DeviceQueue> queue_;
  emulation::ProblemParts parts_;
};

/// Whether the host waits for its work when a step is over: tensors of the tests are the host's, and are read without
/// asking any stream.
std::atomic<bool> waits_after_steps{true};

/// The streams of the library, but for that.
class WaitingStreams final : public transport::Streams {
 public:
  explicit WaitingStreams(std::shared_ptr<Streams> streams) : streams_(std::move(streams)) {}
  const std::shared_ptr<Streams>& inner() const { return streams_; }

  void join_host() override {
    streams_->join_host();
    if (!waits_after_steps || emulated_gpu::is_capturing(CurrentStream::get())) return;
    check(cudaStreamSynchronize(CurrentStream::get()), "the end of a step");
  }

  std::shared_ptr<std::byte> allocate(int64_t bytes) override { return streams_->allocate(bytes); }
  Shared allocate_shared(int64_t bytes) override { return streams_->allocate_shared(bytes); }
  std::shared_ptr<std::byte> open(const IpcHandle& handle, int64_t bytes) override {
    return streams_->open(handle, bytes);
  }
  void record(int point, Stream stream) override { streams_->record(point, stream); }
  void wait_for(Stream stream, int point) override { streams_->wait_for(stream, point); }
  void drain() noexcept override { streams_->drain(); }
  void put(const transport::PutTable& table) override { streams_->put(table); }
  void signal(std::span<const transport::SignalTo> signals) override { streams_->signal(signals); }
  void send(const transport::SendTable& table, const std::shared_ptr<transport::Sender>& sender) override {
    streams_->send(table, sender);
  }
  void quiet(const std::shared_ptr<transport::Sender>& sender) override { streams_->quiet(sender); }
  void await(std::span<const transport::AwaitedMessage> messages) override { streams_->await(messages); }
  void fill_nan_if_stopped(const RowView& rows, const RowExtent& n) override { streams_->fill_nan_if_stopped(rows, n); }
  bool is_captured() const override { return streams_->is_captured(); }
  void set_tape(std::shared_ptr<transport::Tape> tape) override { streams_->set_tape(std::move(tape)); }
  void replay(const transport::Tape& tape) override { streams_->replay(tape); }
  std::optional<transport::StreamFault> fault() const override { return streams_->fault(); }
  void stop() noexcept override { streams_->stop(); }

 private:
  std::shared_ptr<Streams> streams_;
};

/// Whether ATen computes where the own kernels do not, and not the CPU's kernel.
std::atomic<bool> aten_computes{false};

/// What made backends and streams before.
runtime::DeviceFactory& factory_before() {
  static auto* const factory = new runtime::DeviceFactory;
  return *factory;
}

}  // namespace
}  // namespace distca::cuda

extern "C" {

/// From here on contexts as said above are on the emulated GPU; `own_attention`: with the library's own kernels for
/// attention, else with the CPU's. Its compute capability is `major`.0.
DISTCA_EXPORT void use_emulated_gpu(bool own_attention, int major) {
  using namespace distca;
  emulated_gpu::compute_capability_major = major;
  const auto make_backend =
      [own_attention](const std::string&, const std::string&,
                      const std::shared_ptr<transport::Streams>& streams) -> std::shared_ptr<runtime::Backend> {
    // Without streams it is for distca.attention.
    const auto inner = streams ? dynamic_cast<const cuda::WaitingStreams&>(*streams).inner() : nullptr;
    std::shared_ptr<runtime::Backend> device = cuda::distca_cuda_library()->make_backend(
        std::make_shared<cuda::AtenInPlace>(), 0, &cuda::current_stream, own_attention, inner);
    if (own_attention || !inner || cuda::aten_computes) return device;
    return std::make_shared<cuda::HostAttention>(std::move(device), cuda::queue_of(inner));
  };
  const auto make_streams = [](const std::string&, std::chrono::milliseconds timeout, int put_blocks) {
    return std::make_shared<cuda::WaitingStreams>(
        cuda::distca_cuda_library()->make_streams(0, &cuda::current_stream, timeout, put_blocks));
  };
  cuda::factory_before() = runtime::set_device_factory({make_backend, make_streams});
}
DISTCA_EXPORT int is_own_the_default() { return distca::cuda::distca_cuda_library()->is_own_the_default(0); }
/// Ends that.
DISTCA_EXPORT void leave_emulated_gpu() { distca::runtime::set_device_factory(distca::cuda::factory_before()); }

/// In contexts that are made from here on; what stands for ATen computes nothing.
DISTCA_EXPORT void let_aten_compute(bool on) { distca::cuda::aten_computes = on; }

/// At the end of a step; a replay or a launch of a graph never waits.
DISTCA_EXPORT void wait_after_steps(bool wait) { distca::cuda::waits_after_steps = wait; }
DISTCA_EXPORT void set_page_locked_memory(bool is_there) { emulated_gpu::has_page_locked_memory = is_there; }
DISTCA_EXPORT void set_compiled_for_device(bool is) { emulated_gpu::compiled_for_device = is; }
DISTCA_EXPORT void run_graphs_one_by_one(bool on) { emulated_gpu::one_by_one = on; }

/// How many operations of that name, kernels among them, were done in this process.
DISTCA_EXPORT int64_t emulated_launches(const char* name) { return emulated_gpu::num_done(name); }

/// The thread blocks of the largest launch of that kernel since the last question.
DISTCA_EXPORT int64_t take_most_blocks(const char* kernel) { return emulated_gpu::take_most_blocks(kernel); }

/// Whether the first launch of a kernel had to load it, which may wait for the whole device.
DISTCA_EXPORT int was_loaded_by_a_launch(const char* kernel) { return emulated_gpu::was_loaded_by_a_launch(kernel); }

// Of the calling thread's stream. Each returns the number of an error, 0 for none.
DISTCA_EXPORT int begin_capture(int mode) {
  return cudaStreamBeginCapture(distca::cuda::CurrentStream::get(), static_cast<cudaStreamCaptureMode>(mode));
}
DISTCA_EXPORT int end_capture(cudaGraphExec_t* graph) {
  cudaGraph_t captured = nullptr;
  const cudaError_t error = cudaStreamEndCapture(distca::cuda::CurrentStream::get(), &captured);
  cudaGetLastError();  // of what may have made it fail, too
  if (error != cudaSuccess) return error;
  cudaGraphInstantiate(graph, captured);
  return cudaGraphDestroy(captured);
}
DISTCA_EXPORT int launch_graph(cudaGraphExec_t graph) {
  return cudaGraphLaunch(graph, distca::cuda::CurrentStream::get());
}
DISTCA_EXPORT int destroy_graph(cudaGraphExec_t graph) { return cudaGraphExecDestroy(graph); }
/// Another one is current in the calling thread from here on.
DISTCA_EXPORT void use_stream(int number) { distca::cuda::CurrentStream::number() = number; }
DISTCA_EXPORT int synchronize() { return cudaStreamSynchronize(distca::cuda::CurrentStream::get()); }
}
