#include "plan/layout.h"

#include <algorithm>
#include <numeric>

#include "common/align.h"

namespace distca::plan {
namespace {

constexpr int64_t kMaxRows = int64_t{1} << 31;  // of one document or one rank
constexpr int64_t kMaxRanks = int64_t{1} << 20;

void check_segment(const Segment& s, size_t rank, size_t index) {
  require(s.document >= kPadding, "layout: rank ", rank, ", segment ", index, ": document ", s.document,
          " is negative; documents are numbered from 0, padding is ", kPadding);
  require(s.begin >= 0 && s.end > s.begin && s.end <= kMaxRows, "layout: rank ", rank, ", segment ", index,
          " (document ", s.document, "): rows [", s.begin, ", ", s.end,
          ") are not allowed; 0 <= begin < end <= ", kMaxRows);
}

void check_ranks(int64_t num_ranks) {
  require(num_ranks >= 1 && num_ranks <= kMaxRanks, "layout: ranks = ", num_ranks, "; 1 to ", kMaxRanks,
          " are allowed");
}

void check_length(int64_t length, size_t document) {
  require(length >= 1 && length <= kMaxRows, "layout: document ", document, " has length ", length, "; 1 to ", kMaxRows,
          " are allowed");
}

using Ranks = std::vector<std::vector<Segment>>;

/// As many rows on every rank, to a row.
struct EqualRows {
  int64_t total;
  int64_t num_ranks;

  /// The rows of ranks below `rank`.
  int64_t before(int64_t rank) const { return static_cast<int64_t>(__int128{total} * rank / num_ranks); }
};

/// Cuts rows of a document into 2 n chunks for n ranks from `first` on, after the last of which comes rank 0. Each gets
/// one from either end.
void cut_from_both_ends(const Segment& rows, size_t first, size_t n, Ranks& ranks) {
  const auto chunks = static_cast<int64_t>(2 * n);
  for (size_t i = 0; i < n; ++i) {
    for (int64_t chunk : {static_cast<int64_t>(i), chunks - 1 - static_cast<int64_t>(i)}) {
      const Segment s{rows.document, rows.begin + rows.num_rows() * chunk / chunks,
                      rows.begin + rows.num_rows() * (chunk + 1) / chunks};
      if (s.num_rows() > 0) ranks[(first + i) % ranks.size()].push_back(s);
    }
  }
}

int64_t rows_of(const std::vector<Segment>& segments) {
  int64_t rows = 0;
  for (const Segment& s : segments) rows += s.num_rows();
  return rows;
}

/// Puts pieces on ranks from `first` on until each has its rows. A piece that is longer than what is left on a rank
/// continues on the next one that has room.
void fill(const std::vector<Segment>& pieces, int64_t first, const EqualRows& rows, Ranks& ranks) {
  int64_t rank = first - 1, room = 0;
  for (Segment rest : pieces) {
    while (rest.num_rows() > 0) {
      while (room <= 0) {
        ++rank;
        room = rows.before(rank + 1) - rows.before(rank) - rows_of(ranks[static_cast<size_t>(rank)]);
      }
      const int64_t take = std::min(room, rest.num_rows());
      ranks[static_cast<size_t>(rank)].push_back({rest.document, rest.begin, rest.begin + take});
      rest.begin += take;
      room -= take;
    }
  }
}

/// Neighbouring ranks, after the last of which comes rank 0, and the rows of the one that holds most.
struct Block {
  size_t first = 0;
  int64_t most = INT64_MAX;
};

/// Of all blocks of n ranks the one whose fullest rank holds least.
Block emptiest_block(const std::vector<int64_t>& used, size_t n) {
  Block found;
  for (size_t first = 0; first < used.size(); ++first) {
    int64_t most = 0;
    for (size_t i = 0; i < n; ++i) most = std::max(most, used[(first + i) % used.size()]);
    if (most < found.most) found = {first, most};
  }
  return found;
}

}  // namespace

Layout::Layout(std::vector<std::vector<Segment>> ranks, std::vector<Branch> branches, std::vector<SharedRows> shared)
    : ranks_(std::move(ranks)) {
  require(!ranks_.empty() && ranks_.size() <= static_cast<size_t>(kMaxRanks), "layout: ", ranks_.size(),
          " ranks; 1 to ", kMaxRanks, " are allowed");
  std::vector<Placement> placements;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    int64_t row = 0;
    for (size_t i = 0; i < ranks_[r].size(); ++i) {
      const Segment& s = ranks_[r][i];
      check_segment(s, r, i);
      if (s.document != kPadding) placements.push_back({s.document, s.begin, s.end, static_cast<int64_t>(r), row});
      row += s.num_rows();
      require(row <= kMaxRows, "layout: rank ", r, " holds more than ", kMaxRows, " rows");
    }
    num_rows_.push_back(row);
  }
  std::sort(placements.begin(), placements.end(), [](const Placement& a, const Placement& b) {
    return a.document != b.document ? a.document < b.document : a.begin < b.begin;
  });
  std::vector<int64_t> begin_with_others;
  for (const Branch& b : branches) begin_with_others.push_back(b.document);
  for (const SharedRows& s : shared) begin_with_others.push_back(s.document);
  std::ranges::sort(begin_with_others);
  for (const Placement& p : placements) {
    const int64_t next = num_documents();
    if (p.document != next - 1) {
      require(p.document == next, "layout: document ", next, " is missing; documents are numbered 0 .. n-1 without ",
              "gaps, and the next one given is ", p.document, " on rank ", p.rank);
      require(p.begin == 0 || std::ranges::binary_search(begin_with_others, p.document), "layout: document ",
              p.document, ": rows [0, ", p.begin, ") are on no rank");
      placements_.next();
      document_lengths_.push_back(p.begin);
    }
    int64_t& length = document_lengths_.back();
    require(p.begin == length, "layout: document ", p.document, ": rows [", std::min(p.begin, length), ", ",
            std::max(p.begin, length), ") are ", p.begin > length ? "on no rank" : "given twice", " (rank ", p.rank,
            ")");
    length = p.end;
    placements_.add(p);
  }
  if (begin_with_others.empty()) return;
  add_shared(branches, std::move(shared));
  check_shared();
  find_clusters();
  find_keys();
}

/// Finds which rows of others each document begins with. Those of branches are rows that their parents have.
void Layout::add_shared(const std::vector<Branch>& branches, std::vector<SharedRows> shared) {
  const int64_t n = num_documents();
  const auto own = [&](int64_t document) { return placements_[document].front().begin; };
  const auto length = [&](int64_t document) { return document_lengths_[static_cast<size_t>(document)]; };
  std::ranges::stable_sort(shared, {}, &SharedRows::document);
  for (const SharedRows& s : shared) {
    require(s.document >= 0 && s.document < n && s.of >= 0 && s.of < n, "layout: document ", s.document,
            " begins with rows of document ", s.of, "; 0 to ", n - 1, " are allowed");
    require(own(s.of) <= s.begin && s.begin < s.end && s.end <= length(s.of), "layout: document ", s.document,
            " begins with rows [", s.begin, ", ", s.end, ") of document ", s.of, ", whose own are [", own(s.of), ", ",
            length(s.of), ")");
  }
  std::vector<int64_t> parents(static_cast<size_t>(n), -1);
  for (const Branch& b : branches) {
    require(b.document >= 0 && b.document < n && b.parent >= 0 && b.parent < n, "layout: document ", b.document,
            " branches off document ", b.parent, "; 0 to ", n - 1, " are allowed");
    int64_t& parent = parents[static_cast<size_t>(b.document)];
    require(parent < 0 && !std::ranges::binary_search(shared, b.document, {}, &SharedRows::document),
            "layout: document ", b.document, " branches off two documents, or off one and begins with rows of others");
    require(own(b.parent) < own(b.document) && own(b.document) <= length(b.parent), "layout: document ", b.document,
            ", whose first row is ", own(b.document), ", branches off document ", b.parent, ", which has rows [",
            own(b.parent), ", ", length(b.parent), "); it has to have the row before that one");
    parent = b.parent;
  }
  std::vector<SharedRows> rows;  // of what a branch has, from the last one to the first
  for (int64_t document = 0; document < n; ++document) {
    rows.clear();
    int64_t d = document;
    for (int64_t end = own(d); parents[static_cast<size_t>(d)] >= 0; end = own(d)) {
      d = parents[static_cast<size_t>(d)];
      rows.push_back({document, 0, d, own(d), end});
    }
    const auto said = std::ranges::equal_range(shared, d, {}, &SharedRows::document);
    shared_.next();
    int64_t found = 0;
    const auto add = [&](int64_t of, int64_t begin, int64_t end) {
      SharedRows* const last = found > 0 ? &shared_.last() : nullptr;
      if (last != nullptr && last->of == of && last->end == begin)
        last->end = end;
      else
        shared_.add({document, found, of, begin, end});
      found += end - begin;
    };
    for (const SharedRows& s : said) add(s.of, s.begin, s.end);
    for (auto s = rows.rbegin(); s != rows.rend(); ++s) add(s->of, s->begin, s->end);
    require(found == own(document), "layout: document ", document, " begins with ", found,
            " rows of others; its own begin at row ", own(document));
  }
}

/// Checks that no document has a row twice.
void Layout::check_shared() const {
  std::vector<SharedRows> sorted;
  for (int64_t document = 0; document < num_documents(); ++document) {
    const auto rows = shared_[document];
    sorted.assign(rows.begin(), rows.end());
    std::ranges::sort(sorted, {}, [](const SharedRows& s) { return std::pair(s.of, s.begin); });
    for (size_t i = 0; i < sorted.size(); ++i) {
      const SharedRows& s = sorted[i];
      require(s.of != document, "layout: document ", document, " begins with its own row ", s.begin);
      require(i == 0 || s.of != sorted[i - 1].of || s.begin >= sorted[i - 1].end, "layout: document ", document,
              " begins with row ", s.begin, " of document ", s.of, " twice");
    }
  }
}

void Layout::find_clusters() {
  clusters_.resize(static_cast<size_t>(num_documents()));
  std::iota(clusters_.begin(), clusters_.end(), 0);
  const auto find = [&](int64_t document) {
    while (cluster(document) != document)
      document = clusters_[static_cast<size_t>(document)] = cluster(cluster(document));
    return document;
  };
  for (const SharedRows& s : shared_.all()) {
    const int64_t a = find(s.document), b = find(s.of);
    clusters_[static_cast<size_t>(std::max(a, b))] = std::min(a, b);
  }
  std::vector<int64_t> sizes(clusters_.size(), 0);
  for (int64_t& c : clusters_) {
    c = cluster(c);  // ascending: that of a lower number is found already
    largest_cluster_ = std::max(largest_cluster_, ++sizes[static_cast<size_t>(c)]);
  }
}

/// Finds where the keys of each document lie, and which documents have its rows.
void Layout::find_keys() {
  const auto n = static_cast<size_t>(num_documents());
  std::vector<std::vector<SharedRows>> readers(n);
  std::vector<SharedRows> rows;
  for (int64_t document = 0; document < num_documents(); ++document) {
    const int64_t first = first_row(document);
    rows.assign(shared_[document].begin(), shared_[document].end());
    rows.push_back({document, first, document, first, document_lengths_[static_cast<size_t>(document)]});
    key_placements_.next();
    for (const SharedRows& s : rows) {
      readers[static_cast<size_t>(s.of)].push_back(s);
      if (first == 0) continue;
      const auto of_owner = placements(s.of);
      auto p = std::ranges::upper_bound(of_owner, s.begin, {}, &Placement::end);
      for (; p != of_owner.end() && p->begin < s.end; ++p)
        key_placements_.add(p->within(s.begin, s.end).later(s.shift()));
    }
    std::ranges::sort(rows, {}, [](const SharedRows& s) { return std::pair(s.of, s.begin); });
    by_owner_.next();
    for (const SharedRows& s : rows) by_owner_.add(s);
  }
  for (const std::vector<SharedRows>& of_document : readers) {
    readers_.next();
    for (const SharedRows& s : of_document) readers_.add(s);
  }
}

void Layout::add_common(int64_t document, int64_t other, int64_t from, int64_t to,
                        std::vector<std::pair<int64_t, int64_t>>& found) const {
  if (document == other) {
    if (from < to) found.emplace_back(from, to);
    return;
  }
  const auto of_document = by_owner_[document];
  auto first = of_document.begin();
  for (const SharedRows& theirs : by_owner_[other]) {
    const int64_t begin = std::max(theirs.begin, from - theirs.shift());
    const int64_t end = std::min(theirs.end, to - theirs.shift());
    if (begin >= end) continue;
    while (first != of_document.end() && std::pair(first->of, first->end) <= std::pair(theirs.of, begin)) ++first;
    for (auto ours = first; ours != of_document.end() && ours->of == theirs.of && ours->begin < end; ++ours)
      found.emplace_back(std::max(begin, ours->begin) + ours->shift(), std::min(end, ours->end) + ours->shift());
  }
}

Layout Layout::with_bidirectional(const std::vector<std::pair<int64_t, BidirectionalRows>>& rows_of_documents) const {
  Layout made = *this;
  made.bidirectional_ = {};
  if (rows_of_documents.empty()) return made;
  auto sorted = rows_of_documents;
  std::sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first < b.first : a.second.begin < b.second.begin;
  });
  int64_t last_document = -1, last_end = 0;
  for (const auto& [document, rows] : sorted) {
    require(document >= 0 && document < num_documents(), "layout: bidirectional rows [", rows.begin, ", ", rows.end,
            ") of document ", document, "; 0 to ", num_documents() - 1, " are allowed");
    const int64_t first = first_row(document), length = document_lengths_[static_cast<size_t>(document)];
    require(first <= rows.begin && rows.begin < rows.end && rows.end <= length, "layout: document ", document,
            ": bidirectional rows [", rows.begin, ", ", rows.end, "); ", first, " <= begin < end <= ", length,
            first > 0 ? " (its own rows)" : " (its length)");
    require(document != last_document || rows.begin >= last_end, "layout: document ", document,
            ": bidirectional rows [", rows.begin, ", ", rows.end, ") begin before the ones before them end, at row ",
            last_end);
    for (; last_document < document; ++last_document) made.bidirectional_.next();
    last_end = rows.end;
    made.bidirectional_.add(rows);
  }
  for (; last_document + 1 < num_documents(); ++last_document) made.bidirectional_.next();
  return made;
}

Layout Layout::from_documents(const std::vector<std::vector<int64_t>>& lengths) {
  std::vector<std::vector<Segment>> ranks(lengths.size());
  int64_t document = 0;
  for (size_t r = 0; r < lengths.size(); ++r) {
    for (int64_t length : lengths[r]) {
      require(length >= 1 && length <= kMaxRows, "layout: document ", document, " on rank ", r, " has length ", length,
              "; 1 to ", kMaxRows, " are allowed");
      ranks[r].push_back({document++, 0, length});
    }
  }
  return Layout(std::move(ranks));
}

Layout Layout::packed(const std::vector<int64_t>& lengths, int64_t num_ranks, int64_t tokens_per_rank) {
  check_ranks(num_ranks);
  require(tokens_per_rank >= 1 && tokens_per_rank <= kMaxRows, "layout: tokens_per_rank = ", tokens_per_rank, "; 1 to ",
          kMaxRows, " are allowed");
  std::vector<std::vector<Segment>> ranks(static_cast<size_t>(num_ranks));
  size_t rank = 0;
  int64_t room = tokens_per_rank;
  for (size_t d = 0; d < lengths.size(); ++d) {
    check_length(lengths[d], d);
    for (int64_t begin = 0; begin < lengths[d];) {
      if (room == 0) {
        ++rank;
        room = tokens_per_rank;
      }
      require(rank < ranks.size(), "layout: document ", d, " (", lengths[d], " rows) does not fit: ", num_ranks,
              " ranks of ", tokens_per_rank, " rows are full at its row ", begin);
      const int64_t take = std::min(room, lengths[d] - begin);
      ranks[rank].push_back({static_cast<int64_t>(d), begin, begin + take});
      begin += take;
      room -= take;
    }
  }
  return Layout(std::move(ranks));
}

Layout Layout::head_tail(const std::vector<int64_t>& lengths, int64_t num_ranks, int64_t longer_than,
                         std::optional<int64_t> context) {
  check_ranks(num_ranks);
  const int64_t group_ranks = context.value_or(num_ranks);
  require(group_ranks >= 1 && group_ranks <= num_ranks, "layout: context = ", group_ranks, "; 1 to ", num_ranks,
          " (the number of ranks) are allowed");
  require(longer_than >= 0 && longer_than <= kMaxRows, "layout: longer_than is ", longer_than, "; 0 to ", kMaxRows,
          " tokens are allowed");
  for (size_t d = 0; d < lengths.size(); ++d) check_length(lengths[d], d);
  const EqualRows rows{std::accumulate(lengths.begin(), lengths.end(), int64_t{0}), num_ranks};
  Ranks ranks(static_cast<size_t>(num_ranks));
  size_t document = 0;
  int64_t next_row = 0;  // of the document
  for (int64_t first = 0; first < num_ranks; first += group_ranks) {
    const int64_t end = std::min(first + group_ranks, num_ranks);
    std::vector<Segment> whole;
    for (int64_t room = rows.before(end) - rows.before(first); room > 0;) {
      const int64_t take = std::min(room, lengths[document] - next_row);
      const Segment piece{static_cast<int64_t>(document), next_row, next_row + take};
      if (take > longer_than)
        cut_from_both_ends(piece, static_cast<size_t>(first), static_cast<size_t>(end - first), ranks);
      else
        whole.push_back(piece);
      room -= take;
      next_row += take;
      if (next_row == lengths[document]) {
        ++document;
        next_row = 0;
      }
    }
    fill(whole, first, rows, ranks);
  }
  return Layout(std::move(ranks));
}

Layout Layout::spread(const std::vector<int64_t>& lengths, int64_t num_ranks) {
  using Wide = unsigned __int128;
  check_ranks(num_ranks);
  Wide cubes = 0;
  const auto cube = [](int64_t n) { return Wide(n) * Wide(n) * Wide(n); };
  std::vector<size_t> by_length(lengths.size());
  for (size_t d = 0; d < lengths.size(); ++d) {
    check_length(lengths[d], d);
    cubes += cube(lengths[d]);
    by_length[d] = d;
  }
  std::stable_sort(by_length.begin(), by_length.end(), [&](size_t a, size_t b) { return lengths[a] > lengths[b]; });
  const EqualRows rows{std::accumulate(lengths.begin(), lengths.end(), int64_t{0}), num_ranks};
  const auto n = static_cast<size_t>(num_ranks);
  Ranks ranks(n);
  std::vector<int64_t> used(n, 0);
  std::vector<char> is_spread(lengths.size(), 0);
  for (size_t d : by_length) {
    // Keys of a document leave for each server of its attention. These are as many as its squared length, in
    // proportion.
    const auto homes = static_cast<int64_t>(std::min<Wide>(n, (Wide(n) * cube(lengths[d]) + cubes - 1) / cubes));
    const int64_t filled = ceil_div(lengths[d] * num_ranks, rows.total);
    if (2 * homes < 3 * filled) continue;
    const auto of_document = static_cast<size_t>(homes);
    const Block block = emptiest_block(used, of_document);
    if (block.most + ceil_div(lengths[d], homes) + 2 > rows.total / num_ranks) continue;  // two chunks are rounded
    cut_from_both_ends({static_cast<int64_t>(d), 0, lengths[d]}, block.first, of_document, ranks);
    for (size_t i = 0; i < of_document; ++i) {
      const size_t rank = (block.first + i) % n;
      used[rank] = rows_of(ranks[rank]);
    }
    is_spread[d] = 1;
  }
  std::vector<Segment> others;
  for (size_t d = 0; d < lengths.size(); ++d)
    if (is_spread[d] == 0) others.push_back({static_cast<int64_t>(d), 0, lengths[d]});
  fill(others, 0, rows, ranks);
  return Layout(std::move(ranks));
}

Layout Layout::join(const std::vector<Part>& parts, int64_t num_ranks) {
  require(num_ranks >= 1 && num_ranks <= kMaxRanks, "layout: ", num_ranks, " ranks; 1 to ", kMaxRanks, " are allowed");
  std::vector<std::vector<Segment>> ranks(static_cast<size_t>(num_ranks));
  std::vector<char> taken(ranks.size(), 0);
  std::vector<std::pair<int64_t, BidirectionalRows>> bidirectional;
  std::vector<SharedRows> shared;
  int64_t num_documents = 0;
  for (const Part& part : parts) {
    require(std::ssize(part.ranks) == part.layout->num_ranks(), "layout: a part of ", part.layout->num_ranks(),
            " ranks is put on ", part.ranks.size());
    for (size_t r = 0; r < part.ranks.size(); ++r) {
      const int64_t to = part.ranks[r];
      require(to >= 0 && to < num_ranks, "layout: a part is put on rank ", to, "; 0 to ", num_ranks - 1,
              " are allowed");
      require(taken[static_cast<size_t>(to)]++ == 0, "layout: two ranks of the parts are put on rank ", to);
      std::vector<Segment>& segments = ranks[static_cast<size_t>(to)];
      segments = part.layout->ranks()[r];
      for (Segment& s : segments)
        if (s.document != kPadding) s.document += num_documents;
    }
    for (int64_t document = 0; document < part.layout->num_documents(); ++document)
      for (const BidirectionalRows& rows : part.layout->bidirectional(document))
        bidirectional.emplace_back(num_documents + document, rows);
    for (SharedRows s : part.layout->shared()) {
      s.document += num_documents;
      s.of += num_documents;
      shared.push_back(s);
    }
    num_documents += part.layout->num_documents();
  }
  return Layout(std::move(ranks), {}, std::move(shared)).with_bidirectional(bidirectional);
}

}  // namespace distca::plan
