// The multiply-adds of the peak measurement (peak.h); part of micro_kernel.cpp (see there).
#pragma once

#include "attention/micro_simd.h"

namespace distca::attention {
namespace {

/// Makes as many products as a product's tile has accumulators, `rounds` times, on registers alone. Returns the number
/// of floating-point operations. `sink` keeps the compiler from leaving the products out.
template <class Operands>
double multiply_registers(int64_t rounds, float* sink) {
  Floats sum[kTileM][kTileN];
  for (int i = 0; i < kTileM; ++i)  // no two are the same: the compiler would compute equal ones once
    for (int j = 0; j < kTileN; ++j) sum[i][j] = broadcast(static_cast<float>(i * kTileN + j));
  const Floats left = load(sink), right = load(sink + kWidth);
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 8
    for (int i = 0; i < kTileM; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kTileN; ++j) sum[i][j] = Operands::multiply_add(left, right, sum[i][j]);
    }
  }
  Floats total{};
  for (int i = 0; i < kTileM; ++i)
    for (int j = 0; j < kTileN; ++j) total += sum[i][j];
  store(sink + 2 * kWidth, total);
  return static_cast<double>(rounds) * kTileM * kTileN * kWidth * 2 * Operands::kElements;
}

}  // namespace
}  // namespace distca::attention
