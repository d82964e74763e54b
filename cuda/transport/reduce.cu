#include "runtime/check.h"
#include "runtime/elements.h"
#include "transport/put_table.h"
#include "transport/reduce.h"

namespace distca::cuda {
namespace {

using runtime::Four;
using runtime::kReduceChunk;
using runtime::place_of_value;
using runtime::reduced;
using runtime::ReduceEntry;

constexpr int kThreads = 256;
constexpr int kBlocks = 132 * 8;

struct DeviceReduceTable {
  const int32_t* num_chunks;
  const ReduceEntry* entries;
  const std::byte* const* terms;
  const uint64_t* counts;
};

template <class Element>
struct Widen {
  __host__ __device__ float operator()(uint16_t bits) const {
    if constexpr (sizeof(Element) == 2) return as_float(reinterpret_cast<const Element&>(bits));
    return 0.f;  // terms are not narrow
  }
};

template <class Element>
__global__ void __launch_bounds__(kThreads) reduce_kernel(DeviceReduceTable table) {
  const int32_t num_chunks = *table.num_chunks, num_entries = static_cast<int32_t>(table.counts[1]);
  for (int32_t chunk = blockIdx.x; chunk < num_chunks; chunk += gridDim.x) {
    const ReduceEntry& e = table.entries[transport::entry_of_chunk(table.entries, num_entries, chunk)];
    const int64_t begin = (chunk - e.first_chunk) * kReduceChunk;
    const int64_t end = min(begin + kReduceChunk, e.num_values);
    for (int64_t i = begin + 4 * static_cast<int64_t>(threadIdx.x); i < end; i += 4 * kThreads) {
      const Four sum = reduced(e, table.terms, i, Widen<Element>());
      if (!e.finishes) {
        *reinterpret_cast<Four*>(e.sum + i) = sum;
        continue;
      }
      // Values are stored one by one, because the returned tensor need not be aligned.
      auto* const to = reinterpret_cast<Element*>(place_of_value(e, i, sizeof(Element)));
#pragma unroll
      for (int j = 0; j < 4; ++j) store(to + j, sum.x[j]);
    }
  }
}

}  // namespace

void reduce_rows(const DeviceTable& table, DType dtype, cudaStream_t stream) {
  const DeviceReduceTable t = {table.part<const int32_t>(0), table.part<const ReduceEntry>(1),
                               table.part<const std::byte* const>(2), table.counts()};
  switch (dtype) {
    case DType::kFloat32:
      reduce_kernel<float><<<kBlocks, kThreads, 0, stream>>>(t);
      break;
    case DType::kBFloat16:
      reduce_kernel<__nv_bfloat16><<<kBlocks, kThreads, 0, stream>>>(t);
      break;
    case DType::kFloat16:
      reduce_kernel<__half><<<kBlocks, kThreads, 0, stream>>>(t);
      break;
  }
  check(cudaGetLastError(), "the kernel that adds key gradients");
}

void load_reduce_kernels() {
  load_kernel(reduce_kernel<float>);
  load_kernel(reduce_kernel<__nv_bfloat16>);
  load_kernel(reduce_kernel<__half>);
}

}  // namespace distca::cuda
