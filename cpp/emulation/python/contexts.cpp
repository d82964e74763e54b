// Contexts with emulated parts for tests and benchmarks, and what tests do to contexts.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <tuple>

#include "emulation/link.h"
#include "emulation/loopback.h"
#include "emulation/nan_fill.h"
#include "emulation/python/bindings.h"
#include "emulation/queued_backend.h"
#include "emulation/reordering.h"
#include "emulation/sleeping_backend.h"
#include "python/connect.h"
#include "transport/stream_order.h"

namespace py = pybind11;

namespace distca::emulation {
namespace {

using python::ContextPtr;
using python::TransportPtr;

/// Bytes a second, latency in seconds, and whether puts take the time of one byte (LinkOptions).
using Link = std::tuple<double, double, bool>;

/// The costs of forward and of backward, each followed by the nanoseconds of its unit.
using Replay = std::tuple<plan::CostModel, double, plan::CostModel, double>;

/// Puts a ReorderingTransport, a link, or both in front of a transport, if asked to.
TransportPtr wrap(TransportPtr transport, const std::optional<uint64_t>& reorder_seed,
                  const std::optional<Link>& link) {
  if (reorder_seed) {
    const uint64_t seed = *reorder_seed * 1000003u + static_cast<uint64_t>(transport->rank());
    transport = std::make_unique<ReorderingTransport>(std::move(transport), seed);
  }
  if (link) {
    const auto& [bytes_per_second, latency, signal_only] = *link;
    require(latency >= 0 && latency <= 10, "link: a latency of ", latency, " s; 0 to 10 are allowed");
    const auto nanoseconds = std::chrono::nanoseconds(static_cast<int64_t>(latency * 1e9));
    transport =
        std::make_unique<LinkTransport>(std::move(transport), LinkOptions{bytes_per_second, nanoseconds, signal_only});
  }
  return transport;
}

std::vector<ContextPtr> make_loopback(const std::vector<std::string>& names, int64_t slot_bytes, double timeout,
                                      const plan::CostModel& cost, const std::string& device,
                                      const std::string& attention, int put_blocks,
                                      std::optional<uint64_t> reorder_seed, bool progress_thread,
                                      std::optional<Link> link, const std::optional<Replay>& replay, bool streams,
                                      int hosts) {
  const int num_ranks = python::num_loopback_ranks(names);
  const bool by_cpu = device == "cpu" && attention != "flash";
  auto options = python::context_options("", slot_bytes, timeout, cost);
  std::vector<runtime::Device> devices;
  for (int r = 0; r < num_ranks; ++r) {
    if (streams && by_cpu)
      devices.push_back(make_host_device(options.timeout));
    else if (streams)
      devices.push_back(runtime::make_device(device, attention, options.timeout, put_blocks));
    else if (replay)
      devices.push_back({make_sleeping_backend({std::get<0>(*replay), std::get<1>(*replay)},
                                               {std::get<2>(*replay), std::get<3>(*replay)}),
                         nullptr});
    else
      devices.push_back({runtime::make_backend(device, attention), nullptr});
  }
  const runtime::HeapNeeds needs = runtime::heap_needs(num_ranks, slot_bytes);
  std::vector<TransportPtr> transports;
  if (hosts == 1) {
    transports = python::loopback_transports(devices, by_cpu, needs);
  } else {
    std::vector<std::shared_ptr<transport::Streams>> queues;
    for (const runtime::Device& one : devices) queues.push_back(one.streams);
    transports = make_loopback_of_hosts(needs.heap_bytes, needs.num_signals, queues, hosts, needs.send_arena_bytes);
  }
  std::vector<ContextPtr> contexts;
  for (size_t r = 0; r < devices.size(); ++r) {
    options.name = names[r];
    if (progress_thread) transports[r] = transport::make_background(std::move(transports[r]));
    contexts.push_back(
        python::register_context(wrap(std::move(transports[r]), reorder_seed, link), options, devices[r].backend));
  }
  return contexts;
}

ContextPtr connect_shm(transport::ShmListener& listener, int rank, const std::vector<std::string>& addresses,
                       std::string name, int64_t slot_bytes, double timeout, double connect_timeout,
                       const plan::CostModel& cost, bool progress_thread, std::optional<uint64_t> reorder_seed,
                       std::optional<Link> link, const std::string& cpu_isa) {
  auto options = python::context_options(std::move(name), slot_bytes, timeout, cost);
  auto backend = runtime::make_backend("cpu", "auto", cpu_isa);
  const py::gil_scoped_release release;
  auto transport = python::shm_transport(listener, rank, addresses, slot_bytes, connect_timeout, progress_thread);
  return python::register_context(wrap(std::move(transport), reorder_seed, link), std::move(options),
                                  std::move(backend));
}

/// Does what connect_ipc of distca._C does, with threads in place of GPUs.
ContextPtr connect_ipc(const python::Listener& listener, int rank, const std::vector<std::string>& addresses,
                       std::string name, int64_t slot_bytes, double timeout, double connect_timeout,
                       const plan::CostModel& cost) {
  auto options = python::context_options(std::move(name), slot_bytes, timeout, cost);
  const py::gil_scoped_release release;
  runtime::Device mine = make_host_device(options.timeout);
  return python::ipc_context(listener, rank, addresses, std::move(mine), std::move(options), connect_timeout);
}

std::vector<std::tuple<int, int64_t, int64_t, int64_t>> take_transfers(runtime::Context& context) {
  std::vector<std::tuple<int, int64_t, int64_t, int64_t>> transfers;
  if (auto* const link = dynamic_cast<LinkTransport*>(&context.transport()))
    for (const Transfer& t : link->take_transfers()) transfers.emplace_back(t.peer, t.bytes, t.begin_ns, t.end_ns);
  return transfers;
}

/// Puts rows that lie without gaps in the memory of the context's device, and signals, as a step does.
void send_rows(runtime::Context& context, int peer, uintptr_t address, int64_t num_rows, int64_t row_bytes,
               int64_t word, uint64_t value) {
  transport::Transport& transport = context.transport();
  const RowView rows{reinterpret_cast<std::byte*>(address), row_bytes, row_bytes};
  transport.put(peer, 0, row_bytes, row_bytes, rows, {num_rows, 1, row_bytes});
  if (transport::StreamOrder* const streams = transport.stream_order()) {
    streams->announce(peer, word, value);
    streams->send(0);
  } else {
    transport.signal(peer, word, value);
  }
}

/// Returns when what was put so far is there or, on a GPU, makes the work that PyTorch queues from here on come after
/// it.
void join(runtime::Context& context) {
  transport::StreamOrder* const streams = context.transport().stream_order();
  if (streams == nullptr) return context.transport().quiet();
  streams->end_reads(0);
  streams->await_reads(0);
  streams->end(0);
}

}  // namespace

void bind_contexts(py::module_& m) {
  const auto released = py::call_guard<py::gil_scoped_release>();
  m.def("make_loopback", &make_loopback, py::kw_only(), py::arg("names"), py::arg("slot_bytes"), py::arg("timeout"),
        py::arg("cost"), py::arg("device") = "cpu", py::arg("attention") = "auto", py::arg("put_blocks") = 0,
        py::arg("reorder_seed") = std::nullopt, py::arg("progress_thread") = false, py::arg("link") = std::nullopt,
        py::arg("replay") = std::nullopt, py::arg("streams") = false, py::arg("hosts") = 1);
  m.def("connect_shm", &connect_shm, py::kw_only(), py::arg("listener"), py::arg("rank"), py::arg("addresses"),
        py::arg("name"), py::arg("slot_bytes"), py::arg("timeout"), py::arg("connect_timeout"), py::arg("cost"),
        py::arg("progress_thread") = false, py::arg("reorder_seed") = std::nullopt, py::arg("link") = std::nullopt,
        py::arg("cpu_isa") = "");
  m.def("connect_ipc", &connect_ipc, py::kw_only(), py::arg("listener").none(false), py::arg("rank"),
        py::arg("addresses"), py::arg("name"), py::arg("slot_bytes"), py::arg("timeout"), py::arg("connect_timeout"),
        py::arg("cost"));
  m.def("find_context", &runtime::find_context, py::arg("name"));
  m.def("take_transfers", &take_transfers, py::arg("context"));
  m.def("fill_with_nan", &fill_with_nan, py::arg("context"), released);
  m.def("mark_died", [](runtime::Context& context) { emulation::mark_died(context.transport()); }, py::arg("context"));
  m.def("send_rows", &send_rows, py::arg("context"), py::arg("peer"), py::arg("address"), py::arg("num_rows"),
        py::arg("row_bytes"), py::arg("word"), py::arg("value"), released);
  m.def("join", &join, py::arg("context"), released);
  m.def("quiet", [](runtime::Context& context) { context.transport().quiet(); }, py::arg("context"), released);
  m.def(
      "exchange", [](runtime::Context& context) { context.transport().exchange(false, [] {}); }, py::arg("context"),
      released);
}

}  // namespace distca::emulation
