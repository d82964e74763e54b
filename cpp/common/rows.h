// Strided views of [rows, heads, dim] tensors and the copy between two of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace distca {

/// A strided view of rows. Row i, head h starts at `data + i * row_stride + h * head_stride`; the last dimension is
/// contiguous. Strides are in bytes and may be any multiple of the element size.
struct RowView {
  std::byte* data = nullptr;
  int64_t row_stride = 0;
  int64_t head_stride = 0;

  std::byte* at(int64_t row, int64_t head) const { return data + row * row_stride + head * head_stride; }
  RowView from_row(int64_t row) const { return from(row, 0); }
  RowView from(int64_t row, int64_t head) const { return {at(row, head), row_stride, head_stride}; }
};

/// The size of a copy: `num_rows` rows of `num_heads` heads of `head_bytes` bytes.
struct RowExtent {
  int64_t num_rows = 0;
  int64_t num_heads = 0;
  int64_t head_bytes = 0;

  int64_t bytes() const { return num_rows * num_heads * head_bytes; }
};

/// Copies between views that do not overlap, in as few memcpy calls as the strides allow.
inline void copy_rows(const RowView& dst, const RowView& src, const RowExtent& n) {
  const int64_t row_bytes = n.num_heads * n.head_bytes;
  const bool whole_rows = n.num_heads == 1 || (dst.head_stride == n.head_bytes && src.head_stride == n.head_bytes);
  if (whole_rows && dst.row_stride == row_bytes && src.row_stride == row_bytes) {
    std::memcpy(dst.data, src.data, static_cast<size_t>(n.num_rows * row_bytes));
    return;
  }
  for (int64_t i = 0; i < n.num_rows; ++i) {
    if (whole_rows) {
      std::memcpy(dst.at(i, 0), src.at(i, 0), static_cast<size_t>(row_bytes));
    } else {
      for (int64_t h = 0; h < n.num_heads; ++h)
        std::memcpy(dst.at(i, h), src.at(i, h), static_cast<size_t>(n.head_bytes));
    }
  }
}

}  // namespace distca
