// Contexts on the emulated GPU: in a process that has called `use_emulated_gpu`, those with device="cpu",
// attention="flash" and streams queue their steps on the streams of the library for CUDA, with its backend.
#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "runtime/backend.h"
#include "runtime/check.h"
#include "runtime/cuda_library.h"
#include "streams.h"

namespace distca::cuda {

/// The library's own entry.
extern "C" const runtime::CudaLibrary* distca_cuda_library();

namespace {

/// The stream that is current in the calling thread, as PyTorch would have one for it: it goes to another thread when
/// this one ends.
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
    static thread_local const CurrentStream mine;
    return mine.stream_;
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

/// A problem with all that it points to but rows.
class KeptProblem {
 public:
  explicit KeptProblem(const attention::Problem& from)
      : problem_(from), groups_(from.groups.begin(), from.groups.end()), tasks_(from.tasks.begin(), from.tasks.end()) {
    arrays_.reserve(groups_.size());
    for (attention::KeyGroup& g : groups_) {
      Arrays& own = arrays_.emplace_back();
      own.blocks.assign(g.blocks.begin(), g.blocks.end());
      own.grads.assign(g.grads.begin(), g.grads.end());
      g.blocks = own.blocks;
      g.grads = own.grads;
      if (g.sinks == nullptr) continue;
      own.sinks.assign(g.sinks, g.sinks + g.kv_heads * from.heads.group_heads());
      g.sinks = own.sinks.data();
    }
    problem_.groups = groups_;
    problem_.tasks = tasks_;
  }
  KeptProblem(const KeptProblem&) = delete;

  const attention::Problem& get() const { return problem_; }
  /// Where its rows lie.
  std::vector<const void*> words() const {
    std::vector<const void*> all;
    for (const attention::KeyGroup& g : groups_)
      for (const RowView* view : {&g.k[0], &g.k[1], &g.v[0], &g.v[1]}) all.push_back(view->data);
    for (const attention::Task& t : tasks_)
      for (const RowView* view : {&t.q, &t.out, &t.lse, &t.dout, &t.delta, &t.dq}) all.push_back(view->data);
    return all;
  }

 private:
  struct Arrays {
    std::vector<int64_t> blocks;
    std::vector<attention::KeyGradRun> grads;
    std::vector<float> sinks;
  };

  attention::Problem problem_;
  std::vector<attention::KeyGroup> groups_;
  std::vector<attention::Task> tasks_;
  std::vector<Arrays> arrays_;
};

/// Stands for ATen's backend on a GPU: memory of the device, and attention by the CPU's kernel in the order of the
/// stream. All else is what DeviceBackend does itself.
class AtenInPlace final : public runtime::Backend {
 public:
  std::string device() const override { return "cpu"; }
  std::string attention(const HeadShape&) const override { return "the CPU's kernel on an emulated GPU"; }
  bool plan_independent(const HeadShape&) const override { return false; }
  void check(const HeadShape&, float) const override {}
  std::shared_ptr<std::byte> allocate(int64_t bytes) override {
    void* data = nullptr;
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;  // PyTorch allocates in captures too
    cudaThreadExchangeStreamCaptureMode(&mode);
    cuda::check(cudaMalloc(&data, static_cast<size_t>(bytes)), "memory of the device");
    cudaThreadExchangeStreamCaptureMode(&mode);
    const cudaStream_t stream = CurrentStream::get();
    cuda::check(cudaMemsetAsync(data, 0, static_cast<size_t>(bytes), stream), "clearing memory");
    return {static_cast<std::byte*>(data), [stream](std::byte* p) { emulated_gpu::free_in_order(p, stream); }};
  }
  void forward(const attention::Problem& problem, const Parallel&) override {
    queue("host forward", problem, &Backend::forward);
  }
  void backward(const attention::Problem& problem, const Parallel&) override {
    queue("host backward", problem, &Backend::backward);
  }

  void copy(const RowView&, const RowView&, const RowExtent&) override { not_asked(); }
  void finish() override { not_asked(); }
  void reduce(const runtime::ReduceTable&, DType) override { not_asked(); }
  void fill(const RowView&, const RowExtent&, runtime::Fill) override { not_asked(); }
  void row_dot(const HeadShape&, int64_t, const RowView&, const RowView&, const RowView&, const Parallel&) override {
    not_asked();
  }

 private:
  static void not_asked() { emulated_gpu::fail("ATen's backend is asked for what the kernels do"); }

  void queue(const char* name, const attention::Problem& problem,
             void (Backend::*attention)(const attention::Problem&, const Parallel&)) {
    auto kept = std::make_shared<const KeptProblem>(problem);
    auto run = [cpu = cpu_, kept, attention](uint32_t) { ((*cpu).*attention)(kept->get(), Parallel()); };
    cuda::check(emulated_gpu::queue(CurrentStream::get(), {name, kept->words(), std::move(run)}), name);
  }

  std::shared_ptr<Backend> cpu_ = runtime::make_backend("cpu", "auto");
};

/// The streams of the library, but that the host waits for its work when a step is over: the tests' tensors are the
/// host's, and are read without asking any stream.
class WaitingStreams final : public transport::Streams {
 public:
  explicit WaitingStreams(std::shared_ptr<Streams> streams) : streams_(std::move(streams)) {}
  const std::shared_ptr<Streams>& inner() const { return streams_; }

  void hand_over() override {
    streams_->hand_over();
    if (emulated_gpu::is_capturing(CurrentStream::get())) return;
    check(cudaStreamSynchronize(CurrentStream::get()), "the end of a step");
  }

  std::shared_ptr<std::byte> allocate(int64_t bytes) override { return streams_->allocate(bytes); }
  Shared allocate_shared(int64_t bytes) override { return streams_->allocate_shared(bytes); }
  std::shared_ptr<std::byte> open(const Card& card, int64_t bytes) override { return streams_->open(card, bytes); }
  void record(int point, Stream stream) override { streams_->record(point, stream); }
  void wait_for(Stream stream, int point) override { streams_->wait_for(stream, point); }
  void drain() noexcept override { streams_->drain(); }
  void put(const transport::PutTable& table) override { streams_->put(table); }
  void signal(std::span<const transport::SignalTo> signals) override { streams_->signal(signals); }
  void await(std::span<const transport::AwaitedMessage> messages) override { streams_->await(messages); }
  void fill_nan_if_stopped(const RowView& rows, const RowExtent& n) override { streams_->fill_nan_if_stopped(rows, n); }
  void set_tape(std::shared_ptr<transport::Tape> tape) override { streams_->set_tape(std::move(tape)); }
  void replay(const transport::Tape& tape) override {
    streams_->replay(tape);
    hand_over();
  }
  std::optional<transport::StreamFault> fault() const override { return streams_->fault(); }
  void stop() noexcept override { streams_->stop(); }

 private:
  std::shared_ptr<Streams> streams_;
};

/// What made backends and streams before.
runtime::Makers& makers_before() {
  static auto* const makers = new runtime::Makers;
  return *makers;
}

}  // namespace
}  // namespace distca::cuda

extern "C" {

/// From here on contexts as said above are on the emulated GPU; `own_attention`: with the library's own kernels.
DISTCA_EXPORT void use_emulated_gpu(bool own_attention) {
  using namespace distca;
  const auto make_backend = [own_attention](const std::string&, const std::string&,
                                            const std::shared_ptr<transport::Streams>& streams) {
    // Contexts whose steps the host takes have none.
    const auto waiting = std::dynamic_pointer_cast<cuda::WaitingStreams>(streams);
    return cuda::distca_cuda_library()->make_backend(std::make_shared<cuda::AtenInPlace>(), 0, &cuda::current_stream,
                                                     own_attention, waiting ? waiting->inner() : nullptr);
  };
  const auto make_streams = [](const std::string&, std::chrono::milliseconds timeout, int put_blocks) {
    return std::make_shared<cuda::WaitingStreams>(
        cuda::distca_cuda_library()->make_streams(0, &cuda::current_stream, timeout, put_blocks));
  };
  cuda::makers_before() = runtime::set_makers({make_backend, make_streams});
}
/// Ends that.
DISTCA_EXPORT void leave_emulated_gpu() { distca::runtime::set_makers(distca::cuda::makers_before()); }

/// How many operations of that name, kernels among them, were done in this process.
DISTCA_EXPORT int64_t emulated_launches(const char* name) { return emulated_gpu::num_done(name); }

// Of the calling thread's stream. Each returns the number of an error, 0 for none.
DISTCA_EXPORT int begin_capture(int mode) {
  return cudaStreamBeginCapture(distca::cuda::CurrentStream::get(), static_cast<cudaStreamCaptureMode>(mode));
}
DISTCA_EXPORT int end_capture(cudaGraphExec_t* graph) {
  cudaGraph_t captured = nullptr;
  const cudaError_t error = cudaStreamEndCapture(distca::cuda::CurrentStream::get(), &captured);
  if (error != cudaSuccess) return error;
  cudaGraphInstantiate(graph, captured);
  return cudaGraphDestroy(captured);
}
DISTCA_EXPORT int launch_graph(cudaGraphExec_t graph) {
  return cudaGraphLaunch(graph, distca::cuda::CurrentStream::get());
}
DISTCA_EXPORT int destroy_graph(cudaGraphExec_t graph) { return cudaGraphExecDestroy(graph); }
DISTCA_EXPORT int synchronize() { return cudaStreamSynchronize(distca::cuda::CurrentStream::get()); }
}
