#include "attention/work_list.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "attention/store_order.h"

namespace distca::attention::cuda {

namespace {

int checked(int64_t n, const char* what) {
  require(n >= -kMostRows && n <= kMostRows, what, " is ", n, "; the CUDA kernels take up to ", kMostRows);
  return static_cast<int>(n);
}

void check_aligned(const RowView& view, const char* what) {
  const auto bits = reinterpret_cast<uintptr_t>(view.data) | static_cast<uintptr_t>(view.row_stride) |
                    static_cast<uintptr_t>(view.head_stride);
  require(bits % 16 == 0, what, ": address ", static_cast<const void*>(view.data), " and strides ", view.row_stride,
          ", ", view.head_stride, " bytes have to be multiples of 16 for the CUDA kernels");
}

/// The stride that a map gets. The stride of a dimension of one element does not matter, but the map wants a valid one:
/// that of rows side by side.
int64_t used_stride(int64_t stride, int64_t size, int64_t dim) { return size == 1 ? (2 * dim + 15) / 16 * 16 : stride; }

/// Adds the map of `rows` rows of keys, which are loaded a box of one head at a time.
int add_key_map(WorkList& list, const RowView& view, int64_t dim, int64_t heads, int64_t rows, const char* what) {
  const int index = static_cast<int>(list.maps.size());
  MapSpec& map = list.maps.emplace_back();
  if (rows <= 0) return index;
  check_aligned(view, what);
  map = {view.data,
         {dim, rows, heads},
         {used_stride(view.row_stride, rows, dim), used_stride(view.head_stride, heads, dim)},
         {kBoxColumns, kTableRows, 1}};
  return index;
}

/// Adds the map of `rows` rows of queries, which are loaded some tokens at a time with all heads that share a key/value
/// head.
int add_query_map(WorkList& list, const RowView& view, int64_t dim, int64_t heads, int64_t rows, const char* what) {
  const int index = static_cast<int>(list.maps.size());
  MapSpec& map = list.maps.emplace_back();
  if (rows <= 0) return index;
  check_aligned(view, what);
  map = {view.data,
         {dim, heads, rows},
         {used_stride(view.head_stride, heads, dim), used_stride(view.row_stride, rows, dim)},
         {kBoxColumns, list.params.group_heads, list.params.tile_tokens}};
  return index;
}

ScoreMap score_map(const Scores& scores) {
  constexpr float kLog2E = 1.4426950408889634f;
  if (scores.softcap != 0.f) return {kLog2E, 1.f, scores.softcap, scores.scale / scores.softcap};
  if (scores.scale == 0.f) return {1.f, 0.f, 0.f, 0.f};
  return {std::fabs(scores.scale) * kLog2E, scores.scale > 0.f ? 1.f : -1.f, 0.f, 0.f};
}

ScoreEntry score_entry(const Scores& scores) {
  const auto window = static_cast<int>(std::min(scores.mask.window, kMostRows));
  return {{window, scores.mask.is_full() ? 1 : 0}, score_map(scores), scores.scale};
}

void begin_list(const Problem& problem, TileShape shape, WorkList& list) {
  list.items.clear();
  list.store_items.clear();
  list.tasks.clear();
  list.groups.clear();
  list.runs.clear();
  list.bidirectional.clear();
  list.blocks.clear();
  list.maps.clear();
  list.costs.clear();
  list.unsorted.clear();
  list.first_item.clear();
  list.before.clear();
  list.follows.clear();
  KernelParams& p = list.params = KernelParams{};
  p.dim = static_cast<int>(problem.heads.dim);
  p.v_dim = static_cast<int>(problem.heads.v_dim);
  p.group_heads = checked(problem.heads.group_heads(), "number of query heads that share a key/value head");
  require(p.group_heads >= 1 && p.group_heads <= shape.rows, p.group_heads,
          " query heads share a key/value head; the CUDA kernels take up to ", shape.rows);
  p.tile_tokens = shape.rows / p.group_heads;
  check_scores(problem);
  std::transform(problem.scores.begin(), problem.scores.end(), p.scores, score_entry);
}

void add_group(const Problem& problem, const KeyGroup& group, WorkList& list) {
  GroupEntry entry{};
  entry.scores = static_cast<int>(group.scores);
  require(group.kv_begin < group.kv_end, "a group of keys has rows ", group.kv_begin, " to ", group.kv_end,
          "; the CUDA kernels need one at least");
  entry.kv_begin = checked(group.kv_begin, "first key row");
  entry.kv_end = checked(group.kv_end, "end of key rows");
  entry.first_block = checked(group.first_block, "first key block");
  entry.blocks = checked(static_cast<int64_t>(list.blocks.size()), "number of key blocks");
  // A source ends after the last row that the table refers to.
  int64_t rows[2] = {0, 0};
  for (size_t b = 0; b < group.blocks.size(); ++b) {
    const int64_t word = group.blocks[b], begin = (group.first_block + static_cast<int64_t>(b)) * kTableRows;
    const int64_t end = (word >> 1) + std::min(begin + kTableRows, group.kv_end) - begin;
    checked(word >> 1, "row of a key block");
    rows[word & 1] = std::max(rows[word & 1], end);
    list.blocks.push_back(word);
  }
  const HeadShape& heads = problem.heads;
  entry.k_maps = add_key_map(list, group.k[0], heads.dim, group.kv_heads, rows[0], "k");
  add_key_map(list, group.k[1], heads.dim, group.kv_heads, rows[1], "k in the arena");
  add_key_map(list, group.v[0], heads.v_dim, group.kv_heads, rows[0], "v");
  add_key_map(list, group.v[1], heads.v_dim, group.kv_heads, rows[1], "v in the arena");
  entry.bidirectional_begin = static_cast<int>(list.bidirectional.size());
  for (const BidirectionalRows& rows : group.bidirectional)
    list.bidirectional.push_back({checked(rows.begin, "first bidirectional row"), checked(rows.end, "their end")});
  entry.bidirectional_end = checked(static_cast<int64_t>(list.bidirectional.size()), "number of bidirectional rows");
  list.groups.push_back(entry);
}

void add_task(const Problem& problem, const Task& task, Signal signal, WorkList& list) {
  TaskEntry entry{};
  entry.group = checked(task.group, "number of groups");
  entry.q_begin = checked(task.q_begin, "first query row");
  entry.num_rows = checked(task.q_end, "end of query rows") - entry.q_begin;
  entry.num_tiles = ceil_div(entry.num_rows, list.params.tile_tokens);
  const int64_t kv_heads = problem.groups[static_cast<size_t>(task.group)].kv_heads;
  entry.q_map = add_query_map(list, task.q, problem.heads.dim, kv_heads * list.params.group_heads, entry.num_rows, "q");
  entry.signal = signal;
  entry.out = task.out;
  entry.lse = task.lse;
  entry.delta = task.delta;
  entry.dq = task.dq;
  entry.max_logits = task.max_logits;
  list.tasks.push_back(entry);
}

/// Sorts `unsorted` into `items`: by (remote, cost descending), and otherwise in the order in which they stand.
void sort_items(WorkList& list) {
  checked(static_cast<int64_t>(list.unsorted.size()), "number of work items");
  if (list.unsorted.empty()) return;
  const auto most = static_cast<size_t>(*std::max_element(list.costs.begin(), list.costs.end()));
  const auto rank_of = [&](size_t i) {
    return static_cast<size_t>(list.unsorted[i].remote) * (most + 1) + most - static_cast<size_t>(list.costs[i]);
  };
  // Costs are small numbers: items are counted, and each finds its place.
  std::vector<int32_t>& places = list.places;
  places.assign(2 * (most + 1) + 1, 0);
  for (size_t i = 0; i < list.unsorted.size(); ++i) ++places[rank_of(i) + 1];
  std::partial_sum(places.begin(), places.end(), places.begin());
  list.items.resize(list.unsorted.size());
  list.numbers.resize(list.unsorted.size());
  for (size_t i = 0; i < list.unsorted.size(); ++i) {
    list.numbers[i] = places[rank_of(i)]++;
    list.items[static_cast<size_t>(list.numbers[i])] = list.unsorted[i];
  }
}

void add_tables(const Problem& problem, std::span<const Signal> signals, WorkList& list) {
  require(signals.empty() || signals.size() == problem.tasks.size(), signals.size(), " signals for ",
          problem.tasks.size(), " tasks");
  for (const KeyGroup& group : problem.groups) add_group(problem, group, list);
  list.params.bidirectional = list.bidirectional.data();
  for (size_t t = 0; t < problem.tasks.size(); ++t)
    add_task(problem, problem.tasks[t], signals.empty() ? Signal{} : signals[t], list);
}

/// Adds the items of each key/value head of a group with their costs, blocks in ascending order.
void add_key_items(const KeyGroup& group, int group_index, int keys, WorkList& list) {
  const GroupEntry& entry = list.groups[static_cast<size_t>(group_index)];
  const auto tasks =
      std::span(list.tasks)
          .subspan(static_cast<size_t>(group.task_begin), static_cast<size_t>(group.task_end - group.task_begin));
  const bool remote =
      std::any_of(tasks.begin(), tasks.end(), [](const TaskEntry& t) { return t.signal.word != nullptr; });
  const size_t first = list.unsorted.size();
  for (int block = entry.kv_begin / keys; block * keys < entry.kv_end; ++block) {
    const int begin = maximum(block * keys, entry.kv_begin), end = minimum((block + 1) * keys, entry.kv_end);
    WorkItem item{group_index, 0, 0, 0, block, 0, remote ? 1 : 0, 0, 0, 0};
    for (size_t t = 0; t < tasks.size(); ++t) {
      const RowRange seeing = tiles_that_see(list.params, entry, tasks[t], begin, end);
      if (seeing.begin >= seeing.end) continue;
      const int index = static_cast<int>(group.task_begin + static_cast<int64_t>(t));
      if (item.task_end == 0) item.task = index;
      item.task_end = index + 1;
      item.num_tiles += seeing.end - seeing.begin;
    }
    list.unsorted.push_back(item);
    list.costs.push_back(item.num_tiles);
  }
  // Each block costs at least what any later block costs. Then sorting by cost keeps the order.
  for (size_t i = list.costs.size(); i-- > first + 1;) list.costs[i - 1] = std::max(list.costs[i - 1], list.costs[i]);
  const size_t end = list.unsorted.size();
  for (int head = 1; head < group.kv_heads; ++head) {
    for (size_t i = first; i < end; ++i) {
      list.unsorted.push_back(list.unsorted[i]);
      list.unsorted.back().kv_head = head;
      list.costs.push_back(list.costs[i]);
    }
  }
}

// ---- groups that add to the same key gradients

/// Finds which items store to the same rows just one after another. All of them are listed as those of the first head.
void find_follows(const Problem& problem, int keys, WorkList& list) {
  StoreOrder order;
  for (size_t g = 0; g < problem.groups.size(); ++g) {
    const int first_block = list.unsorted[list.first_item[g]].index;
    for (const KeyGradRun& run : problem.groups[g].grads) {
      if (run.dtype != DType::kFloat32) continue;  // nobody adds to it
      for (int64_t row = run.begin; row < run.end;) {
        const int64_t block = row / keys, end = std::min(run.end, (block + 1) * keys);
        const size_t item = list.first_item[g] + static_cast<size_t>(block - first_block);
        order.store(run, row, end, static_cast<int64_t>(item),
                    [&](int64_t before) { list.follows.emplace_back(item, static_cast<size_t>(before)); });
        row = end;
      }
    }
  }
  std::ranges::sort(list.follows);
  list.follows.erase(std::unique(list.follows.begin(), list.follows.end()), list.follows.end());
}

/// Raises costs so that an item is sorted after those that it waits for, and lets a group come last if it waits for one
/// that waits for a signal.
void order_groups(const Problem& problem, WorkList& list) {
  auto follows = list.follows.rbegin();
  for (size_t g = problem.groups.size(); g-- > 0;) {
    const size_t first = list.first_item[g], end = list.end_item(g);
    const size_t blocks = (end - first) / static_cast<size_t>(problem.groups[g].kv_heads);
    // Those of later groups have raised these by now. Blocks of a head stay in ascending order.
    for (size_t i = first + blocks; i-- > first + 1;) list.costs[i - 1] = std::max(list.costs[i - 1], list.costs[i]);
    for (size_t i = first + blocks; i < end; ++i) list.costs[i] = list.costs[i - blocks];
    for (; follows != list.follows.rend() && follows->first >= first; ++follows)
      list.costs[follows->second] = std::max(list.costs[follows->second], list.costs[follows->first]);
  }
  const auto is_remote = [&](size_t item) -> int& {
    return list.unsorted[list.first_item[static_cast<size_t>(list.unsorted[item].group)]].remote;
  };
  for (const auto& [item, before] : list.follows) is_remote(item) |= is_remote(before);  // by groups, ascending
  for (size_t g = 0; g < problem.groups.size(); ++g)
    for (size_t i = list.first_item[g]; i < list.end_item(g); ++i) list.unsorted[i].remote = is_remote(i);
}

/// Tells items after which ones they store their gradients.
void chain_items(const Problem& problem, WorkList& list) {
  const auto blocks_of = [&](size_t item) {
    const auto g = static_cast<size_t>(list.unsorted[item].group);
    return (list.end_item(g) - list.first_item[g]) / static_cast<size_t>(problem.groups[g].kv_heads);
  };
  for (auto begin = list.follows.begin(); begin != list.follows.end();) {
    const size_t item = begin->first;
    const auto end = std::find_if(begin, list.follows.end(), [&](const auto& f) { return f.first != item; });
    const auto heads = static_cast<size_t>(problem.groups[static_cast<size_t>(list.unsorted[item].group)].kv_heads);
    for (size_t head = 0; head < heads; ++head) {
      WorkItem& one = list.items[static_cast<size_t>(list.numbers[item + head * blocks_of(item)])];
      one.before_begin = static_cast<int>(list.before.size());
      for (auto f = begin; f != end; ++f) {
        const int before = list.numbers[f->second + head * blocks_of(f->second)];
        list.items[static_cast<size_t>(before)].is_awaited = 1;
        list.before.push_back(before);
      }
      one.before_end = checked(static_cast<int64_t>(list.before.size()), "number of items that others wait for");
    }
    begin = end;
  }
}

}  // namespace

void list_forward(const Problem& problem, std::span<const Signal> signals, TileShape shape, WorkList& list) {
  begin_list(problem, shape, list);
  add_tables(problem, signals, list);
  for (size_t t = 0; t < problem.tasks.size(); ++t) {
    const TaskEntry& task = list.tasks[t];
    const GroupEntry& group = list.groups[static_cast<size_t>(task.group)];
    const GroupMask mask = list.params.mask_of(group);
    const auto kv_heads = static_cast<int>(problem.groups[static_cast<size_t>(task.group)].kv_heads);
    check_aligned(task.out, "out");
    const int index = static_cast<int>(t), remote = task.signal.word != nullptr ? 1 : 0;
    for (int head = 0; head < kv_heads; ++head) {
      for (int tile = 0; tile < task.num_tiles; ++tile) {
        const RowRange keys = visible_keys(mask, tile_tokens(list.params, task, tile), group);
        require(keys.begin < keys.end, "rows of task ", t, " see none of the keys ", group.kv_begin, " to ",
                group.kv_end, "; the CUDA kernels need one at least");
        list.unsorted.push_back({task.group, head, index, index + 1, tile, 0, remote, 0, 0, 0});
        list.costs.push_back(ceil_div(keys.end, shape.keys) - keys.begin / shape.keys);
      }
    }
  }
  sort_items(list);
}

void list_backward(const Problem& problem, std::span<const Signal> signals, TileShape shape, WorkList& list) {
  begin_list(problem, shape, list);
  add_tables(problem, signals, list);
  int64_t num_tiles = 0;
  for (size_t t = 0; t < problem.tasks.size(); ++t) {
    TaskEntry& task = list.tasks[t];
    const auto kv_heads = static_cast<int>(problem.groups[static_cast<size_t>(task.group)].kv_heads);
    task.dout_map = add_query_map(list, problem.tasks[t].dout, problem.heads.v_dim, kv_heads * list.params.group_heads,
                                  task.num_rows, "dout");
    check_aligned(task.dq, "dq");
    task.first_tile = checked(num_tiles, "number of query tiles");
    num_tiles += int64_t{kv_heads} * task.num_tiles;
    for (int head = 0; head < kv_heads; ++head)
      for (int tile = 0; tile < task.num_tiles; ++tile) list.store_items.push_back({static_cast<int>(t), head, tile});
  }
  checked(num_tiles, "number of query tiles");
  for (size_t g = 0; g < problem.groups.size(); ++g) {
    const KeyGroup& group = problem.groups[g];
    GroupEntry& entry = list.groups[g];
    entry.run_begin = static_cast<int>(list.runs.size());
    for (const KeyGradRun& run : group.grads) {
      check_aligned(run.dk, "dk");
      check_aligned(run.dv, "dv");
      list.runs.push_back(
          {static_cast<int>(run.begin), static_cast<int>(run.end), run.dtype, run.is_added ? 1 : 0, run.dk, run.dv});
    }
    entry.run_end = static_cast<int>(list.runs.size());
    list.first_item.push_back(list.unsorted.size());
    add_key_items(group, static_cast<int>(g), shape.keys, list);
  }
  if (has_adds(problem)) {
    find_follows(problem, shape.keys, list);
    order_groups(problem, list);
  }
  sort_items(list);
  chain_items(problem, list);
}

}  // namespace distca::attention::cuda
