// Chooses the tables of inner loops that this CPU can run.
#include <cstdlib>

#include "attention/attention.h"
#include "attention/cpu_model.h"
#include "attention/micro_kernel.h"
#include "common/error.h"

namespace distca::attention {

extern const InstructionSet kInstructionSet_plain;
#if defined(__x86_64__)
extern const InstructionSet kInstructionSet_avx2;
extern const InstructionSet kInstructionSet_avx512;
extern const InstructionSet kInstructionSet_avx512_bf16;
extern const InstructionSet kInstructionSet_amx;
#endif

namespace {

// The flags tested are those that micro_kernel.cpp is compiled with.
#if defined(__x86_64__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
bool has_pairs() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
bool has_tiles() { return has_pairs() && may_use_tiles(); }
#endif
bool always() { return true; }

struct Candidate {
  const InstructionSet* set;
  bool (*is_supported)();       // asked only if the set is wanted: asking for tiles changes the process
  bool (*is_good)() = &always;  // whether it may be taken if none is named
};

/// The best one comes first. A CPU that supports one supports those behind it.
constexpr Candidate kCandidates[] = {
#if defined(__x86_64__)
    {&kInstructionSet_amx, has_tiles},     {&kInstructionSet_avx512_bf16, has_pairs, dot_is_faster},
    {&kInstructionSet_avx512, has_avx512}, {&kInstructionSet_avx2, has_avx2},
#endif
    {&kInstructionSet_plain, always},
};

const InstructionSet& best_or_named(std::string_view isa, std::string_view source) {
  for (const Candidate& candidate : kCandidates) {
    const bool is_wanted = isa.empty() || isa == candidate.set->name;
    if (is_wanted && candidate.is_supported() && (!isa.empty() || candidate.is_good())) return *candidate.set;
  }
#if defined(__x86_64__)
  if (isa.ends_with("_emulated") && has_avx2() && emulated_kernels() != nullptr) {
    for (const InstructionSet* set : {emulated_kernels()->pairs, emulated_kernels()->tiles})
      if (isa == set->name) return *set;
  }
#endif
  std::string allowed;
  for (const std::string& name : cpu_instruction_sets()) allowed += (allowed.empty() ? "" : ", ") + name;
  throw InvalidArgumentError(message(source, " is \"", isa, "\"; this CPU and build allow: ", allowed));
}

}  // namespace

std::vector<std::string> cpu_instruction_sets() {
  std::vector<std::string> names;
  for (const Candidate& candidate : kCandidates) {
    if (candidate.is_supported()) names.emplace_back(candidate.set->name);
  }
  return names;
}

const InstructionSet& select_instruction_set(std::string_view isa) {
  if (!isa.empty()) return best_or_named(isa, "isa");
  const char* variable = std::getenv("DISTCA_CPU_ISA");
  return best_or_named(variable == nullptr ? "" : variable, "environment variable DISTCA_CPU_ISA");
}

}  // namespace distca::attention
