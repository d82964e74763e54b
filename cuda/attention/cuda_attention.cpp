#include "attention/cuda_attention.h"

#include <cuda.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <vector>

#include "attention/kernels.h"
#include "attention/work_list.h"
#include "common/align.h"
#include "runtime/capability.h"
#include "runtime/table_ring.h"

namespace distca::attention::cuda {

namespace {

using distca::cuda::check;

/// The kernels of a family; those for smaller heads come first.
using AllKernels = std::array<std::span<const HeadKernels>, 5>;
AllKernels kernels_of(KernelFamily family) {
  if (family == KernelFamily::kHopper)
    return {hopper_kernels_64(), hopper_kernels_128(), hopper_kernels_192(), hopper_kernels_256(),
            hopper_kernels_512()};
  return {ampere_kernels_64(), ampere_kernels_128(), ampere_kernels_192(), ampere_kernels_256(), ampere_kernels_512()};
}

/// The kernels for heads of this shape, or null if there are none.
const HeadKernels* kernels_for(KernelFamily family, const HeadShape& heads) {
  for (const auto& kernels : kernels_of(family))
    for (const HeadKernels& k : kernels)
      if (k.dtype == heads.dtype && heads.dim <= k.dim && heads.v_dim <= k.v_dim) return &k;
  return nullptr;
}

/// The driver's function. It is found at run time, because nothing links libcuda.
using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

EncodeTiled find_encode_tiled() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
        "looking for cuTensorMapEncodeTiled");
  require<DeviceError>(found == cudaDriverEntryPointSuccess && function != nullptr,
                       "the CUDA driver has no cuTensorMapEncodeTiled; CUDA >= 12 is needed");
  return reinterpret_cast<EncodeTiled>(function);
}

void encode(EncodeTiled encode_tiled, DType dtype, const MapSpec& spec, TensorMap& map) {
  // CUDA 12 aligns a CUtensorMap to 64 bytes, CUDA 13 to 128.
  static_assert(sizeof(TensorMap) == sizeof(CUtensorMap) && alignof(TensorMap) >= alignof(CUtensorMap));
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
  require<DeviceError>(result == CUDA_SUCCESS, "cuTensorMapEncodeTiled refuses a tensor of ", sizes[0], " x ", sizes[1],
                       " x ", sizes[2], ", strides ", strides[0], ", ", strides[1], " bytes, at ",
                       static_cast<const void*>(spec.data), ": error ", static_cast<int>(result));
}

// The parts of the tables.
enum : size_t { kItems, kStoreItems, kTasks, kGroups, kRuns, kBefore, kBidirectional, kBlocks, kMaps, kNumParts };

}  // namespace

struct CudaAttention::State {
  int device = 0;
  int num_sms = 0;
  int room = 0;  // multiprocessors that are left free while rows travel
  KernelFamily family;
  EncodeTiled encode_tiled = nullptr;  // only for kernels that use the copy engine
  distca::cuda::TableRing ring;

  // What was prepared last.
  WorkList list;
  std::vector<TensorMap> maps;
  AttentionLaunch launch;
  std::array<transport::TablePart, kNumParts> parts;

  const HeadKernels& begin(const HeadShape& heads) {
    const std::string reason = unsupported_reason(heads, family);
    require(reason.empty(), reason);
    return *kernels_for(family, heads);
  }
  int sms_for(const Problem& problem) const {
    return problem.rows_travel ? std::max(ceil_div(num_sms, 2), num_sms - room) : num_sms;
  }
  void finish(DType dtype) {
    using transport::table_part;
    maps.resize(list.maps.size());
    for (size_t i = 0; i < maps.size(); ++i) {
      if (encode_tiled != nullptr)
        encode(encode_tiled, dtype, list.maps[i], maps[i]);
      else
        std::memcpy(maps[i].opaque, &list.maps[i], sizeof(MapSpec));
    }
    parts = {table_part("work items", list.items),
             table_part("tiles of queries", list.store_items),
             table_part("tasks", list.tasks),
             table_part("groups of tasks", list.groups),
             table_part("runs of key gradients", list.runs),
             table_part("items that others wait for", list.before),
             table_part("ranges of bidirectional rows", list.bidirectional),
             table_part("key blocks", list.blocks),
             table_part("tensor maps", maps)};
  }
};

void load_kernels(KernelFamily family) {
  for (const auto& kernels : kernels_of(family))
    for (const HeadKernels& k : kernels) check(k.load(), "loading kernels");
}

KernelFamily family_of(int major, int minor) {
  return major == 9 && minor == 0 ? KernelFamily::kHopper : KernelFamily::kAmpere;
}

std::string unsupported_reason(const HeadShape& heads, KernelFamily family) {
  if (heads.dtype == DType::kFloat32) return "the CUDA kernels take bfloat16 and float16, not float32";
  const HeadKernels* const kernels = kernels_for(family, heads);
  if (!is_head_dim(heads.dim) || !is_head_dim(heads.v_dim) || kernels == nullptr)
    return message("the CUDA kernels take head dimensions that are multiples of 8 up to ", kMostHeadDim, ", not ",
                   heads.dim, " and ", heads.v_dim);
  if (heads.kv_heads < 1 || heads.q_heads % heads.kv_heads != 0)
    return message(heads.q_heads, " query heads do not share ", heads.kv_heads, " key/value heads evenly");
  const int most = std::min(kernels->forward_shape.rows, kernels->backward_shape.rows);
  if (heads.group_heads() > most)
    return message("the CUDA kernels let up to ", most, " query heads of these dimensions share a key/value head on ",
                   "this GPU, not ", heads.group_heads());
  return {};
}

CudaAttention::CudaAttention(int device, std::optional<KernelFamily> family) : state_(std::make_unique<State>()) {
  state_->device = device;
  check(cudaDeviceGetAttribute(&state_->num_sms, cudaDevAttrMultiProcessorCount, device), "asking about the device");
  const auto [major, minor] = distca::cuda::capability_of(device);
  state_->family = family.value_or(family_of(major, minor));
  if (state_->family == KernelFamily::kHopper) state_->encode_tiled = find_encode_tiled();
}
CudaAttention::~CudaAttention() = default;
CudaAttention::CudaAttention(CudaAttention&&) noexcept = default;
CudaAttention& CudaAttention::operator=(CudaAttention&&) noexcept = default;

void CudaAttention::leave_room(int sms) { state_->room = sms; }

void CudaAttention::prepare_forward(const Problem& problem, std::span<const Signal> signals) {
  State& s = *state_;
  const HeadKernels& kernels = s.begin(problem.heads);
  list_forward(problem, signals, kernels.forward_shape, s.list);
  s.launch.set(kernels, s.list.params, /*is_backward=*/false, /*is_deterministic=*/false, s.sms_for(problem));
  s.finish(problem.heads.dtype);
}

void CudaAttention::prepare_backward(const Problem& problem, bool deterministic, std::span<const Signal> signals) {
  State& s = *state_;
  const HeadKernels& kernels = s.begin(problem.heads);
  list_backward(problem, signals, kernels.backward_shape, s.list);
  s.launch.set(kernels, s.list.params, /*is_backward=*/true, deterministic, s.sms_for(problem));
  s.finish(problem.heads.dtype);
}

std::span<const transport::TablePart> CudaAttention::parts() const { return state_->parts; }
const AttentionLaunch& CudaAttention::launch() const { return state_->launch; }
size_t CudaAttention::scratch_bytes() const { return state_->launch.scratch_bytes(transport::TableLayout(parts())); }

void CudaAttention::run(void* scratch, cudaStream_t stream) {
  State& s = *state_;
  if (s.list.items.empty()) return;
  s.launch(s.ring.upload(s.parts, stream), scratch, stream);
  s.ring.done(stream);
}

void AttentionLaunch::set(const HeadKernels& kernels, const KernelParams& params, bool is_backward,
                          bool is_deterministic, int num_sms) {
  kernels_ = &kernels;
  params_ = params;
  is_backward_ = is_backward;
  is_deterministic_ = is_deterministic;
  num_sms_ = num_sms;
}

AttentionLaunch::Kind AttentionLaunch::kind() const {
  const KernelParams& p = params_;
  const auto word = [](auto x) { return static_cast<uint32_t>(x); };
  Kind kind = {word(p.dim),         word(p.v_dim),         word(p.group_heads),
               word(p.tile_tokens), word(kernels_->dtype), word(is_deterministic_)};
  // Entries have no padding, and those that no group has are zeros.
  static_assert(sizeof(ScoreEntry) == sizeof(TileMask) + sizeof(ScoreMap) + sizeof(float));
  std::memcpy(kind.end() - kScoreWords, p.scores, sizeof(p.scores));
  return kind;
}

size_t AttentionLaunch::scratch_bytes(const transport::TableLayout& tables) const {
  return scratch(tables, nullptr).bytes;
}

AttentionLaunch::Scratch AttentionLaunch::scratch(const transport::TableLayout& tables, std::byte* base) const {
  const size_t num_tiles = is_backward_ ? tables.capacity(kStoreItems) : 0;
  Carver<256> carver(base);
  Scratch s;
  const auto passes = static_cast<size_t>(is_backward_ ? kernels_->passes : 1);
  s.next_item = carver.take<int>(passes);
  s.turns = carver.take<int>(is_deterministic_ ? num_tiles * static_cast<size_t>(kernels_->turns_per_tile) : 0);
  s.stored = carver.take<int>(is_backward_ ? passes * 2 * tables.capacity(kItems) : 0);
  s.dq_sums = carver.take<float>(num_tiles * static_cast<size_t>(kernels_->dq_elements));
  s.bytes = carver.used();
  return s;
}

void AttentionLaunch::operator()(const distca::cuda::DeviceTable& tables, void* memory, cudaStream_t stream) const {
  if (tables.capacity(kItems) == 0) return;
  const Scratch s = scratch(*tables.layout, static_cast<std::byte*>(memory));
  check(cudaMemsetAsync(memory, 0, s.bytes, stream), "clearing scratch memory");
  KernelParams p = params_;
  p.counts = tables.counts();
  p.items = tables.part<const WorkItem>(kItems);
  p.store_items = tables.part<const StoreItem>(kStoreItems);
  p.tasks = tables.part<const TaskEntry>(kTasks);
  p.groups = tables.part<const GroupEntry>(kGroups);
  p.runs = tables.part<const RunEntry>(kRuns);
  p.before = tables.part<const int>(kBefore);
  p.bidirectional = tables.part<const RowRange>(kBidirectional);
  p.blocks = tables.part<const int64_t>(kBlocks);
  p.maps = tables.part<const TensorMap>(kMaps);
  p.next_item = s.next_item;
  p.dq_sums = s.dq_sums;
  p.turns = is_deterministic_ ? s.turns : nullptr;
  p.stored = s.stored;
  const auto num_items = static_cast<int>(tables.capacity(kItems));
  if (!is_backward_) {
    check(kernels_->forward(p, num_items, num_sms_, stream), "starting the forward kernel");
    return;
  }
  for (p.pass = 0; p.pass < kernels_->passes; ++p.pass) {
    check(kernels_->backward(p, num_items, num_sms_, stream), "starting the backward kernel");
    ++p.next_item;
    p.stored += 2 * tables.capacity(kItems);
  }
  if (const auto num_tiles = static_cast<int>(tables.capacity(kStoreItems)); num_tiles > 0)
    check(kernels_->store_queries(p, num_tiles, num_sms_, stream), "starting the kernel that stores dq");
}

}  // namespace distca::attention::cuda
