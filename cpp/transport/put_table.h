// The table of one launch of the put kernel, as plain data: messages to peers, whose rows go straight from where they
// lie into the peers' arenas. The host makes it. Addresses are computed by the same functions on host and device, so
// that tests on the host cover them. It knows nothing of CUDA.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "common/error.h"
#include "common/host_device.h"
#include "common/rows.h"

namespace distca::transport {

/// One put: rows, which consist of heads, which consist of words. A word is the largest power of two up to 16 bytes
/// that all addresses allow.
struct PutEntry {
  const std::byte* from;
  std::byte* to;
  int64_t from_row_stride, from_head_stride, to_row_stride, to_head_stride;  // bytes
  int64_t num_rows;
  int32_t words_per_row, words_per_head, word_bytes;
  int32_t rows_per_chunk;
  int32_t first_chunk;  // number in the table
  int32_t num_chunks;
  int32_t message;
  uint32_t row_magic, head_magic;  // see quotient()
};

/// All puts of one message to a peer. They come after its credit and before its signal.
struct PutMessage {
  int32_t peer;
  int32_t num_chunks;
  const uint64_t* credit;  // own word; rows may be written once it is >= credit_value. Null: at once
  uint64_t credit_value;
  uint64_t* signal;  // the peer's word, as this rank addresses it. Null: none is written
  uint64_t signal_value;
  int64_t round;
};

struct Rows {
  int64_t begin, end;
};

/// The rows of an entry that chunk number `chunk` of the table covers.
DISTCA_HOST_DEVICE inline Rows rows_of_chunk(const PutEntry& e, int32_t chunk) {
  const int64_t begin = static_cast<int64_t>(chunk - e.first_chunk) * e.rows_per_chunk;
  const int64_t end = begin + e.rows_per_chunk;
  return {begin, end < e.num_rows ? end : e.num_rows};
}

/// The entry that a chunk belongs to.
template <class Entry>
DISTCA_HOST_DEVICE inline int32_t entry_of_chunk(const Entry* entries, int32_t num_entries, int32_t chunk) {
  int32_t low = 0, high = num_entries - 1;
  while (low < high) {
    const int32_t middle = (low + high + 1) / 2;
    if (entries[middle].first_chunk <= chunk)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

/// i / d by a product, where `magic` is ceil(2^32 / d); 0 where that does not hold for each i that comes.
DISTCA_HOST_DEVICE inline uint32_t quotient(uint32_t i, int32_t d, uint32_t magic) {
  return magic == 0 ? i / static_cast<uint32_t>(d) : static_cast<uint32_t>(uint64_t{i} * magic >> 32);
}

struct WordPlace {
  const std::byte* from;
  std::byte* to;
};

/// The source and target of word `i` of the rows from `first_row` on. Words are counted row by row, head by head.
DISTCA_HOST_DEVICE inline WordPlace place_of_word(const PutEntry& e, int64_t first_row, uint32_t i) {
  const uint32_t row_in_chunk = quotient(i, e.words_per_row, e.row_magic);
  const uint32_t in_row = i - row_in_chunk * static_cast<uint32_t>(e.words_per_row);
  const uint32_t head = e.words_per_head == e.words_per_row ? 0 : quotient(in_row, e.words_per_head, e.head_magic);
  const int64_t in_head = static_cast<int64_t>(in_row - head * static_cast<uint32_t>(e.words_per_head)) * e.word_bytes;
  const int64_t row = first_row + row_in_chunk;
  return {e.from + row * e.from_row_stride + head * e.from_head_stride + in_head,
          e.to + row * e.to_row_stride + head * e.to_head_stride + in_head};
}

/// Collects the messages of one launch.
class DISTCA_EXPORT PutTable {
 public:
  /// A chunk is what one thread block copies at a time: about `chunk_bytes`, but at least a row.
  explicit PutTable(int64_t chunk_bytes = int64_t{32} << 10) : chunk_bytes_(chunk_bytes) {}

  /// Begins the message to a peer. Its `num_chunks` is ignored.
  void open(const PutMessage& message);
  /// Adds rows to the message that was opened last.
  void add(const RowView& to, const RowView& from, const RowExtent& extent);
  /// Sets the signal of that message.
  void close(uint64_t* signal, uint64_t value);
  void clear();

  bool empty() const { return entries_.empty(); }
  std::span<const PutEntry> entries() const { return entries_; }
  std::span<const PutMessage> messages() const { return messages_; }
  int32_t num_chunks() const { return num_chunks_; }
  int64_t num_bytes() const { return num_bytes_; }

 private:
  int64_t chunk_bytes_;
  int32_t num_chunks_ = 0;
  int64_t num_bytes_ = 0;
  std::vector<PutEntry> entries_;
  std::vector<PutMessage> messages_;
};

/// The number of thread blocks that keep a link busy (Little's law): the bytes that must be under way to hide its
/// latency, divided by the bytes that one block has under way. The rest of the GPU is left to attention.
struct LinkModel {
  int64_t bytes_per_second;   // in one direction
  int64_t latency_ns = 1500;  // of a load followed by a store to a peer
  int32_t max_blocks = 32;
};
/// The link that the GPUs of a compute capability have between them: NVLink 3 (A100), 4 (H100, H200) and 5 (B200,
/// B300), and PCIe 5 elsewhere.
DISTCA_EXPORT LinkModel link_of(int major, int minor);
DISTCA_EXPORT int32_t blocks_for(const LinkModel& link, int64_t bytes_under_way_of_a_block);

}  // namespace distca::transport
