#include "transport/put_table.h"

#include <algorithm>
#include <limits>

#include "common/align.h"

namespace distca::transport {
namespace {

constexpr int64_t kMaxWordBytes = 16;

/// The largest power of two up to 16 that divides all sizes, strides and addresses.
int64_t word_bytes(const RowView& to, const RowView& from, const RowExtent& n) {
  int64_t bits = kMaxWordBytes | n.head_bytes;
  for (const RowView& view : {to, from}) {
    bits |= static_cast<int64_t>(reinterpret_cast<uintptr_t>(view.data));
    if (n.num_heads > 1) bits |= view.head_stride;
    if (n.num_rows > 1) bits |= view.row_stride;
  }
  return bits & -bits;
}

/// What quotient() takes for numbers below `end`.
uint32_t magic_of(int64_t d, int64_t end) {
  constexpr int64_t kOne = int64_t{1} << 32;
  // The rounded product exceeds i / d by less than i * d / 2^32 / d, which must not reach the next multiple of 1 / d.
  return d > 1 && d < kOne && end <= kOne / d ? static_cast<uint32_t>((kOne + d - 1) / d) : 0;
}

}  // namespace

void PutTable::open(const PutMessage& message) {
  messages_.push_back(message);
  messages_.back().num_chunks = 0;
}

void PutTable::add(const RowView& to, const RowView& from, const RowExtent& extent) {
  require(!messages_.empty(), "rows are put before a message is opened");
  if (extent.bytes() == 0) return;
  const int64_t row_bytes = extent.num_heads * extent.head_bytes;
  const bool has_gaps = to.head_stride != extent.head_bytes || from.head_stride != extent.head_bytes;
  const RowExtent n = has_gaps ? extent : RowExtent{extent.num_rows, 1, row_bytes};
  const int64_t word = word_bytes(to, from, n);
  const int64_t rows_per_chunk = std::clamp<int64_t>(chunk_bytes_ / row_bytes, 1, n.num_rows);
  // Words of a chunk are counted in 32 bits.
  require(rows_per_chunk * row_bytes / word <= std::numeric_limits<int32_t>::max(), "a row of ", row_bytes,
          " bytes is too long to be put");
  const int64_t num_chunks = ceil_div(n.num_rows, rows_per_chunk);
  require(num_chunks_ + num_chunks <= std::numeric_limits<int32_t>::max(), "a message of ", num_chunks,
          " chunks is too long");
  const int64_t words = row_bytes / word, words_of_head = n.head_bytes / word;
  entries_.push_back({from.data, to.data, from.row_stride, from.head_stride, to.row_stride, to.head_stride, n.num_rows,
                      static_cast<int32_t>(words), static_cast<int32_t>(words_of_head), static_cast<int32_t>(word),
                      static_cast<int32_t>(rows_per_chunk), num_chunks_, static_cast<int32_t>(num_chunks),
                      static_cast<int32_t>(messages_.size()) - 1, magic_of(words, rows_per_chunk * words),
                      magic_of(words_of_head, words)});
  messages_.back().num_chunks += static_cast<int32_t>(num_chunks);
  num_chunks_ += static_cast<int32_t>(num_chunks);
  num_bytes_ += n.bytes();
}

void PutTable::close(uint64_t* signal, uint64_t value) {
  messages_.back().signal = signal;
  messages_.back().signal_value = value;
}

void PutTable::clear() {
  entries_.clear();
  messages_.clear();
  num_chunks_ = 0;
  num_bytes_ = 0;
}

LinkModel link_of(int major, int minor) {
  const auto with = [](int64_t gigabytes_per_second) {
    return LinkModel{.bytes_per_second = gigabytes_per_second << 30};
  };
  if (major == 8 && minor == 0) return with(300);
  if (major == 9) return with(450);
  return with(major == 10 ? 900 : 64);
}

int32_t blocks_for(const LinkModel& link, int64_t bytes_under_way_of_a_block) {
  const double under_way = static_cast<double>(link.bytes_per_second) * static_cast<double>(link.latency_ns) * 1e-9;
  const auto blocks = static_cast<int64_t>(under_way / static_cast<double>(bytes_under_way_of_a_block)) + 1;
  return static_cast<int32_t>(std::clamp<int64_t>(blocks, 1, link.max_blocks));
}

}  // namespace distca::transport
