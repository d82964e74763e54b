// The instructions of sm_90a that the kernels use, on CUTLASS's CuTe: barriers in shared memory, the bulk copy engine,
// matrix products of a warpgroup. gpu.h has those of all GPUs. Nothing else in the kernels knows what they run on.
// Therefore a test can put other headers in the place of these and run them on a host.
//
// Operands of products are tiles of 16-bit elements in shared memory. Columns come in chunks of 64 (128 bytes), and a
// chunk's rows one after another. Tiles are aligned to 1024 bytes and swizzled as the copy engine does it (16-byte
// piece p of row r lies at p ^ (r % 8)).
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/numeric_types.h>

#include <cstdint>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm90.hpp>
#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <utility>

#include "attention/gpu.h"

namespace distca::attention::cuda::hopper {

using namespace gpu;

namespace detail {

/// Keeps the compiler from moving accesses to memory across it. It is no instruction. CUTLASS's barriers and its fence
/// of the proxy need it beside them, because their asm has no clobber of memory.
DISTCA_DEVICE void keep_order() { asm volatile("" ::: "memory"); }

}  // namespace detail

// ---- threads

/// Named barriers of the CTA, 0 to 7, for `threads` threads, which are whole warps.
DISTCA_DEVICE void sync_named(int barrier, int threads) {
  detail::keep_order();
  cutlass::arch::NamedBarrier::sync(static_cast<uint32_t>(threads), static_cast<uint32_t>(barrier));
  detail::keep_order();
}
DISTCA_DEVICE void arrive_named(int barrier, int threads) {
  detail::keep_order();
  cutlass::arch::NamedBarrier::arrive(static_cast<uint32_t>(threads), static_cast<uint32_t>(barrier));
}
/// Sets the registers of each thread of the warpgroup from here on. All four warps call it.
template <int kRegisters>
DISTCA_DEVICE void raise_registers() {
  cutlass::arch::warpgroup_reg_alloc<kRegisters>();
}
template <int kRegisters>
DISTCA_DEVICE void lower_registers() {
  cutlass::arch::warpgroup_reg_dealloc<kRegisters>();
}

// ---- barriers in shared memory

/// A barrier in shared memory. Its phases complete one after another, each when `arrivals` threads have arrived and all
/// announced bytes are there. wait(parity) returns once the phase of that parity is complete. The first phase has
/// parity 0; before it, parity 1 counts as complete.
struct Barrier {
  uint64_t word;

  DISTCA_DEVICE void init(int arrivals) { cutlass::arch::ClusterBarrier::init(&word, static_cast<uint32_t>(arrivals)); }
  DISTCA_DEVICE void arrive() {
    detail::keep_order();
    cutlass::arch::ClusterBarrier::arrive(&word);
  }
  DISTCA_DEVICE void expect_bytes(int bytes) {
    cutlass::arch::ClusterTransactionBarrier::expect_transaction(&word, static_cast<uint32_t>(bytes));
  }
  DISTCA_DEVICE void wait(int parity) {
    cutlass::arch::ClusterBarrier::wait(&word, static_cast<uint32_t>(parity));
    detail::keep_order();
  }
};

/// Makes initialised barriers known to the copy engine; sync_cta() comes after it.
DISTCA_DEVICE void fence_barrier_init() { cutlass::arch::fence_barrier_init(); }

// ---- the asynchronous proxy: the copy engine, and products reading shared memory

/// Orders this thread's own accesses to shared memory, and those it has been told of, before later ones by the proxy.
DISTCA_DEVICE void fence_shared() {
  detail::keep_order();
  cutlass::arch::fence_view_async_shared();
  detail::keep_order();
}
/// Does the same for all memory: for what another GPU or a copy wrote and whose signal this thread has seen.
DISTCA_DEVICE void fence_all() { asm volatile("fence.proxy.async;" ::: "memory"); }
/// Must come before the first use in this CTA of a map that the host has copied to memory.
DISTCA_DEVICE void acquire_map(const TensorMap* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(map) : "memory");
}
/// One thread calls this: it starts loading a box and reports the bytes to `barrier`. What lies outside the tensor
/// becomes zero.
DISTCA_DEVICE void load_box(const TensorMap* map, Barrier* barrier, void* shared, int column, int row, int plane) {
  cute::SM90_TMA_LOAD_3D::copy(map, &barrier->word, static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                               shared, column, row, plane);
}

// ---- products of a warpgroup

/// CUTLASS's names of the elements.
template <class Element>
using Native = std::conditional_t<std::is_same_v<Element, BFloat16>, cutlass::bfloat16_t, cutlass::half_t>;

/// The dimension of the product along which the columns of an operand's tile run.
enum class Columns { kInner, kOuter };

/// Where an operand starts, as the low half of its descriptor; the other half is the same for all operands. With
/// kOuter, chunk_bytes is the distance from one chunk of 64 columns to the next.
struct Operand {
  uint32_t low;

  DISTCA_DEVICE uint64_t descriptor() const {
    cute::GmmaDescriptor d;
    d.desc_ = 0;
    d.bitfield.stride_byte_offset_ = 1024 >> 4;  // eight rows
    d.bitfield.layout_type_ = static_cast<uint8_t>(cute::SM90::GMMA::LayoutType::B128);
    d.reg32_[0] = low;
    return d.desc_;
  }
};

DISTCA_DEVICE Operand make_operand(const void* shared, int chunk_bytes) {
  cute::GmmaDescriptor d;
  d.desc_ = 0;
  d.bitfield.start_address_ = static_cast<uint16_t>(cute::cast_smem_ptr_to_uint(shared) >> 4);
  d.bitfield.leading_byte_offset_ = static_cast<uint16_t>(chunk_bytes >> 4);
  uint32_t low = d.reg32_[0];
  // It is made anew each time. The descriptors of all steps of a product, kept over a loop, would take more registers
  // than there are.
  asm volatile("" : "+r"(low));
  return {low};
}

/// The operand `bytes` further on in shared memory.
DISTCA_DEVICE Operand advance(Operand operand, int bytes) { return {operand.low + static_cast<uint32_t>(bytes >> 4)}; }

namespace detail {

template <Columns kColumns>
inline constexpr cute::SM90::GMMA::Major kMajor =
    kColumns == Columns::kInner ? cute::SM90::GMMA::Major::K : cute::SM90::GMMA::Major::MN;

template <class Operation, class A, int kRegisters, size_t... kIndex>
DISTCA_DEVICE void multiply(float (&sums)[kRegisters], const A& a, Operand b, bool add,
                            std::index_sequence<kIndex...>) {
  const auto scale = add ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero;
  if constexpr (std::is_same_v<A, Operand>)
    Operation::fma(a.descriptor(), b.descriptor(), sums[kIndex]..., scale);
  else
    Operation::fma(a[0], a[1], a[2], a[3], b.descriptor(), sums[kIndex]..., scale);
}

}  // namespace detail

/// Starts sums [64, kColumnsB] (+)= A [64, 16] * B [16, kColumnsB] and does not wait for it. In thread t of the
/// warpgroup, sums[4 j + 2 i + e] is element (t / 32 * 16 + t % 32 / 4 + 8 i, 8 j + t % 4 * 2 + e).
template <class Element, int kColumnsB, Columns kA, Columns kB>
DISTCA_DEVICE void multiply(float (&sums)[kColumnsB / 2], Operand a, Operand b, bool add) {
  using Shape = cute::Shape<cute::_64, cute::Int<kColumnsB>, cute::_16>;
  using Operation = decltype(cute::SM90::GMMA::ss_op_selector<Native<Element>, Native<Element>, float, Shape,
                                                              detail::kMajor<kA>, detail::kMajor<kB>>());
  detail::multiply<Operation>(sums, a, b, add, std::make_index_sequence<kColumnsB / 2>());
}

/// Does the same with A in registers: a[i + 2 j] is the pair of elements (row of sums[2 i], columns 8 j + t % 4 * 2 and
/// the next one).
template <class Element, int kColumnsB, Columns kB>
DISTCA_DEVICE void multiply(float (&sums)[kColumnsB / 2], const uint32_t (&a)[4], Operand b, bool add) {
  using Shape = cute::Shape<cute::_64, cute::Int<kColumnsB>, cute::_16>;
  using Operation = decltype(cute::SM90::GMMA::rs_op_selector<Native<Element>, Native<Element>, float, Shape,
                                                              cute::SM90::GMMA::Major::K, detail::kMajor<kB>>());
  detail::multiply<Operation>(sums, a, b, add, std::make_index_sequence<kColumnsB / 2>());
}

/// Must come before products are started: earlier uses of their registers are done then.
DISTCA_DEVICE void begin_products() { cute::warpgroup_arrive(); }
/// Makes the products started since the last call a group.
DISTCA_DEVICE void end_group() { cute::warpgroup_commit_batch(); }
/// Waits until no more than `kGroups` groups are under way.
template <int kGroups>
DISTCA_DEVICE void wait_groups() {
  cute::warpgroup_wait<kGroups>();
}
/// Keeps what comes later behind the computation of x. ptxas moves waits for products in front of whatever does not
/// depend on them, but not in front of a store that depends on x: it is done as good as never, to a word that nobody
/// reads.
template <int kNumber>
DISTCA_DEVICE void stay_behind(const float (&x)[kNumber], uint32_t* nowhere) {
  uint32_t mixed = 0;
#pragma unroll
  for (int i = 0; i < kNumber; i += 2) mixed ^= __float_as_uint(x[i]) ^ __float_as_uint(x[i + 1]);
  asm volatile("{.reg .pred p; setp.eq.u32 p, %0, 0x5eb9a1d3; @p st.shared.u32 [%1], %0;}" ::"r"(mixed),
               "r"(cute::cast_smem_ptr_to_uint(nowhere))
               : "memory");
}
/// Keeps the compiler from moving other uses of registers across the start or the end of a product.
template <class T, int kRegisters>
DISTCA_DEVICE void pin(T (&registers)[kRegisters]) {
#pragma unroll
  for (int i = 0; i < kRegisters; ++i) cute::warpgroup_fence_operand(registers[i]);
}
template <class T, int kRows, int kRegisters>
DISTCA_DEVICE void pin(T (&registers)[kRows][kRegisters]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) pin(registers[i]);
}

// ---- memory

DISTCA_DEVICE void store_shared(void* shared, const Words4& words) {
  *static_cast<uint4*>(shared) = make_uint4(words.x[0], words.x[1], words.x[2], words.x[3]);
}
DISTCA_DEVICE void store_shared(float* shared, float a, float b, float c, float d) {
  *reinterpret_cast<float4*>(shared) = make_float4(a, b, c, d);
}
DISTCA_DEVICE void store_shared(void* shared, uint32_t word) { *static_cast<uint32_t*>(shared) = word; }
/// Adds to p[0..4), at the memory. p is a multiple of 16 bytes.
DISTCA_DEVICE void add_global(float* p, float a, float b, float c, float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}
/// One thread calls this: the copy engine adds `n` fp32 in shared memory to those in memory, one after another at each
/// place. Both are multiples of 16 bytes.
DISTCA_DEVICE void add_shared(float* p, const float* shared, int n) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(p),
               "r"(cute::cast_smem_ptr_to_uint(shared)), "r"(n * static_cast<int>(sizeof(float)))
               : "memory");
  cute::tma_store_arrive();
}
/// Waits until the adds that this thread has started have read shared memory.
DISTCA_DEVICE void wait_read() { cute::tma_store_wait<0>(); }
/// Waits until they are done.
DISTCA_DEVICE void wait_added() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
}  // namespace distca::attention::cuda::hopper
