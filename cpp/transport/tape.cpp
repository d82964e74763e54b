#include "transport/tape.h"

#include <string_view>
#include <utility>

namespace distca::transport {

std::shared_ptr<const Table> Tape::add(const char* operation, std::span<const TablePart> parts, Start start) {
  if (!is_complete_) {
    const AllocateTable allocate = [this](size_t bytes) {
      return device_ ? device_->allocate(bytes) : allocate_on_host(bytes);
    };
    const auto table = std::make_shared<Table>(parts, headroom_, allocate);
    operations_.push_back({operation, table, std::make_shared<Table>(parts, headroom_), std::move(start)});
    return table;
  }
  // The code that queues operations asks for the same ones whatever the plan.
  require<OperatingSystemError>(next_ < operations_.size() && std::string_view(operations_[next_].name) == operation,
                                "recording: operation ", next_, " is now a ", operation);
  Operation& o = operations_[next_++];
  o.table->check(operation, parts);
  o.staged->fill(parts);
  return nullptr;
}

void Tape::rewind() {
  is_complete_ = true;
  next_ = 0;
}

void Tape::await_readers() const {
  if (device_) device_->await_readers();
}

void Tape::commit() {
  require<OperatingSystemError>(next_ == operations_.size(), "recording: ", next_, " operations of ",
                                operations_.size());
  for (Operation& o : operations_) o.table->fill(*o.staged);
  if (device_) device_->commit();
}

void Tape::replay() const {
  for (const Operation& o : operations_) o.start(o.table);
}

}  // namespace distca::transport
