// Stands for CUDA's header of that name.
#pragma once

#include <cmath>

#include "common/dtype.h"

struct __nv_bfloat16 {
  uint16_t bits;
};
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  return {std::isnan(x) ? uint16_t{0x7fff} : distca::float_to_bf16(x)};
}
inline float __bfloat162float(__nv_bfloat16 x) { return distca::bf16_to_float(x.bits); }
