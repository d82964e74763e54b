// The largest number of floating-point operations a second that this CPU reaches with the instructions of the kernel.
#pragma once

#include "common/dtype.h"
#include "common/error.h"

namespace distca::attention {

/// Measures multiply-adds on registers alone, by `num_threads` threads at once, for `seconds`. A multiply-add counts as
/// two operations.
DISTCA_EXPORT double measure_peak_flops(DType dtype, int num_threads, double seconds);

}  // namespace distca::attention
