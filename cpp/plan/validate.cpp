#include "plan/validate.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "plan/consistency.h"
#include "plan/origin.h"

namespace distca::plan {
namespace {

/// Whether [begin, begin + count) lies inside [0, size). Nothing overflows.
bool inside(int64_t begin, int64_t count, int64_t size) {
  return begin >= 0 && count >= 0 && begin <= size && count <= size - begin;
}

/// Checks every index, row and offset of a slice against its bounds, then the tables against each other.
class Validator {
 public:
  explicit Validator(std::span<const int64_t> words) : words_(words), view_(words) {}

  void run() {
    check_header();
    check_tables();
    check_scores();
    check_shared();
    check_bidirectional();
    for (const SegmentRow& s : view_.segments())
      check_plan(s.document >= -1 && s.begin >= 0 && s.begin < s.end && s.end <= kMaxRows, "segment of document ",
                 s.document, ": rows [", s.begin, ", ", s.end, ")");
    check_groups();
    check_tasks();
    for (Phase p : {Phase::kForward, Phase::kBackward}) {
      check_sends(p);
      check_receives(p);
      check_waits(p);
    }
    check_consistency(view_);
    check_digests();
  }

 private:
  static constexpr int64_t kMaxRows = int64_t{1} << 31;

  const Header& h() const { return view_.header(); }

  void check_header() {
    check_plan(h().num_ranks >= 1 && h().rank >= 0 && h().rank < h().num_ranks, "rank ", h().rank, " of ",
               h().num_ranks);
    check_plan(h().num_rows >= 0 && h().num_rows <= kMaxRows, "it says ", h().num_rows, " rows");
    check_plan(h().q_heads >= 1 && h().q_heads <= 4096 && h().kv_heads >= 1 && h().q_heads % h().kv_heads == 0 &&
                   is_head_dim(h().dim) && is_head_dim(h().v_dim) && h().dtype >= 0 && h().dtype < kNumDTypes &&
                   h().key_block_rows >= 1 && h().key_block_rows <= 4096,
               "its head shape is not possible");
    check_plan(label_words(label_of(h().label)) == h().label, "its label is not text");
    check_plan(h().num_rounds >= 1 && h().num_rounds <= kMaxRounds, "it says ", h().num_rounds, " rounds");
    constexpr int64_t kMaxArena = int64_t{1} << 46;
    for (int64_t bytes : h().arena_bytes)
      check_plan(bytes >= 0 && bytes <= h().slot_bytes && h().slot_bytes <= kMaxArena, "an arena of ", bytes,
                 " bytes in a slot of ", h().slot_bytes, ", which may have ", kMaxArena);
    check_plan((h().retains == 0 || h().retains == 1) && h().retained_bytes >= 0 &&
                   h().retained_bytes <= (h().retains != 0 ? kMaxArena : 0),
               "it retains ", h().retained_bytes, " bytes");
  }

  void check_scores() const {
    check_plan(!view_.scores().empty() && count(view_.scores()) <= kMostScores, "it has ", view_.scores().size(),
               " rows of scores");
    const ScoresRow& first = view_.scores()[0];
    for (const ScoresRow& s : view_.scores()) {
      check_plan(s.mask_kind >= 0 && s.mask_kind < kNumMaskKinds && s.window >= 0 && s.window <= kMaxRows,
                 "it says mask ", s.mask_kind, " with window ", s.window);
      for (const auto& [word, of_first] : {std::pair{s.scale, first.scale}, {s.softcap, first.softcap}})
        check_plan((word == kOfTheCall) == (of_first == kOfTheCall) && (word == kOfTheCall || is_score_word(word)),
                   "it says ", word, " for a scale or softcap");
      check_plan(s.softcap == kOfTheCall || score_value(s.softcap) >= 0.f, "it says softcap ", score_value(s.softcap));
    }
    for (const GroupRow& g : view_.groups()) check_index(g.scores);
    for (const SegmentRow& s : view_.segments()) check_index(s.scores);
  }
  void check_index(int64_t scores) const {
    check_plan(scores >= 0 && scores < count(view_.scores()), "scores ", scores, " of ", view_.scores().size());
  }

  /// Checks that the rows of others are what documents of this rank's rows and tasks begin with, and that no document
  /// has a row twice.
  void check_shared() const {
    std::set<int64_t> needed;
    for (const GroupRow& g : view_.groups()) needed.insert(g.document);
    for (const SegmentRow& s : view_.segments()) needed.insert(s.document);
    int64_t document = kPadding, at = 0;
    std::vector<SharedRows> sorted(view_.shared().begin(), view_.shared().end());
    for (const SharedRows& s : view_.shared()) {
      if (s.document != document) at = 0;
      check_plan(s.document >= document && s.document >= 0 && s.at == at && s.of >= 0 && s.of != s.document &&
                     s.begin >= 0 && s.begin < s.end && s.end <= kMaxRows && at + s.num_rows() <= kMaxRows,
                 "document ", s.document, " begins with rows [", s.begin, ", ", s.end, ") of document ", s.of,
                 " at row ", s.at);
      check_plan(needed.contains(s.document), "it has rows that document ", s.document, " begins with, which it has ",
                 "nothing of");
      document = s.document;
      at += s.num_rows();
    }
    std::ranges::sort(sorted, {}, [](const SharedRows& s) { return std::tuple(s.document, s.of, s.begin); });
    for (size_t i = 1; i < sorted.size(); ++i)
      check_plan(sorted[i].document != sorted[i - 1].document || sorted[i].of != sorted[i - 1].of ||
                     sorted[i].begin >= sorted[i - 1].end,
                 "document ", sorted[i].document, " begins with row ", sorted[i].begin, " of document ", sorted[i].of,
                 " twice");
    for (const SegmentRow& s : view_.segments())
      check_plan(s.begin >= view_.first_row(s.document), "segment of document ", s.document, ": row ", s.begin,
                 " is not its own");
  }

  /// Checks that rows that see each other are possible, and that each belongs to the groups of one document.
  void check_bidirectional() const {
    std::map<int64_t, std::pair<int64_t, int64_t>> of_documents;
    for (const GroupRow& g : view_.groups()) {
      const std::pair found(g.bidirectional_begin, g.bidirectional_end);
      check_plan(0 <= found.first && found.first <= found.second && found.second <= count(view_.bidirectional()) &&
                     of_documents.emplace(g.document, found).first->second == found,
                 "bidirectional rows ", found.first, " to ", found.second, " of document ", g.document);
    }
    std::set<std::pair<int64_t, int64_t>> ranges;
    for (const auto& [document, range] : of_documents) {
      check_plan(range.first < range.second ? ranges.insert(range).second : range.first == 0, "bidirectional rows ",
                 range.first, " to ", range.second, " of document ", document);
    }
    int64_t next = 0;
    for (const auto& [begin, end] : ranges) {
      check_plan(begin == next, "bidirectional rows ", next, " to ", begin, " of no document");
      int64_t last = 0;
      for (; next < end; ++next) {
        const BidirectionalRows& rows = view_.bidirectional()[static_cast<size_t>(next)];
        check_plan(last <= rows.begin && rows.begin < rows.end && rows.end <= kMaxRows, "bidirectional rows [",
                   rows.begin, ", ", rows.end, ") after row ", last);
        last = rows.end;
      }
    }
    check_plan(next == count(view_.bidirectional()), "bidirectional rows from ", next, " on of no document");
  }

  /// Checks that tables follow one another without gaps.
  void check_tables() const {
    int64_t next = kHeaderWords;
    for (size_t id = 0; id < kNumTables; ++id) {
      const TableSpan& t = h().tables[id];
      check_plan(t.begin == next && t.count >= 0 && t.count <= (h().num_words - next) / kRowWords[id], "table ", id,
                 ": ", t.count, " rows at word ", t.begin, "; it begins at word ", next, " of ", h().num_words);
      next += t.count * kRowWords[id];
    }
    check_plan(next == h().num_words, "its tables end at word ", next, " of ", h().num_words);
    check_plan(count(view_.rank_digests()) == h().num_ranks, "it has digests of ", count(view_.rank_digests()),
               " ranks of ", h().num_ranks);
    check_plan(
        inside(0, h().num_local_groups, count(view_.groups())) && inside(0, h().num_local_tasks, count(view_.tasks())),
        "more local groups or tasks than there are");
  }

  /// Checks that the digest, which ranks compare, is that of these tables.
  void check_digests() const {
    TableWords tables;
    for (size_t id = 0; id < kNumTables; ++id) tables[id] = view_.words_of(static_cast<TableId>(id));
    check_plan(static_cast<int64_t>(tables_digest(h(), tables)) == view_.rank_digests()[static_cast<size_t>(h().rank)],
               "its tables are not those of rank ", h().rank, " of the plan that its digest is of");
    check_plan(static_cast<int64_t>(plan_digest(h(), view_.rank_digests())) == h().plan_digest,
               "it does not say the digest of its plan");
  }

  template <class Row>
  static int64_t count(std::span<const Row> rows) {
    return static_cast<int64_t>(rows.size());
  }

  /// Checks the place of `rows` rows of a tensor at an arena offset. `heads` is a table's row that says which heads
  /// they have.
  template <class Row>
  void check_extent(const char* what, Phase p, Direction d, TensorKind kind, const Row& heads, int64_t offset,
                    int64_t rows, int64_t alignment = kExtentAlignment) const {
    check_memory(what, "arena", h().arena_bytes[static_cast<size_t>(p)], p, d, kind, heads, offset, rows, alignment);
  }
  template <class Row>
  void check_memory(const char* what, const char* memory, int64_t size, Phase p, Direction d, TensorKind kind,
                    const Row& heads, int64_t offset, int64_t rows, int64_t alignment) const {
    const HeadShape part = view_.heads().with_kv_heads(heads.kv_head_end - heads.kv_head_begin);
    const int64_t bytes = rows * row_format(part, p, d, kind).row_stride();
    check_plan(offset % alignment == 0 && inside(offset, bytes, size), what, ": ", rows, " rows at offset ", offset,
               " do not lie in the ", memory, " of ", size, " bytes");
  }
  template <class Row>
  void check_heads(const char* what, const Row& row) const {
    check_plan(row.kv_head_begin >= 0 && row.kv_head_begin < row.kv_head_end && row.kv_head_end <= h().kv_heads, what,
               ": key/value heads [", row.kv_head_begin, ", ", row.kv_head_end, ") of ", h().kv_heads);
  }
  void check_rows(const char* what, int64_t row, int64_t rows) const {
    check_plan(rows >= 1 && inside(row, rows, h().num_rows), what, ": ", rows, " rows from row ", row, " on, of ",
               h().num_rows);
  }
  void check_peer(const char* what, int64_t peer, int64_t round) const {
    check_plan(peer >= 0 && peer < h().num_ranks, what, ": peer ", peer, " of ", h().num_ranks);
    check_plan(round >= 0 && round < kMaxRounds, what, ": round ", round);
  }

  void check_groups() const {
    int64_t next_task = 0, index = 0;
    for (const GroupRow& g : view_.groups()) {
      check_heads("group", g);
      check_plan(g.kv_begin >= 0 && g.kv_end > g.kv_begin && g.kv_end <= kMaxRows &&
                     g.first_block == g.kv_begin / h().key_block_rows &&
                     g.num_blocks == (g.kv_end + h().key_block_rows - 1) / h().key_block_rows - g.first_block &&
                     inside(g.block_begin, g.num_blocks, count(view_.blocks())),
                 "group ", index, " (document ", g.document, "): its key blocks");
      check_plan(g.task_begin == next_task && g.task_end >= next_task && g.task_end <= count(view_.tasks()), "group ",
                 index, ": its tasks");
      const int64_t arena_rows = g.num_arena_rows;
      check_plan(arena_rows >= 0 && arena_rows <= count(view_.blocks()) * h().key_block_rows, "group ", index,
                 ": its rows in the arena");
      if (arena_rows > 0) {
        check_extent("group", Phase::kForward, Direction::kIn, TensorKind::kK, g, g.forward_k, arena_rows);
        check_extent("group", Phase::kForward, Direction::kIn, TensorKind::kV, g, g.forward_v, arena_rows);
        check_backward_keys(g, arena_rows);
      } else {
        check_plan(g.retained_k == -1 && g.retained_v == -1, "group ", index, ": keys are retained that do not travel");
      }
      for (int64_t b = 0; b < g.num_blocks; ++b) {
        const int64_t entry = view_.blocks()[static_cast<size_t>(g.block_begin + b)];
        const int64_t start = (g.first_block + b) * h().key_block_rows;
        const int64_t begin = std::max(start, g.kv_begin), end = std::min(start + h().key_block_rows, g.kv_end);
        constexpr int64_t kMaxRow = int64_t{1} << 32;
        check_plan(
            entry >= -2 * kMaxRow && entry <= 2 * kMaxRow &&
                inside((entry >> 1) + (begin - start), end - begin, (entry & 1) != 0 ? arena_rows : h().num_rows),
            "group ", index, ": key block ", b);
      }
      check_grads(g, index);
      check_plan(g.round >= -1 && g.round < kMaxRoundsIn, "group ", index, ": round ", g.round);
      const bool local = index < h().num_local_groups;
      check_plan(!local || (arena_rows == 0 && g.task_end <= h().num_local_tasks), "group ", index, " is not local");
      next_task = g.task_end;
      ++index;
    }
    check_plan(next_task == count(view_.tasks()), "tasks without a group");
  }

  /// Checks that keys for backward lie either in the retained memory or in the arena.
  void check_backward_keys(const GroupRow& g, int64_t arena_rows) const {
    for (const auto& [kind, backward, retained] :
         {std::tuple{TensorKind::kK, g.backward_k, g.retained_k}, {TensorKind::kV, g.backward_v, g.retained_v}}) {
      if (g.retained_k < 0) {
        check_extent("group", Phase::kBackward, Direction::kIn, kind, g, backward, arena_rows);
        check_plan(retained == -1, "group: keys retained at offset ", retained);
      } else {
        check_memory("group", "retained memory", h().retained_bytes, Phase::kForward, Direction::kIn, kind, g, retained,
                     arena_rows, kExtentAlignment);
        check_plan(backward == -1, "group: keys are retained, and in backward's arena at offset ", backward);
      }
    }
  }

  void check_grads(const GroupRow& g, int64_t index) const {
    check_plan(g.grad_begin >= 0 && g.grad_end >= g.grad_begin && g.grad_end <= count(view_.grads()), "group ", index,
               ": its gradients");
    int64_t next = g.kv_begin;
    for (const GradRow& r :
         view_.grads().subspan(static_cast<size_t>(g.grad_begin), static_cast<size_t>(g.grad_end - g.grad_begin))) {
      check_plan(r.begin == next && r.end > r.begin && r.end <= g.kv_end, "group ", index, ": gradient rows [", r.begin,
                 ", ", r.end, ")");
      next = r.end;
      if (r.target == static_cast<int64_t>(GradTarget::kReturned)) {
        check_rows("gradient", r.row, r.end - r.begin);
        continue;
      }
      check_plan(r.target > 0 && r.target <= static_cast<int64_t>(GradTarget::kAdded), "gradient target ", r.target);
      const bool narrow = r.target == static_cast<int64_t>(GradTarget::kArena);
      // What is added goes into the middle of an extent: aligned to eight floats only.
      const int64_t alignment = r.target == static_cast<int64_t>(GradTarget::kAdded) ? 32 : kExtentAlignment;
      check_extent("gradient", Phase::kBackward, Direction::kOut, narrow ? TensorKind::kDk : TensorKind::kDkPartial, g,
                   r.dk, r.end - r.begin, alignment);
      check_extent("gradient", Phase::kBackward, Direction::kOut, narrow ? TensorKind::kDv : TensorKind::kDvPartial, g,
                   r.dv, r.end - r.begin, alignment);
    }
    check_plan(next == g.kv_end, "group ", index, ": its gradients end at row ", next, " of ", g.kv_end);
  }

  void check_tasks() const {
    int64_t index = 0;
    for (const TaskRow& t : view_.tasks()) {
      check_plan(t.group >= 0 && t.group < count(view_.groups()), "task ", index, ": group ", t.group);
      const GroupRow& g = view_.groups()[static_cast<size_t>(t.group)];
      const DocumentMask mask = view_.mask_of(g);
      check_plan(index >= g.task_begin && index < g.task_end, "task ", index, " is not in its group");
      check_plan(t.q_begin >= view_.first_row(g.document), "task ", index, ": row ", t.q_begin,
                 " is not the document's own");
      check_plan(t.q_begin >= 0 && t.q_end > t.q_begin && t.q_end <= g.kv_end && t.kv_begin >= g.kv_begin &&
                     t.kv_end <= g.kv_end && t.kv_begin == mask.first_key(t.q_begin) &&
                     t.kv_end == mask.end_key(t.q_end - 1, g.kv_end),
                 "task ", index, ": rows [", t.q_begin, ", ", t.q_end, ") see keys [", t.kv_begin, ", ", t.kv_end, ")");
      check_plan(index == g.task_begin || view_.tasks()[static_cast<size_t>(index) - 1].q_end <= t.q_begin, "task ",
                 index, " overlaps the one before");
      const int64_t rows = t.q_end - t.q_begin;
      check_peer("task", t.home, 0);
      if (t.home == h().rank) {
        check_rows("task", t.home_row, rows);
      } else {
        check_plan(index >= h().num_local_tasks, "task ", index, " is not local");
        check_extent("task", Phase::kForward, Direction::kIn, TensorKind::kOut, g, t.forward_q, rows);
        check_extent("task", Phase::kForward, Direction::kIn, TensorKind::kLse, g, t.forward_lse, rows);
        check_extent("task", Phase::kBackward, Direction::kIn, TensorKind::kQ, g, t.backward_q, rows);
        check_extent("task", Phase::kBackward, Direction::kIn, TensorKind::kDout, g, t.backward_dout, rows);
        check_extent("task", Phase::kBackward, Direction::kIn, TensorKind::kLse, g, t.backward_lse, rows);
        check_extent("task", Phase::kBackward, Direction::kIn, TensorKind::kDelta, g, t.backward_delta, rows);
      }
      ++index;
    }
  }

  void check_sends(Phase p) const {
    const SendRow* last = nullptr;
    for (const SendRow& s : view_.sends(p)) {
      check_peer("send", s.peer, s.round);
      const auto place = [&](const SendRow& one) {  // ranks after this one come first
        return std::tuple(one.direction, one.message(), one.peer + (one.peer < h().rank ? h().num_ranks : 0));
      };
      check_plan(last == nullptr || place(*last) <= place(s), "send to rank ", s.peer, ": out of order");
      last = &s;
      check_heads("send", s);
      const bool in = s.direction == static_cast<int64_t>(Direction::kIn);
      check_plan((in || s.direction == static_cast<int64_t>(Direction::kOut)) && s.num_rows >= 1 &&
                     s.num_rows <= kMaxRows && s.tensor >= 0 && s.tensor < static_cast<int64_t>(TensorKind::kCount) &&
                     s.target >= 0 && s.target <= h().slot_bytes,
                 "send to rank ", s.peer);
      const auto kind = static_cast<TensorKind>(s.tensor);
      check_plan(in == is_input(p, kind), "send to rank ", s.peer, ": tensor ", s.tensor, " in this message");
      check_plan(in ? s.round < kMaxRoundsIn && s.after == 0 : s.after >= 0 && s.after < kMaxRoundsIn, "send to rank ",
                 s.peer, " in round ", s.round, " after ", s.after);
      if (in) {
        check_rows("send", s.row, s.num_rows);
        if (s.peer == h().rank)  // it goes into the middle of an extent: aligned to elements only
          check_extent("copy", p, Direction::kIn, kind, s, s.target, s.num_rows, view_.heads().element_bytes());
      } else {
        check_plan(s.peer != h().rank, "rows are sent home to their own rank");
        check_extent("send", p, Direction::kIn, kind, s, s.source, s.num_rows);
      }
    }
  }

  static bool is_input(Phase p, TensorKind k) {
    if (k == TensorKind::kLse) return p == Phase::kBackward;
    return k == TensorKind::kQ || k == TensorKind::kK || k == TensorKind::kV ||
           (p == Phase::kBackward && (k == TensorKind::kDout || k == TensorKind::kDelta));
  }

  void check_receives(Phase p) const {
    for (const ReceiveRow& r : view_.receives(p)) {
      check_peer("receive", r.peer, r.round);
      check_heads("receive", r);
      check_plan(r.tensor >= 0 && r.tensor < static_cast<int64_t>(TensorKind::kCount), "receive: tensor ", r.tensor);
      const auto kind = static_cast<TensorKind>(r.tensor);
      check_plan(!is_input(p, kind) && (p == Phase::kForward ? kind == TensorKind::kOut || kind == TensorKind::kLse
                                                             : kind >= TensorKind::kDq),
                 "receive: tensor ", r.tensor, " in this message");
      check_plan(r.round < h().num_rounds, "receive: round ", r.round, " of ", h().num_rounds);
      check_rows("receive", r.row, r.num_rows);
      check_plan(r.action >= 0 && r.action <= static_cast<int64_t>(ReceiveAction::kFinish), "receive: action ",
                 r.action);
      const bool finishes = r.action == static_cast<int64_t>(ReceiveAction::kFinish);
      check_plan(finishes == (r.peer == h().rank), "receive: action ", r.action, " of rows of rank ", r.peer);
      if (finishes) {
        check_plan(is_partial(kind) && r.round == 0 && r.source == -1, "receive: tensor ", r.tensor,
                   " is done in round ", r.round, ", from offset ", r.source);
        check_extent("receive", p, Direction::kOut, kind, r, r.sum, r.num_rows);
        continue;
      }
      check_extent("receive", p, Direction::kOut, kind, r, r.source, r.num_rows);
      if (r.action == static_cast<int64_t>(ReceiveAction::kCopy)) {
        check_plan(!is_partial(kind), "receive: tensor ", r.tensor, " is only copied");
        continue;
      }
      check_plan(is_partial(kind) || (kind >= TensorKind::kDk && view_.heads().dtype != DType::kFloat32),
                 "receive: tensor ", r.tensor, " is added");
      check_extent("receive", p, Direction::kOut, kind_of_sum(kind), r, r.sum, r.num_rows);
    }
  }

  void check_waits(Phase p) const {
    for (const WaitRow& w : view_.waits(p)) {
      check_peer("wait", w.peer, w.round);
      check_plan(w.peer != h().rank && (w.direction == 0 || w.direction == 1), "wait for rank ", w.peer);
      const bool in = w.direction == static_cast<int64_t>(Direction::kIn);
      const int64_t rounds = in ? kMaxRoundsIn : p == Phase::kBackward ? h().num_rounds : 1;
      check_plan(w.round < rounds, "wait for rank ", w.peer, " in round ", w.round);
    }
  }

  std::span<const int64_t> words_;
  SliceView view_;
};

}  // namespace

int64_t check_unaltered(std::span<const int64_t> words) {
  const auto size = static_cast<int64_t>(words.size());
  check_plan(size >= kHeaderWords, "it has ", size, " words; a plan has at least ", kHeaderWords,
             " (pass plan.tensor of this rank, whole)");
  const Header& h = SliceView(words).header();
  check_plan(h.magic == kMagic, "it does not start with a plan's mark (pass plan.tensor, an int64 CPU tensor)");
  check_plan(h.version == kFormatVersion, "its format version is ", h.version, ", this library reads ", kFormatVersion);
  check_plan(h.num_words >= kHeaderWords && h.num_words <= size, "it is truncated: ", size, " words of ", h.num_words);
  const auto used = words.subspan(kChecksumBegin, static_cast<size_t>(h.num_words - kChecksumBegin));
  check_plan(static_cast<int64_t>(digest(used)) == h.checksum, "its checksum does not match: it was altered");
  return h.checksum;
}

void validate(std::span<const int64_t> words) {
  check_unaltered(words);
  Validator(words).run();
}

}  // namespace distca::plan
