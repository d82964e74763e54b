// The flat form of a plan: what one rank needs to take part in a step, as int64 words.
//
// A slice is a Header, then tables of rows of fixed size. Everything is position independent. Byte offsets count from
// the start of a slot's arena, rows from the start of the rank's own token tensor. `-1` means none.
//
// A group, and all rows that travel for it, has a range of the key/value heads and the query heads that share them.
// Below, "heads" are those of the range, e is the bytes of an element, P = max(dim, v_dim). Rows lie in an arena like
// this:
//   q of a forward task   [rows, q_heads, P] e    out overwrites it in place, head by head
//   q of a backward task  [rows, q_heads, dim] e
//   dout                  [rows, q_heads, P] e    dq overwrites it in place
//   lse, delta            [rows, q_heads] fp32
//   k, v                  [blocks x key_block_rows, kv_heads, dim | v_dim] e
//   dk, dv                [rows, kv_heads, dim | v_dim] e, or fp32 where several groups contribute, unless the plan's
//                         contributions are narrow and these have fewer bytes; their sums, at home, always are
//   out, dq come home     [rows, q_heads, v_dim | dim] e
//
// Where a server retains a group, k and v of the forward step lie in the rank's retained memory as they did in the
// arena, from the end of forward on. They do not travel in backward and have no place in its arena.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>

#include "common/digest.h"
#include "common/dtype.h"
#include "common/mask.h"
#include "plan/layout.h"

namespace distca::plan {

inline constexpr int64_t kMagic = 0x64697374636131;  // "distca1"
inline constexpr int64_t kFormatVersion = 11;
/// Every extent of an arena starts at a multiple of this many bytes.
inline constexpr int64_t kExtentAlignment = 64;
/// A label has at most as many bytes.
inline constexpr int64_t kLabelWords = 6;
/// Rounds in which gradients come home are numbered below this.
inline constexpr int64_t kMaxRounds = 1 << 16;
/// Rounds in which rows go to servers are numbered below this.
inline constexpr int64_t kMaxRoundsIn = 3;

enum class Phase : int64_t { kForward = 0, kBackward = 1 };
inline constexpr std::array kPhases = {Phase::kForward, Phase::kBackward};
/// The two messages of a phase: rows that go to a server, and rows that come back home.
enum class Direction : int64_t { kIn = 0, kOut = 1 };

enum class TensorKind : int64_t {
  kQ,
  kK,
  kV,
  kOut,
  kLse,
  kDout,
  kDelta,
  kDq,
  kDk,
  kDv,
  kDkPartial,
  kDvPartial,  // fp32, one of several contributions to a row, or their sum
  kCount
};

/// The word of a scale or softcap that the plan leaves to the calls.
inline constexpr int64_t kOfTheCall = -1;
/// The word of a number in fp32, and the number that a word says.
constexpr int64_t score_word(float value) { return std::bit_cast<uint32_t>(value); }
constexpr float score_value(int64_t word) { return std::bit_cast<float>(static_cast<uint32_t>(word)); }
/// Whether it is the word of a finite number.
constexpr bool is_score_word(int64_t word) {
  constexpr int64_t kExponent = 0x7f800000;
  return word >= 0 && word <= UINT32_MAX && (word & kExponent) != kExponent;
}

/// What makes the scores of some documents. If one of a plan's rows leaves the scale or the softcap to the calls, all
/// do.
struct ScoresRow {
  int64_t mask_kind = 0, window = 0;
  int64_t scale = kOfTheCall, softcap = kOfTheCall;

  Mask mask() const { return {static_cast<MaskKind>(mask_kind), window}; }
  bool operator==(const ScoresRow&) const = default;
};

/// One unbroken range of keys of a document at this server, for a range of heads. Blocks are entries of the block table
/// (see attention::KeyGroup).
struct GroupRow {
  int64_t document;
  int64_t scores;                                  // index into the table of scores
  int64_t bidirectional_begin, bidirectional_end;  // the document's, in the table of bidirectional rows
  int64_t kv_head_begin, kv_head_end;
  int64_t kv_begin, kv_end;
  int64_t first_block, num_blocks, block_begin;  // block_begin: index into the block table
  int64_t task_begin, task_end;
  int64_t num_arena_rows;  // of all groups whose keys lie at these offsets: with the same heads, of one cluster
  int64_t forward_k, forward_v, backward_k, backward_v;  // arena offsets
  int64_t retained_k, retained_v;                        // offsets in the retained memory; where set, backward_* are -1
  int64_t grad_begin, grad_end;                          // index into the gradient table
  int64_t round;                                         // of the rows that it waits for; -1: it needs none of others
};

constexpr int64_t block_entry(int64_t row, bool in_arena) { return 2 * row + (in_arena ? 1 : 0); }

/// One task of this server, for the heads of its group. Arena offsets are -1 where the task's rows have their home
/// here.
struct TaskRow {
  int64_t group;
  int64_t q_begin, q_end, kv_begin, kv_end;
  int64_t home, home_row;
  int64_t forward_q, forward_lse;
  int64_t backward_q, backward_dout, backward_lse, backward_delta;
};

enum class GradTarget : int64_t {
  kReturned = 0,  // the tensor that backward returns, in the input dtype, at `row`
  kArena = 1,     // scratch in the input dtype, which is sent to the home, another rank
  kPartial = 2,   // scratch in fp32: this server's contribution, which is sent to another rank, or a sum of this home
  kAdded = 3,     // added to what an earlier group of this server has written as kPartial, of these rows and others
};
/// Key gradients of document rows [begin, end) that this server computes.
struct GradRow {
  int64_t begin, end;
  int64_t target;
  int64_t row;     // for kReturned
  int64_t dk, dv;  // arena offsets for the other targets
};

/// The next rows of the token tensor: rows [begin, end) of a document, or padding (kPadding), where out and gradients
/// are 0 and lse is -inf.
struct SegmentRow {
  int64_t document;
  int64_t scores;  // index into the table of scores; 0 for padding
  int64_t begin, end;
  int64_t num_rows() const { return end - begin; }
};

/// One put of this rank, or a copy within the rank where peer == rank. The source is `row` of the rank's own tensor, or
/// the arena at `source` (then row = -1).
struct SendRow {
  int64_t direction, round;
  int64_t after;  // of rows that go home: the round in which the rows came that they are computed from; else 0
  int64_t peer, tensor;
  int64_t row, source;
  int64_t num_rows;
  int64_t kv_head_begin, kv_head_end;
  int64_t target;  // offset in the peer's arena

  /// The number of its message among those of a direction to a peer. Results of the first round go home in a message
  /// for each round of rows, those of a later round in one.
  std::pair<int64_t, int64_t> message() const { return {round, round == 0 ? after : 0}; }
};

enum class ReceiveAction : int64_t {
  kCopy = 0,    // into the returned tensor
  kAssign = 1,  // the first contribution to the sum at `sum`
  kAdd = 2,     // a further one
  kFinish = 3,  // no rows: a sum that this rank alone computes is done
};
/// Rows that come home, and what the home does with them. The terms of a sum have one dtype: fp32 (kDkPartial,
/// kDvPartial) or that of the heads (kDk, kDv). Where the action is kFinish, `peer` is the rank itself,
/// the tensor that of the sum, and `source` -1.
struct ReceiveRow {
  int64_t round, peer, tensor, action;
  int64_t row, num_rows;
  int64_t kv_head_begin, kv_head_end;
  int64_t source;  // arena offset (home-in)
  int64_t sum;     // arena offset, of a sum in fp32; -1 for kCopy
};

/// A message to wait for: `peer` puts rows of this direction in this round, and needs credit for that.
struct WaitRow {
  int64_t direction, round, peer;
};

struct TableSpan {
  int64_t begin = 0;  // first word
  int64_t count = 0;  // rows
};

enum TableId : size_t {
  kRankDigests,  // tables_digest of each rank's tables
  kScores,
  kShared,  // what documents begin with of which the rank holds or computes rows, in the order of Layout::shared
  kBidirectional,
  kGroups,
  kTasks,
  kBlocks,
  kGrads,
  kSegments,
  kForwardSends,
  kBackwardSends,
  kForwardReceives,
  kBackwardReceives,
  kForwardWaits,
  kBackwardWaits,
  kNumTables
};

/// How a plan was made, as far as its tables do not say so. From this two plans can be told apart in words. It is not
/// compared, because plans that were made differently and came out alike go together.
struct PlanArguments {
  int64_t num_documents, num_tokens;
  int64_t tolerance_ppm, min_rows, capacity;
  int64_t choices;            // bits (origin.h)
  int64_t mask_kind, window;  // of the first document
  int64_t scores_digest;      // of all documents' masks, windows, scales and softcaps
  int64_t lists_digest;       // of servers, speeds, nodes, bytes of rounds, retained bytes and given tasks
};

struct Header {
  int64_t magic, version;
  int64_t num_words;  // header and tables, without the padding to a power of two
  int64_t checksum;   // of words [4, num_words)
  // These words are the same on all ranks. The digest covers the version, the words from layout_digest to slot_bytes,
  // and the digests of all ranks' tables.
  int64_t plan_digest;
  int64_t layout_digest, cost_digest;
  int64_t num_ranks;
  int64_t q_heads, kv_heads, dim, v_dim, dtype;
  int64_t key_block_rows;
  std::array<int64_t, kLabelWords> label;  // text that its maker gave it (options.h), padded with zeros
  int64_t retains;                         // 1: some server, on whatever rank, may keep rows from forward to backward
  int64_t slot_bytes;                      // the largest arena of any rank and phase
  // These words are this rank's own.
  int64_t rank;
  int64_t num_rows;                    // rows of its token tensor
  std::array<int64_t, 2> arena_bytes;  // by phase
  int64_t retained_bytes;              // bytes that it keeps from forward to backward
  int64_t num_rounds;                  // rounds in which gradients come to this home
  int64_t num_local_groups;            // groups are sorted by round: local ones first
  int64_t num_local_tasks;
  PlanArguments arguments;  // the same on all ranks, and in no digest
  std::array<TableSpan, kNumTables> tables;
};
static_assert(std::is_trivially_copyable_v<Header> && sizeof(Header) % 8 == 0);
inline constexpr int64_t kHeaderWords = sizeof(Header) / 8;
inline constexpr int64_t kChecksumBegin = 4;
/// The words of the header that digests cover: [first, second) are the same on all ranks, [second, third) are the
/// rank's own.
inline constexpr std::array<size_t, 3> kHeaderParts = {offsetof(Header, layout_digest) / 8, offsetof(Header, rank) / 8,
                                                       offsetof(Header, arguments) / 8};

constexpr int64_t padded_dim(const HeadShape& h) { return h.dim > h.v_dim ? h.dim : h.v_dim; }

/// How one row lies in an arena, and how many of its bytes travel.
struct RowFormat {
  int64_t num_heads;
  int64_t head_bytes;   // bytes of a head that carry data
  int64_t head_stride;  // bytes from head to head in an arena
  int64_t row_stride() const { return num_heads * head_stride; }
  int64_t wire_bytes() const { return num_heads * head_bytes; }
};

/// Whether a tensor has key/value heads rather than query heads.
constexpr bool has_kv_heads(TensorKind kind) {
  return kind == TensorKind::kK || kind == TensorKind::kV || kind >= TensorKind::kDk;
}

/// The format of a tensor's rows in the arena at the end of a message: kIn is an arena of a server, kOut one of a home.
/// `h` has the heads that travel.
constexpr RowFormat row_format(const HeadShape& h, Phase phase, Direction direction, TensorKind kind) {
  const int64_t e = h.element_bytes(), padded = padded_dim(h) * e;
  const bool at_server = direction == Direction::kIn;
  switch (kind) {
    case TensorKind::kQ:
      return {h.q_heads, h.dim * e, phase == Phase::kForward ? padded : h.dim * e};
    case TensorKind::kOut:
      return {h.q_heads, h.v_dim * e, at_server ? padded : h.v_dim * e};
    case TensorKind::kDout:
      return {h.q_heads, h.v_dim * e, padded};
    case TensorKind::kDq:
      return {h.q_heads, h.dim * e, at_server ? padded : h.dim * e};
    case TensorKind::kLse:
    case TensorKind::kDelta:
      return {h.q_heads, 4, 4};
    case TensorKind::kK:
    case TensorKind::kDk:
      return {h.kv_heads, h.dim * e, h.dim * e};
    case TensorKind::kV:
    case TensorKind::kDv:
      return {h.kv_heads, h.v_dim * e, h.v_dim * e};
    case TensorKind::kDkPartial:
      return {h.kv_heads, h.dim * 4, h.dim * 4};
    case TensorKind::kDvPartial:
      return {h.kv_heads, h.v_dim * 4, h.v_dim * 4};
    case TensorKind::kCount:
      break;
  }
  return {0, 0, 0};
}

/// Whether a tensor is dk rather than dv, of either dtype.
constexpr bool is_key_gradient_dk(TensorKind kind) { return kind == TensorKind::kDk || kind == TensorKind::kDkPartial; }
/// Whether key gradients of this kind are in fp32, whatever the dtype of the heads.
constexpr bool is_partial(TensorKind kind) { return kind == TensorKind::kDkPartial || kind == TensorKind::kDvPartial; }
/// The kind of the sum of key gradients of this kind.
constexpr TensorKind kind_of_sum(TensorKind kind) {
  return is_key_gradient_dk(kind) ? TensorKind::kDkPartial : TensorKind::kDvPartial;
}

/// The number of words of one row, for each table.
inline constexpr std::array<int64_t, kNumTables> kRowWords = {1,
                                                              sizeof(ScoresRow) / 8,
                                                              sizeof(SharedRows) / 8,
                                                              sizeof(BidirectionalRows) / 8,
                                                              sizeof(GroupRow) / 8,
                                                              sizeof(TaskRow) / 8,
                                                              1,
                                                              sizeof(GradRow) / 8,
                                                              sizeof(SegmentRow) / 8,
                                                              sizeof(SendRow) / 8,
                                                              sizeof(SendRow) / 8,
                                                              sizeof(ReceiveRow) / 8,
                                                              sizeof(ReceiveRow) / 8,
                                                              sizeof(WaitRow) / 8,
                                                              sizeof(WaitRow) / 8};

/// Reads a slice. The words must outlive the view. Only `validate` (validate.h) says whether they may be trusted.
class SliceView {
 public:
  explicit SliceView(std::span<const int64_t> words) : words_(words) {}

  std::span<const int64_t> words() const { return words_; }
  const Header& header() const { return *reinterpret_cast<const Header*>(words_.data()); }
  HeadShape heads() const {
    const Header& h = header();
    return {h.q_heads, h.kv_heads, h.dim, h.v_dim, static_cast<DType>(h.dtype)};
  }
  std::span<const int64_t> rank_digests() const { return table<int64_t>(kRankDigests); }
  std::span<const SharedRows> shared() const { return table<SharedRows>(kShared); }
  /// The rows of others that a document begins with, ascending by `at`.
  std::span<const SharedRows> shared(int64_t document) const {
    const auto found = std::ranges::equal_range(shared(), document, {}, &SharedRows::document);
    return {found.begin(), found.end()};
  }
  /// The first row of a document that is its own.
  int64_t first_row(int64_t document) const {
    const auto rows = shared(document);
    return rows.empty() ? 0 : rows.back().at + rows.back().num_rows();
  }
  /// Calls visit(owner, row, num_rows) for rows [begin, end) of a document, which are own rows of the owner from `row`
  /// on, of one owner after the other.
  template <class Visit>
  void for_each_owner(int64_t document, int64_t begin, int64_t end, const Visit& visit) const {
    const auto rows = shared(document);
    auto s = std::ranges::upper_bound(rows, begin, {}, [](const SharedRows& r) { return r.at + r.num_rows(); });
    for (; s != rows.end() && begin < end; ++s) {
      const int64_t next = std::min(end, s->at + s->num_rows());
      visit(s->of, begin - s->shift(), next - begin);
      begin = next;
    }
    if (begin < end) visit(document, begin, end - begin);
  }
  std::span<const BidirectionalRows> bidirectional() const { return table<BidirectionalRows>(kBidirectional); }
  std::span<const ScoresRow> scores() const { return table<ScoresRow>(kScores); }
  std::span<const BidirectionalRows> bidirectional_of(const GroupRow& g) const {
    return bidirectional().subspan(static_cast<size_t>(g.bidirectional_begin),
                                   static_cast<size_t>(g.bidirectional_end - g.bidirectional_begin));
  }
  DocumentMask mask_of(const GroupRow& g) const { return {scores_of(g).mask(), bidirectional_of(g)}; }
  const ScoresRow& scores_of(const GroupRow& g) const { return scores()[static_cast<size_t>(g.scores)]; }
  const ScoresRow& scores_of(const SegmentRow& s) const { return scores()[static_cast<size_t>(s.scores)]; }
  std::span<const GroupRow> groups() const { return table<GroupRow>(kGroups); }
  std::span<const TaskRow> tasks() const { return table<TaskRow>(kTasks); }
  std::span<const int64_t> blocks() const { return table<int64_t>(kBlocks); }
  std::span<const GradRow> grads() const { return table<GradRow>(kGrads); }
  std::span<const SegmentRow> segments() const { return table<SegmentRow>(kSegments); }
  std::span<const SendRow> sends(Phase p) const { return table<SendRow>(by_phase(kForwardSends, p)); }
  std::span<const ReceiveRow> receives(Phase p) const { return table<ReceiveRow>(by_phase(kForwardReceives, p)); }
  std::span<const WaitRow> waits(Phase p) const { return table<WaitRow>(by_phase(kForwardWaits, p)); }
  /// The words of a table.
  std::span<const int64_t> words_of(TableId id) const {
    const TableSpan& t = header().tables[id];
    return words_.subspan(static_cast<size_t>(t.begin), static_cast<size_t>(t.count * kRowWords[id]));
  }

 private:
  static TableId by_phase(TableId forward, Phase p) { return static_cast<TableId>(forward + static_cast<size_t>(p)); }
  template <class Row>
  std::span<const Row> table(TableId id) const {
    const TableSpan& t = header().tables[id];
    return {reinterpret_cast<const Row*>(words_.data() + t.begin), static_cast<size_t>(t.count)};
  }

  std::span<const int64_t> words_;
};

// The digests that ranks compare. The digest of a plan covers the digests of all ranks' tables. A rank whose tables are
// not those of the plan therefore has another digest.

/// The words of each table of a rank.
using TableWords = std::array<std::span<const int64_t>, kNumTables>;

/// The words of a header.
inline std::span<const int64_t> header_words(const Header& header) {
  return {reinterpret_cast<const int64_t*>(&header), static_cast<size_t>(kHeaderWords)};
}

/// The digest of one rank's part of a plan. It leaves out the block table, which `validate` derives from the other
/// tables.
inline uint64_t tables_digest(const Header& header, const TableWords& tables) {
  ListDigest d;
  d.add(header_words(header).subspan(kHeaderParts[1], kHeaderParts[2] - kHeaderParts[1]));
  for (size_t id = kRankDigests + 1; id < kNumTables; ++id)
    if (id != kBlocks) d.add(tables[id]);
  return d.value();
}

/// The digest of a plan: of the header words that all slices share, and of the digests of all ranks' tables.
inline uint64_t plan_digest(const Header& header, std::span<const int64_t> rank_digests) {
  ListDigest d;
  d.add({&header.version, 1});
  d.add(header_words(header).subspan(kHeaderParts[0], kHeaderParts[1] - kHeaderParts[0]));
  d.add(rank_digests);
  return d.value();
}

}  // namespace distca::plan
