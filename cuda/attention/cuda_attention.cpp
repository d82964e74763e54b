#include "attention/cuda_attention.h"

#include <cuda.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "attention/kernels.h"
#include "attention/work_list.h"

namespace distca::attention::cuda {

namespace {

void check(cudaError_t error, const char* what) {
  require<OperatingSystemError>(error == cudaSuccess, what, ": ", cudaGetErrorString(error));
}

/// The kernels for heads of this shape; null where there are none.
const HeadKernels* kernels_for(const HeadShape& heads) {
  for (const auto& kernels : {hopper_kernels_64(), hopper_kernels_128(), hopper_kernels_192(), hopper_kernels_256()})
    for (const HeadKernels& k : kernels)
      if (k.dtype == heads.dtype && heads.dim <= k.dim && heads.v_dim <= k.v_dim) return &k;
  return nullptr;
}

/// The driver's function, found at run time: nothing links libcuda.
using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

EncodeTiled find_encode_tiled() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
        "looking for cuTensorMapEncodeTiled");
  require<OperatingSystemError>(found == cudaDriverEntryPointSuccess && function != nullptr,
                                "the CUDA driver has no cuTensorMapEncodeTiled; CUDA >= 12 is needed");
  return reinterpret_cast<EncodeTiled>(function);
}

void encode(EncodeTiled encode_tiled, DType dtype, const MapSpec& spec, TensorMap& map) {
  static_assert(sizeof(TensorMap) == sizeof(CUtensorMap) && alignof(TensorMap) == alignof(CUtensorMap));
  map = TensorMap{};
  if (spec.data == nullptr) return;
  cuuint64_t sizes[3], strides[2];
  cuuint32_t box[3], element_strides[3] = {1, 1, 1};
  std::copy_n(spec.sizes, 3, sizes);
  std::copy_n(spec.strides, 2, strides);
  std::copy_n(spec.box, 3, box);
  const CUtensorMapDataType type =
      dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const CUresult result =
      encode_tiled(reinterpret_cast<CUtensorMap*>(&map), type, 3, const_cast<std::byte*>(spec.data), sizes, strides,
                   box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  require<OperatingSystemError>(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled refuses a tensor of ", sizes[0], " x ",
                                sizes[1], " x ", sizes[2], ", strides ", strides[0], ", ", strides[1], " bytes, at ",
                                static_cast<const void*>(spec.data), ": error ", static_cast<int>(result));
}

/// Carves arrays out of memory, each aligned to 256 bytes; from null it only counts.
class Carver {
 public:
  explicit Carver(std::byte* base) : base_(base) {}
  template <class T>
  T* take(size_t n) {
    T* result = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += (n * sizeof(T) + 255) / 256 * 256;
    return result;
  }
  size_t used() const { return used_; }

 private:
  std::byte* base_;
  size_t used_ = 0;
};

/// A run's memory: tables, copied from the host; then what starts as zeros.
struct Memory {
  WorkItem* items;
  StoreItem* store_items;
  TaskEntry* tasks;
  GroupEntry* groups;
  RunEntry* runs;
  int64_t* blocks;
  TensorMap* maps;
  int* next_item;
  float* dq_sums;
  int* turns;
  size_t table_bytes;
  size_t bytes;
};

Memory carve(std::byte* base, const WorkList& list, size_t num_sums, size_t num_turns) {
  Carver carver(base);
  Memory m{};
  m.items = carver.take<WorkItem>(list.items.size());
  m.store_items = carver.take<StoreItem>(list.store_items.size());
  m.tasks = carver.take<TaskEntry>(list.tasks.size());
  m.groups = carver.take<GroupEntry>(list.groups.size());
  m.runs = carver.take<RunEntry>(list.runs.size());
  m.blocks = carver.take<int64_t>(list.blocks.size());
  m.maps = carver.take<TensorMap>(list.maps.size());
  m.table_bytes = carver.used();
  m.next_item = carver.take<int>(1);
  m.turns = carver.take<int>(num_turns);
  m.dq_sums = carver.take<float>(num_sums);
  m.bytes = carver.used();
  return m;
}

/// Page-locked memory that a copy reads from until its event has happened.
struct Staging {
  std::byte* data = nullptr;
  size_t bytes = 0;
  cudaEvent_t copied = nullptr;

  Staging() = default;
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;
  ~Staging() {
    if (copied != nullptr) cudaEventDestroy(copied);
    if (data != nullptr) cudaFreeHost(data);
  }
  bool is_free() const { return copied == nullptr || cudaEventQuery(copied) == cudaSuccess; }
  void reserve(size_t n) {
    if (copied == nullptr) check(cudaEventCreateWithFlags(&copied, cudaEventDisableTiming), "creating an event");
    if (n <= bytes) return;
    if (data != nullptr) cudaFreeHost(data);
    data = nullptr;
    bytes = 0;
    void* p = nullptr;
    check(cudaHostAlloc(&p, n, cudaHostAllocDefault), "page-locked memory for work lists");
    data = static_cast<std::byte*>(p);
    bytes = n;
  }
};

}  // namespace

struct CudaAttention::State {
  int device = 0;
  int num_sms = 0;
  int major = 0;
  int minor = 0;
  EncodeTiled encode_tiled = nullptr;
  std::vector<std::unique_ptr<Staging>> staging;

  // What was prepared last.
  WorkList list;
  std::vector<TensorMap> maps;
  const HeadKernels* kernels = nullptr;
  bool is_backward = false;
  size_t num_sums = 0;
  size_t num_turns = 0;

  const HeadKernels& begin(const HeadShape& heads) {
    const std::string reason = unsupported_reason(heads, major, minor);
    require(reason.empty(), reason);
    kernels = kernels_for(heads);
    return *kernels;
  }
  size_t finish(DType dtype) {
    maps.resize(list.maps.size());
    for (size_t i = 0; i < maps.size(); ++i) encode(encode_tiled, dtype, list.maps[i], maps[i]);
    return carve(nullptr, list, num_sums, num_turns).bytes;
  }
  /// Memory that no copy reads any more; more of it where there is none.
  Staging& free_staging(size_t bytes) {
    auto found = std::find_if(staging.begin(), staging.end(), [](const auto& s) { return s->is_free(); });
    if (found == staging.end()) found = staging.insert(staging.end(), std::make_unique<Staging>());
    (*found)->reserve(bytes);
    return **found;
  }
};

std::string unsupported_reason(const HeadShape& heads, int major, int minor) {
  if (major != 9 || minor != 0)
    return message("the CUDA kernels are for compute capability 9.0, this device has ", major, ".", minor);
  if (heads.dtype == DType::kFloat32) return "the CUDA kernels take bfloat16 and float16, not float32";
  if (heads.dim < 8 || heads.v_dim < 8 || heads.dim % 8 != 0 || heads.v_dim % 8 != 0 || kernels_for(heads) == nullptr)
    return message("the CUDA kernels take head dimensions that are multiples of 8 up to 256, not ", heads.dim, " and ",
                   heads.v_dim);
  if (heads.kv_heads < 1 || heads.q_heads % heads.kv_heads != 0)
    return message(heads.q_heads, " query heads do not share ", heads.kv_heads, " key/value heads evenly");
  if (heads.group_heads() > kernels_for(heads)->backward_shape.rows)
    return message("the CUDA kernels let up to ", kernels_for(heads)->backward_shape.rows,
                   " query heads share a key/value head, not ", heads.group_heads());
  return {};
}

CudaAttention::CudaAttention(int device) : state_(std::make_unique<State>()) {
  state_->device = device;
  const std::pair<cudaDeviceAttr, int*> attributes[] = {{cudaDevAttrMultiProcessorCount, &state_->num_sms},
                                                        {cudaDevAttrComputeCapabilityMajor, &state_->major},
                                                        {cudaDevAttrComputeCapabilityMinor, &state_->minor}};
  for (const auto& [attribute, value] : attributes)
    check(cudaDeviceGetAttribute(value, attribute, device), "asking about the CUDA device");
  state_->encode_tiled = find_encode_tiled();
}
CudaAttention::~CudaAttention() = default;
CudaAttention::CudaAttention(CudaAttention&&) noexcept = default;
CudaAttention& CudaAttention::operator=(CudaAttention&&) noexcept = default;

size_t CudaAttention::prepare_forward(const Problem& problem, std::span<const Signal> signals) {
  State& s = *state_;
  const HeadKernels& kernels = s.begin(problem.heads);
  s.is_backward = false;
  list_forward(problem, signals, kernels.forward_shape, s.list);
  s.num_sums = s.num_turns = 0;
  return s.finish(problem.heads.dtype);
}

size_t CudaAttention::prepare_backward(const Problem& problem, bool deterministic, std::span<const Signal> signals) {
  State& s = *state_;
  const HeadKernels& kernels = s.begin(problem.heads);
  s.is_backward = true;
  list_backward(problem, signals, kernels.backward_shape, s.list);
  const auto num_tiles = static_cast<size_t>(s.list.params.num_store_items);
  s.num_sums = num_tiles * static_cast<size_t>(kernels.dq_elements);
  s.num_turns = deterministic ? num_tiles * static_cast<size_t>(kernels.turns_per_tile) : 0;
  return s.finish(problem.heads.dtype);
}

void CudaAttention::run(void* scratch, cudaStream_t stream) {
  State& s = *state_;
  const WorkList& list = s.list;
  if (list.items.empty()) return;
  const Memory m = carve(static_cast<std::byte*>(scratch), list, s.num_sums, s.num_turns);
  Staging& staging = s.free_staging(m.table_bytes);
  const Memory host = carve(staging.data, list, 0, 0);
  const auto copy = [](const auto& from, auto* to) {
    static_assert(std::is_trivially_copyable_v<std::remove_pointer_t<decltype(to)>>);
    if (!from.empty()) std::memcpy(static_cast<void*>(to), from.data(), from.size() * sizeof(from[0]));
  };
  copy(list.items, host.items);
  copy(list.store_items, host.store_items);
  copy(list.tasks, host.tasks);
  copy(list.groups, host.groups);
  copy(list.runs, host.runs);
  copy(list.blocks, host.blocks);
  copy(s.maps, host.maps);
  check(cudaMemcpyAsync(scratch, staging.data, m.table_bytes, cudaMemcpyHostToDevice, stream), "copying work lists");
  check(cudaEventRecord(staging.copied, stream), "recording an event");
  check(cudaMemsetAsync(static_cast<std::byte*>(scratch) + m.table_bytes, 0, m.bytes - m.table_bytes, stream),
        "clearing scratch memory");

  KernelParams p = list.params;
  p.items = m.items;
  p.store_items = m.store_items;
  p.tasks = m.tasks;
  p.groups = m.groups;
  p.runs = m.runs;
  p.blocks = m.blocks;
  p.maps = m.maps;
  p.next_item = m.next_item;
  p.dq_sums = m.dq_sums;
  p.turns = s.num_turns == 0 ? nullptr : m.turns;
  const int num_ctas = std::min(s.num_sms, p.num_items);
  if (!s.is_backward) {
    check(s.kernels->forward(p, num_ctas, stream), "starting the forward kernel");
    return;
  }
  check(s.kernels->backward(p, num_ctas, stream), "starting the backward kernel");
  if (p.num_store_items > 0)
    check(s.kernels->store_queries(p, p.num_store_items, stream), "starting the kernel that stores dq");
}

}  // namespace distca::attention::cuda
