// The launcher for the CPU: checks a problem, expands its tasks to work items and runs the passes over them.
#include <functional>
#include <limits>
#include <tuple>

#include "attention/attention.h"
#include "attention/cpu_kernel.h"
#include "attention/store_order.h"
#include "common/error.h"

namespace distca::attention {

namespace {

void check(const Problem& problem) {
  const HeadShape& heads = problem.heads;
  require(heads.kv_heads >= 1 && heads.q_heads >= 1 && heads.q_heads % heads.kv_heads == 0, "attention: q_heads is ",
          heads.q_heads, " and kv_heads ", heads.kv_heads,
          "; both must be positive and q_heads a multiple of kv_heads");
  for (const int64_t dim : {heads.dim, heads.v_dim})
    require(is_head_dim(dim), "attention: a head dimension is ", dim, "; allowed are multiples of 8 from 8 to ",
            kMostHeadDim);
  const auto dtype = static_cast<int64_t>(heads.dtype);
  require(dtype >= 0 && dtype < kNumDTypes, "attention: dtype is ", dtype, "; allowed are 0 to ", kNumDTypes - 1);
  check_scores(problem);
  const int64_t num_groups = std::ssize(problem.groups);
  const int64_t num_tasks = std::ssize(problem.tasks);
  for (int64_t g = 0; g < num_groups; ++g) {
    const KeyGroup& group = problem.groups[g];
    const DocumentMask mask = problem.mask_of(group);
    require(1 <= group.kv_heads && group.kv_heads <= heads.kv_heads, "attention: group ", g, " has ", group.kv_heads,
            " key/value heads; 1 to ", heads.kv_heads, " are allowed");
    require(0 <= group.kv_begin && group.kv_begin <= group.kv_end, "attention: group ", g, " has key rows [",
            group.kv_begin, ", ", group.kv_end, ")");
    require(group.kv_begin == group.kv_end ||
                (group.first_block == group.kv_begin / kKeyBlockRows &&
                 group.first_block + std::ssize(group.blocks) >= ceil_div(group.kv_end, kKeyBlockRows)),
            "attention: group ", g, " has ", group.blocks.size(), " blocks from block ", group.first_block,
            ", which do not cover key rows [", group.kv_begin, ", ", group.kv_end, ")");
    require(0 <= group.task_begin && group.task_begin <= group.task_end && group.task_end <= num_tasks,
            "attention: group ", g, " has tasks [", group.task_begin, ", ", group.task_end, ") of ", num_tasks);
    int64_t last = 0;
    for (int64_t t = group.task_begin; t < group.task_end; ++t) {
      const Task& task = problem.tasks[t];
      require(task.group == g, "attention: task ", t, " is of group ", task.group, " but in the task range of group ",
              g);
      const bool all_keys = mask.mask == Mask{MaskKind::kFull};  // there may be more rows than keys
      require(last <= task.q_begin && task.q_begin < task.q_end && (all_keys || task.q_end <= group.kv_end) &&
                  mask.first_key(task.q_begin) >= group.kv_begin &&
                  mask.end_key(task.q_end - 1, group.kv_end) <= group.kv_end,
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
      require(!run.is_added || run.dtype == DType::kFloat32, "attention: group ", g, " adds a key gradient run [",
              run.begin, ", ", run.end, ") to others that are not in fp32");
      covered = run.end;
    }
    require(covered == group.kv_end, "attention: group ", g, " has key gradient runs up to row ", covered, " of [",
            group.kv_begin, ", ", group.kv_end, ")");
  }
}

}  // namespace

KernelCall::KernelCall(const Problem& p, const MicroKernel& m)
    : problem(&p),
      micro(&m),
      group_heads(p.heads.q_heads / p.heads.kv_heads),
      words(p.heads.dim / m.word_elements),
      v_words(p.heads.v_dim / m.word_elements),
      columns(round_up(p.heads.dim, kColumnUnit)),
      v_columns(round_up(p.heads.v_dim, kColumnUnit)),
      // A step of keys is read once for item_rows * group_heads rows. More rows would not fit into the second-level
      // cache.
      item_rows(std::clamp<int64_t>(kMostTiles / group_heads, 1, kMostTiles) * kTileRows) {}

struct CpuAttention::State {
  /// Units are taken in batches of about this many floats of packed memory for each worker. That is small enough for
  /// caches and work enough for all workers.
  static constexpr int64_t kBatchFloats = int64_t{1} << 20;

  const InstructionSet* isa = nullptr;
  KernelCall call;
  const Pass* pass = nullptr;
  std::vector<Unit> units;  // of all batches, after those that are computed whole
  size_t num_whole = 0;     // units that are computed whole
  int64_t most_cost = 0;    // the largest cost of such a unit
  std::vector<WorkItem> items;
  std::vector<Buffer> scratch;  // one for each worker
  Buffer memory;
  std::unique_ptr<std::atomic<int32_t>[]> progress;
  int64_t num_progress = 0;
  std::atomic<int64_t> next_item{0};

  void start(const Problem& problem, int64_t (*unit_floats)(const KernelCall&, const KeyGroup&)) {
    call = KernelCall(problem, isa->kernel_for(problem.heads.dtype));
    units.clear();
    num_whole = 0;
    add_units(unit_floats, [](const KeyGroup&) { return true; });
  }

  /// Like start, for backward. Units come by waves, each of which adds to the key gradients of those before.
  void start_backward(const Problem& problem) {
    start(problem, backward_unit_floats);
    if (!has_adds(problem)) return;
    StoreOrder order;
    std::vector<int64_t> waves;  // by group
    for (const KeyGroup& group : problem.groups) {
      int64_t wave = 0;
      for (const KeyGradRun& run : group.grads)
        order.store(run, run.begin, run.end, std::ssize(waves),
                    [&](int64_t before) { wave = std::max(wave, waves[static_cast<size_t>(before)] + 1); });
      waves.push_back(wave);
    }
    for (Unit& unit : units) unit.wave = waves[static_cast<size_t>(unit.group)];
    std::ranges::sort(units, std::less(),
                      [](const Unit& unit) { return std::tuple(unit.wave, unit.group, unit.kv_head); });
  }

  /// Like start, for forward. Units that one worker computes whole come first. They have few keys, and are each at most
  /// a quarter of a worker's share of the work, where there are several workers.
  void start_forward(const Problem& problem, int num_workers) {
    call = KernelCall(problem, isa->kernel_for(problem.heads.dtype));
    int64_t cost = 0;
    for (const KeyGroup& group : problem.groups) cost += group.kv_heads * cost_of(group);
    most_cost = num_workers > 1 ? cost / (4 * num_workers) : cost;
    const auto is_whole = [&](const KeyGroup& group) {
      return forward_unit_floats(call, group) <= kMostWholeUnitFloats && cost_of(group) <= most_cost;
    };
    units.clear();
    add_units(forward_unit_floats, is_whole);
    num_whole = units.size();
    add_units(forward_unit_floats, [&](const KeyGroup& group) { return !is_whole(group); });
  }

  /// Pairs of query rows and keys of a unit of the group, or somewhat more where a mask cuts its tasks.
  int64_t cost_of(const KeyGroup& group) const {
    const DocumentMask mask = call.problem->mask_of(group);
    int64_t cost = 0;
    for (int64_t t = group.task_begin; t < group.task_end; ++t) {
      const Task& task = call.problem->tasks[static_cast<size_t>(t)];
      cost += (task.q_end - task.q_begin) * (mask.end_key(task.q_end - 1, group.kv_end) - mask.first_key(task.q_begin));
    }
    return cost;
  }

  template <class IsWanted>
  void add_units(int64_t (*unit_floats)(const KernelCall&, const KeyGroup&), const IsWanted& is_wanted) {
    for (int64_t g = 0; g < std::ssize(call.problem->groups); ++g) {
      const KeyGroup& group = call.problem->groups[static_cast<size_t>(g)];
      if (!is_wanted(group)) continue;
      for (int64_t head = 0; head < group.kv_heads; ++head)
        units.push_back({.group = g, .kv_head = head, .num_floats = unit_floats(call, group)});
    }
  }

  /// Runs `body` for each batch of units in turn.
  template <class Body>
  void for_each_batch(const Parallel& parallel, const Body& body) {
    const int64_t most = kBatchFloats * std::max(parallel.num_workers, 1);
    for (size_t begin = num_whole; begin < units.size();) {
      size_t end = begin;
      int64_t floats = 0;
      const auto fits = [&](const Unit& unit) {
        return unit.wave == units[begin].wave && floats + unit.num_floats <= most;
      };
      for (; end < units.size() && (end == begin || fits(units[end])); ++end) {
        units[end].offset = floats;
        floats += round_up(units[end].num_floats, 16);
      }
      memory.reserve(floats);
      call.memory = memory.data();
      call.units = std::span(units).subspan(begin, end - begin);
      body();
      begin = end;
    }
  }

  /// Makes items of the units that are computed whole: as many heads of a group as are not too much work together.
  void add_whole_units() {
    items.clear();
    call.units = std::span(units).first(num_whole);
    for (int64_t begin = 0; begin < std::ssize(call.units);) {
      const Unit& unit = call.units[static_cast<size_t>(begin)];
      const KeyGroup& group = call.group_of(unit);
      const int64_t cost = cost_of(group);
      const int64_t heads =
          std::clamp<int64_t>(most_cost / 2 / std::max<int64_t>(cost, 1), 1, group.kv_heads - unit.kv_head);
      items.push_back({heads * cost, begin, 0, begin, begin + heads});
      begin += heads;
    }
  }

  /// Makes the steps of keys of each group that has units in the batch. An item's unit is the first of these units.
  void add_step_items() {
    items.clear();
    for (int64_t u = 0; u < std::ssize(call.units); ++u) {
      const Unit& unit = call.units[static_cast<size_t>(u)];
      if (u > 0 && call.units[static_cast<size_t>(u - 1)].group == unit.group) continue;
      const KeyGroup& group = call.group_of(unit);
      for_each_step(group, [&](int64_t begin, int64_t end) { items.push_back({end - begin, u, 0, begin, end}); });
    }
  }

  void add_query_items() {
    items.clear();
    for (int64_t u = 0; u < std::ssize(call.units); ++u) {
      const KeyGroup& group = call.group_of(call.units[static_cast<size_t>(u)]);
      const DocumentMask mask = call.problem->mask_of(group);
      for (int64_t t = group.task_begin; t < group.task_end; ++t) {
        const Task& task = call.problem->tasks[static_cast<size_t>(t)];
        for (int64_t begin = task.q_begin; begin < task.q_end; begin += call.item_rows) {
          const int64_t end = std::min(begin + call.item_rows, task.q_end);
          const int64_t num_keys = mask.end_key(end - 1, group.kv_end) - mask.first_key(begin);
          items.push_back({(end - begin) * num_keys, u, t, begin, end});
        }
      }
    }
  }

  /// Makes the chunks of keys. The items of a unit stay in ascending order when they are sorted by cost, because a
  /// chunk never costs more here than the one before it.
  void add_chunk_items() {
    items.clear();
    for (int64_t u = 0; u < std::ssize(call.units); ++u) {
      const KeyGroup& group = call.group_of(call.units[static_cast<size_t>(u)]);
      const DocumentMask mask = call.problem->mask_of(group);
      const auto tasks = call.problem->tasks.subspan(static_cast<size_t>(group.task_begin),
                                                     static_cast<size_t>(group.task_end - group.task_begin));
      int64_t cost = std::numeric_limits<int64_t>::max();
      for (int64_t begin = group.kv_begin; begin < group.kv_end;) {
        const int64_t end = std::min(round_down(begin, kChunkKeys) + kChunkKeys, group.kv_end);
        int64_t rows = 1;
        for (const Task& task : tasks) {
          const RowRange seeing = rows_seeing(mask, task, begin, end);
          rows += std::max<int64_t>(seeing.end - seeing.begin, 0);
        }
        cost = std::min(cost, rows * kChunkKeys);
        items.push_back({cost, u, 0, begin, end});
        begin = end;
      }
    }
  }

  /// Sets the counters of the batch, one for each strip and head, to zero.
  void reset_progress() {
    int64_t strips = 0;
    for (size_t i = 0; i < call.units.size(); ++i) {
      Unit& unit = units[static_cast<size_t>(call.units.data() - units.data()) + i];
      unit.first_strip = strips;
      strips += backward_unit_strips(call, call.group_of(unit));
    }
    if (num_progress < strips) {
      progress = std::make_unique<std::atomic<int32_t>[]>(static_cast<size_t>(strips));
      num_progress = strips;
    }
    for (int64_t i = 0; i < strips; ++i) progress[static_cast<size_t>(i)].store(0, std::memory_order_relaxed);
    call.progress = progress.get();
  }

  void sort_items() {
    std::sort(items.begin(), items.end(), [](const WorkItem& a, const WorkItem& b) {
      if (a.cost != b.cost) return a.cost > b.cost;
      if (a.unit != b.unit) return a.unit < b.unit;
      return a.begin < b.begin;
    });
  }

  void work(int num_workers, float* base) {
    const KernelThread thread(*call.micro);
    WorkerItems mine(items, num_workers, next_item);
    while (const WorkItem* item = mine.take()) pass->work(call, *item, mine, base);
  }

  void run(const Pass& which, const Parallel& parallel) {
    if (items.empty()) return;
    const int num_workers = static_cast<int>(std::min<int64_t>(std::max(parallel.num_workers, 1), std::ssize(items)));
    if (std::ssize(scratch) < num_workers) scratch.resize(static_cast<size_t>(num_workers));
    const int64_t floats = which.scratch_floats(call);
    for (int i = 0; i < num_workers; ++i) scratch[static_cast<size_t>(i)].reserve(floats);
    pass = &which;
    next_item.store(0, std::memory_order_relaxed);
    // What the lambda captures is small enough that std::function keeps it inside itself.
    parallel.run(num_workers,
                 [this, num_workers](int worker) { work(num_workers, scratch[static_cast<size_t>(worker)].data()); });
  }
};

CpuAttention::CpuAttention(std::string_view isa) : state_(std::make_unique<State>()) {
  state_->isa = &select_instruction_set(isa);
}
CpuAttention::~CpuAttention() = default;

const char* CpuAttention::isa() const { return state_->isa->name; }
const char* CpuAttention::operands(DType dtype) const { return state_->isa->kernel_for(dtype).operands; }

CpuAttention::CpuAttention(CpuAttention&&) noexcept = default;
CpuAttention& CpuAttention::operator=(CpuAttention&&) noexcept = default;

void CpuAttention::forward(const Problem& problem, const Parallel& parallel) {
  check(problem);
  State& s = *state_;
  s.start_forward(problem, parallel.num_workers);
  s.add_whole_units();
  s.sort_items();
  s.run(kWholeUnitsPass, parallel);
  s.for_each_batch(parallel, [&] {
    s.add_step_items();
    s.run(kPackKeysPass, parallel);
    s.add_query_items();
    s.sort_items();
    s.run(kForwardPass, parallel);
  });
}

void CpuAttention::backward(const Problem& problem, const Parallel& parallel) {
  check(problem);
  check_key_gradients(problem);
  State& s = *state_;
  s.start_backward(problem);
  s.for_each_batch(parallel, [&] {
    s.reset_progress();
    s.add_chunk_items();
    s.sort_items();
    s.run(kGradientPass, parallel);
    s.add_query_items();
    s.run(kStoreQueryGradientPass, parallel);
  });
}

}  // namespace distca::attention
