// The layout: which rows of which documents every rank holds, in the order of its packed token tensor.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "common/error.h"
#include "common/mask.h"

namespace distca::plan {

/// The document number of padding rows.
inline constexpr int64_t kPadding = -1;

/// Rows [begin, end) of a document, consecutive on one rank.
struct Segment {
  int64_t document = kPadding;
  int64_t begin = 0;
  int64_t end = 0;

  int64_t num_rows() const { return end - begin; }
  bool operator==(const Segment&) const = default;
};

/// A segment and where it lives.
struct Placement {
  int64_t document = 0;
  int64_t begin = 0;
  int64_t end = 0;
  int64_t rank = 0;
  int64_t row = 0;    // row of `begin` in the rank's token tensor
  int64_t shift = 0;  // of keys: they are rows [begin - shift, end - shift) of `document` (Layout::key_placements)

  /// The part of it in [from, to), which may be empty.
  Placement within(int64_t from, int64_t to) const {
    Placement part = *this;
    part.begin = std::max(begin, from);
    part.end = std::min(end, to);
    part.row += part.begin - begin;
    return part;
  }
  /// The same rows as keys of a document that has them `by` rows later.
  Placement later(int64_t by) const {
    Placement keys = *this;
    keys.begin += by;
    keys.end += by;
    keys.shift = by;
    return keys;
  }
};

/// Rows [begin, end) of document `of`, its own, which `document` has from its row `at` on.
struct SharedRows {
  int64_t document = 0, at = 0;
  int64_t of = 0, begin = 0, end = 0;

  int64_t num_rows() const { return end - begin; }
  /// What a row of `of` is later in `document`.
  int64_t shift() const { return at - begin; }
  bool operator==(const SharedRows&) const = default;
};

/// A document that begins with all rows that another one, `parent`, has before the first row of its own.
struct Branch {
  int64_t document = 0;
  int64_t parent = 0;
};

/// Things of documents, document by document.
template <class T>
class ByDocument {
 public:
  /// Goes on to the next document.
  void next() { first_.push_back(things_.size()); }
  void add(const T& thing) { things_.push_back(thing); }
  T& last() { return things_.back(); }

  bool empty() const { return things_.empty(); }
  std::span<const T> all() const { return things_; }
  std::span<const T> operator[](int64_t document) const {
    const size_t d = static_cast<size_t>(document), begin = first_[d];
    return std::span(things_).subspan(begin, (d + 1 < first_.size() ? first_[d + 1] : things_.size()) - begin);
  }

 private:
  std::vector<T> things_;
  std::vector<size_t> first_;
};

/// Which rows every rank holds. The constructor checks that documents are numbered 0 .. n-1 and that the segments of
/// each document tile [0, length) exactly, or [first_row, length) if it begins with rows of other documents. These are
/// the ones that `shared` says, in that order (`at` is ignored), or those of a parent.
class DISTCA_EXPORT Layout {
 public:
  explicit Layout(std::vector<std::vector<Segment>> ranks, std::vector<Branch> branches = {},
                  std::vector<SharedRows> shared = {});

  /// Data parallel: every rank holds whole documents, numbered over the ranks in order.
  static Layout from_documents(const std::vector<std::vector<int64_t>>& lengths);
  /// Documents one after another over the ranks. A document that is longer than what is left on a rank continues on the
  /// next one.
  static Layout packed(const std::vector<int64_t>& lengths, int64_t num_ranks, int64_t tokens_per_rank);
  /// Context parallel: each document of more than `longer_than` rows is cut into 2 * num_ranks chunks; rank r holds
  /// chunk r and the r-th chunk from the end. The others fill the ranks up to equal rows, one after another. With
  /// `context`, groups of so many neighbouring ranks get equal shares of the rows in order, and each does so with its
  /// share; the last group may have fewer ranks.
  static Layout head_tail(const std::vector<int64_t>& lengths, int64_t num_ranks, int64_t longer_than = 0,
                          std::optional<int64_t> context = std::nullopt);

  /// Equal rows on every rank, to a row. A document lies on as many neighbouring ranks as its share of the keys that
  /// leave their homes, cut as by `head_tail`, if these are at least 1.5 times as many as it fills. The others fill the
  /// ranks one after another.
  static Layout spread(const std::vector<int64_t>& lengths, int64_t num_ranks);

  /// A layout, and the rank that each of its ranks becomes.
  struct Part {
    std::shared_ptr<const Layout> layout;
    std::vector<int64_t> ranks;
  };
  /// Several layouts on different ranks. Documents are numbered on from part to part.
  static Layout join(const std::vector<Part>& parts, int64_t num_ranks);

  /// The same rows, where these rows of documents see each other besides. Each document's are disjoint; they may come
  /// in any order.
  Layout with_bidirectional(const std::vector<std::pair<int64_t, BidirectionalRows>>& rows_of_documents) const;

  int64_t num_ranks() const { return static_cast<int64_t>(ranks_.size()); }
  int64_t num_documents() const { return static_cast<int64_t>(document_lengths_.size()); }
  int64_t num_rows(int64_t rank) const { return num_rows_[static_cast<size_t>(rank)]; }
  const std::vector<std::vector<Segment>>& ranks() const { return ranks_; }
  const std::vector<int64_t>& document_lengths() const { return document_lengths_; }
  /// All segments of all documents, ascending by (document, begin).
  std::span<const Placement> placements() const { return placements_.all(); }
  /// All segments of one document, in ascending order.
  std::span<const Placement> placements(int64_t document) const { return placements_[document]; }
  /// The rows of others that documents begin with, by document and `at`. Ranges that continue one another are one.
  std::span<const SharedRows> shared() const { return shared_.all(); }
  std::span<const SharedRows> shared(int64_t document) const {
    return shared_.empty() ? std::span<const SharedRows>() : shared_[document];
  }
  bool has_shared() const { return !shared_.empty(); }
  /// The first row of a document that is its own; 0 unless it begins with rows of others.
  int64_t first_row(int64_t document) const { return shared_.empty() ? 0 : placements_[document].front().begin; }
  /// The lowest number of all documents with which this one shares rows, over however many others. It stands for all of
  /// them.
  int64_t cluster(int64_t document) const {
    return shared_.empty() ? document : clusters_[static_cast<size_t>(document)];
  }
  /// How many documents the largest cluster has; 1 if no document begins with rows of others.
  int64_t largest_cluster() const { return largest_cluster_; }
  /// Whether rows of the document see those of another one, or the other way round.
  bool shares_rows(int64_t document) const {
    return has_shared() && (first_row(document) > 0 || readers_[document].size() > 1);
  }
  /// The segments of all rows that a document has, those of others included, in ascending order. Each lies in one
  /// document, of which it has the number.
  std::span<const Placement> key_placements(int64_t document) const {
    return first_row(document) == 0 ? placements(document) : key_placements_[document];
  }
  /// Adds to `found` the rows [begin, end) of a document that rows [from, to) of another one are, too.
  void add_common(int64_t document, int64_t other, int64_t from, int64_t to,
                  std::vector<std::pair<int64_t, int64_t>>& found) const;
  /// Calls visit(SharedRows) for all rows of a document that it has itself, and that others have.
  template <class Visit>
  void for_each_reader(int64_t document, const Visit& visit) const {
    if (shared_.empty())
      return visit(SharedRows{document, 0, document, 0, document_lengths_[static_cast<size_t>(document)]});
    for (const SharedRows& rows : readers_[document]) visit(rows);
  }

  /// The rows of a document that see each other besides what its mask lets them see, in ascending order.
  std::span<const BidirectionalRows> bidirectional(int64_t document) const {
    return bidirectional_.empty() ? std::span<const BidirectionalRows>() : bidirectional_[document];
  }
  /// Whether any document has such rows.
  bool has_bidirectional() const { return !bidirectional_.empty(); }

 private:
  void add_shared(const std::vector<Branch>& branches, std::vector<SharedRows> shared);
  void check_shared() const;
  void find_clusters();
  void find_keys();

  std::vector<std::vector<Segment>> ranks_;
  std::vector<int64_t> num_rows_;
  std::vector<int64_t> document_lengths_;
  ByDocument<Placement> placements_;
  // These are empty if no document begins with rows of others.
  ByDocument<SharedRows> shared_;
  ByDocument<SharedRows> by_owner_;  // of each document, and its own rows, by `of` and `begin`
  ByDocument<SharedRows> readers_;   // the same, of each `of`, by `document` and `at`
  std::vector<int64_t> clusters_;    // by document
  int64_t largest_cluster_ = 1;
  ByDocument<Placement> key_placements_;  // of documents that begin with rows of others

  ByDocument<BidirectionalRows> bidirectional_;  // empty if no document has any
};

}  // namespace distca::plan
