// The layout: which rows of which documents every rank holds, in the order of its packed token tensor.
#pragma once

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
  int64_t row = 0;  // row of `begin` in the rank's token tensor
};

/// A document that shares its first rows with another one, `parent`: those before the first row of its own.
struct Branch {
  int64_t document = 0;
  int64_t parent = 0;

  bool operator==(const Branch&) const = default;
};

/// A document whose rows may see rows of another one: those before `end`.
struct Reader {
  int64_t document = 0;
  int64_t end = 0;
};

/// Which rows every rank holds. The constructor checks that documents are numbered 0 .. n-1 and that the segments of
/// each document tile [0, length) exactly, or those of a branch [first_row, length), where the parent has the row
/// before its first one.
class DISTCA_EXPORT Layout {
 public:
  explicit Layout(std::vector<std::vector<Segment>> ranks, std::vector<Branch> branches = {});

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
  std::span<const Placement> placements() const { return placements_; }
  /// All segments of one document, in ascending order.
  std::span<const Placement> placements(int64_t document) const;
  /// The documents that share first rows with another one, ascending.
  std::span<const Branch> branches() const { return branches_; }
  bool has_branches() const { return !branches_.empty(); }
  /// The first row of a document that is its own; 0 unless it is a branch.
  int64_t first_row(int64_t document) const {
    return branches_.empty() ? 0 : placements_[first_placement_[static_cast<size_t>(document)]].begin;
  }
  /// The document that a branch shares its first rows with.
  int64_t parent(int64_t branch) const;
  /// The document that all documents with which this one shares rows branch off, over however many others. It stands
  /// for all of them.
  int64_t tree(int64_t document) const { return branches_.empty() ? document : trees_[static_cast<size_t>(document)]; }
  /// How many first rows two documents have in common; all if they are one document.
  int64_t shared_rows(int64_t a, int64_t b) const;
  /// Whether rows of the document see those of another one, or the other way round.
  bool shares_rows(int64_t document) const {
    return has_branches() && (first_row(document) > 0 || readers_of(document).size() > 1);
  }
  /// The segments of all rows that a document has, those that it shares included, in ascending order. Each lies in one
  /// document, of which it has the number.
  std::span<const Placement> key_placements(int64_t document) const;
  /// Calls visit(Reader) for every document whose rows may see those that are the document's own: itself and its
  /// branches, over however many others.
  template <class Visit>
  void for_each_reader(int64_t document, const Visit& visit) const {
    if (branches_.empty()) return visit(Reader{document, document_lengths_[static_cast<size_t>(document)]});
    for (const Reader& reader : readers_of(document)) visit(reader);
  }

  /// The rows of a document that see each other besides what its mask lets them see, in ascending order.
  std::span<const BidirectionalRows> bidirectional(int64_t document) const;
  /// Whether any document has such rows.
  bool has_bidirectional() const { return !bidirectional_.empty(); }

 private:
  void add_branches();
  std::span<const Reader> readers_of(int64_t document) const {
    const size_t first = first_reader_[static_cast<size_t>(document)];
    return std::span(readers_).subspan(first, first_reader_[static_cast<size_t>(document) + 1] - first);
  }

  std::vector<std::vector<Segment>> ranks_;
  std::vector<int64_t> num_rows_;
  std::vector<int64_t> document_lengths_;
  std::vector<Placement> placements_;
  std::vector<size_t> first_placement_;  // first index of each document, then the number of all
  // These are empty if there are no branches.
  std::vector<Branch> branches_;
  std::vector<int64_t> trees_;               // by document
  std::vector<Placement> key_placements_;    // of branches
  std::vector<size_t> first_key_placement_;  // first index of each document, then the number of all
  std::vector<Reader> readers_;
  std::vector<size_t> first_reader_;  // the same

  std::vector<BidirectionalRows> bidirectional_;
  std::vector<size_t> first_bidirectional_;  // the same; empty if no document has any
};

}  // namespace distca::plan
