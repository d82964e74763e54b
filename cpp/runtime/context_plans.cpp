// What a context accepts before a step begins: a slice, the scores of a call, and a pair of plans.
#include <algorithm>
#include <unordered_map>

#include "attention/attention.h"
#include "plan/layout.h"
#include "plan/origin.h"
#include "plan/validate.h"
#include "runtime/context.h"

namespace distca::runtime {
namespace {

/// Says where the segments differ: at the first one of this rank that does, or on other ranks.
std::string first_difference(const plan::SliceView& a, const plan::SliceView& b) {
  const auto text = [](const plan::SliceView& slice, size_t i) {
    if (i >= slice.segments().size()) return std::string("nothing");
    const plan::SegmentRow& s = slice.segments()[i];
    const std::string rows = message("[", s.begin, ", ", s.end, ")");
    if (s.document == plan::kPadding) return "padding " + rows;
    return message("rows ", rows, " of document ", s.document,
                   slice.shared(s.document).empty() ? "" : ", which begins with rows of others");
  };
  for (size_t i = 0; i < std::max(a.segments().size(), b.segments().size()); ++i)
    if (text(a, i) != text(b, i))
      return message(" (segment ", i, " of this rank has ", text(b, i), ", in that of forward ", text(a, i), ")");
  return " (on other ranks)";
}

/// What this rank's documents begin with in a plan.
class Beginnings {
 public:
  Beginnings(const plan::SliceView& slice, bool is_asked) : slice_(slice) {
    if (!is_asked || slice.shared().empty()) return;
    for (size_t i = 0; i < slice.segments().size(); ++i) first_segment_.emplace(slice.segments()[i].document, i);
  }
  /// Whether two documents begin with the same rows of others. Numbers of documents do not count: it is the same one if
  /// the same of this rank's segments is its first, or if this rank has none of it.
  static bool are_alike(const Beginnings& a, int64_t of_a, const Beginnings& b, int64_t of_b) {
    const auto same = [&](const plan::SharedRows& x, const plan::SharedRows& y) {
      return x.at == y.at && x.begin == y.begin && x.end == y.end && a.first_segment(x.of) == b.first_segment(y.of);
    };
    return std::ranges::equal(a.slice_.shared(of_a), b.slice_.shared(of_b), same);
  }

 private:
  size_t first_segment(int64_t document) const {
    const auto found = first_segment_.find(document);
    return found == first_segment_.end() ? SIZE_MAX : found->second;
  }

  const plan::SliceView& slice_;
  std::unordered_map<int64_t, size_t> first_segment_;  // by document
};

}  // namespace

plan::SliceView Context::accept(std::span<const int64_t> plan_words, const HeadShape& heads, int64_t num_rows) const {
  protocol_.check_healthy();
  check_once(plan_words);
  const plan::SliceView slice(plan_words);
  const plan::Header& h = slice.header();
  require(h.num_ranks == num_ranks(), "plan is for ", h.num_ranks, " ranks, context \"", options_.name, "\" has ",
          num_ranks());
  require(h.rank == rank(), "plan is the slice of rank ", h.rank, ", this is rank ", rank(), " of context \"",
          options_.name, "\"; make it with distca.plan(..., context=), or use plan.for_rank(", rank(), ")");
  // Not a `require`, which would make the texts, and allocate, at every call.
  if (slice.heads() != heads) {
    throw InvalidArgumentError(
        message("plan was made for ", plan::describe(slice.heads()), "; the tensors have ", plan::describe(heads)));
  }
  require(h.num_rows == num_rows, "plan is of another layout: it has ", h.num_rows, " rows on rank ", h.rank,
          ", the tensors have ", num_rows);
  require(static_cast<uint64_t>(h.cost_digest) == options_.cost_digest, "plan was made with another cost model than ",
          "context \"", options_.name, "\"; pass the same cost to distca.init and distca.plan");
  require(h.key_block_rows == attention::kKeyBlockRows, "plan has key blocks of ", h.key_block_rows,
          " rows, the kernel has ", attention::kKeyBlockRows);
  require<CapacityError>(h.slot_bytes <= options_.slot_bytes, "plan needs ", h.slot_bytes, " bytes a slot, context \"",
                         options_.name, "\" has ", options_.slot_bytes,
                         "; give distca.init heap_bytes >= ", kNumSlots * h.slot_bytes);
  return slice;
}

ScoreOptions Context::accept(const plan::SliceView& slice, ScoreOptions scores) const {
  const auto check = [&](const char* name, const plan::SegmentRow& s, int64_t word, float of_call) {
    if (word == plan::score_word(of_call)) return;
    throw InvalidArgumentError(message(name, " = ", of_call, "; the plan says ", plan::score_value(word),
                                       " for document ", s.document, ", of which this rank has rows"));
  };
  const plan::ScoresRow& first = slice.scores()[0];
  if (first.scale == plan::kOfTheCall && first.softcap == plan::kOfTheCall) return scores;
  for (const plan::SegmentRow& s : slice.segments()) {
    if (s.document == plan::kPadding) continue;
    const plan::ScoresRow& row = slice.scores_of(s);
    if (row.scale != plan::kOfTheCall) check("scale", s, row.scale, scores.scale);
    if (row.softcap != plan::kOfTheCall) check("softcap", s, row.softcap, scores.softcap);
  }
  if (first.scale != plan::kOfTheCall) scores.scale = 0.f;
  if (first.softcap != plan::kOfTheCall) scores.softcap = 0.f;
  return scores;
}

/// Validates a plan once. All layers of a step of training come with one plan, which is known again by its checksum.
void Context::check_once(std::span<const int64_t> plan_words) const {
  const int64_t checksum = plan::check_unaltered(plan_words);
  const std::lock_guard lock(valid_mutex_);
  const auto end = valid_.begin() + static_cast<std::ptrdiff_t>(std::min(next_valid_, valid_.size()));
  if (std::find(valid_.begin(), end, checksum) != end) return;
  plan::validate(plan_words);
  valid_[next_valid_++ % valid_.size()] = checksum;
}

void Context::check_same_problem(const plan::SliceView& forward, const plan::SliceView& backward) const {
  const plan::Header &f = forward.header(), &b = backward.header();
  // The digest of a layout is over all ranks' segments. In plans with labels, those of other ranks may differ, and the
  // numbers of documents with them: each rank answers for its own rows.
  const bool are_labelled = f.label[0] != 0 && b.label[0] != 0;
  const Beginnings of_forward(forward, are_labelled), of_backward(backward, are_labelled);
  const auto same = [&](const plan::SegmentRow& x, const plan::SegmentRow& y) {
    const bool same_document =
        are_labelled ? (x.document == plan::kPadding) == (y.document == plan::kPadding) : x.document == y.document;
    const bool alike = !are_labelled || x.document == plan::kPadding ||
                       Beginnings::are_alike(of_forward, x.document, of_backward, y.document);
    return same_document && alike && x.begin == y.begin && x.end == y.end;
  };
  if ((!are_labelled && f.layout_digest != b.layout_digest) ||
      !std::ranges::equal(forward.segments(), backward.segments(), same)) {
    throw InvalidArgumentError(message("the plan of backward is of another layout than that of forward",
                                       first_difference(forward, backward), "; make both of one layout"));
  }
  for (size_t i = 0; i < forward.segments().size(); ++i) {
    if (forward.segments()[i].document == plan::kPadding) continue;
    const plan::ScoresRow &x = forward.scores_of(forward.segments()[i]),
                          &y = backward.scores_of(backward.segments()[i]);
    if (x == y) continue;
    throw InvalidArgumentError(message("the plan of backward has ", plan::describe(y), ", that of forward ",
                                       plan::describe(x), "; make both with one mask, window, scale and softcap"));
  }
}

}  // namespace distca::runtime
