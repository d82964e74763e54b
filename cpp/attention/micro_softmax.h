// The online softmax and its gradient over a tile of scores, for micro_kernel.cpp alone (see there).
//
// Query rows are the lanes of a vector. Sums over keys go into four accumulators, chosen by the key's number modulo
// four.
#pragma once

#include "attention/micro_products.h"

namespace distca::attention {
namespace {

constexpr int kSums = 4;
/// Vectors whose weights are made together.
constexpr int kTogether = 2;

/// exp(x) - 1 for x >= 0, without cancellation near zero.
DISTCA_INLINE Floats exponential_minus_one(Floats x) {
  constexpr float kRound = 12582912.f;
  const Floats shifted = fused(x, broadcast(kLog2E), broadcast(kRound));
  const Floats n = shifted - kRound;
  Floats r = fused(n, broadcast(-kLn2High), x);
  r = fused(n, broadcast(-kLn2Low), r);
  Floats p = broadcast(kPowers[0]);
#pragma GCC unroll 8
  for (int i = 1; i < 5; ++i) p = fused(p, r, broadcast(kPowers[i]));
  p = fused(p, r * r, r);
  const Floats power = (Floats)(((Words)shifted << 23) + 0x3f800000u);
  return fused(p, power, power - 1.f);
}

DISTCA_INLINE Floats hyperbolic_tangent(Floats x) {
  const Words sign = (Words)x & 0x80000000u;
  const Floats size = (Floats)((Words)x & 0x7fffffffu);
  const Floats e = exponential_minus_one(2.f * (size < 20.f ? size : broadcast(20.f)));
  const Floats result = (Floats)((Words)(e / (e + 2.f)) | sign);
  return x == x ? result : x;
}

void cap_scores(const ScoreTile& tile, float scale, float cap, float* scores) {
  for (int64_t key = tile.begin; key < tile.end; ++key) {
    for (int64_t lane = 0; lane < tile.lanes; lane += kWidth) {
      float* at = scores + key * kTileRows + lane;
      store(at, cap * hyperbolic_tangent(load(at) * (scale / cap)));
    }
  }
}

/// Writes the operand words of keys `key`, key + 1, ...: kSums vectors of `values` become rows of [words, kTileRows].
template <class Operands>
DISTCA_INLINE void store_keys(const Floats (&values)[kSums], int64_t key, float* rows) {
  if constexpr (Operands::kElements == 1) {
#pragma GCC unroll 4
    for (int u = 0; u < kSums; ++u) store(rows + (key + u) * kTileRows, values[u]);
  } else {
#pragma GCC unroll 4
    for (int u = 0; u < kSums; u += 2)
      store(rows + (key + u) / 2 * kTileRows, Operands::pairs_of(values[u], values[u + 1]));
  }
}

/// Makes one step for one vector of query rows, in place: words of a pair of keys lie no later than the first key's
/// scores.
template <class Operands>
DISTCA_INLINE void softmax_lanes(const ScoreTile& tile, int64_t lane, float scale, float* scores,
                                 const SoftmaxState& state) {
  int64_t end = tile.end;  // no row of the vector sees a key from here on
  if (is_edge(tile)) {
    const Visible& seen = tile.visible;
    const auto in_tile = [&](int64_t key) { return smaller_of(larger_of(key, tile.begin), tile.end); };
    const LaneVisibility visible = lane_visibility(seen, lane);
    end = in_tile((int64_t{seen.upto[lane + kWidth - 1]} + kSums - 1) / kSums * kSums);
    // All rows of the vector see the keys before this one.
    const int64_t first = seen.from[lane + kWidth - 1] > tile.begin ? tile.begin : in_tile(seen.upto[lane]);
    for (int64_t key = first; key < end; ++key) {
      float* at = scores + key * kTileRows;
      store(at, sees(visible, static_cast<int32_t>(key)) ? load(at) : broadcast(-kInfinity));
    }
  }
  Floats largest[kSums];
#pragma GCC unroll 4
  for (int u = 0; u < kSums; ++u) largest[u] = broadcast(-kInfinity);
  for (int64_t key = tile.begin; key < end; key += kSums) {
#pragma GCC unroll 4
    for (int u = 0; u < kSums; ++u) largest[u] = larger(largest[u], load(scores + (key + u) * kTileRows));
  }
  const Floats found = scale * larger(larger(largest[0], largest[1]), larger(largest[2], largest[3]));
  const Floats old_base = load(state.row_base + lane);
  const Floats new_base = found > old_base + kSlack ? found : old_base;
  const Floats base = new_base == -kInfinity ? Floats{} : new_base;  // -inf - -inf would be NaN
  const Floats rescale = exponential(old_base - base);
  Floats sum[kSums] = {};
  for (int64_t key = tile.begin; key < end; key += kSums) {
    Floats p[kSums];
#pragma GCC unroll 4
    for (int u = 0; u < kSums; u += kTogether) {
      Floats weight[kTogether];
#pragma GCC unroll 2
      for (int i = 0; i < kTogether; ++i) weight[i] = load(scores + (key + u + i) * kTileRows);
      Operands::make_weights(weight, scale, base);
#pragma GCC unroll 2
      for (int i = 0; i < kTogether; ++i) {
        p[u + i] = weight[i];
        sum[u + i] = sum[u + i] + weight[i];
      }
    }
    store_keys<Operands>(p, key, scores);
  }
  for (int64_t key = end; key < tile.end; key += kSums) store_keys<Operands>({}, key, scores);
  store(state.row_base + lane, new_base);
  store(state.row_max + lane, larger(load(state.row_max + lane), found));
  store(state.row_sum + lane, fused(load(state.row_sum + lane), rescale, (sum[0] + sum[1]) + (sum[2] + sum[3])));
  store(state.rescale + lane, rescale);
}

template <class Operands>
void softmax_step(const ScoreTile& tile, float scale, float* scores, const SoftmaxState& state) {
  for (int64_t lane = 0; lane < tile.lanes; lane += kWidth)
    softmax_lanes<Operands>(tile, lane, scale, scores + lane, state);
}

void log_sum_exp(const float* row_base, const float* row_sum, float* lse) {
  for (int64_t lane = 0; lane < kTileRows; lane += kWidth) {
    const Floats sum = load(row_sum + lane);
    const Floats result = load(row_base + lane) + logarithm(sum);
    store(lse + lane, sum == 0.f ? broadcast(-kInfinity) : result);
  }
}

struct GradientLanes {
  Floats lse, delta;
  Ints valid;
  LaneVisibility visible;
};

/// Sets p and ds to P and dS of a vector of query rows and keys `key`, key + 1, ..., key + kTogether - 1.
template <class Operands, bool kEdge, bool kCap>
DISTCA_INLINE void gradients_of(const GradientLanes& lanes, int64_t key, float scale, float inverse_cap,
                                const float* scores, const float* dprobs, Floats* p, Floats* ds) {
  Floats score[kTogether], weight[kTogether];
#pragma GCC unroll 2
  for (int u = 0; u < kTogether; ++u) weight[u] = score[u] = load(scores + (key + u) * kTileRows);
  Operands::make_weights(weight, scale, lanes.lse);
#pragma GCC unroll 2
  for (int u = 0; u < kTogether; ++u) {
    p[u] = weight[u];
    ds[u] = p[u] * (load(dprobs + (key + u) * kTileRows) - lanes.delta);
    if constexpr (kCap) {
      const Floats t = score[u] * inverse_cap;
      ds[u] = ds[u] * fused(-t, t, broadcast(1.f));
    }
    if constexpr (kEdge) {
      const Ints seen = sees(lanes.visible, static_cast<int32_t>(key + u)) & lanes.valid;
      p[u] = seen ? p[u] : Floats{};
      ds[u] = seen ? ds[u] : Floats{};
    }
  }
}

template <class Operands, bool kEdge, bool kCap>
DISTCA_INLINE void gradient_tile(const ScoreTile& tile, float scale, float inverse_cap, const float* lse,
                                 const float* delta, const float* scores, const float* dprobs,
                                 const GradientOutputs& outputs) {
  constexpr int kVectors = Operands::kElements;  // vectors of lanes at a time: pairs of query rows need two
  for (int64_t lane = 0; lane < tile.lanes; lane += kVectors * kWidth) {
    // The second vector may lie past the tile's lanes and then sees nothing.
    GradientLanes lanes[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = lane + v * kWidth;
      lanes[v] = {load(lse + at), load(delta + at), load(lse + at) != -kInfinity, lane_visibility(tile.visible, at)};
      if (at >= tile.lanes) lanes[v].valid = Ints{};
    }
    for (int64_t key = tile.begin; key < tile.end; key += kSums) {
      Floats p[kVectors][kSums], ds[kVectors][kSums];
#pragma GCC unroll 4
      for (int u = 0; u < kSums; u += kTogether) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          const int64_t at = lane + v * kWidth;
          gradients_of<Operands, kEdge, kCap>(lanes[v], key + u, scale, inverse_cap, scores + at, dprobs + at, p[v] + u,
                                              ds[v] + u);
        }
      }
#pragma GCC unroll 4
      for (int u = 0; u < kSums; ++u) {
        const int64_t row = (key + u) * kPanelWords + lane / kVectors;
        if constexpr (kVectors == 1) {
          store(outputs.probs + row, p[0][u]);
          store(outputs.dscores + row, ds[0][u]);
        } else {
          store(outputs.probs + row, Operands::halves_of(p[0][u], p[1][u]));
          store(outputs.dscores + row, Operands::halves_of(ds[0][u], ds[1][u]));
        }
      }
      if constexpr (kVectors > 1) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) store_keys<Operands>(ds[v], key, outputs.dscore_rows + lane + v * kWidth);
      }
    }
  }
}

template <class Operands>
void softmax_gradient(const ScoreTile& tile, float scale, float cap, const float* lse, const float* delta,
                      const float* scores, const float* dprobs, const GradientOutputs& outputs) {
  bool edge = is_edge(tile) || tile.lanes % (Operands::kElements * kWidth) != 0;
  for (int64_t i = 0; i < tile.lanes; ++i) edge |= lse[i] == -kInfinity;
  const float inverse = cap == 0.f ? 0.f : 1.f / cap;
  if (cap != 0.f && edge)
    gradient_tile<Operands, true, true>(tile, scale, inverse, lse, delta, scores, dprobs, outputs);
  else if (cap != 0.f)
    gradient_tile<Operands, false, true>(tile, scale, inverse, lse, delta, scores, dprobs, outputs);
  else if (edge)
    gradient_tile<Operands, true, false>(tile, scale, inverse, lse, delta, scores, dprobs, outputs);
  else
    gradient_tile<Operands, false, false>(tile, scale, inverse, lse, delta, scores, dprobs, outputs);
}

}  // namespace
}  // namespace distca::attention
