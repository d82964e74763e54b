// Prints digests of plans of all kinds: test_plan_digests.py compares those of differently compiled schedulers.
#include <cinttypes>
#include <cstdio>
#include <memory>

#include "common/digest.h"
#include "plan/plan.h"

using namespace distca;
using namespace distca::plan;

namespace {

/// Numbers that are the same everywhere.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  int64_t below(int64_t n) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<int64_t>((state_ >> 33) % static_cast<uint64_t>(n));
  }

 private:
  uint64_t state_;
};

Layout make_layout(Random& random, int64_t num_ranks) {
  std::vector<std::vector<int64_t>> of_ranks(static_cast<size_t>(num_ranks));
  std::vector<int64_t> lengths;
  int64_t total = 0;
  for (auto& of_rank : of_ranks) {
    for (int64_t i = random.below(12); i >= 0; --i) {
      of_rank.push_back(1 + random.below(int64_t{1} << (4 + random.below(13))));
      lengths.push_back(of_rank.back());
      total += of_rank.back();
    }
  }
  switch (random.below(3)) {
    case 0:
      return Layout::from_documents(of_ranks);
    case 1:
      return Layout::packed(lengths, num_ranks, total / num_ranks + 1);
    default:
      return Layout::head_tail(lengths, num_ranks);
  }
}

PlanOptions make_options(Random& random, int64_t num_ranks) {
  PlanOptions o;
  const int64_t kv_heads = int64_t{1} << random.below(4);
  o.heads = {kv_heads << random.below(3), kv_heads, 128, 64, DType::kBFloat16};
  if (random.below(4) == 0)
    o.scores[0].mask_kind = 1;
  else if (random.below(3) == 0)
    o.scores[0].window = 1 + random.below(3000);
  if (random.below(3) == 0) o.cost = {3, 700, {}};
  if (random.below(4) == 0) o.cost.rates = {2, {4096, 3000, 3500, 2000, 1500, 1024}};
  o.tolerance_ppm = random.below(2) * 10'000 + random.below(3) * 20'000;
  o.min_rows = 1 + random.below(200);
  o.split_heads = random.below(4) > 0;
  o.ranks_per_node = random.below(3) * 4;
  o.objective = static_cast<Objective>(random.below(2));
  if (random.below(4) == 0)
    for (int64_t r = 0; r < num_ranks; ++r) o.speeds.push_back(1 + random.below(100));
  if (random.below(6) == 0)
    for (int64_t r = 0; r < num_ranks; r += 2) o.servers.push_back(r);
  if (random.below(3) == 0)
    for (int64_t r = 0; r < num_ranks; ++r) o.retain_bytes.push_back(random.below(int64_t{1} << 27));
  return o;
}

void print(const Plan& plan) {
  Digest d;
  for (int64_t load : plan.stats().load) d.add(load);
  for (int64_t r = 0; r < plan.layout().num_ranks(); ++r) d.add(plan.slice(r));
  const ByteBounds bounds = plan.byte_lower_bounds();
  std::printf("%016" PRIx64 " %016" PRIx64 " %" PRId64 " %" PRId64 "\n", plan.digest(), d.value(), bounds.bytes,
              bounds.between_nodes);
}

}  // namespace

int main() {
  for (uint64_t seed = 0; seed < 24; ++seed) {
    Random random(seed);
    const int64_t num_ranks = 1 + random.below(24);
    const auto layout = std::make_shared<Layout>(make_layout(random, num_ranks));
    PlanOptions options = make_options(random, num_ranks);
    const Plan plan(layout, options);
    print(plan);
    // Again in less memory than it would take, if that can be.
    options.capacity = plan.stats().wanted_slot_bytes * 9 / 10;
    try {
      print(Plan(layout, options));
    } catch (const Error& error) {
      std::printf("%s\n", error.kind());
    }
  }
}
