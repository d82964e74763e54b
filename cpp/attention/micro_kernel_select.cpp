// Chooses the tables of inner loops that this CPU can run.
#include <cstdlib>

#include "attention/micro_kernel.h"
#include "common/error.h"

namespace distca::attention {

extern const InstructionSet kInstructionSet_plain;
#if defined(__x86_64__)
extern const InstructionSet kInstructionSet_avx2;
extern const InstructionSet kInstructionSet_avx512;
extern const InstructionSet kInstructionSet_avx512_bf16;
#endif

namespace {

struct Candidate {
  const InstructionSet* set;
  bool supported;
};

const InstructionSet& best_or_named(std::string_view isa, std::string_view source) {
  // The best one comes first. The flags tested are those that micro_kernel.cpp is compiled with.
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#endif
  const Candidate candidates[] = {
#if defined(__x86_64__)
      {&kInstructionSet_avx512_bf16, avx512 && __builtin_cpu_supports("avx512bf16")},
      {&kInstructionSet_avx512, avx512},
      {&kInstructionSet_avx2, avx2},
#endif
      {&kInstructionSet_plain, true},
  };
  std::string allowed;
  for (const Candidate& candidate : candidates) {
    if (!candidate.supported) continue;
    if (isa.empty() || isa == candidate.set->name) return *candidate.set;
    allowed += allowed.empty() ? "" : ", ";
    allowed += candidate.set->name;
  }
  throw InvalidArgumentError(message(source, " is \"", isa, "\"; this CPU and build allow: ", allowed));
}

}  // namespace

const InstructionSet& select_instruction_set(std::string_view isa) {
  if (!isa.empty()) return best_or_named(isa, "isa");
  const char* variable = std::getenv("DISTCA_CPU_ISA");
  return best_or_named(variable == nullptr ? "" : variable, "environment variable DISTCA_CPU_ISA");
}

}  // namespace distca::attention
