// A table (transport/table.h) in device memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transport/table.h"

namespace distca::cuda {

struct DeviceTable {
  const transport::TableLayout* layout = nullptr;
  std::byte* memory = nullptr;

  template <class T>
  T* part(size_t i) const {
    return reinterpret_cast<T*>(memory + layout->offset(i));
  }
  /// The numbers of elements of the parts, one count for each part.
  const uint64_t* counts() const { return reinterpret_cast<const uint64_t*>(memory); }
  /// The most elements of a part. This is all that the host knows of the counts of a table that is filled again.
  size_t capacity(size_t i) const { return layout->capacity(i); }
};

}  // namespace distca::cuda
