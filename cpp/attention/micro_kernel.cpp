// The inner loops of the CPU kernel, written once with vector extensions and compiled once for each instruction set.
//
// DISTCA_ISA names the instruction set (avx512_bf16, avx512, avx2, plain). Everything but the tables has internal
// linkage, and no inline function or template of a header outside these parts is used. Otherwise a copy of one that was
// compiled here for AVX-512 could become the only one in the library and run on a CPU that lacks it. Products are fused
// explicitly where the instruction set can. The compiler must not contract others (-ffp-contract=off); then all code
// paths round alike.
#include "attention/micro_kernel.h"

#include "attention/micro_pack.h"
#include "attention/micro_peak.h"
#include "attention/micro_products.h"
#include "attention/micro_softmax.h"

#define DISTCA_JOIN_(a, b) a##b
#define DISTCA_JOIN(a, b) DISTCA_JOIN_(a, b)
#define DISTCA_TEXT_(a) #a
#define DISTCA_TEXT(a) DISTCA_TEXT_(a)

namespace distca::attention {
namespace {

template <class Operands>
constexpr MicroKernel table(decltype(MicroKernel::pack_rows) rows, decltype(MicroKernel::pack_row_pairs) row_pairs) {
  return {Operands::kElements,
          rows,
          row_pairs,
          transpose_rows<Operands>,
          multiply_scores<Operands>,
          multiply_visible<Operands>,
          cap_scores,
          softmax_step<Operands>,
          softmax_gradient<Operands>,
          store_rows,
          multiply_registers<Operands>};
}

constexpr MicroKernel kFloats = table<FloatOperands>(pack_floats, pack_float_row_pairs);
#if defined(__AVX512BF16__)
constexpr MicroKernel kPairs = table<PairOperands>(pack_pairs, pack_pair_rows);
constexpr const MicroKernel* kPairTable = &kPairs;
#else
constexpr const MicroKernel* kPairTable = nullptr;
#endif

}  // namespace

extern const InstructionSet DISTCA_JOIN(kInstructionSet_, DISTCA_ISA);
const InstructionSet DISTCA_JOIN(kInstructionSet_, DISTCA_ISA) = {DISTCA_TEXT(DISTCA_ISA), &kFloats, kPairTable};

}  // namespace distca::attention
