// Two threads that stand for the streams of a device, for tests. They run what is queued on them in order, with the
// code of which kernels are made, while the rank's own thread goes on.
#pragma once

#include <array>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <utility>

#include "common/worker.h"
#include "transport/streams.h"
#include "transport/tape.h"

namespace distca::emulation {

class DISTCA_EXPORT HostStreams final : public transport::Streams {
 public:
  explicit HostStreams(std::chrono::milliseconds timeout);
  /// Waits until all that was queued is done.
  ~HostStreams() override;

  /// Queues any operation, with a copy of what it reads. The next `join_host` throws what the operation throws.
  using Work = std::function<void(const transport::Table& table)>;
  void queue(Stream stream, const char* operation, std::span<const transport::TablePart> parts, Work work);
  bool is_stopped() const { return transport::is_stopped(guard_); }

  std::shared_ptr<std::byte> allocate(int64_t bytes) override;
  Shared allocate_shared(int64_t bytes) override;
  std::shared_ptr<std::byte> open(const IpcHandle& handle, int64_t bytes) override;
  void record(int point, Stream stream) override;
  void wait_for(Stream stream, int point) override;
  void join_host() override;
  void drain() noexcept override;
  void put(const transport::PutTable& table) override;
  void signal(std::span<const transport::SignalTo> signals) override;
  void send(const transport::SendTable& table, const std::shared_ptr<transport::Sender>& sender) override;
  void quiet(const std::shared_ptr<transport::Sender>& sender) override;
  void await(std::span<const transport::AwaitedMessage> messages) override;
  void fill_nan_if_stopped(const RowView& rows, const RowExtent& n) override;
  bool is_captured() const override { return false; }
  void set_tape(std::shared_ptr<transport::Tape> tape) override { tape_ = std::move(tape); }
  void replay(const transport::Tape& tape) override;
  std::optional<transport::StreamFault> fault() const override;
  void stop() noexcept override { transport::set(&told_to_stop_); }

 private:
  using Lane = WorkQueue<std::function<void()>>;
  struct Point;

  Lane& lane(Stream stream) { return *lanes_[static_cast<size_t>(stream)]; }

  uint32_t stopped_ = 0, told_to_stop_ = 0;
  transport::StreamFault fault_;
  transport::Guard guard_;
  std::array<std::shared_ptr<Point>, kNumPoints> points_;
  std::mutex thrown_mutex_;
  std::exception_ptr thrown_;  // by an operation on either stream
  std::shared_ptr<transport::Tape> tape_;
  std::array<std::unique_ptr<Lane>, 2> lanes_;  // last: they end before what they use goes
};

}  // namespace distca::emulation
