// Chooses the table of inner loops that this CPU can run.
#include <cstdlib>

#include "attention/micro_kernel.h"
#include "common/error.h"

namespace distca::attention {

extern const MicroKernel kMicroKernel_plain;
#if defined(__x86_64__)
extern const MicroKernel kMicroKernel_avx2;
extern const MicroKernel kMicroKernel_avx512;
#endif

namespace {

struct Candidate {
  const MicroKernel* micro;
  bool supported;
};

const MicroKernel& best_or_named(std::string_view isa, std::string_view source) {
  // Best first; the flags tested are those that micro_kernel.cpp is compiled with.
  const Candidate candidates[] = {
#if defined(__x86_64__)
      {&kMicroKernel_avx512, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                                 __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")},
      {&kMicroKernel_avx2, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")},
#endif
      {&kMicroKernel_plain, true},
  };
  std::string allowed;
  for (const Candidate& candidate : candidates) {
    if (!candidate.supported) continue;
    if (isa.empty() || isa == candidate.micro->isa) return *candidate.micro;
    allowed += allowed.empty() ? "" : ", ";
    allowed += candidate.micro->isa;
  }
  throw InvalidArgumentError(message(source, " is \"", isa, "\"; this CPU and build allow: ", allowed));
}

}  // namespace

const MicroKernel& select_micro_kernel(std::string_view isa) {
  if (!isa.empty()) return best_or_named(isa, "isa");
  const char* variable = std::getenv("DISTCA_CPU_ISA");
  return best_or_named(variable == nullptr ? "" : variable, "environment variable DISTCA_CPU_ISA");
}

}  // namespace distca::attention
