#include "plan/plan.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <numeric>

#include "common/digest.h"
#include "plan/capacity.h"
#include "plan/digests.h"
#include "plan/limits.h"
#include "plan/origin.h"
#include "plan/rounds.h"

namespace distca::plan {
namespace {

void check_heads(const HeadShape& h) {
  require(h.q_heads >= 1 && h.kv_heads >= 1 && h.q_heads % h.kv_heads == 0 && h.q_heads <= 4096, "heads: ", h.q_heads,
          " query heads and ", h.kv_heads,
          " key/value heads; 1 to 4096 query heads that are a multiple of the key/value heads are allowed");
  require(h.dim >= 8 && h.dim <= 256 && h.dim % 8 == 0 && h.v_dim >= 8 && h.v_dim <= 256 && h.v_dim % 8 == 0,
          "heads: dim = ", h.dim, ", v_dim = ", h.v_dim, "; multiples of 8 from 8 to 256 are allowed");
}

void check_options(const Layout& layout, const PlanOptions& o) {
  check_heads(o.schedule.heads);
  o.schedule.cost.check();
  const Mask& mask = o.schedule.mask;
  require(mask.window >= 0 && (mask.window == 0 || mask.kind == MaskKind::kCausal), "plan: window = ", mask.window,
          "; 0 (none) and, with the causal mask only, positive numbers of keys are allowed");
  require(o.schedule.tolerance_ppm >= 0 && o.schedule.tolerance_ppm <= 1'000'000,
          "plan: tolerance = ", static_cast<double>(o.schedule.tolerance_ppm) * 1e-6, "; 0 to 1 is allowed");
  require(o.schedule.min_rows >= 1, "plan: min_rows = ", o.schedule.min_rows, "; at least 1 is allowed");
  const std::vector<int64_t>& servers = o.schedule.servers;
  for (size_t i = 0; i < servers.size(); ++i) {
    require(servers[i] >= 0 && servers[i] < layout.num_ranks() && (i == 0 || servers[i - 1] < servers[i]),
            "plan: servers[", i, "] = ", servers[i], "; ascending ranks below ", layout.num_ranks(), " are allowed");
  }
  const std::vector<int64_t>& speeds = o.schedule.speeds;
  require(speeds.empty() || static_cast<int64_t>(speeds.size()) == layout.num_ranks(), "plan: ", speeds.size(),
          " speeds for ", layout.num_ranks(), " ranks");
  for (size_t i = 0; i < speeds.size(); ++i)
    require(speeds[i] >= 1 && speeds[i] <= 1 << 20, "plan: speeds[", i, "] = ", speeds[i], "; 1 to ", 1 << 20,
            " are allowed");
  require(o.schedule.ranks_per_node >= 0, "plan: ranks_per_node = ", o.schedule.ranks_per_node,
          "; 0 (one node) or a positive number is allowed");
  require(o.schedule.balance || servers.empty(), "plan: servers are given, but without balance every row is computed ",
          "at home");
  const std::vector<int64_t>& retain = o.arrangement.retain_bytes;
  require(retain.empty() || static_cast<int64_t>(retain.size()) == layout.num_ranks(), "plan: retain_bytes has ",
          retain.size(), " numbers for ", layout.num_ranks(), " ranks");
  for (size_t i = 0; i < retain.size(); ++i)
    require(retain[i] >= 0, "plan: retain_bytes of rank ", i, " = ", retain[i], "; 0 or a positive number is allowed");
  require(o.capacity > 0, "plan: capacity = ", o.capacity, " bytes; it must be positive");
  const auto& rates = o.schedule.cost.rates.rates;
  const int64_t dearest = rates.empty() ? RateTable::kRateUnit : *std::max_element(rates.begin(), rates.end());
  __int128 pairs = 0, rows = 0;
  for (int64_t length : layout.document_lengths()) {
    pairs += static_cast<__int128>(length) * length;  // of the full mask, which has the most
    rows += length;
  }
  const __int128 total =
      (pairs * o.schedule.cost.per_pair * dearest / RateTable::kRateUnit + rows * o.schedule.cost.per_row) *
      o.schedule.heads.q_heads;
  require(total < static_cast<__int128>(INT64_MAX) / 2, "plan: the total cost of the layout passes 2^62; make the ",
          "cost model's units coarser or the documents shorter");
}

template <class Row, class Allocator>
std::span<const int64_t> words_of(const std::vector<Row, Allocator>& rows) {
  return {reinterpret_cast<const int64_t*>(rows.data()), rows.size() * (sizeof(Row) / 8)};
}

uint64_t layout_digest(const Layout& layout) {
  ListDigest d;
  for (const std::vector<Segment>& segments : layout.ranks()) d.add(words_of(segments));
  return d.value();
}

Made how_made(const Layout& layout, const PlanOptions& options, std::span<const GivenTask> tasks) {
  const ScheduleOptions& o = options.schedule;
  int64_t num_tokens = 0;
  for (const int64_t length : layout.document_lengths()) num_tokens += length;
  ListDigest lists;
  for (const std::vector<int64_t>* list : {&o.servers, &o.speeds, &options.arrangement.retain_bytes}) lists.add(*list);
  lists.add({&o.ranks_per_node, 1});
  lists.add({reinterpret_cast<const int64_t*>(tasks.data()), tasks.size() * (sizeof(GivenTask) / 8)});
  return {.num_documents = std::ssize(layout.document_lengths()),
          .num_tokens = num_tokens,
          .tolerance_ppm = o.tolerance_ppm,
          .min_rows = o.min_rows,
          .capacity = options.capacity,
          .choices = (o.balance ? kBalance : 0) | (o.split_heads ? kSplitHeads : 0) | (options.overlap ? kOverlap : 0) |
                     (o.objective == Objective::kForward ? kForwardOnly : 0),
          .lists_digest = static_cast<int64_t>(lists.value())};
}

/// The words of all tables but that of the ranks' digests.
TableWords words_of(const RankTables& t) {
  return {std::span<const int64_t>(), words_of(t.groups),      words_of(t.tasks),    words_of(t.blocks),
          words_of(t.grads),          words_of(t.segments),    words_of(t.sends[0]), words_of(t.sends[1]),
          words_of(t.receives[0]),    words_of(t.receives[1]), words_of(t.waits[0]), words_of(t.waits[1])};
}

int64_t nanoseconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

Plan::Plan(std::shared_ptr<const Layout> layout, const PlanOptions& options)
    : layout_(std::move(layout)), options_(options) {
  const auto start = std::chrono::steady_clock::now();
  check_options(*layout_, options_);
  const ScheduleOptions& o = options_.schedule;
  Draft draft = make_draft(*layout_, o, options_.arrangement);
  const size_t neediest = neediest_rank(draft.arrangement);
  const int64_t wanted = slot_bytes(draft.arrangement);
  draft = fit(*layout_, o, options_.arrangement, options_.capacity, std::move(draft));
  tasks_ = std::move(draft.tasks);
  complete(std::move(draft.arrangement));
  header_.made = how_made(*layout_, options_, {});
  stats_.wanted_slot_bytes = wanted;
  if (!is_within_tolerance()) {
    const bool fits = wanted <= options_.capacity;
    stats_.binding = !o.balance ? Binding::kBalanceOff : fits ? Binding::kGrain : Binding::kCapacity;
    if (stats_.binding == Binding::kCapacity) stats_.binding_rank = static_cast<int64_t>(neediest);
  }
  stats_.plan_ns = nanoseconds_since(start);
}

Plan::Plan(std::shared_ptr<const Layout> layout, const PlanOptions& options, std::span<const GivenTask> tasks)
    : layout_(std::move(layout)), options_(options) {
  const auto start = std::chrono::steady_clock::now();
  check_options(*layout_, options_);
  const ScheduleOptions& o = options_.schedule;
  tasks_ = task_list(*layout_, o, tasks);
  complete(arrange(*layout_, o.heads, options_.arrangement, o.ranks_per_node, tasks_));
  check_capacity(arrangement_, options_.capacity);
  header_.made = how_made(*layout_, options_, tasks);
  stats_.wanted_slot_bytes = header_.slot_bytes;
  if (!is_within_tolerance()) stats_.binding = Binding::kGivenTasks;
  stats_.plan_ns = nanoseconds_since(start);
}

/// Fills in everything that follows from the tasks.
void Plan::complete(Arrangement arrangement) {
  const ScheduleOptions& o = options_.schedule;
  const auto load_of = [&](int64_t document, int64_t begin, int64_t end, int64_t kv_heads) {
    const int64_t length = layout_->document_lengths()[static_cast<size_t>(document)];
    return o.cost.cost(o.mask, length, begin, end) * kv_heads * o.heads.group_heads();
  };
  stats_.load_before = loads_at_home(*layout_, o);
  for (int64_t& load : stats_.load_before) load *= head_groups(o).query_heads_of_group;
  stats_.load.assign(stats_.load_before.size(), 0);
  for (const Task& t : tasks_)
    stats_.load[static_cast<size_t>(t.server)] +=
        load_of(t.document, t.q_begin, t.q_end, t.kv_head_end - t.kv_head_begin);
  stats_.load_lower_bound = load_lower_bound(*layout_, o);
  arrangement_ = std::move(arrangement);
  merge_rounds(arrangement_, o.heads, tasks_, options_.overlap ? options_.capacity : slot_bytes(arrangement_));
  header_ = common_header();
  RankTables tables;
  for (int64_t rank = 0; rank < layout_->num_ranks(); ++rank) {
    fill_tables(rank, /*with_blocks=*/false, tables);
    rank_digests_.push_back(static_cast<int64_t>(tables_digest(header_of(rank, tables), words_of(tables))));
  }
  header_.plan_digest = static_cast<int64_t>(plan_digest(header_, rank_digests_));
}

bool Plan::is_within_tolerance() const {
  const ScheduleOptions& o = options_.schedule;
  const int64_t unit = head_groups(o).query_heads_of_group;
  const int64_t total = std::accumulate(stats_.load.begin(), stats_.load.end(), int64_t{0}) / unit;
  const std::vector<int64_t> limits = load_limits(total, server_speeds(*layout_, o), o.tolerance_ppm);
  return std::equal(stats_.load.begin(), stats_.load.end(), limits.begin(),
                    [&](int64_t load, int64_t limit) { return load <= limit * unit; });
}

int64_t Plan::num_servers() const {
  const auto& servers = options_.schedule.servers;
  return servers.empty() ? layout_->num_ranks() : static_cast<int64_t>(servers.size());
}

bool Plan::retains() const {
  const std::vector<int64_t>& retain = options_.arrangement.retain_bytes;
  return std::any_of(retain.begin(), retain.end(), [](int64_t bytes) { return bytes > 0; });
}

ByteBounds Plan::byte_lower_bounds() const { return plan::byte_lower_bounds(*layout_, options_.schedule, retains()); }

std::vector<Transfer> Plan::transfers() const {
  return list_transfers(*layout_, options_.schedule.heads, tasks_, arrangement_);
}

void Plan::fill_tables(int64_t rank, bool with_blocks, RankTables& tables) const {
  fill_rank_tables(*layout_, options_.schedule.heads, options_.arrangement.key_block_rows, tasks_, arrangement_, rank,
                   with_blocks, tables);
}

/// The header words that all slices share, except the digest of the plan.
Header Plan::common_header() const {
  const HeadShape& h = options_.schedule.heads;
  Header header = {};
  header.magic = kMagic;
  header.version = kFormatVersion;
  header.layout_digest = static_cast<int64_t>(layout_digest(*layout_));
  header.cost_digest = static_cast<int64_t>(options_.schedule.cost.digest());
  header.num_ranks = layout_->num_ranks();
  header.q_heads = h.q_heads;
  header.kv_heads = h.kv_heads;
  header.dim = h.dim;
  header.v_dim = h.v_dim;
  header.dtype = static_cast<int64_t>(h.dtype);
  header.key_block_rows = options_.arrangement.key_block_rows;
  header.mask_kind = static_cast<int64_t>(options_.schedule.mask.kind);
  header.window = options_.schedule.mask.window;
  header.retains = retains();
  header.slot_bytes = slot_bytes(arrangement_);
  return header;
}

/// The header of a rank's slice without what its words determine: their number, their checksum and the places of the
/// tables.
Header Plan::header_of(int64_t rank, const RankTables& tables) const {
  const auto r = static_cast<size_t>(rank);
  Header header = header_;
  header.rank = rank;
  header.num_rows = layout_->num_rows(rank);
  header.arena_bytes = {arrangement_.arenas[0][r].total(), arrangement_.arenas[1][r].total()};
  header.retained_bytes = arrangement_.retained_bytes[r];
  header.num_rounds = arrangement_.num_rounds[r];
  for (const GroupRow& g : tables.groups) {
    if (!g.is_local) break;
    ++header.num_local_groups;
    header.num_local_tasks = g.task_end;
  }
  return header;
}

std::vector<int64_t> Plan::slice(int64_t rank) const {
  require(rank >= 0 && rank < layout_->num_ranks(), "plan: rank = ", rank, "; 0 to ", layout_->num_ranks() - 1,
          " are allowed");
  RankTables tables;
  fill_tables(rank, /*with_blocks=*/true, tables);
  Header header = header_of(rank, tables);
  TableWords of_tables = words_of(tables);
  of_tables[kRankDigests] = rank_digests_;
  std::vector<int64_t> words(static_cast<size_t>(kHeaderWords));
  for (size_t id = 0; id < kNumTables; ++id) {
    header.tables[id] = {std::ssize(words), std::ssize(of_tables[id]) / kRowWords[id]};
    words.insert(words.end(), of_tables[id].begin(), of_tables[id].end());
  }
  header.num_words = std::ssize(words);
  std::copy_n(reinterpret_cast<const int64_t*>(&header), kHeaderWords, words.begin());
  words[3] = static_cast<int64_t>(distca::digest(std::span(words).subspan(kChecksumBegin)));
  words.resize(std::bit_ceil(words.size()));
  return words;
}

}  // namespace distca::plan
