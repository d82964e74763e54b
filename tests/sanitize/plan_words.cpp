// Validates plans of which one word was changed, to extreme values above all, with digests and checksum that match: run
// under sanitizers, no value of any word may overflow, reach past the words, or be taken for a size.
#include <array>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <memory>
#include <vector>

#include "plan/plan.h"
#include "plan/validate.h"

using namespace distca;
using namespace distca::plan;

namespace {

using Limits = std::numeric_limits<int64_t>;
constexpr std::array kValues = {Limits::min(),
                                Limits::min() + 1,
                                -(int64_t{1} << 62),
                                -(int64_t{1} << 32),
                                int64_t{-2},
                                int64_t{-1},
                                int64_t{0},
                                int64_t{1},
                                int64_t{65},
                                int64_t{1} << 31,
                                (int64_t{1} << 31) + 1,
                                int64_t{1} << 46,
                                (int64_t{1} << 62) + 1,
                                Limits::max() - 1,
                                Limits::max()};

/// Makes what the slice says of itself match its words, as far as these say where the tables are.
void repair(std::vector<int64_t>& words) {
  const SliceView slice(words);
  Header& h = *reinterpret_cast<Header*>(words.data());
  const auto size = static_cast<int64_t>(words.size());
  TableWords tables;
  bool known = true;
  for (size_t id = 0; id < kNumTables; ++id) {
    const TableSpan& t = h.tables[id];
    known = known && t.begin >= 0 && t.begin <= size && t.count >= 0 && t.count <= (size - t.begin) / kRowWords[id];
    if (known) tables[id] = slice.words_of(static_cast<TableId>(id));
  }
  if (known && h.rank >= 0 && h.rank < h.tables[kRankDigests].count) {
    words[static_cast<size_t>(h.tables[kRankDigests].begin + h.rank)] = static_cast<int64_t>(tables_digest(h, tables));
    h.plan_digest = static_cast<int64_t>(plan_digest(h, slice.rank_digests()));
  }
  if (h.num_words >= kChecksumBegin && h.num_words <= size)
    h.checksum = static_cast<int64_t>(
        digest(std::span(words).subspan(kChecksumBegin, static_cast<size_t>(h.num_words - kChecksumBegin))));
}

std::vector<Plan> make_plans() {
  const auto layout = std::make_shared<Layout>(std::vector<std::vector<Segment>>{
      {{0, 0, 150}, {kPadding, 0, 7}, {1, 0, 20}}, {{1, 20, 60}, {0, 150, 220}}, {{2, 0, 9}}, {}});
  PlanOptions o;
  o.heads = {4, 2, 16, 24, DType::kFloat32};
  o.min_rows = 1;
  o.tolerance_ppm = 0;
  std::vector<Plan> plans;
  plans.emplace_back(layout, o);
  o.retain_bytes = {1 << 20, 0, 1 << 20, 1 << 20};
  plans.emplace_back(layout, o);
  o.scores[0].window = 40;
  plans.emplace_back(layout, o);
  o.scores = {{1, 0}, {0, 40}};
  o.scores_of_document = {0, 1, 0};
  plans.emplace_back(layout, o);
  const auto tree = std::make_shared<Layout>(
      std::vector<std::vector<Segment>>{{{0, 0, 90}, {1, 90, 130}}, {{2, 60, 100}, {kPadding, 0, 3}}, {{3, 100, 140}}},
      std::vector<Branch>{{1, 0}, {2, 0}, {3, 2}});
  o.scores = {ScoresRow()};
  o.scores_of_document = {};
  o.retain_bytes = {1 << 20, 0, 1 << 20};
  plans.emplace_back(tree, o);
  o.heads.dtype = o.reduce_dtype = DType::kBFloat16;
  plans.emplace_back(tree, o);
  const auto merged = std::make_shared<Layout>(
      std::vector<std::vector<Segment>>{{{0, 0, 90}, {2, 120, 160}}, {{1, 70, 110}, {3, 100, 130}}, {{2, 160, 170}}},
      std::vector<Branch>{},
      std::vector<SharedRows>{
          {1, 0, 0, 20, 90}, {2, 0, 1, 70, 110}, {2, 0, 0, 0, 80}, {3, 0, 2, 130, 160}, {3, 0, 0, 10, 80}});
  plans.emplace_back(merged, o);
  return plans;
}

}  // namespace

int main() {
  int64_t refused = 0, accepted = 0;
  for (const Plan& plan : make_plans()) {
    for (int64_t rank = 0; rank < plan.layout().num_ranks(); ++rank) {
      const std::vector<int64_t> right = plan.slice(rank);
      validate(right);
      const auto used = static_cast<size_t>(SliceView(right).header().num_words);
      for (size_t i = 0; i < used; ++i) {
        for (size_t v = 0; v < kValues.size() + 4; ++v) {
          std::vector<int64_t> words = right;
          words[i] = v < kValues.size()        ? kValues[v]
                     : v == kValues.size()     ? right[i] ^ 1
                     : v == kValues.size() + 1 ? right[i] ^ 64
                     : v == kValues.size() + 2 ? right[(i * 7 + 5) % used]
                                               : static_cast<int64_t>(static_cast<uint64_t>(right[i]) + 64);
          repair(words);
          try {
            validate(words);
            ++accepted;
          } catch (const PlanFormatError&) {
            ++refused;
          }
        }
      }
    }
  }
  std::printf("%lld changed plans were refused, %lld accepted\n", static_cast<long long>(refused),
              static_cast<long long>(accepted));
  return refused > 0 ? 0 : 1;
}
