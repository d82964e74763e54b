// What a plan is for and how it was made, in words that ranks publish; and in what two plans differ by these words.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "common/dtype.h"
#include "common/mask.h"
#include "plan/tables.h"

namespace distca::plan {

/// Bits of PlanArguments::choices.
inline constexpr int64_t kBalance = 1, kSplitHeads = 2, kOverlap = 4, kForwardOnly = 8, kReducesNarrow = 16;

/// The origin of a plan: the header words of layout, cost model, ranks, heads, key blocks and label, then the
/// arguments.
using Origin =
    std::array<uint64_t, (offsetof(Header, retains) - offsetof(Header, layout_digest) + sizeof(PlanArguments)) / 8>;
Origin origin_of(const Header& header);

/// An origin, and the rank whose plan has it.
struct OriginOnRank {
  const Origin& origin;
  int64_t rank;
};
/// Says in what two plans differ: "tolerance 0.05 on rank 1, 0.01 on rank 0".
std::string difference(const OriginOnRank& one, const OriginOnRank& other);

/// Whether a text may be a label.
bool is_label(std::string_view text);
/// The words of a label, and the label that words say. Bytes that a label may not have become question marks.
std::array<int64_t, kLabelWords> label_words(std::string_view text);
std::string label_of(const std::array<int64_t, kLabelWords>& words);

std::string describe(const HeadShape& heads);
std::string describe(const Mask& mask);
std::string describe(const ScoresRow& scores);

}  // namespace distca::plan
