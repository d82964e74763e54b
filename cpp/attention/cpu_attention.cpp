// The CPU kernel: checks a problem, expands its tasks to work items and runs the passes over them.
#include <limits>

#include "attention/attention.h"
#include "attention/cpu_kernel.h"
#include "common/error.h"

namespace distca::attention {

namespace {

void check(const Problem& problem) {
  const HeadShape& heads = problem.heads;
  require(heads.kv_heads >= 1 && heads.q_heads >= 1 && heads.q_heads % heads.kv_heads == 0, "attention: q_heads is ",
          heads.q_heads, " and kv_heads ", heads.kv_heads,
          "; both must be positive and q_heads a multiple of kv_heads");
  for (const int64_t dim : {heads.dim, heads.v_dim})
    require(dim >= 8 && dim <= 256 && dim % 8 == 0, "attention: a head dimension is ", dim,
            "; allowed are multiples of 8 from 8 to 256");
  const auto dtype = static_cast<int64_t>(heads.dtype);
  require(dtype >= 0 && dtype < kNumDTypes, "attention: dtype is ", dtype, "; allowed are 0 to ", kNumDTypes - 1);
  require(problem.mask.window >= 0 && (problem.mask.window == 0 || problem.mask.kind == MaskKind::kCausal),
          "attention: window is ", problem.mask.window, "; allowed are 0 (none) and, causal only, positive ones");
  const int64_t num_groups = std::ssize(problem.groups);
  const int64_t num_tasks = std::ssize(problem.tasks);
  for (int64_t g = 0; g < num_groups; ++g) {
    const KeyGroup& group = problem.groups[g];
    require(1 <= group.kv_heads && group.kv_heads <= heads.kv_heads, "attention: group ", g, " has ", group.kv_heads,
            " key/value heads; 1 to ", heads.kv_heads, " are allowed");
    require(0 <= group.kv_begin && group.kv_begin <= group.kv_end, "attention: group ", g, " has key rows [",
            group.kv_begin, ", ", group.kv_end, ")");
    require(group.kv_begin == group.kv_end ||
                (group.first_block == group.kv_begin / kKeyBlockRows &&
                 group.first_block + std::ssize(group.blocks) >= round_up(group.kv_end, kKeyBlockRows) / kKeyBlockRows),
            "attention: group ", g, " has ", group.blocks.size(), " blocks from block ", group.first_block,
            ", which do not cover key rows [", group.kv_begin, ", ", group.kv_end, ")");
    require(0 <= group.task_begin && group.task_begin <= group.task_end && group.task_end <= num_tasks,
            "attention: group ", g, " has tasks [", group.task_begin, ", ", group.task_end, ") of ", num_tasks);
    int64_t last = 0;
    for (int64_t t = group.task_begin; t < group.task_end; ++t) {
      const Task& task = problem.tasks[t];
      require(task.group == g, "attention: task ", t, " is of group ", task.group, " but in the task range of group ",
              g);
      require(last <= task.q_begin && task.q_begin < task.q_end && task.q_end <= group.kv_end &&
                  problem.mask.first_key(task.q_begin) >= group.kv_begin,
              "attention: task ", t, " has query rows [", task.q_begin, ", ", task.q_end, "); allowed is an ascending ",
              "range from row ", last, " on that sees keys of [", group.kv_begin, ", ", group.kv_end, ") only");
      last = task.q_end;
    }
  }
  for (int64_t t = 0; t < num_tasks; ++t)
    require(0 <= problem.tasks[t].group && problem.tasks[t].group < num_groups, "attention: task ", t, " is of group ",
            problem.tasks[t].group, "; there are ", num_groups);
}

void check_key_gradients(const Problem& problem) {
  for (size_t g = 0; g < problem.groups.size(); ++g) {
    const KeyGroup& group = problem.groups[g];
    int64_t covered = group.kv_begin;
    for (const KeyGradRun& run : group.grads) {
      require(run.begin == covered && run.begin <= run.end, "attention: group ", g, " has a key gradient run [",
              run.begin, ", ", run.end, "); the next one must begin at row ", covered);
      covered = run.end;
    }
    require(covered == group.kv_end, "attention: group ", g, " has key gradient runs up to row ", covered, " of [",
            group.kv_begin, ", ", group.kv_end, ")");
  }
}

}  // namespace

struct CpuAttention::State {
  const MicroKernel* micro = nullptr;
  KernelCall call;
  const Pass* pass = nullptr;
  std::vector<WorkItem> items;
  std::vector<std::vector<float>> scratch;  // one a worker
  std::atomic<int64_t> next_item{0};

  void add_query_items() {
    const Problem& problem = *call.problem;
    items.clear();
    for (int64_t t = 0; t < std::ssize(problem.tasks); ++t) {
      const Task& task = problem.tasks[t];
      const Mask& mask = problem.mask;
      const KeyGroup& group = problem.groups[task.group];
      const int64_t length = group.kv_end;
      for (int64_t head = 0; head < group.kv_heads; ++head) {
        for (int64_t begin = task.q_begin; begin < task.q_end; begin += call.item_rows) {
          const int64_t end = std::min(begin + call.item_rows, task.q_end);
          const int64_t num_keys = mask.end_key(end - 1, length) - mask.first_key(begin);
          items.push_back({(end - begin) * num_keys, t, head, begin, end});
        }
      }
    }
  }

  void add_key_items() {
    const Problem& problem = *call.problem;
    items.clear();
    for (int64_t g = 0; g < std::ssize(problem.groups); ++g) {
      const KeyGroup& group = problem.groups[g];
      for (int64_t begin = group.kv_begin; begin < group.kv_end;) {
        const int64_t end = std::min((begin / kKeyBlockRows + 1) * kKeyBlockRows, group.kv_end);
        int64_t rows = 1;
        for (const Task& task : problem.tasks.subspan(group.task_begin, group.task_end - group.task_begin)) {
          const RowRange seeing = rows_seeing(problem.mask, task, begin, end);
          rows += std::max<int64_t>(seeing.end - seeing.begin, 0);
        }
        for (int64_t head = 0; head < group.kv_heads; ++head)
          items.push_back({rows * (end - begin), g, head, begin, end});
        begin = end;
      }
    }
  }

  void work(int worker) {
    // Vectors that straddle two cache lines cost twice.
    const uintptr_t address = reinterpret_cast<uintptr_t>(scratch[worker].data());
    float* base = reinterpret_cast<float*>((address + 63) / 64 * 64);
    for (;;) {
      const int64_t i = next_item.fetch_add(1, std::memory_order_relaxed);
      if (i >= std::ssize(items)) return;
      pass->work(call, items[i], base);
    }
  }

  void run(const Pass& which, const Parallel& parallel) {
    if (items.empty()) return;
    std::sort(items.begin(), items.end(), [](const WorkItem& a, const WorkItem& b) {
      if (a.cost != b.cost) return a.cost > b.cost;
      if (a.index != b.index) return a.index < b.index;
      return a.kv_head != b.kv_head ? a.kv_head < b.kv_head : a.begin < b.begin;
    });
    const int num_workers = static_cast<int>(std::min<int64_t>(std::max(parallel.num_workers, 1), std::ssize(items)));
    if (std::ssize(scratch) < num_workers) scratch.resize(num_workers);
    const size_t floats = static_cast<size_t>(which.scratch_floats(call)) + 16;
    for (int i = 0; i < num_workers; ++i)
      if (scratch[i].size() < floats) scratch[i].resize(floats);
    pass = &which;
    next_item.store(0, std::memory_order_relaxed);
    parallel.run(num_workers, [this](int worker) { work(worker); });  // one pointer: std::function keeps it inside
  }
};

CpuAttention::CpuAttention(std::string_view isa) : state_(std::make_unique<State>()) {
  state_->micro = &select_micro_kernel(isa);
}
CpuAttention::~CpuAttention() = default;

const char* CpuAttention::isa() const { return state_->micro->isa; }

CpuAttention::CpuAttention(CpuAttention&&) noexcept = default;
CpuAttention& CpuAttention::operator=(CpuAttention&&) noexcept = default;

void CpuAttention::forward(const Problem& problem, const Parallel& parallel) {
  check(problem);
  state_->call = KernelCall(problem, *state_->micro);
  state_->add_query_items();
  state_->run(kForwardPass, parallel);
}

void CpuAttention::backward(const Problem& problem, const Parallel& parallel) {
  check(problem);
  check_key_gradients(problem);
  state_->call = KernelCall(problem, *state_->micro);
  // All key gradients first: the second pass may write dq over the dout that the first one reads.
  state_->add_key_items();
  state_->run(kKeyGradientPass, parallel);
  state_->add_query_items();
  state_->run(kQueryGradientPass, parallel);
}

}  // namespace distca::attention
