#include "transport/send_table.h"

#include <utility>

namespace distca::cuda {
namespace {

constexpr int64_t kAlignment = 16;

}  // namespace

int64_t SendTable::add(int64_t to, int64_t row_stride, int64_t head_stride, const RowExtent& n) {
  const int64_t bytes = (n.num_rows - 1) * row_stride + (n.num_heads - 1) * head_stride + n.head_bytes;
  const bool continues = !pieces_.empty() && pieces_.back().to + pieces_.back().bytes == to;
  // As aligned as it will be there, so that rows are copied in words of the same size.
  int64_t from = used_;
  if (!continues) from += (to - from) % kAlignment + ((to - from) % kAlignment < 0 ? kAlignment : 0);
  if (bytes > arena_bytes_ - from) return -1;
  used_ = from + bytes;
  if (continues)
    pieces_.back().bytes += bytes;
  else
    pieces_.push_back({from, to, bytes});
  return from;
}

std::vector<SendPiece> SendTable::take() { return std::exchange(pieces_, {}); }

}  // namespace distca::cuda
