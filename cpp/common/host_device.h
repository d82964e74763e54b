// Marks functions that a GPU's kernels and the host have in common.
#pragma once

#ifdef __CUDACC__
#define DISTCA_HOST_DEVICE __host__ __device__
#else
#define DISTCA_HOST_DEVICE
#endif
