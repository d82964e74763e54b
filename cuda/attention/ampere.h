// The instructions of compute capability 8.0 and later that the kernels use: copies into shared memory, loads of
// matrices, products of a warp. gpu.h has the others.
//
// Operands of products are tiles of 16-bit elements in shared memory. A matrix is 8 rows of 16 bytes.
#pragma once

#include "attention/gpu.h"

namespace distca::attention::cuda::ampere {

using namespace gpu;

/// A place in shared memory.
struct Place {
  uint32_t address;

  DISTCA_DEVICE Place operator+(int bytes) const { return {address + static_cast<uint32_t>(bytes)}; }
  /// The place whose address differs in these bits.
  DISTCA_DEVICE Place operator^(int bits) const { return {address ^ static_cast<uint32_t>(bits)}; }
};
DISTCA_DEVICE Place place_of(const void* shared) { return {static_cast<uint32_t>(__cvta_generic_to_shared(shared))}; }

/// Named barriers of the CTA, 0 to 7, for `threads` threads, which are whole warps.
DISTCA_DEVICE void sync_named(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier + 1), "r"(threads) : "memory");
}

// ---- copies into shared memory, which end some time later

/// Starts copying 16 bytes, both aligned to as many; zeros if they are not `valid`, and nothing is read then.
DISTCA_DEVICE void copy16(Place to, const std::byte* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to.address), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}
/// The same with 4 bytes.
DISTCA_DEVICE void copy4(Place to, const std::byte* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to.address), "l"(from), "r"(valid ? 4 : 0)
               : "memory");
}
/// Makes the copies that this thread has started since the last call a group.
DISTCA_DEVICE void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits until no more than `kGroups` of this thread's groups are under way. Others see the bytes after a barrier.
template <int kGroups>
DISTCA_DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// ---- products of a warp

/// Loads four matrices. Lane l names row l % 8 of matrix l / 8. Word i becomes, of matrix i, the elements 2 (l % 4) and
/// the next one of row l / 4.
DISTCA_DEVICE void load_matrices(uint32_t (&words)[4], Place row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(row.address)
               : "memory");
}
/// The same of the transposed matrices.
DISTCA_DEVICE void load_transposed(uint32_t (&words)[4], Place row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(row.address)
               : "memory");
}

/// Columns 8 (2 j + i) to 8 (2 j + i) + 7 of sums [16, ...] += A [16, 16] * B [16, 8]. In lane l, sums[4 n + 2 h + e]
/// is element (l / 4 + 8 h, 8 n + l % 4 * 2 + e), a[h + 2 k] the pair of elements (l / 4 + 8 h, 8 k + l % 4 * 2) and
/// the next one, and b[2 i + k] the pair (8 k + l % 4 * 2, l / 4) and the next row.
template <class Element, int kSums>
DISTCA_DEVICE void multiply(float (&sums)[kSums], int j, int i, const uint32_t (&a)[4], const uint32_t (&b)[4]) {
  float* c = sums + 4 * (2 * j + i);
  if constexpr (std::is_same_v<Element, BFloat16>)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[2 * i]), "r"(b[2 * i + 1]));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[2 * i]), "r"(b[2 * i + 1]));
}

/// Comes after loads and products, before what they have given is read. It is no instruction: a host that does a warp's
/// work does it here.
DISTCA_DEVICE void end_products() {}

DISTCA_DEVICE void store_shared(Place to, uint32_t word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to.address), "r"(word) : "memory");
}

}  // namespace distca::attention::cuda::ampere
