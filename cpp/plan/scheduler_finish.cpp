// The last steps of the scheduler: rows that found no room, single rows, and by how much a move really changes loads.
#include <algorithm>

#include "plan/limits.h"
#include "plan/scheduler.h"

namespace distca::plan {
namespace {

using Wide = __int128;

}  // namespace

/// Moves what found no room from ranks that do not serve to whichever server has the smallest load.
void Scheduler::place_remains() {
  for (int32_t r = 0; r < static_cast<int32_t>(load_.size()); ++r) {
    if (speed_[static_cast<size_t>(r)] > 0 || load_[static_cast<size_t>(r)] == 0) continue;
    materialise(r);
    for (int32_t i = first_piece_[static_cast<size_t>(r)]; i >= 0;) {
      const Piece p = pieces_[static_cast<size_t>(i)];
      if (p.empty()) {
        i = p.next;
        continue;
      }
      const int32_t to = lightest();
      const Document d = document_of(p);
      if (left_.in[static_cast<size_t>(to)] <= 0) {  // no server may have more: the whole piece goes at once
        apply(i, {{p.begin, p.end, p.num_heads(), p.num_heads() * finder_.cost(d, p.begin, p.end), 0}, to, false});
      } else {
        const int64_t begin =
            std::min(p.end - 1, finder_.tail_begin(d, p.begin, p.end, std::max<int64_t>(0, room(to))));
        apply(i, {{begin, p.end, 1, finder_.cost(d, begin, p.end), 0}, to, false});
      }
      // What remains of the piece now comes first in the list.
      i = first_piece_[static_cast<size_t>(r)];
    }
  }
}

/// Whether the load of `a` with `extra_a` more is larger than that of `b` with `extra_b` more, after division by their
/// speeds.
bool Scheduler::heavier(int32_t a, int64_t extra_a, int32_t b, int64_t extra_b) const {
  const auto i = static_cast<size_t>(a), j = static_cast<size_t>(b);
  return Wide{load_[i] + extra_a} * speed_[j] > Wide{load_[j] + extra_b} * speed_[i];
}

/// The server with the smallest load, among those that may have more if there are any.
int32_t Scheduler::lightest() const {
  int32_t found = -1;
  for (int32_t r = 0; r < static_cast<int32_t>(load_.size()); ++r) {
    const auto i = static_cast<size_t>(r);
    if (speed_[i] == 0) continue;
    const bool has_room = left_.in[i] > 0, found_has = found >= 0 && left_.in[static_cast<size_t>(found)] > 0;
    if (found < 0 || has_room > found_has || (has_room == found_has && heavier(found, 0, r, 0))) found = r;
  }
  return found;
}

/// Moves rows from the largest load to the smallest, as long as the larger one of the two falls.
void Scheduler::polish() {
  for (size_t i = 0; i < 64 + 4 * load_.size(); ++i) {
    int32_t from = -1;
    for (int32_t r = 0; r < static_cast<int32_t>(load_.size()); ++r)
      if (speed_[static_cast<size_t>(r)] > 0 && (from < 0 || heavier(r, 0, from, 0))) from = r;
    if (load_[static_cast<size_t>(from)] <= limit_[static_cast<size_t>(from)]) return;
    const int32_t to = lightest();
    materialise(from);
    int32_t piece = -1;
    const Move move = last_resort(from, to, piece);
    if (piece < 0) return;
    apply(piece, move);
  }
}

/// The rows of one head whose move brings the two loads closest to each other.
Scheduler::Move Scheduler::last_resort(int32_t from, int32_t to, int32_t& piece) const {
  const auto f = static_cast<size_t>(from), t = static_cast<size_t>(to);
  const Wide speeds = Wide{speed_[f]} + speed_[t];
  const auto even = static_cast<int64_t>((Wide{load_[f]} * speed_[t] - Wide{load_[t]} * speed_[f]) / speeds);
  Move best;
  int64_t best_distance = kNoLimit;
  const auto offer = [&](int32_t i, int64_t begin, int64_t end) {
    if (begin >= end) return;
    const Piece& p = pieces_[static_cast<size_t>(i)];
    const Shard shard = {begin, end, 1, finder_.cost(document_of(p), begin, end), 0};
    const int64_t distance = std::abs(shard.cost - even);
    if (distance >= best_distance || !heavier(from, 0, to, shard.cost) || shard.cost > allowance(p, to)) return;
    if (!is_additive_ && relief(p, shard) <= 0) return;
    best_distance = distance;
    best = {shard, to, false};
    piece = i;
  };
  for (int32_t i = first_piece_[f]; i >= 0; i = pieces_[static_cast<size_t>(i)].next) {
    const Piece& p = pieces_[static_cast<size_t>(i)];
    if (p.empty()) continue;
    const int64_t begin = finder_.tail_begin(document_of(p), p.begin, p.end, std::min(even, allowance(p, to)));
    offer(i, begin, p.end);
    offer(i, std::max(p.begin, begin - 1), p.end);
    offer(i, p.begin, p.begin + 1);
  }
  return best;
}

/// How much cost of a piece may go to a rank.
int64_t Scheduler::allowance(const Piece& p, int32_t to) const {
  return std::min(to == p.origin ? kNoLimit : left_.in[static_cast<size_t>(to)],
                  p.server == p.origin ? left_.out[static_cast<size_t>(p.origin)] : kNoLimit);
}

void Scheduler::count_exchange(const Piece& p, int32_t to, int64_t cost) {
  const auto count = [](std::vector<int64_t>& left, std::vector<int64_t>& exchanged, int32_t rank, int64_t amount) {
    const auto r = static_cast<size_t>(rank);
    exchanged[r] += amount;
    if (left[r] != kNoLimit) left[r] -= amount;
  };
  // A piece that was away from its origin gives back the allowance that it used.
  if (p.server == p.origin)
    count(left_.out, exchanged_.out, p.origin, cost);
  else
    count(left_.in, exchanged_.in, p.server, -cost);
  if (to == p.origin)
    count(left_.out, exchanged_.out, p.origin, -cost);
  else
    count(left_.in, exchanged_.in, to, cost);
}

/// By how much the load of the piece's server falls when the shard goes. This is less than the shard's cost where the
/// rest costs more in parts.
int64_t Scheduler::relief(const Piece& p, const Shard& s) const {
  const Document d = document_of(p);
  return s.num_heads *
         (finder_.cost(d, p.begin, p.end) - finder_.cost(d, p.begin, s.begin) - finder_.cost(d, s.end, p.end));
}

/// The cost of the tasks of a document at a server. For each head, rows that follow each other in the document and at
/// their home are one task.
int64_t Scheduler::cost_at(int32_t server, int64_t document) const {
  std::vector<Piece> parts;
  const auto of_document = layout_.placements(document);
  const auto first = static_cast<int32_t>(of_document.data() - layout_.placements().data());
  for (int32_t i = 0; !is_materialised_[static_cast<size_t>(server)] && i < std::ssize(of_document); ++i) {
    const Placement& p = of_document[static_cast<size_t>(i)];
    if (p.rank == server && !is_cut_[static_cast<size_t>(first + i)])
      parts.push_back({first + i, server, server, 0, static_cast<int32_t>(num_heads_), p.begin, p.end});
  }
  for (int32_t i = first_piece_[static_cast<size_t>(server)]; i >= 0; i = pieces_[static_cast<size_t>(i)].next) {
    const Piece& p = pieces_[static_cast<size_t>(i)];
    if (!p.empty() && placement_of(p).document == document) parts.push_back(p);
  }
  std::sort(parts.begin(), parts.end(), [](const Piece& a, const Piece& b) { return a.begin < b.begin; });
  const Document d = options_.document(layout_, document);
  int64_t cost = 0;
  for (int32_t head = 0; head < num_heads_; ++head) {
    int64_t begin = 0, end = 0;
    const Placement* home = nullptr;
    for (const Piece& p : parts) {
      if (head < p.head_begin || head >= p.head_end) continue;
      const Placement& at = placement_of(p);
      const bool follows =
          home && p.begin == end && at.rank == home->rank && at.row - at.begin == home->row - home->begin;
      if (!follows) {
        cost += finder_.cost(d, begin, end);
        begin = p.begin;
      }
      end = p.end;
      home = &at;
    }
    cost += finder_.cost(d, begin, end);
  }
  return cost;
}

}  // namespace distca::plan
