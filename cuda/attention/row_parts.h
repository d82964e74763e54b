// What a thread does with its part of rows of products, whatever multiplies them. A warp has 16 rows. In a thread's
// registers, sums[4 j + 2 i + e] is element (lane / 4 + 8 i, 8 j + lane % 4 * 2 + e).
#pragma once

#include "attention/gpu.h"
#include "attention/tables.h"

namespace distca::attention::cuda {

inline constexpr int kWarp = 32;
inline constexpr float kInfinity = __builtin_huge_valf();

/// The lane of this thread. It is computed anew each time and not kept in a register.
DISTCA_DEVICE int lane_of_warp() { return gpu::thread_of_cta() % kWarp; }

/// Two neighbouring elements of a row of fp32.
struct alignas(8) FloatPair {
  float x, y;
};

/// Takes a number into a maximum that all threads of the GPU share. Most threads only look.
DISTCA_DEVICE void raise_maximum(float* p, float value) {
  const float now = gpu::load_relaxed(p);
  if (value <= now || now != now) return;
  const MaximumWord w = maximum_word(value);
  if (w.is_signed)
    gpu::keep_larger(reinterpret_cast<int*>(p), static_cast<int>(w.word));
  else
    gpu::keep_smaller(reinterpret_cast<unsigned*>(p), w.word);
}

/// Makes products of queries and keys mapped ones, before exponent_scale. The map is looked at once and not for each,
/// so that the exponentials and reciprocals of many overlap.
template <int kNumber>
DISTCA_DEVICE void map_scores(const ScoreMap& map, float (&scores)[kNumber]) {
  if (map.cap != 0.f) {
    // tanh(y) = 1 - 2 / (exp(2 y) + 1)
    constexpr float kTwoLog2E = 2.885390081777927f;
    const float cap = map.cap, scale = gpu::product(map.cap_scale, kTwoLog2E);
#pragma unroll
    for (int i = 0; i < kNumber; ++i) {
      const float e = gpu::exp2_fast(gpu::product(scale, scores[i]));
      scores[i] = gpu::product(cap, gpu::fused(-2.f, gpu::reciprocal(e + 1.f), 1.f));
    }
  } else if (map.sign != 1.f) {
    const float sign = map.sign;
#pragma unroll
    for (int i = 0; i < kNumber; ++i) scores[i] = gpu::product(sign, scores[i]);
  }
}
DISTCA_DEVICE bool maps_scores(const ScoreMap& map) { return map.cap != 0.f || map.sign != 1.f; }

/// Multiplies gradients of mapped scores by the slope of the map.
template <int kNumber>
DISTCA_DEVICE void scale_by_slope(const ScoreMap& map, const float (&scores)[kNumber], float (&gradients)[kNumber]) {
  const float inverse = map.cap != 0.f ? 1.f / map.cap : 0.f;  // without a cap the slope is 1
#pragma unroll
  for (int i = 0; i < kNumber; ++i) {
    const float t = gpu::product(scores[i], inverse);
    gradients[i] = gpu::product(gradients[i], gpu::fused(-t, t, 1.f));
  }
}

template <int kRegisters>
DISTCA_DEVICE void clear(float (&sums)[kRegisters]) {
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) sums[i] = 0.f;
}

/// Exchanges what four neighbouring lanes have of 32 columns of a row of products. Before, words.x[j] of a lane are
/// columns 8 j + lane % 4 * 2 and the next one. Afterwards the four words of a lane are columns 8 (lane % 4) to 8 (lane
/// % 4) + 7.
DISTCA_DEVICE gpu::Words4 gather_columns(gpu::Words4 words, int lane) {
  // This is a transposition of 4 x 4 words: first of pairs, then of pairs of pairs.
  const bool odd = (lane & 1) != 0, high = (lane & 2) != 0;
#pragma unroll
  for (int j = 0; j < 4; j += 2) {
    const uint32_t other = gpu::shuffle_xor(odd ? words.x[j] : words.x[j + 1], 1);
    words.x[j] = odd ? other : words.x[j];
    words.x[j + 1] = odd ? words.x[j + 1] : other;
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const uint32_t other = gpu::shuffle_xor(high ? words.x[j] : words.x[j + 2], 2);
    words.x[j] = high ? other : words.x[j];
    words.x[j + 2] = high ? words.x[j + 2] : other;
  }
  return words;
}

/// Writes the first `columns` of row `i` (0 or 1) of a thread's part of `sums`, times `factor`, to dst, rounded to
/// Element. All four lanes of a row call it with the same arguments but for `sums`.
template <class Element, int kColumns>
DISTCA_DEVICE void store_row(const float (&sums)[kColumns / 2], int i, float factor, std::byte* dst, int columns,
                             bool valid, int lane) {
#pragma unroll
  for (int part = 0; part < kColumns / 32; ++part) {
    gpu::Words4 words;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int at = 4 * (4 * part + j) + 2 * i;
      words.x[j] = gpu::pack<Element>(gpu::product(sums[at], factor), gpu::product(sums[at + 1], factor));
    }
    words = gather_columns(words, lane);
    const int column = 32 * part + 8 * (lane % 4);
    if (valid && column < columns) gpu::store_global(dst + column * 2, words);
  }
}

/// The keys that a row sees of which the tile, whose tokens are `rows`, has number `row`.
DISTCA_DEVICE RowRange visible_of(const KernelParams& p, const GroupEntry& group, const GroupMask& mask,
                                  const RowRange& rows, int row) {
  const int token = rows.begin + row / p.group_heads;
  return token < rows.end ? RowRange{mask.first_key(token), mask.end_key(token, group.kv_end)} : RowRange{0, 0};
}

/// The softmax of a thread's two rows, eight apart, over the blocks of keys that they see.
struct SoftmaxRows {
  // For each row: the maximum of the mapped scores so far, and this thread's part of the sum.
  float row_max[2];
  float row_sum[2];
  float rescale[2];

  DISTCA_DEVICE void begin() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      row_max[i] = -kInfinity;
      row_sum[i] = 0.f;
    }
  }

  /// Turns scores of a block into probabilities relative to the new maximum. `rescale` becomes the factor on older
  /// sums. `keys_of_all` are those that every row of the tile sees,
  /// visible(r) those that row r does.
  template <int kKeys, class Visible>
  DISTCA_DEVICE void to_probabilities(const ScoreMap& map, const RowRange& keys_of_all, int block,
                                      const Visible& visible, float (&scores)[kKeys / 2]) {
    const int begin = block * kKeys, first_key = begin + lane_of_warp() % 4 * 2;
    map_scores(map, scores);
    if (begin < keys_of_all.begin || begin + kKeys > keys_of_all.end) {
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) {
        const RowRange& see = visible(i / 2 % 2);
        const int key = first_key + i / 4 * 8 + i % 2;
        if (key < see.begin || key >= see.end) scores[i] = -kInfinity;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float highest = row_max[r];
#pragma unroll
      for (int i = 2 * r; i < kKeys / 2; i += 4) highest = fmaxf(highest, fmaxf(scores[i], scores[i + 1]));
      highest = fmaxf(highest, gpu::shuffle_xor(highest, 1));
      highest = fmaxf(highest, gpu::shuffle_xor(highest, 2));
      // A row that has seen nothing yet takes exponents of -inf, not of -inf + inf.
      const float base = highest == -kInfinity ? 0.f : gpu::product(highest, map.exponent_scale);
      // This takes the rounded products; therefore an unchanged maximum gives 1.
      rescale[r] = gpu::exp2_fast(gpu::product(row_max[r], map.exponent_scale) - base);
      row_max[r] = highest;
      float sum = 0.f;
#pragma unroll
      for (int i = 2 * r; i < kKeys / 2; i += 4) {
        scores[i] = gpu::exp2_fast(gpu::fused(scores[i], map.exponent_scale, -base));
        scores[i + 1] = gpu::exp2_fast(gpu::fused(scores[i + 1], map.exponent_scale, -base));
        sum += scores[i];
        sum += scores[i + 1];
      }
      row_sum[r] = gpu::fused(row_sum[r], rescale[r], sum);
    }
  }

  /// Divides columns [first_column, first_column + kColumns) of out by the sums and writes them; with the first ones
  /// the log-sum-exp and, where somebody asks, the largest scores. `rows` are the tile's tokens. `first_row()` is the
  /// first of the two rows in the tile, and is asked for each, because registers are scarce.
  template <class Element, int kColumns, class FirstRow, class FirstColumn>
  DISTCA_DEVICE void store(const KernelParams& p, const WorkItem& item, int scores, const RowRange& rows,
                           const float (&out)[kColumns / 2], const FirstRow& first_row,
                           const FirstColumn& first_column) const {
    const TaskEntry& task = p.tasks[item.task];
    const float exponent_scale = p.scores[scores].map.exponent_scale;
    constexpr float kLn2 = 0.6931471805599453f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row() + 8 * r, head = item.kv_head * p.group_heads + row % p.group_heads;
      const int token = rows.begin + row / p.group_heads;
      const bool valid = token < rows.end;
      float sum = row_sum[r];
      sum += gpu::shuffle_xor(sum, 1);
      sum += gpu::shuffle_xor(sum, 2);
      const float factor = sum == 0.f ? 0.f : 1.f / sum;
      store_row<Element, kColumns>(out, r, factor, address(task.out, token - task.q_begin, head) + first_column() * 2,
                                   p.v_dim - first_column(), valid, lane_of_warp());
      if (valid && lane_of_warp() % 4 == 0 && first_column() == 0) {
        const float highest = gpu::product(row_max[r], exponent_scale);  // a power of two
        const float lse = sum == 0.f ? -kInfinity : highest * kLn2 + logf(sum);
        *reinterpret_cast<float*>(address(task.lse, token - task.q_begin, head)) = lse;
        // The sum of a row whose scores are no numbers is none.
        if (task.max_logits != nullptr)
          raise_maximum(task.max_logits + head, sum == sum ? score_of(p.scores[scores], row_max[r]) : sum);
      }
    }
  }
};

/// Writes row `kRow` (0 or 1) of a thread's part of sums of dk or dv, times `factor`, to where the group's gradients
/// go, or adds it there. `first_key()` is the document row of the first one. The sums are columns from `begin` on of
/// the `columns` that there are in all.
template <class Element, int kRow, int kSums, class FirstKey>
DISTCA_DEVICE void store_key(const KernelParams& p, const WorkItem& item, const FirstKey& first_key,
                             const float (&sums)[kSums], float factor, int begin, int columns,
                             RowView RunEntry::* view) {
  const GroupEntry& group = p.groups[item.group];
  const int row = first_key() + 8 * kRow;
  if (row < group.kv_begin || row >= group.kv_end) return;
  int first = group.run_begin, last = group.run_end - 1;
  while (first < last) {  // finds the first run that ends after the row
    const int middle = (first + last) / 2;
    if (p.runs[middle].end > row)
      last = middle;
    else
      first = middle + 1;
  }
  const RunEntry& run = p.runs[first];
  const bool floats = run.dtype == DType::kFloat32;
  const int first_column = begin + lane_of_warp() % 4 * 2;
  std::byte* dst = address(run.*view, row - run.begin, item.kv_head) + first_column * (floats ? 4 : 2);
#pragma unroll
  for (int j = 0; j < kSums / 4; ++j) {
    if (begin + 8 * j >= columns) break;
    const float x = gpu::product(sums[4 * j + 2 * kRow], factor);
    const float y = gpu::product(sums[4 * j + 2 * kRow + 1], factor);
    if (run.is_added != 0)
      gpu::add_global(reinterpret_cast<float*>(dst + j * 32), x, y);
    else if (floats)
      *reinterpret_cast<FloatPair*>(dst + j * 32) = {x, y};
    else
      *reinterpret_cast<uint32_t*>(dst + j * 16) = gpu::pack<Element>(x, y);
  }
}

}  // namespace distca::attention::cuda
