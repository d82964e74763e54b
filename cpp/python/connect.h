// Functions that make and connect contexts, shared by distca._C and distca.testing._emulation.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "common/error.h"
#include "plan/cost.h"
#include "runtime/backend.h"
#include "runtime/context.h"
#include "transport/background.h"
#include "transport/loopback.h"
#include "transport/shared_heaps.h"
#include "transport/shm.h"
#include "transport/tcp.h"

namespace distca::python {

using ContextPtr = std::shared_ptr<runtime::Context>;
using TransportPtr = std::unique_ptr<transport::Transport>;

inline std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1e3));
}

inline runtime::ContextOptions context_options(std::string name, int64_t slot_bytes, double timeout,
                                               const plan::CostModel& cost) {
  require(timeout > 0 && timeout < 1e9, "context: timeout = ", timeout, " s; a positive number of seconds is expected");
  require(slot_bytes > 0 && slot_bytes <= int64_t{1} << 46, "context: ", slot_bytes,
          " bytes a slot; 1 to 2^46 are allowed");
  runtime::ContextOptions options;
  options.name = std::move(name);
  options.slot_bytes = slot_bytes;
  options.timeout = milliseconds(timeout);
  cost.check();
  options.cost_digest = cost.digest();
  return options;
}

/// Makes a context and puts it into the registry.
inline ContextPtr register_context(TransportPtr transport, runtime::ContextOptions options,
                                   std::shared_ptr<runtime::Backend> backend = nullptr) {
  auto context = std::make_shared<runtime::Context>(std::move(transport), std::move(options), std::move(backend));
  runtime::add_context(context);
  return context;
}

/// The number of ranks of a loopback group. Each rank has one name, that of its context.
inline int num_loopback_ranks(const std::vector<std::string>& names) {
  require(!names.empty() && names.size() <= 4096, "loopback: ", names.size(), " ranks; 1 to 4096 are allowed");
  return static_cast<int>(names.size());
}

/// The transports of a loopback group. Rows travel by the devices' streams if there are any. Otherwise the host copies
/// them if it owns the memory (`on_host`), and the backends do if it does not.
inline std::vector<TransportPtr> loopback_transports(const std::vector<runtime::Device>& devices, bool on_host,
                                                     const runtime::HeapNeeds& needs) {
  std::vector<std::shared_ptr<transport::Streams>> streams;
  std::vector<std::shared_ptr<Memory>> memories;
  for (const runtime::Device& device : devices) {
    if (device.streams) streams.push_back(device.streams);
    if (!on_host) memories.push_back(device.backend);
  }
  if (!streams.empty()) return transport::make_stream_loopback(needs.heap_bytes, needs.num_signals, streams);
  return transport::make_loopback(static_cast<int>(devices.size()), needs.heap_bytes, needs.num_signals, memories);
}

inline TransportPtr shm_transport(transport::ShmListener& listener, int rank, const std::vector<std::string>& addresses,
                                  int64_t slot_bytes, double connect_timeout, bool progress_thread) {
  const runtime::HeapNeeds needs = runtime::heap_needs(static_cast<int64_t>(addresses.size()), slot_bytes);
  auto transport = transport::connect_shm(std::move(listener), rank, addresses, needs.heap_bytes, needs.num_signals,
                                          milliseconds(connect_timeout));
  return progress_thread ? transport::make_background(std::move(transport)) : std::move(transport);
}

using Listener = std::variant<transport::ShmListener*, transport::TcpListener*>;

/// Connects the ranks for their control transport, by shm or tcp as the listener says. The listener is used up.
inline TransportPtr connect_control(const Listener& listener, int rank, const std::vector<std::string>& addresses,
                                    int64_t num_signals, std::chrono::milliseconds timeout) {
  if (auto* const shm = std::get_if<transport::ShmListener*>(&listener))
    return transport::connect_shm(std::move(**shm), rank, addresses, 0, num_signals, timeout);
  return transport::connect_tcp(std::move(*std::get<transport::TcpListener*>(listener)), rank, addresses, num_signals,
                                timeout);
}

/// Makes the context of a rank whose device, and those of ranks in other processes, write into each other's memory.
inline ContextPtr ipc_context(const Listener& listener, int rank, const std::vector<std::string>& addresses,
                              runtime::Device mine, runtime::ContextOptions options, double connect_timeout) {
  const auto num_ranks = static_cast<int>(addresses.size());
  const runtime::HeapNeeds needs = runtime::heap_needs(num_ranks, options.slot_bytes);
  const auto deadline = std::chrono::steady_clock::now() + milliseconds(connect_timeout);
  auto control = connect_control(listener, rank, addresses, transport::control_words(num_ranks, needs.num_signals),
                                 milliseconds(connect_timeout));
  auto transport = transport::share_heaps("cuda-ipc", std::move(control), std::move(mine.streams), needs.heap_bytes,
                                          needs.num_signals, deadline);
  return register_context(std::move(transport), std::move(options), std::move(mine.backend));
}

}  // namespace distca::python
