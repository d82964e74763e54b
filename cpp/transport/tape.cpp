#include "transport/tape.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string_view>
#include <utility>

namespace distca::transport {
namespace {

/// Room in a table that is to be filled anew, where what it holds at first says little about what will come.
constexpr size_t kLeastRoom = 256;

size_t count_of(const TablePart& part) { return part.bytes.size() / part.element_bytes; }

size_t room_for(const TablePart& part, double headroom) {
  if (headroom <= 1 || part.is_one) return count_of(part);
  return std::max(kLeastRoom, static_cast<size_t>(std::ceil(headroom * static_cast<double>(count_of(part)))));
}

}  // namespace

Table::Table(std::span<const TablePart> parts, double headroom) {
  require(parts.size() <= kMaxParts, "table of ", parts.size(), " parts");
  size_t bytes = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    capacities_[i] = room_for(parts[i], headroom);
    offsets_[i] = bytes;
    bytes += (capacities_[i] * parts[i].element_bytes + 15) / 16 * 16;
  }
  memory_.resize(bytes);
  fill(parts);
}

void Table::check(const char* operation, std::span<const TablePart> parts) const {
  for (size_t i = 0; i < parts.size(); ++i) {
    const size_t count = count_of(parts[i]);
    if (count <= capacities_[i]) continue;
    throw CapacityError(message("plan needs ", count, " ", parts[i].name, " in one ", operation,
                                ", the recording has room for ", capacities_[i],
                                "; record with a plan that has more of them, or with more headroom"));
  }
}

void Table::fill(std::span<const TablePart> parts) {
  for (size_t i = 0; i < parts.size(); ++i) {
    counts_[i] = count_of(parts[i]);
    if (counts_[i] > 0) std::memcpy(memory_.data() + offsets_[i], parts[i].bytes.data(), parts[i].bytes.size());
  }
}

void Table::fill(const Table& other) {
  counts_ = other.counts_;
  std::memcpy(memory_.data(), other.memory_.data(), memory_.size());
}

void Tape::add(const char* operation, std::span<const TablePart> parts, Start start) {
  if (!is_complete_) {
    const auto table = std::make_shared<Table>(parts, headroom_);
    operations_.push_back({operation, table, std::make_shared<Table>(*table), std::move(start)});
    return;
  }
  // The code that queues operations asks for the same ones whatever the plan.
  require<OperatingSystemError>(next_ < operations_.size() && std::string_view(operations_[next_].name) == operation,
                                "recording: operation ", next_, " is now a ", operation);
  Operation& o = operations_[next_++];
  o.table->check(operation, parts);
  o.staged->fill(parts);
}

void Tape::rewind() {
  is_complete_ = true;
  next_ = 0;
}

void Tape::commit() {
  require<OperatingSystemError>(next_ == operations_.size(), "recording: ", next_, " operations of ",
                                operations_.size());
  for (Operation& o : operations_) o.table->fill(*o.staged);
}

void Tape::replay() const {
  for (const Operation& o : operations_) o.start(o.table);
}

}  // namespace distca::transport
