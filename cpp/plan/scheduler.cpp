#include "plan/scheduler.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "common/align.h"
#include "plan/head_parallel.h"
#include "plan/limits.h"

namespace distca::plan {
namespace {

using Wide = __int128;
constexpr size_t kNeighbours = 8;  // the ranks of this many segments before and after one are considered
constexpr int kTakers = 8;         // and the servers of this many shards of the document, the last that moved
constexpr int32_t kNoRank = std::numeric_limits<int32_t>::max();

}  // namespace

Scheduler::Scheduler(const Layout& layout, const PlanOptions& options, const Approach& approach,
                     const Allowances& allowances)
    : layout_(layout),
      options_(options),
      finder_(options),
      is_additive_(options.cost.is_additive()),
      gathers_(approach.gathers),
      has_allowances_(!allowances.in.empty()),
      left_(allowances),
      num_heads_(head_groups(options).num_groups),
      ranks_per_node_(ranks_of_node(layout, options)),
      num_nodes_(ceil_div(layout.num_ranks(), ranks_per_node_)) {
  const auto n = static_cast<size_t>(layout.num_ranks());
  load_ = loads_at_home(layout, options, approach.head_parallel);
  speed_ = server_speeds(layout, options);
  if (!has_allowances_) left_ = {std::vector<int64_t>(n, kNoLimit), std::vector<int64_t>(n, kNoLimit)};
  exchanged_ = {std::vector<int64_t>(n, 0), std::vector<int64_t>(n, 0)};
  first_piece_.assign(n, -1);
  is_materialised_.assign(n, 0);
  is_cut_.assign(layout.placements().size(), 0);
  last_moved_.assign(static_cast<size_t>(layout.num_documents()), -1);
  room_of_.assign(n, 0);
  node_out_.assign(static_cast<size_t>(num_nodes_), kNoLimit);
  node_in_.assign(static_cast<size_t>(num_nodes_), kNoLimit);
  index_placements();
  if (!approach.head_parallel.empty()) exchange_rows_for_heads(approach.head_parallel);
  set_limits();
}

void Scheduler::exchange_rows_for_heads(std::span<const HeadParallel> head_parallel) {
  for (int64_t document = 0; document < layout_.num_documents(); ++document) {
    const HeadParallel how = head_parallel[static_cast<size_t>(document)];
    if (how.group_size == 1) continue;
    const auto first = static_cast<size_t>(layout_.placements(document).data() - layout_.placements().data());
    std::fill_n(is_cut_.begin() + static_cast<int64_t>(first), layout_.placements(document).size(), 1);
    for (const HeadParallelGroup& g : head_parallel_groups(layout_, options_, document, how)) {
      for (const HeadParallelGroup::Member& m : g.members) {
        for (const HeadParallelGroup::Run& run : g.runs)
          add_piece({run.placement, m.rank, m.rank, m.head_begin, m.head_end, run.begin, run.end});
        load_[static_cast<size_t>(m.rank)] += cost_at(m.rank, document);
      }
    }
  }
}

void Scheduler::index_placements() {
  const auto placements = layout_.placements();
  first_of_rank_.assign(load_.size() + 1, 0);
  for (const Placement& p : placements) ++first_of_rank_[static_cast<size_t>(p.rank) + 1];
  std::partial_sum(first_of_rank_.begin(), first_of_rank_.end(), first_of_rank_.begin());
  by_rank_.resize(placements.size());
  std::vector<size_t> next(first_of_rank_.begin(), first_of_rank_.end() - 1);
  for (size_t i = 0; i < placements.size(); ++i)
    by_rank_[next[static_cast<size_t>(placements[i].rank)]++] = static_cast<int32_t>(i);
}

void Scheduler::set_limits() {
  const int64_t total = std::accumulate(load_.begin(), load_.end(), int64_t{0});
  limit_ = load_limits(total, speed_, options_.tolerance_ppm);
  // Nodes aim a little below the tolerance. Therefore not all of their ranks have to be filled to the last row.
  const int64_t lower_tolerance = options_.tolerance_ppm * 3 / 4;
  std::vector<int64_t> lower = load_limits(total, speed_, lower_tolerance);
  if (has_allowances_) {
    raise_to_reachable(load_, speed_, left_, options_.tolerance_ppm, limit_);
    raise_to_reachable(load_, speed_, left_, lower_tolerance, lower);
  }
  node_limit_.assign(static_cast<size_t>(num_nodes_), 0);
  for (size_t r = 0; r < lower.size(); ++r) node_limit_[r / static_cast<size_t>(ranks_per_node_)] += lower[r];
}

void Scheduler::balance() {
  const auto n = static_cast<int32_t>(load_.size()), of_node = static_cast<int32_t>(ranks_per_node_);
  if (num_nodes_ > 1) {
    exchange_between_nodes();
    for (int32_t r = 0; r < n; r += of_node) drain(r, std::min(n, r + of_node), options_.min_rows);
  }
  move_leftovers();
  constexpr int kRounds = 4;
  for (int round = 0; !is_additive_ && round < kRounds; ++round) {
    set_limits();
    if (all_within_limits()) break;
    move_leftovers();
  }
}

void Scheduler::move_leftovers() {
  const auto n = static_cast<int32_t>(load_.size());
  drain(0, n, options_.min_rows);
  if (options_.min_rows > 1) drain(0, n, 1);
  place_remains();
  polish();
}

bool Scheduler::all_within_limits() const {
  return std::equal(load_.begin(), load_.end(), limit_.begin(),
                    [](int64_t load, int64_t limit) { return load <= limit; });
}

void Scheduler::exchange_between_nodes() {
  std::vector<int64_t> excess(node_limit_.size());
  for (size_t r = 0; r < load_.size(); ++r) excess[r / static_cast<size_t>(ranks_per_node_)] += load_[r];
  for (size_t node = 0; node < excess.size(); ++node) {
    excess[node] -= node_limit_[node];
    node_out_[node] = std::max<int64_t>(0, excess[node]);
    node_in_[node] = std::max<int64_t>(0, -excess[node]);
  }
  drain(0, static_cast<int32_t>(load_.size()), options_.min_rows);
  node_out_.assign(node_out_.size(), kNoLimit);
  node_in_.assign(node_in_.size(), kNoLimit);
}

/// Moves shards from ranks above their limit to ranks below it, among ranks [rank_begin, rank_end).
void Scheduler::drain(int32_t rank_begin, int32_t rank_end, int64_t min_rows) {
  for (const Room& r : rooms_) room_of_[static_cast<size_t>(r.rank)] = 0;
  rooms_.clear();
  sources_.clear();
  for (int32_t r = rank_begin; r < rank_end; ++r) {
    const auto i = static_cast<size_t>(r);
    if (load_[i] > limit_[i]) {
      if (surplus(r) <= 0) continue;
      materialise(r);
      for (int32_t p = first_piece_[i]; p >= 0; p = pieces_[static_cast<size_t>(p)].next) push_source(p);
    } else if (speed_[i] > 0 && room(r) > 0) {
      room_of_[i] = room(r);
      rooms_.push_back({room(r), r});
    }
  }
  if (sources_.empty()) return;
  std::make_heap(sources_.begin(), sources_.end());
  std::sort(rooms_.begin(), rooms_.end());
  while (!sources_.empty() && !rooms_.empty()) {
    std::pop_heap(sources_.begin(), sources_.end());
    const int32_t piece = sources_.back().piece;
    sources_.pop_back();
    const Piece& p = pieces_[static_cast<size_t>(piece)];
    if (surplus(p.server) <= 0) continue;
    // A rank may end below its limit, because a shard has min_rows rows at least.
    const int64_t least = finder_.cost(document_of(p), p.begin, std::min(p.end, p.begin + min_rows));
    const int64_t amount = std::min(std::max(surplus(p.server), least), leaving(p));
    // The largest room is considered in any case; therefore it must be up to date.
    while (!rooms_.empty() && room(rooms_.back().rank) != rooms_.back().amount)
      set_room(rooms_.back().rank, room(rooms_.back().rank));
    const Move move = best_move(p, amount, min_rows);
    if (move.rank >= 0 && (is_additive_ || relief(p, move.shard) > 0)) apply(piece, move);
  }
}

void Scheduler::push_source(int32_t piece) {
  const Piece& p = pieces_[static_cast<size_t>(piece)];
  if (p.empty()) return;
  sources_.push_back({finder_.value(document_of(p), p.begin, p.end), piece});
}

Scheduler::Move Scheduler::best_move(const Piece& p, int64_t amount, int64_t min_rows) {
  Move best;
  if (rooms_.empty()) return best;
  const auto at_least = [&](int64_t wanted) {
    return static_cast<size_t>(std::lower_bound(rooms_.begin(), rooms_.end(), Room{wanted, kNoRank}) - rooms_.begin());
  };
  const size_t last = rooms_.size() - 1;
  consider(p, amount, min_rows, rooms_[last].rank, best);
  const size_t fitting = at_least(amount);
  if (fitting < last) consider(p, amount, min_rows, rooms_[fitting].rank, best);
  const Document d = document_of(p);
  const int64_t ideal = finder_.cost(d, finder_.best_tail(d, p.begin, p.end), p.end);
  const int64_t most = std::min(amount, rooms_[last].amount);
  for (int64_t k = most / ideal, tried = 0; k > 0 && tried < 2; --k, ++tried) {
    const size_t near = at_least(k * ideal);
    if (near < last && near != fitting) consider(p, amount, min_rows, rooms_[near].rank, best);
  }
  // Ranks that hold other rows of the document, or were given some, lack fewer of its keys. (Where all of its rows lie
  // on one rank, a shard brings nearly as much for a byte to any rank.)
  const int64_t document = placement_of(p).document;
  const auto of_document = layout_.key_placements(document);
  if (of_document.size() > 1) {
    const auto own = layout_.placements(document);
    const size_t here = of_document.size() - own.size() + static_cast<size_t>(&placement_of(p) - own.data());
    const size_t begin = here - std::min<size_t>(here, kNeighbours);
    for (size_t i = begin; i < std::min(of_document.size(), here + kNeighbours); ++i)
      if (room_of_[static_cast<size_t>(of_document[i].rank)] > 0)
        consider(p, amount, min_rows, static_cast<int32_t>(of_document[i].rank), best);
    int32_t moved = gathers_ ? last_moved_[static_cast<size_t>(layout_.cluster(document))] : -1;
    for (int i = 0; i < kTakers && moved >= 0; ++i) {
      const Piece& taken = pieces_[static_cast<size_t>(moved)];
      if (room_of_[static_cast<size_t>(taken.server)] > 0) consider(p, amount, min_rows, taken.server, best);
      moved = taken.moved_before;
    }
  }
  return best;
}

void Scheduler::consider(const Piece& p, int64_t amount, int64_t min_rows, int32_t rank, Move& best) {
  const int64_t budget = std::min(amount, room(rank));
  if (budget <= 0 || rank == p.server) return;
  const Document d = document_of(p);
  const auto offer = [&](Shard s) {
    if (s.empty()) return;
    s.bytes = s.num_heads * finder_.bytes(missing_rows(p, s, rank), missing_keys(p, s, rank));
    if (s.better_than(best.shard)) best = {s, rank, true};
  };
  const int64_t column = finder_.cost(d, p.begin, p.end);
  if (speed_[static_cast<size_t>(p.server)] == 0 && column <= budget)  // all of it has to go in the end
    offer(finder_.of_heads(d, p.begin, p.end, std::min(p.num_heads(), budget / column), budget, min_rows));
  else
    offer(finder_.best(d, p.begin, p.end, p.num_heads(), budget, min_rows));
}

/// Number of query rows of the shard that the server does not hold.
int64_t Scheduler::missing_rows(const Piece& p, const Shard& s, int32_t server) const {
  int64_t missing = 0;
  for_each_home(p, s.begin, s.end, [&](const Placement& home, int64_t begin, int64_t end) {
    if (home.rank != server) missing += end - begin;
  });
  return missing;
}

/// Number of key rows that the shard needs and that the server neither holds nor gets for other pieces.
int64_t Scheduler::missing_keys(const Piece& p, const Shard& s, int32_t server) const {
  const int64_t document = placement_of(p).document;
  const auto [length, mask] = document_of(p);
  int64_t next = mask.first_key(s.begin);
  const int64_t end = mask.end_key(s.end - 1, length);
  const auto of_document = layout_.placements(document), of_keys = layout_.key_placements(document);
  if (of_keys.size() == 1 && last_moved_[static_cast<size_t>(document)] < 0 && !layout_.shares_rows(document))
    return end - next;
  std::vector<std::pair<int64_t, int64_t>> present;
  // What a document with common rows brings to the server, or has there.
  const auto add_keys_of = [&](int64_t other, int64_t first_row, int64_t end_row) {
    const auto [rows, other_mask] = options_.document(layout_, other);
    layout_.add_common(document, other, other_mask.first_key(first_row), other_mask.end_key(end_row - 1, rows),
                       present);
  };
  for (const Placement& q : of_keys.first(of_keys.size() - of_document.size()))
    if (q.rank == server) present.emplace_back(q.begin, q.end);
  const auto held = placements_of(static_cast<size_t>(server));
  const auto first = static_cast<int32_t>(of_document.data() - layout_.placements().data());
  for (auto i = std::lower_bound(held.begin(), held.end(), first); i != held.end(); ++i) {
    const Placement& q = layout_.placements()[static_cast<size_t>(*i)];
    if (q.document != document) break;
    // A segment of which nothing moved is computed where it lies.
    if (is_cut_[static_cast<size_t>(*i)])
      present.emplace_back(q.begin, q.end);
    else
      present.emplace_back(std::min(q.begin, mask.first_key(q.begin)), mask.end_key(q.end - 1, length));
  }
  if (layout_.has_shared()) {
    for (int32_t i : held) {
      const Placement& q = layout_.placements()[static_cast<size_t>(i)];
      if (q.document != document && layout_.cluster(q.document) == layout_.cluster(document) &&
          !is_cut_[static_cast<size_t>(i)])
        add_keys_of(q.document, q.begin, q.end);
    }
  }
  for (int32_t i = first_piece_[static_cast<size_t>(server)]; i >= 0; i = pieces_[static_cast<size_t>(i)].next) {
    const Piece& q = pieces_[static_cast<size_t>(i)];
    if (q.empty() || layout_.cluster(placement_of(q).document) != layout_.cluster(document)) continue;
    // A piece counts if it has all heads of the shard, which are the first ones of `p`.
    if (q.head_begin <= p.head_begin && q.head_end >= p.head_begin + s.num_heads)
      add_keys_of(placement_of(q).document, q.begin, q.end);
  }
  std::sort(present.begin(), present.end());
  int64_t missing = 0;
  for (const auto& [b, e] : present) {
    missing += std::max<int64_t>(0, std::min(b, end) - next);
    next = std::max(next, e);
  }
  return missing + std::max<int64_t>(0, end - next);
}

void Scheduler::apply(int32_t index, const Move& move) {
  const Piece p = pieces_[static_cast<size_t>(index)];
  const Shard& s = move.shard;
  const auto head_end = static_cast<int32_t>(p.head_begin + s.num_heads);
  const auto from = static_cast<size_t>(p.server), to = static_cast<size_t>(move.rank);
  const int64_t document = placement_of(p).document;
  if (!is_additive_) {
    load_[from] -= cost_at(p.server, document);
    load_[to] -= cost_at(move.rank, document);
  }
  pieces_[static_cast<size_t>(index)].end = p.begin;  // empty, unless a part that remains takes its place
  bool reused = false;
  const auto keep = [&](int32_t head_begin, int32_t end_head, int64_t begin, int64_t end) {
    if (head_begin == end_head || begin == end) return;
    Piece rest = {p.placement, p.server, p.origin, head_begin, end_head, begin, end, p.next, p.moved_before};
    int32_t at = index;
    if (reused)
      at = add_piece(rest);
    else
      pieces_[static_cast<size_t>(index)] = rest;
    reused = true;
    if (move.goes_on) {
      push_source(at);
      std::push_heap(sources_.begin(), sources_.end());
    }
  };
  keep(head_end, p.head_end, p.begin, p.end);
  keep(p.head_begin, head_end, p.begin, s.begin);
  keep(p.head_begin, head_end, s.end, p.end);
  int32_t& last_moved = last_moved_[static_cast<size_t>(layout_.cluster(document))];
  last_moved = add_piece({p.placement, move.rank, p.origin, p.head_begin, head_end, s.begin, s.end, -1, last_moved});
  is_cut_[static_cast<size_t>(p.placement)] = 1;
  if (is_additive_) {
    load_[from] -= s.cost;
    load_[to] += s.cost;
  } else {
    load_[from] += cost_at(p.server, document);
    load_[to] += cost_at(move.rank, document);
  }
  count_exchange(p, move.rank, s.cost);
  if (node_of(p.server) != node_of(move.rank)) {
    auto& out = node_out_[static_cast<size_t>(node_of(p.server))];
    auto& in = node_in_[static_cast<size_t>(node_of(move.rank))];
    if (out != kNoLimit) out -= s.cost;
    if (in != kNoLimit) in -= s.cost;
  }
  if (room_of_[to] > 0) set_room(move.rank, room(move.rank));
}

void Scheduler::set_room(int32_t rank, int64_t amount) {
  int64_t& now = room_of_[static_cast<size_t>(rank)];
  rooms_.erase(std::lower_bound(rooms_.begin(), rooms_.end(), Room{now, rank}));
  now = std::max<int64_t>(0, amount);
  if (now > 0) rooms_.insert(std::lower_bound(rooms_.begin(), rooms_.end(), Room{now, rank}), Room{now, rank});
}

void Scheduler::materialise(int32_t rank) {
  char& done = is_materialised_[static_cast<size_t>(rank)];
  if (done) return;
  done = 1;
  for (int32_t i : placements_of(static_cast<size_t>(rank))) {
    if (is_cut_[static_cast<size_t>(i)]) continue;  // its document's ranks exchanged rows for heads
    const Placement& p = layout_.placements()[static_cast<size_t>(i)];
    add_piece({i, rank, rank, 0, static_cast<int32_t>(num_heads_), p.begin, p.end});
  }
}

int32_t Scheduler::add_piece(Piece piece) {
  int32_t& first = first_piece_[static_cast<size_t>(piece.server)];
  piece.next = first;
  first = static_cast<int32_t>(pieces_.size());
  pieces_.push_back(piece);
  return first;
}

std::vector<Task> Scheduler::schedule() {
  if (options_.balance) balance();
  return tasks();
}

std::vector<Task> Scheduler::tasks() const {
  const auto placements = layout_.placements();
  std::vector<Piece> pieces;
  for (const Piece& p : pieces_)
    if (!p.empty() && is_cut_[static_cast<size_t>(p.placement)]) pieces.push_back(p);
  // Placements are in ascending order of documents.
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
    return a.server != b.server ? a.server < b.server : a.placement < b.placement;
  });
  const HeadGroups groups = head_groups(options_);
  TaskWriter writer(layout_, options_, groups.heads_of_group);
  writer.reserve(placements.size() + 4 * pieces.size());  // tasks may be cut by heads later
  auto piece = pieces.begin();
  const auto add_pieces = [&](int32_t server, int32_t end) {
    for (; piece != pieces.end() && piece->server == server && piece->placement < end; ++piece)
      for_each_home(*piece, piece->begin, piece->end, [&](const Placement& home, int64_t row, int64_t row_end) {
        writer.add(home, row, row_end, piece->head_begin, piece->head_end, server);
      });
  };
  for (int32_t r = 0; r < layout_.num_ranks(); ++r) {
    for (int32_t i : placements_of(static_cast<size_t>(r))) {
      if (is_cut_[static_cast<size_t>(i)]) continue;
      add_pieces(r, i);
      const Placement& p = placements[static_cast<size_t>(i)];
      writer.add(p, p.begin, p.end, 0, groups.num_groups, r);
    }
    add_pieces(r, static_cast<int32_t>(placements.size()));
  }
  return writer.take();
}

}  // namespace distca::plan
