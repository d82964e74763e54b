// What the kernel has to know of the CPU it runs on, beside what the compiler's own questions tell.
#pragma once

#include <string_view>

namespace distca::attention {

/// Whether the CPU multiplies tiles of bf16 (AMX), and the operating system lets this process use them. The first call
/// asks the system for that.
bool may_use_tiles();

/// Whether the dot instruction on pairs of bf16 (AVX512_BF16) is faster on a model of CPU than converting to fp32. A
/// table says so and nothing is timed: the answer decides bits, and must be the same on all machines of a model.
/// `vendor` and `family` are those of CPUID, the extended family included.
bool dot_is_faster(std::string_view vendor, unsigned family);
/// The same of this CPU.
bool dot_is_faster();

}  // namespace distca::attention
