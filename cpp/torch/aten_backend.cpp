// The backend whose work ATen's operators do: strided copies move and sum rows, flash attention computes attention. It
// runs on every device that has these operators. A GPU without libdistca_cuda gets it.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "common/align.h"
#include "runtime/backend.h"
#include "runtime/cuda_library.h"
#include "torch/aten.h"
#include "torch/flash.h"
#include "torch/gpu.h"

namespace distca::ops {
namespace {

using attention::KeyGradRun;
using attention::KeyGroup;
using attention::Problem;
using attention::Task;
using runtime::Fill;
using torch::headeronly::ScalarType;
using torch::stable::Device;

ScalarType scalar_type(DType dtype) {
  return dtype == DType::kFloat32   ? ScalarType::Float
         : dtype == DType::kFloat16 ? ScalarType::Half
                                    : ScalarType::BFloat16;
}

/// Rows of tasks that one call of flash attention takes, packed one after another.
struct Call {
  struct Member {
    const Task* task;
    int64_t begin, end;  // rows of the task
    int64_t q_row;
  };
  FlashOptions options;
  std::vector<Member> members;
  std::vector<LocalTask> tasks;
  int64_t q_rows = 0;
};

/// Groups of a problem with the same number of heads and the same scores. Their keys are packed one after another.
struct Pack {
  struct Group {
    const KeyGroup* group;
    int64_t kv_row;  // row of its first key
  };
  HeadShape heads;
  std::vector<Group> groups;
  std::vector<Call> calls;
  int64_t kv_rows = 0;

  /// Adds document rows [begin, end) of a task of the last group, whose keys are not packed yet. They see [first_key,
  /// end_key) as the options say.
  void add(const FlashOptions& options, const Task& task, int64_t begin, int64_t end, int64_t first_key,
           int64_t end_key) {
    auto call = std::find_if(calls.begin(), calls.end(), [&](const Call& c) { return c.options == options; });
    if (call == calls.end()) call = calls.insert(call, Call{.options = options});
    const int64_t kv_row = kv_rows - groups.back().group->kv_begin, q_end = call->q_rows + end - begin;
    call->tasks.push_back({call->q_rows, q_end, kv_row + first_key, kv_row + end_key});
    call->members.push_back({&task, begin - task.q_begin, end - task.q_begin, call->q_rows});
    call->q_rows = q_end;
  }
};

/// Adds the rows of a task. Those that see each other besides are calls of their own, because flash attention knows
/// nothing of them.
void add_task(const DocumentMask& mask, float scale, const KeyGroup& group, const Task& t, Pack& pack) {
  constexpr Mask kFull{MaskKind::kFull, 0};
  const int64_t window = mask.mask.window;
  if (mask.mask.is_full()) {
    // Flash attention takes a task's last key for that of its last row, which sees `after` keys more.
    const int64_t end_key = mask.end_key(t.q_end - 1, group.kv_end), after = end_key - t.q_end;
    const FlashOptions options = window == 0 ? FlashOptions{kFull, scale}
                                             : FlashOptions{mask.mask, scale, window - 1 + after, window - 1 - after};
    pack.add(options, t, t.q_begin, t.q_end, std::max(group.kv_begin, mask.first_key(t.q_begin)), end_key);
    return;
  }
  const BidirectionalRows *range = mask.ending_after(t.q_begin), *const last = mask.bidirectional.data() +
                                                                               mask.bidirectional.size();
  for (int64_t row = t.q_begin, end; row < t.q_end; row = end) {
    while (range != last && range->end <= row) ++range;
    const int64_t first_key = std::max(group.kv_begin, mask.first_key(row));
    if (range == last || range->begin > row) {
      end = range == last ? t.q_end : std::min(t.q_end, range->begin);
      pack.add({mask.mask, scale}, t, row, end, first_key, mask.end_key(end - 1, group.kv_end));
    } else {
      end = std::min(t.q_end, range->end);
      const FlashOptions options =
          window == 0 ? FlashOptions{kFull, scale} : FlashOptions{mask.mask, scale, window - 1 + range->end - end};
      pack.add(options, t, row, end, first_key, range->end);
    }
  }
}

/// Packs a problem's groups by their heads and scores, because one call of flash attention takes one number of heads,
/// one mask and one scale.
std::vector<Pack> pack_groups(const Problem& p) {
  attention::check_scores(p);
  std::map<std::pair<int64_t, int64_t>, Pack> packs;
  for (const KeyGroup& g : p.groups) {
    Pack& pack = packs[{g.kv_heads, g.scores}];
    pack.heads = p.heads.with_kv_heads(g.kv_heads);
    pack.groups.push_back({&g, pack.kv_rows});
    for (int64_t i = g.task_begin; i < g.task_end; ++i)
      add_task(p.mask_of(g), p.scores_of(g).scale, g, p.tasks[static_cast<size_t>(i)], pack);
    pack.kv_rows += g.kv_end - g.kv_begin;
  }
  std::vector<Pack> list;
  for (auto& [key, pack] : packs) {
    if (pack.calls.empty()) pack.calls.emplace_back();  // keys that no row sees: their gradients are zeros
    list.push_back(std::move(pack));
  }
  return list;
}

class AtenBackend final : public runtime::Backend {
 public:
  explicit AtenBackend(Device device) : device_(device), anchor_(empty({1}, ScalarType::Float)) {}

  std::string device() const override { return device_name(anchor_); }
  std::string attention(const HeadShape&) const override { return "ATen's flash attention"; }
  bool plan_independent(const HeadShape&) const override { return false; }
  bool takes_gradient_of_lse() const override { return false; }
  bool finds_max_logits() const override { return false; }
  void largest(std::span<const float* const>, int64_t, float*) override { throw InvalidArgumentError(kNoMaxLogits); }
  void check(const HeadShape& heads, float softcap) const override { check_flash(anchor_, heads, softcap); }

  std::shared_ptr<std::byte> allocate(int64_t bytes) override { return memory(bytes, /*is_zero=*/true); }
  /// PyTorch's allocator gives a tensor's memory only to later work of the same stream.
  std::shared_ptr<std::byte> scratch(int64_t bytes) override { return memory(bytes, /*is_zero=*/false); }

  void copy(const RowView& to, const RowView& from, const RowExtent& n) override {
    if (n.bytes() == 0) return;
    const ScalarType word =
        n.head_bytes % 4 == 0 && words_of_4(to) && words_of_4(from) ? ScalarType::Int : ScalarType::Short;
    const int64_t dim = n.head_bytes / (word == ScalarType::Int ? 4 : 2);
    aten::assign(view(to, n.num_rows, n.num_heads, dim, word), view(from, n.num_rows, n.num_heads, dim, word));
  }

  /// Copies one number to the host, which waits for everything that was started before.
  void finish() override {
    if (device_.is_cpu()) return;
    const int64_t sizes[] = {1};
    Tensor host = torch::stable::empty(sizes, ScalarType::Float);
    torch::stable::copy_(host, anchor_);
  }

  void reduce(const runtime::ReduceTable& table, DType dtype) override {
    for (const runtime::ReduceEntry& e : table.entries) {
      const int64_t num_rows = e.num_values / e.num_heads / e.dim;
      const auto dense = [&](const void* values, DType of_values) {
        const int64_t head_bytes = e.dim * dtype_bytes(of_values);
        auto* const data = static_cast<std::byte*>(const_cast<void*>(values));
        return view({data, e.num_heads * head_bytes, head_bytes}, num_rows, e.num_heads, e.dim, scalar_type(of_values));
      };
      const auto widened = [&](const std::byte* term) {
        return e.narrow ? aten::cast(dense(term, dtype), ScalarType::Float) : dense(term, DType::kFloat32);
      };
      const std::byte* const* term = table.terms.data() + e.first_term;
      const Tensor carried = dense(e.sum, DType::kFloat32);
      Tensor sum = e.starts ? widened(*term++) : carried;
      for (; term != table.terms.data() + e.first_term + e.num_terms; ++term) sum = aten::add(sum, widened(*term));
      if (e.finishes)
        aten::assign(view({e.to, e.to_row_stride, e.to_head_stride}, num_rows, e.num_heads, e.dim, scalar_type(dtype)),
                     sum);
      else if (sum.data_ptr() != static_cast<void*>(e.sum))
        aten::assign(carried, sum);
    }
  }

  void fill(const RowView& rows, const RowExtent& n, Fill value) override {
    if (n.bytes() == 0) return;
    if (value == Fill::kMinusInfinity)
      torch::stable::fill_(fp32(rows, n), -std::numeric_limits<double>::infinity());
    else  // all bits set is a NaN in every dtype
      torch::stable::fill_(view(rows, n.num_rows, n.num_heads, n.head_bytes / 2, ScalarType::Short),
                           value == Fill::kZero ? 0.0 : -1.0);
  }

  void row_delta(const HeadShape& heads, int64_t num_rows, const attention::DeltaRows& rows, const Parallel&) override {
    require(rows.dlse.data == nullptr, kNoGradientOfLse);
    if (num_rows == 0) return;
    const auto widened = [&](const RowView& v) {
      return aten::cast(view(v, num_rows, heads.q_heads, heads.v_dim, scalar_type(heads.dtype)), ScalarType::Float);
    };
    const int64_t dim[] = {2};
    aten::assign(view(rows.delta, num_rows, heads.q_heads, 1, ScalarType::Float),
                 torch::stable::sum(aten::multiply(widened(rows.out), widened(rows.dout)), dim, /*keepdim=*/true));
  }

  void add_sinks(const HeadShape& heads, int64_t num_rows, const RowView& out, const RowView& lse, const float* sinks,
                 const Parallel&) override {
    if (num_rows == 0) return;
    const int64_t sizes[] = {heads.q_heads}, strides[] = {1};
    const Tensor values =
        torch::stable::from_blob(const_cast<float*>(sinks), sizes, strides, device_, ScalarType::Float);
    ops::add_sinks(view(out, num_rows, heads.q_heads, heads.v_dim, scalar_type(heads.dtype)),
                   torch::stable::select(view(lse, num_rows, heads.q_heads, 1, ScalarType::Float), 2, 0), values);
  }

  void forward(const Problem& p, const Parallel&) override {
    for (const Pack& pack : pack_groups(p)) {
      const HeadShape& h = pack.heads;
      const auto [k, v] = gather_keys(pack);
      for (const Call& call : pack.calls) {
        const Tensor q = gather(call, h.q_heads, h.dim, scalar_type(h.dtype), &Task::q);
        const auto [out, lse] = flash_forward(q, k, v, call.tasks, call.options);
        scatter(call, out, &Task::out);
        scatter(call, torch::stable::unsqueeze(lse, 2), &Task::lse);
      }
    }
  }

  void backward(const Problem& p, const Parallel&) override {
    std::vector<Tensor> dk_of(p.groups.size()), dv_of(p.groups.size());
    for (const Pack& pack : pack_groups(p)) {
      const HeadShape& h = pack.heads;
      const ScalarType type = scalar_type(h.dtype);
      const auto [k, v] = gather_keys(pack);
      Tensor all_dk, all_dv;
      for (const Call& call : pack.calls) {
        const Tensor q = gather(call, h.q_heads, h.dim, type, &Task::q);
        const Tensor dout = gather(call, h.q_heads, h.v_dim, type, &Task::dout);
        const Tensor lse = torch::stable::select(gather(call, h.q_heads, 1, ScalarType::Float, &Task::lse), 2, 0);
        const Tensor delta = gather(call, h.q_heads, 1, ScalarType::Float, &Task::delta);
        const auto [dq, dk, dv] =
            flash_backward(dout, q, k, v, stand_in_for_out(dout, delta), lse, call.tasks, call.options);
        scatter(call, dq, &Task::dq);
        const auto widened_sum = [](const Tensor& a, const Tensor& b) {
          return aten::add(aten::cast(a, ScalarType::Float), aten::cast(b, ScalarType::Float));
        };
        const bool is_first = &call == pack.calls.data();
        all_dk = is_first ? dk : widened_sum(all_dk, dk);
        all_dv = is_first ? dv : widened_sum(all_dv, dv);
      }
      for (const Pack::Group& member : pack.groups) {
        const auto group = static_cast<size_t>(member.group - p.groups.data());
        const int64_t rows = member.group->kv_end - member.group->kv_begin;
        dk_of[group] = aten::narrow_rows(all_dk, member.kv_row, rows);
        dv_of[group] = aten::narrow_rows(all_dv, member.kv_row, rows);
      }
    }
    // In the order of the groups, because a group may add to what an earlier one, of whichever pack, has written.
    for (size_t group = 0; group < p.groups.size(); ++group)
      scatter_key_gradients(p.groups[group], dk_of[group], dv_of[group]);
  }

 private:
  static constexpr int64_t kAlignment = 256;

  static bool words_of_4(const RowView& v) {
    return (reinterpret_cast<uintptr_t>(v.data) | static_cast<uintptr_t>(v.row_stride | v.head_stride)) % 4 == 0;
  }

  std::shared_ptr<std::byte> memory(int64_t bytes, bool is_zero) const {
    auto owner = std::make_shared<Tensor>(empty({bytes + kAlignment}, ScalarType::Byte));
    if (is_zero) torch::stable::zero_(*owner);
    const auto address = reinterpret_cast<uintptr_t>(owner->data_ptr());
    auto* const aligned = reinterpret_cast<std::byte*>(round_up(address, kAlignment));
    return {aligned, [owner](std::byte*) {}};
  }

  Tensor empty(std::vector<int64_t> sizes, ScalarType type) const {
    return torch::stable::empty(sizes, type, std::nullopt, device_);
  }
  Tensor empty_rows(int64_t rows, int64_t heads, int64_t dim, ScalarType type) const {
    return empty({rows, heads, dim}, type);
  }

  Tensor view(const RowView& v, int64_t rows, int64_t heads, int64_t dim, ScalarType type) const {
    const int64_t bytes = type == ScalarType::Float || type == ScalarType::Int ? 4 : 2;
    const int64_t sizes[] = {rows, heads, dim}, strides[] = {v.row_stride / bytes, v.head_stride / bytes, 1};
    return torch::stable::from_blob(v.data, sizes, strides, device_, type);
  }
  Tensor fp32(const RowView& v, const RowExtent& n) const {
    return view(v, n.num_rows, n.num_heads, n.head_bytes / 4, ScalarType::Float);
  }

  Tensor gather(const Call& call, int64_t heads, int64_t dim, ScalarType type, RowView Task::* rows) const {
    const Tensor packed = empty_rows(call.q_rows, heads, dim, type);
    for (const Call::Member& m : call.members) {
      const int64_t n = m.end - m.begin;
      aten::assign(aten::narrow_rows(packed, m.q_row, n), view((m.task->*rows).from_row(m.begin), n, heads, dim, type));
    }
    return packed;
  }

  void scatter(const Call& call, const Tensor& packed, RowView Task::* rows) const {
    for (const Call::Member& m : call.members) {
      const int64_t n = m.end - m.begin;
      aten::assign(view((m.task->*rows).from_row(m.begin), n, packed.size(1), packed.size(2), packed.scalar_type()),
                   aten::narrow_rows(packed, m.q_row, n));
    }
  }

  std::pair<Tensor, Tensor> gather_keys(const Pack& pack) const {
    const HeadShape& h = pack.heads;
    const ScalarType type = scalar_type(h.dtype);
    const Tensor k = empty_rows(pack.kv_rows, h.kv_heads, h.dim, type);
    const Tensor v = empty_rows(pack.kv_rows, h.kv_heads, h.v_dim, type);
    for (const Pack::Group& member : pack.groups) {
      const KeyGroup& g = *member.group;
      for_each_run(g, [&](int64_t begin, int64_t end, int source, int64_t row) {
        const int64_t at = member.kv_row + begin - g.kv_begin, n = end - begin;
        aten::assign(aten::narrow_rows(k, at, n), view(g.k[source].from_row(row), n, h.kv_heads, h.dim, type));
        aten::assign(aten::narrow_rows(v, at, n), view(g.v[source].from_row(row), n, h.kv_heads, h.v_dim, type));
      });
    }
    return {k, v};
  }

  /// Calls body(begin, end, source, row) for each run of document rows [begin, end) that lie one after another from
  /// `row` on.
  template <class Body>
  static void for_each_run(const KeyGroup& g, const Body& body) {
    constexpr int64_t n = attention::kKeyBlockRows;
    const auto num_blocks = static_cast<int64_t>(g.blocks.size());
    for (int64_t b = 0; b < num_blocks;) {
      const int64_t entry = g.blocks[static_cast<size_t>(b)], first = (g.first_block + b) * n;
      int64_t count = 1;
      while (b + count < num_blocks && g.blocks[static_cast<size_t>(b + count)] == entry + 2 * count * n) ++count;
      const int64_t begin = std::max(first, g.kv_begin), end = std::min(first + count * n, g.kv_end);
      if (begin < end) body(begin, end, static_cast<int>(entry & 1), (entry >> 1) + begin - first);
      b += count;
    }
  }

  void scatter_key_gradients(const KeyGroup& group, const Tensor& dk, const Tensor& dv) const {
    for (const KeyGradRun& run : group.grads) {
      const int64_t n = run.end - run.begin;
      const auto write = [&](const RowView& to, const Tensor& grads) {
        const Tensor place = view(to, n, grads.size(1), grads.size(2), scalar_type(run.dtype));
        const Tensor rows = aten::narrow_rows(grads, run.begin - group.kv_begin, n);
        aten::assign(place, run.is_added ? aten::add(place, aten::cast(rows, ScalarType::Float)) : rows);
      };
      write(run.dk, dk);
      write(run.dv, dv);
    }
  }

  /// A tensor that stands for out. A server has delta = rowsum(out * dout) and not out; ATen asks for out and makes
  /// just delta from it. Therefore ATen is given the part of out that points along dout, dout * delta / |dout|^2. That
  /// part is no longer than out, and its rounding to the dtype of out changes delta no more than the rounding of out
  /// did.
  static Tensor stand_in_for_out(const Tensor& dout, const Tensor& delta) {
    const Tensor rows = aten::cast(dout, ScalarType::Float);
    const int64_t dim[] = {2};
    // Values are scaled first, because squares of small gradients would be zero. Where all are zero, the result is
    // zero.
    const Tensor largest = torch::stable::amax(aten::unary("aten::abs", rows), dim, /*keepdim=*/true);
    const Tensor unit = zero_for_nan(aten::divide(rows, largest));
    const Tensor square = torch::stable::sum(aten::multiply(unit, unit), dim, /*keepdim=*/true);
    const Tensor along = zero_for_nan(aten::divide(aten::divide(delta, largest), square));
    return aten::cast(aten::multiply(unit, along), dout.scalar_type());
  }
  static Tensor zero_for_nan(const Tensor& t) {
    return aten::tensor(aten::call("aten::nan_to_num", "", t, std::optional(0.0))[0]);
  }

  Device device_;
  Tensor anchor_;
};

/// The device of a name: "cpu", "cuda" or "cuda:" and a number.
Device device_of(const std::string& name) {
  using torch::headeronly::DeviceType;
  if (name == "cpu") return Device(DeviceType::CPU);
  const std::string number = name.starts_with("cuda:") ? name.substr(5) : name == "cuda" ? "0" : "";
  const bool is_number =
      !number.empty() && number.size() < 4 && number.find_first_not_of("0123456789") == std::string::npos;
  require(is_number, "device \"", name, "\"; \"cpu\", \"cuda\" and \"cuda:0\" are examples of what is allowed");
  return Device(DeviceType::CUDA, static_cast<int32_t>(std::stoi(number)));
}

struct Registration {
  Registration() {
    const auto make_backend = [](const std::string& name, const std::string& attention,
                                 const std::shared_ptr<transport::Streams>& streams) {
      const Device device = device_of(name);
      std::shared_ptr<runtime::Backend> aten = std::make_shared<AtenBackend>(device);
      const runtime::CudaLibrary* const library = device.is_cpu() ? nullptr : runtime::cuda_library();
      require<DeviceError>(library != nullptr || attention != "own",
                           "attention = \"own\" needs libdistca_cuda: ", runtime::cuda_library_problem());
      if (library == nullptr) return aten;
      return library->make_backend(aten, device.index(), &gpu_stream, attention == "own", streams);
    };
    const auto make_streams = [](const std::string& name, std::chrono::milliseconds timeout, int put_blocks) {
      const Device device = device_of(name);
      require(!device.is_cpu(), "attention = \"flash\" has no queued steps on the CPU");
      const runtime::CudaLibrary* const library = runtime::cuda_library();
      return library == nullptr ? nullptr : library->make_streams(device.index(), &gpu_stream, timeout, put_blocks);
    };
    runtime::set_device_factory({make_backend, make_streams});
  }
} const registration;

}  // namespace
}  // namespace distca::ops
