#include <algorithm>

#include "common/align.h"
#include "runtime/check.h"
#include "transport/put.h"

namespace distca::cuda {
namespace {

using transport::Awaited;
using transport::entry_of_chunk;
using transport::is_stopped;
using transport::place_of_word;
using transport::Rows;
using transport::rows_of_chunk;
using transport::store_release;
using transport::WordPlace;

constexpr int kThreads = 512;
constexpr int kWordsUnderWay = 4;  // of one thread: this many loads are issued before the first store
constexpr uint32_t kChunksBetweenLooks = 16;
constexpr int kPutBlocksOfSm = 2;  // at least, beside a CTA of attention that has half of the registers
constexpr int32_t kCopyBlocks = 132 * 4;

/// The parts of PutParts in device memory.
struct DevicePutTable {
  const int32_t* num_chunks;
  const PutEntry* entries;
  const PutMessage* messages;
  uint32_t* chunks_done;  // one for each message, 0 before and after
  const uint64_t* counts;

  explicit DevicePutTable(const DeviceTable& table)
      : num_chunks(table.part<const int32_t>(0)),
        entries(table.part<const PutEntry>(1)),
        messages(table.part<const PutMessage>(2)),
        chunks_done(table.part<uint32_t>(3)),
        counts(table.counts()) {}
  __device__ int32_t num_entries() const { return static_cast<int32_t>(counts[1]); }
};

template <class Word>
__device__ void copy_chunk(const PutEntry& e, int64_t first_row, uint32_t num_words) {
  for (uint32_t begin = threadIdx.x; begin < num_words; begin += kThreads * kWordsUnderWay) {
    Word words[kWordsUnderWay];
#pragma unroll
    for (uint32_t j = 0; j < kWordsUnderWay; ++j)
      if (const uint32_t i = begin + j * kThreads; i < num_words)
        words[j] = *reinterpret_cast<const Word*>(place_of_word(e, first_row, i).from);
    asm volatile("" ::: "memory");
#pragma unroll
    for (uint32_t j = 0; j < kWordsUnderWay; ++j)
      if (const uint32_t i = begin + j * kThreads; i < num_words)
        *reinterpret_cast<Word*>(place_of_word(e, first_row, i).to) = words[j];
  }
}

__device__ void copy_chunk(const PutEntry& e, const Rows& rows) {
  const auto num_words = static_cast<uint32_t>((rows.end - rows.begin) * e.words_per_row);
  switch (e.word_bytes) {
    case 16:
      return copy_chunk<uint4>(e, rows.begin, num_words);
    case 8:
      return copy_chunk<uint2>(e, rows.begin, num_words);
    case 4:
      return copy_chunk<uint32_t>(e, rows.begin, num_words);
    case 2:
      return copy_chunk<uint16_t>(e, rows.begin, num_words);
    default:
      return copy_chunk<uint8_t>(e, rows.begin, num_words);
  }
}

/// Counts the chunks of a message that this block has copied. The last block to count signals.
__device__ void count_copied(const PutMessage& m, uint32_t& done, uint32_t num_copied) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  // The rows of this block come before its count, and the counts of all blocks before the signal.
  __threadfence_system();
  if (atomicAdd(&done, num_copied) + num_copied != static_cast<uint32_t>(m.num_chunks)) return;
  __threadfence_system();
  done = 0;
  if (m.signal != nullptr) store_release(m.signal, m.signal_value);
}

// A look for a stop reads the host's memory, and a fence waits until the peer has the rows. Either takes about as long
// as a chunk's way over the link. Therefore a block looks now and then, and fences once a message. What it has copied
// of a message is counted before it waits for another's credit, which the peer may give only after the first's signal.
__global__ void __launch_bounds__(kThreads, kPutBlocksOfSm) put_kernel(DevicePutTable table, Guard guard) {
  __shared__ bool may_write;
  __shared__ PutEntry e;  // of the chunk: chunks ascend, and most come from the same entry as the one before
  const int32_t num_chunks = *table.num_chunks, num_entries = table.num_entries();
  int32_t message = -1;     // whose chunks this block copies
  uint32_t num_copied = 0;  // of them, by this block
  int32_t end = 0;          // of the entry's chunks
  for (int32_t chunk = blockIdx.x; chunk < num_chunks; chunk += gridDim.x) {
    if (chunk >= end) {
      __syncthreads();  // all are done with the entry before
      if (threadIdx.x == 0) e = table.entries[entry_of_chunk(table.entries, num_entries, chunk)];
      __syncthreads();
      end = e.first_chunk + e.num_chunks;
    }
    const PutMessage& m = table.messages[e.message];
    const bool is_first = e.message != message;
    if (is_first && message >= 0) count_copied(table.messages[message], table.chunks_done[message], num_copied);
    if (is_first || num_copied % kChunksBetweenLooks == 0) {
      __syncthreads();  // all have read what the last look has found
      if (threadIdx.x == 0) {
        may_write = !is_stopped(guard);
        if (may_write && is_first && m.credit != nullptr)
          may_write = transport::await(guard, {m.credit, m.credit_value, m.peer, Awaited::kCredit, m.round});
      }
      __syncthreads();
      // Nobody writes any more, and no signal follows: the peers learn of the fault by another word.
      if (!may_write) return;
    }
    copy_chunk(e, rows_of_chunk(e, chunk));
    num_copied = is_first ? 1 : num_copied + 1;
    message = e.message;
  }
  if (message >= 0) count_copied(table.messages[message], table.chunks_done[message], num_copied);
}

__global__ void __launch_bounds__(kThreads, kPutBlocksOfSm) copy_kernel(DevicePutTable table) {
  const int32_t num_chunks = *table.num_chunks, num_entries = table.num_entries();
  for (int32_t chunk = blockIdx.x; chunk < num_chunks; chunk += gridDim.x) {
    const PutEntry e = table.entries[entry_of_chunk(table.entries, num_entries, chunk)];
    copy_chunk(e, rows_of_chunk(e, chunk));
  }
}

__global__ void __launch_bounds__(kThreads)
    await_kernel(const AwaitedMessage* messages, const uint64_t* num_messages, Guard guard) {
  if (is_stopped(guard)) return;
  for (uint64_t i = threadIdx.x; i < *num_messages; i += kThreads) {
    if (!transport::await(guard, messages[i])) return;
  }
}

__global__ void __launch_bounds__(kThreads)
    signal_kernel(const SignalTo* signals, const uint64_t* num_signals, Guard guard) {
  if (is_stopped(guard)) return;
  for (uint64_t i = threadIdx.x; i < *num_signals; i += kThreads) store_release(signals[i].word, signals[i].value);
}

__global__ void __launch_bounds__(kThreads) fill_nan_kernel(RowView rows, RowExtent n, Guard guard) {
  if (!is_stopped(guard)) return;
  const int64_t per_head = n.head_bytes / 2, per_row = n.num_heads * per_head;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < n.num_rows * per_row; i += step) {
    const int64_t row = i / per_row, head = i % per_row / per_head;
    auto* const to = reinterpret_cast<uint16_t*>(rows.data + row * rows.row_stride + head * rows.head_stride);
    to[i % per_head] = 0xffff;  // all bits set is a NaN in every dtype
  }
}

}  // namespace

std::span<const transport::TablePart> PutParts::of(const transport::PutTable& table) {
  using transport::table_part;
  num_chunks_ = table.num_chunks();
  zeros_.assign(table.messages().size(), 0);
  parts_ = {transport::table_value("chunks", num_chunks_), table_part("extents of rows", table.entries()),
            table_part("messages", table.messages()), table_part("messages", zeros_)};
  return parts_;
}

int32_t blocks_of_puts(int major, int minor) {
  constexpr int64_t kBytesUnderWay = int64_t{kThreads} * kWordsUnderWay * 16;
  return transport::blocks_for(transport::link_of(major, minor), kBytesUnderWay);
}

int32_t sms_of_puts(int32_t blocks) { return ceil_div(blocks, kPutBlocksOfSm); }

void put_rows(const DeviceTable& table, const Guard& guard, int32_t blocks, cudaStream_t stream) {
  put_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(DevicePutTable(table), guard);
  check(cudaGetLastError(), "the put kernel");
}

void copy_extents(const DeviceTable& table, cudaStream_t stream) {
  copy_kernel<<<static_cast<unsigned>(kCopyBlocks), kThreads, 0, stream>>>(DevicePutTable(table));
  check(cudaGetLastError(), "the kernel that copies rows");
}

void write_signals(const DeviceTable& table, const Guard& guard, cudaStream_t stream) {
  signal_kernel<<<1, kThreads, 0, stream>>>(table.part<const SignalTo>(0), table.counts(), guard);
  check(cudaGetLastError(), "the kernel that writes signals");
}

void await_messages(const DeviceTable& table, const Guard& guard, cudaStream_t stream) {
  await_kernel<<<1, kThreads, 0, stream>>>(table.part<const AwaitedMessage>(0), table.counts(), guard);
  check(cudaGetLastError(), "the kernel that awaits messages");
}

void load_put_kernels() {
  load_kernel(put_kernel);
  load_kernel(copy_kernel);
  load_kernel(signal_kernel);
  load_kernel(await_kernel);
  load_kernel(fill_nan_kernel);
}

void fill_nan_if_stopped(const RowView& rows, const RowExtent& n, const Guard& guard, cudaStream_t stream) {
  if (n.bytes() == 0) return;
  const int64_t blocks = std::min<int64_t>(1024, ceil_div(n.bytes() / 2, kThreads));
  fill_nan_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(rows, n, guard);
  check(cudaGetLastError(), "the kernel that fills outputs after a fault");
}

}  // namespace distca::cuda
