// Elements of tensors as fp32, and back.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace distca::cuda {

__host__ __device__ inline float as_float(float x) { return x; }
__host__ __device__ inline float as_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__host__ __device__ inline float as_float(__half x) { return __half2float(x); }

__device__ inline void store(float* to, float x) { *to = x; }
__device__ inline void store(__nv_bfloat16* to, float x) { *to = __float2bfloat16_rn(x); }
__device__ inline void store(__half* to, float x) { *to = __float2half_rn(x); }

}  // namespace distca::cuda
