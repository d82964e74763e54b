// The most floating-point operations a second that this CPU does with the instructions of the kernel.
#pragma once

#include "common/dtype.h"
#include "common/error.h"

namespace distca::attention {

/// Multiply-adds on registers alone, by so many threads at once, for so long; a multiply-add counts as two operations.
DISTCA_EXPORT double measure_peak_flops(DType dtype, int num_threads, double seconds);

}  // namespace distca::attention
