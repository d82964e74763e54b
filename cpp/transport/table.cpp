#include "transport/table.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "common/align.h"
#include "common/memory.h"

namespace distca::transport {
namespace {

/// The least room of an array that is to be filled anew, because a short array says little about later ones.
constexpr size_t kLeastRoom = 256;

size_t room_for(const TablePart& part, double headroom) {
  if (headroom <= 1 || part.kind != TablePart::Kind::kArray) return part.count();
  return std::max(kLeastRoom, static_cast<size_t>(std::ceil(headroom * static_cast<double>(part.count()))));
}

}  // namespace

TableLayout::TableLayout(std::span<const TablePart> parts, double headroom) {
  require(parts.size() <= kMaxParts, "table of ", parts.size(), " parts");
  bytes_ = round_up(kMaxParts * sizeof(uint64_t), kAlignment);
  for (size_t i = 0; i < parts.size(); ++i) {
    capacities_[i] = room_for(parts[i], headroom);
    offsets_[i] = bytes_;
    bytes_ += round_up(capacities_[i] * parts[i].element_bytes, kAlignment);
  }
}

void TableLayout::write(std::span<const TablePart> parts, std::byte* memory) const {
  auto* const counts = reinterpret_cast<uint64_t*>(memory);
  for (size_t i = 0; i < parts.size(); ++i) {
    counts[i] = parts[i].count();
    if (counts[i] > 0) std::memcpy(memory + offsets_[i], parts[i].bytes.data(), parts[i].bytes.size());
  }
}

TableMemory allocate_on_host(size_t bytes) {
  std::shared_ptr<std::byte> memory = host_memory(bytes);
  std::byte* const device = memory.get();
  return {std::move(memory), device};
}

Table::Table(std::span<const TablePart> parts, double headroom, const AllocateTable& allocate)
    : layout_(parts, headroom), memory_(allocate(layout_.bytes())) {
  fill(parts);
}

void Table::check(const char* operation, std::span<const TablePart> parts) const {
  for (size_t i = 0; i < parts.size(); ++i) {
    const size_t count = parts[i].count(), capacity = layout_.capacity(i);
    if (count > capacity) {
      throw CapacityError(message("plan needs ", count, " ", parts[i].name, " in one ", operation,
                                  ", the recording has room for ", capacity,
                                  "; record with a plan that has more of them, or with more headroom"));
    }
    const std::byte* const there = memory_.host.get() + layout_.offset(i);
    if (parts[i].kind == TablePart::Kind::kFixed &&
        std::memcmp(there, parts[i].bytes.data(), parts[i].bytes.size()) != 0) {
      throw CapacityError(message("plan has other ", parts[i].name, " in one ", operation,
                                  " than the recording, where they cannot change"));
    }
  }
}

void Table::fill(const Table& other) { std::memcpy(memory_.host.get(), other.host(), layout_.bytes()); }

}  // namespace distca::transport
