// The digests that ranks compare. The digest of a plan covers the digests of all ranks' tables. A rank whose tables are
// not those of the plan therefore has another digest.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "common/digest.h"
#include "plan/tables.h"

namespace distca::plan {

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
