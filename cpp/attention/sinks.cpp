// Sinks are added to results at home, when all rows are there.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "attention/attention.h"
#include "common/error.h"

namespace distca::attention {

namespace {

/// Multiplies `dim` elements by `factor`.
template <class Element, float (*kWiden)(Element), Element (*kNarrow)(float)>
void multiply(int64_t dim, float factor, std::byte* row) {
  auto* const x = reinterpret_cast<Element*>(row);
  for (int64_t d = 0; d < dim; ++d) x[d] = kNarrow(kWiden(x[d]) * factor);
}

float same(float x) { return x; }

using Multiply = void (*)(int64_t, float, std::byte*);
Multiply multiply_for(DType dtype) {
  return dtype == DType::kFloat32    ? multiply<float, same, same>
         : dtype == DType::kBFloat16 ? multiply<uint16_t, bf16_to_float, float_to_bf16>
                                     : multiply<uint16_t, fp16_to_float, float_to_fp16>;
}

}  // namespace

void add_sinks(const HeadShape& heads, int64_t num_rows, const RowView& out, const RowView& lse, const float* sinks,
               const Parallel& parallel) {
  require(num_rows >= 0, "add_sinks: num_rows is ", num_rows, "; it must not be negative");
  if (num_rows == 0) return;
  const Multiply multiply = multiply_for(heads.dtype);
  const int num_workers = static_cast<int>(std::clamp<int64_t>(parallel.num_workers, 1, num_rows));
  const auto work_on_rows = [&](int worker) {
    for (int64_t i = num_rows * worker / num_workers; i < num_rows * (worker + 1) / num_workers; ++i) {
      for (int64_t h = 0; h < heads.q_heads; ++h) {
        float without;
        std::memcpy(&without, lse.at(i, h), sizeof(without));
        if (without == -std::numeric_limits<float>::infinity()) continue;
        const float base = std::max(without, sinks[h]);
        const float with = base + std::log(std::exp(without - base) + std::exp(sinks[h] - base));
        std::memcpy(lse.at(i, h), &with, sizeof(with));
        multiply(heads.v_dim, 1.f / (1.f + std::exp(sinks[h] - without)), out.at(i, h));
      }
    }
  };
  parallel.run(num_workers, [&work_on_rows](int worker) { work_on_rows(worker); });
}

}  // namespace distca::attention
