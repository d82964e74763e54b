// Stands for CUDA's header of that name.
#pragma once

#include <cmath>

#include "common/dtype.h"

struct __half {
  uint16_t bits;
};
inline __half __float2half_rn(float x) { return {std::isnan(x) ? uint16_t{0x7fff} : distca::float_to_fp16(x)}; }
inline float __half2float(__half x) { return distca::fp16_to_float(x.bits); }
