#include "plan/plan.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <numeric>

#include "common/digest.h"
#include "common/error.h"
#include "plan/limits.h"
#include "plan/origin.h"

namespace distca::plan {
namespace {

template <class Row>
std::span<const int64_t> words_of(std::span<const Row> rows) {
  return {reinterpret_cast<const int64_t*>(rows.data()), rows.size() * (sizeof(Row) / 8)};
}
template <class Row, class Allocator>
std::span<const int64_t> words_of(const std::vector<Row, Allocator>& rows) {
  return words_of(std::span<const Row>(rows));
}

uint64_t layout_digest(const Layout& layout) {
  ListDigest d;
  for (const std::vector<Segment>& segments : layout.ranks()) d.add(words_of(segments));
  if (layout.has_shared()) d.add(words_of(layout.shared()));
  for (int64_t document = 0; layout.has_bidirectional() && document < layout.num_documents(); ++document)
    d.add(words_of(layout.bidirectional(document)));
  return d.value();
}

PlanArguments arguments_of(const Layout& layout, const PlanOptions& o, std::span<const GivenTask> given) {
  int64_t num_tokens = 0;
  for (const Placement& p : layout.placements()) num_tokens += p.end - p.begin;
  ListDigest lists;
  for (const std::vector<int64_t>* list : {&o.servers, &o.speeds, &o.retain_bytes}) lists.add(*list);
  lists.add({&o.ranks_per_node, 1});
  lists.add({&o.round_bytes, 1});
  const ScoresRow& first = o.scores[static_cast<size_t>(o.scores_of(0))];
  ListDigest scores;
  scores.add({reinterpret_cast<const int64_t*>(o.scores.data()), o.scores.size() * (sizeof(ScoresRow) / 8)});
  scores.add(o.scores_of_document);
  lists.add({reinterpret_cast<const int64_t*>(given.data()), given.size() * (sizeof(GivenTask) / 8)});
  return {.num_documents = std::ssize(layout.document_lengths()),
          .num_tokens = num_tokens,
          .tolerance_ppm = o.tolerance_ppm,
          .min_rows = o.min_rows,
          .capacity = o.capacity,
          .choices = (o.balance ? kBalance : 0) | (o.split_heads ? kSplitHeads : 0) | (o.overlap ? kOverlap : 0) |
                     (o.objective == Objective::kForward ? kForwardOnly : 0) |
                     (o.reduces_narrow() ? kReducesNarrow : 0),
          .mask_kind = first.mask_kind,
          .window = first.window,
          .scores_digest = static_cast<int64_t>(scores.value()),
          .lists_digest = static_cast<int64_t>(lists.value())};
}

/// The words of all tables but that of the ranks' digests.
TableWords words_of(const SliceTables& t) {
  return {std::span<const int64_t>(), words_of(t.scores),   words_of(t.shared),   words_of(t.bidirectional),
          words_of(t.groups),         words_of(t.tasks),    words_of(t.blocks),   words_of(t.grads),
          words_of(t.segments),       words_of(t.sends[0]), words_of(t.sends[1]), words_of(t.receives[0]),
          words_of(t.receives[1]),    words_of(t.waits[0]), words_of(t.waits[1])};
}

/// The header words that all slices share, except the digest of the plan.
Header common_header(const Layout& layout, const PlanOptions& options, int64_t slot_bytes) {
  const HeadShape& h = options.heads;
  Header header = {};
  header.magic = kMagic;
  header.version = kFormatVersion;
  header.layout_digest = static_cast<int64_t>(layout_digest(layout));
  header.cost_digest = static_cast<int64_t>(options.cost.digest());
  header.num_ranks = layout.num_ranks();
  header.q_heads = h.q_heads;
  header.kv_heads = h.kv_heads;
  header.dim = h.dim;
  header.v_dim = h.v_dim;
  header.dtype = static_cast<int64_t>(h.dtype);
  header.key_block_rows = options.key_block_rows;
  header.label = label_words(options.label);
  header.retains = options.retains();
  header.slot_bytes = slot_bytes;
  return header;
}

/// Where heads of one document go apart, those of all documents of its cluster are cut. In a cluster of more documents
/// than these, heads stay together: that many more tasks and tables cost more than the bytes that splitting saves.
constexpr int64_t kMostSplitDocuments = 64;

}  // namespace

Plan::Plan(std::shared_ptr<const Layout> layout, const PlanOptions& options,
           const std::optional<std::span<const GivenTask>>& given)
    : layout_(std::move(layout)), options_(options) {
  const auto start = std::chrono::steady_clock::now();
  options_.check(*layout_);
  if (given) {
    options_.split_heads = true;  // the tasks say which heads go where; bounds must hold for whatever they do
    draft_.tasks = task_list(*layout_, options_, *given);
    draft_.arrangement = arrange(*layout_, options_, draft_.tasks);
    check_capacity(draft_.arrangement, options_.capacity);
  } else {
    if (layout_->largest_cluster() > kMostSplitDocuments) options_.split_heads = false;
    draft_ = make_draft(*layout_, options_);
  }
  merge_rounds(draft_.arrangement, options_.heads, draft_.tasks,
               options_.overlap ? options_.capacity : draft_.arrangement.slot_bytes());
  stats_.wanted_slot_bytes = given ? draft_.arrangement.slot_bytes() : draft_.wanted_slot_bytes;
  make_header(given.value_or(std::span<const GivenTask>()));
  stats_.load_before = loads_at_home(*layout_, options_);
  for (int64_t& load : stats_.load_before) load *= head_groups(options_).query_heads_of_group;
  stats_.load = loads();
  stats_.load_lower_bound = load_lower_bound(*layout_, options_);
  stats_.binding = binding(given.has_value());
  if (stats_.binding == Binding::kCapacity) stats_.binding_rank = draft_.neediest_rank;
  const auto elapsed = std::chrono::steady_clock::now() - start;
  stats_.plan_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(elapsed).count();
}

/// The load of every rank, in cost-model units x query heads.
std::vector<int64_t> Plan::loads() const {
  std::vector<int64_t> loads(static_cast<size_t>(layout_->num_ranks()), 0);
  for (const Task& t : draft_.tasks) {
    loads[static_cast<size_t>(t.server)] +=
        options_.cost.cost(options_.document(*layout_, t.document), t.q_begin, t.q_end) *
        (t.kv_head_end - t.kv_head_begin) * options_.heads.group_heads();
  }
  return loads;
}

std::vector<int64_t> Plan::rounds_of_tasks() const {
  std::vector<int64_t> rounds(draft_.tasks.size(), -1);
  for (const Group& g : draft_.arrangement.groups)
    std::fill(rounds.begin() + static_cast<int64_t>(g.task_begin), rounds.begin() + static_cast<int64_t>(g.task_end),
              g.round);
  return rounds;
}

Binding Plan::binding(bool tasks_are_given) const {
  const int64_t unit = head_groups(options_).query_heads_of_group;
  const int64_t total = std::accumulate(stats_.load.begin(), stats_.load.end(), int64_t{0}) / unit;
  const std::vector<int64_t> limits = load_limits(total, server_speeds(*layout_, options_), options_.tolerance_ppm);
  const bool is_within_tolerance = std::equal(stats_.load.begin(), stats_.load.end(), limits.begin(),
                                              [&](int64_t load, int64_t limit) { return load <= limit * unit; });
  if (is_within_tolerance) return Binding::kNone;
  if (tasks_are_given) return Binding::kGivenTasks;
  if (!options_.balance) return Binding::kBalanceOff;
  return stats_.wanted_slot_bytes <= options_.capacity ? Binding::kGrain : Binding::kCapacity;
}

int64_t Plan::num_servers() const {
  return options_.servers.empty() ? layout_->num_ranks() : std::ssize(options_.servers);
}

ByteBounds Plan::byte_lower_bounds() const { return plan::byte_lower_bounds(*layout_, options_); }

/// Makes what all slices share. Only their digests are made at once, because a rank needs no slice but its own.
void Plan::make_header(std::span<const GivenTask> given) {
  header_ = common_header(*layout_, options_, draft_.arrangement.slot_bytes());
  SliceTables tables;
  for (int64_t rank = 0; rank < layout_->num_ranks(); ++rank) {
    fill_slice_tables(*layout_, options_, draft_.tasks, draft_.arrangement, rank, /*with_blocks=*/false, tables);
    rank_digests_.push_back(static_cast<int64_t>(tables_digest(header_of(rank, tables), words_of(tables))));
  }
  header_.plan_digest = static_cast<int64_t>(plan_digest(header_, rank_digests_));
  header_.arguments = arguments_of(*layout_, options_, given);
}

/// The header of a rank's slice without what its words determine: their number, their checksum and the places of the
/// tables.
Header Plan::header_of(int64_t rank, const SliceTables& tables) const {
  const auto r = static_cast<size_t>(rank);
  const Arrangement& a = draft_.arrangement;
  Header header = header_;
  header.rank = rank;
  header.num_rows = layout_->num_rows(rank);
  header.arena_bytes = {a.arenas[0][r].total(), a.arenas[1][r].total()};
  header.retained_bytes = a.retained_bytes[r];
  header.num_rounds = a.num_rounds[r];
  for (const GroupRow& g : tables.groups) {
    if (g.round >= 0) break;
    ++header.num_local_groups;
    header.num_local_tasks = g.task_end;
  }
  return header;
}

std::vector<int64_t> Plan::slice(int64_t rank) const {
  require(rank >= 0 && rank < layout_->num_ranks(), "plan: rank = ", rank, "; 0 to ", layout_->num_ranks() - 1,
          " are allowed");
  SliceTables tables;
  fill_slice_tables(*layout_, options_, draft_.tasks, draft_.arrangement, rank, /*with_blocks=*/true, tables);
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
