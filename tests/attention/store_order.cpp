// Compares StoreOrder with the last writer of each row, noted row by row: test_store_order.py compiles and runs it.
// Prints how many runs it has compared.
#include "attention/store_order.h"

#include <cstdio>
#include <random>
#include <set>
#include <vector>

using namespace distca;

int main() {
  constexpr int64_t kRows = 40, kStride = 24, kNobody = -1;
  std::mt19937_64 random(1);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  std::vector<std::byte> rows(kRows * kStride);
  int compared = 0;
  for (int problem = 0; problem < 2000; ++problem) {
    attention::StoreOrder order;
    std::vector<int64_t> last_of_row(kRows, kNobody);
    for (int64_t number = 0; number < 12; ++number, ++compared) {
      const int64_t first_row = below(kRows), end_row = first_row + 1 + below(kRows - first_row);
      // The run begins with some other row of its document, and stores a part of its own rows.
      attention::KeyGradRun run;
      run.begin = below(100);
      run.end = run.begin + kRows - first_row;
      run.dk = {rows.data() + first_row * kStride, kStride, 8};
      run.is_added = below(4) > 0;
      std::set<int64_t> expected, found;
      for (int64_t row = first_row; row < end_row; ++row) {
        int64_t& last = last_of_row[static_cast<size_t>(row)];
        if (run.is_added && last != kNobody) expected.insert(last);
        last = number;
      }
      order.store(run, run.begin, run.begin + (end_row - first_row), number,
                  [&](int64_t before) { found.insert(before); });
      if (found != expected) {
        std::printf("problem %d, run %d: %zu come before it, not %zu\n", problem, static_cast<int>(number),
                    found.size(), expected.size());
        return 1;
      }
    }
  }
  std::printf("%d runs\n", compared);
}
