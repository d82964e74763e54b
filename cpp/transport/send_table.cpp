#include "transport/send_table.h"

namespace distca::transport {
namespace {

constexpr int64_t kAlignment = 16;

}  // namespace

void SendTable::open(const SendMessage& message) {
  messages_.push_back(message);
  messages_.back().first_piece = static_cast<int32_t>(pieces_.size());
  messages_.back().num_pieces = 0;
}

std::byte* SendTable::add(std::byte* to, int64_t row_stride, int64_t head_stride, const RowExtent& n) {
  require(!messages_.empty(), "rows are packed before a message is opened");
  SendMessage& message = messages_.back();
  const int64_t bytes = (n.num_rows - 1) * row_stride + (n.num_heads - 1) * head_stride + n.head_bytes;
  SendPiece* const last = message.num_pieces == 0 ? nullptr : &pieces_.back();
  const bool continues = last != nullptr && last->to + last->bytes == to;
  int64_t from = used_;
  if (!continues) {
    // The piece is as aligned as it will be at the peer, so that rows are copied in words of the same size.
    const auto apart =
        static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) - reinterpret_cast<uintptr_t>(arena_.data() + from)) %
        kAlignment;
    from += (apart + kAlignment) % kAlignment;
  }
  if (bytes > static_cast<int64_t>(arena_.size()) - from) return nullptr;
  used_ = from + bytes;
  std::byte* const packed = arena_.data() + from;
  if (continues) {
    last->bytes += bytes;
  } else {
    pieces_.push_back({packed, to, bytes});
    ++message.num_pieces;
  }
  return packed;
}

void SendTable::close(uint64_t* signal, uint64_t value) {
  messages_.back().signal = signal;
  messages_.back().signal_value = value;
}

void SendTable::clear() {
  used_ = 0;
  messages_.clear();
  pieces_.clear();
}

}  // namespace distca::transport
