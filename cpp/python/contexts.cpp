// Contexts for Python.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstring>
#include <variant>

#include "common/error.h"
#include "plan/cost.h"
#include "python/bindings.h"
#include "runtime/context.h"
#include "runtime/cuda_library.h"
#include "runtime/replay_backend.h"
#include "transport/background.h"
#include "transport/collective.h"
#include "transport/link.h"
#include "transport/loopback.h"
#include "transport/nvshmem.h"
#include "transport/reordering.h"
#include "transport/shared_heaps.h"
#include "transport/shm.h"
#include "transport/stream_order.h"
#include "transport/tcp.h"

namespace py = pybind11;

namespace distca::python {
namespace {

using Milliseconds = std::chrono::milliseconds;

runtime::ContextOptions context_options(std::string name, int64_t slot_bytes, double timeout,
                                        const plan::CostModel& cost) {
  require(timeout > 0 && timeout < 1e9, "context: timeout = ", timeout, " s; a positive number of seconds is expected");
  require(slot_bytes > 0 && slot_bytes <= int64_t{1} << 46, "context: ", slot_bytes,
          " bytes a slot; 1 to 2^46 are allowed");
  runtime::ContextOptions options;
  options.name = std::move(name);
  options.slot_bytes = slot_bytes;
  options.timeout = Milliseconds(static_cast<int64_t>(timeout * 1e3));
  cost.check();
  options.cost_digest = cost.digest();
  return options;
}

using ContextPtr = std::shared_ptr<runtime::Context>;

/// What is put in front of a transport: a thread that makes its puts, or, by a test or a benchmark, an order drawn from
/// a seed, or a link's (bytes a second, latency in seconds, signals only).
struct Wrappers {
  std::optional<uint64_t> reorder_seed;
  std::optional<std::tuple<double, double, bool>> link;
  bool progress_thread = false;
};

/// Costs of forward and of backward, each followed by the nanoseconds of its unit.
using Replay = std::tuple<plan::CostModel, double, plan::CostModel, double>;

ContextPtr register_context(std::unique_ptr<transport::Transport> transport, runtime::ContextOptions options,
                            const Wrappers& wrappers, std::shared_ptr<runtime::Backend> backend = nullptr) {
  const auto& [reorder_seed, link, progress_thread] = wrappers;
  if (progress_thread) transport = transport::make_background(std::move(transport));
  if (reorder_seed) {
    const uint64_t seed = *reorder_seed * 1000003u + static_cast<uint64_t>(transport->rank());
    transport = std::make_unique<transport::ReorderingTransport>(std::move(transport), seed);
  }
  if (link) {
    const auto& [bytes_per_second, latency, signal_only] = *link;
    require(latency >= 0 && latency <= 10, "link: a latency of ", latency, " s; 0 to 10 are allowed");
    const auto nanoseconds = std::chrono::nanoseconds(static_cast<int64_t>(latency * 1e9));
    transport = std::make_unique<transport::LinkTransport>(
        std::move(transport), transport::LinkOptions{bytes_per_second, nanoseconds, signal_only});
  }
  auto context = std::make_shared<runtime::Context>(std::move(transport), std::move(options), std::move(backend));
  runtime::add_context(context);
  return context;
}

std::vector<ContextPtr> make_loopback_contexts(const std::vector<std::string>& names, int64_t slot_bytes,
                                               double timeout, const plan::CostModel& cost,
                                               std::optional<uint64_t> reorder_seed, bool progress_thread,
                                               std::optional<std::tuple<double, double, bool>> link,
                                               const std::string& device, const std::string& attention,
                                               const std::optional<Replay>& replay, bool streams, int hosts,
                                               int put_blocks) {
  const auto n = static_cast<int64_t>(names.size());
  require(n >= 1 && n <= 4096, "loopback: ", n, " ranks; 1 to 4096 are allowed");
  auto options = context_options("", slot_bytes, timeout, cost);
  const runtime::HeapNeeds needs = runtime::heap_needs(n, slot_bytes);
  std::vector<std::shared_ptr<runtime::Backend>> backends;
  std::vector<std::shared_ptr<transport::Streams>> queues;
  for (int64_t r = 0; r < n; ++r) {
    if (streams) {
      runtime::Device one = runtime::make_device(device, attention, options.timeout, put_blocks);
      if (one.streams) queues.push_back(std::move(one.streams));
      backends.push_back(std::move(one.backend));
    } else if (replay) {
      backends.push_back(runtime::make_replay_backend({std::get<0>(*replay), std::get<1>(*replay)},
                                                      {std::get<2>(*replay), std::get<3>(*replay)}));
    } else {
      backends.push_back(runtime::make_backend(device, attention));
    }
  }
  std::vector<std::shared_ptr<Memory>> memories;
  if (device != "cpu" || attention == "flash") memories.assign(backends.begin(), backends.end());
  auto transports =
      queues.empty()
          ? transport::make_loopback(static_cast<int>(n), needs.heap_bytes, needs.num_signals, memories)
          : transport::make_stream_loopback(needs.heap_bytes, needs.num_signals, queues, hosts, needs.send_arena_bytes);
  std::vector<ContextPtr> contexts;
  for (size_t r = 0; r < names.size(); ++r) {
    options.name = names[r];
    contexts.push_back(
        register_context(std::move(transports[r]), options, {reorder_seed, link, progress_thread}, backends[r]));
  }
  return contexts;
}

ContextPtr make_shm_context(transport::ShmListener& listener, int rank, const std::vector<std::string>& addresses,
                            std::string name, int64_t slot_bytes, double timeout, double connect_timeout,
                            const plan::CostModel& cost, std::optional<uint64_t> reorder_seed, bool progress_thread,
                            std::optional<std::tuple<double, double, bool>> link) {
  const auto options = context_options(std::move(name), slot_bytes, timeout, cost);
  const runtime::HeapNeeds needs = runtime::heap_needs(static_cast<int64_t>(addresses.size()), slot_bytes);
  const py::gil_scoped_release release;
  auto transport = transport::connect_shm(std::move(listener), rank, addresses, needs.heap_bytes, needs.num_signals,
                                          Milliseconds(static_cast<int64_t>(connect_timeout * 1e3)));
  return register_context(std::move(transport), options, {reorder_seed, link, progress_thread});
}

/// Connects the hosts' ranks by way of what they listen with; both kinds of listeners are used up.
using Listener = std::variant<transport::ShmListener*, transport::TcpListener*>;
std::unique_ptr<transport::Transport> connect_control(const Listener& listener, int rank,
                                                      const std::vector<std::string>& addresses, int64_t num_signals,
                                                      Milliseconds timeout) {
  if (auto* const shm = std::get_if<transport::ShmListener*>(&listener))
    return transport::connect_shm(std::move(**shm), rank, addresses, 0, num_signals, timeout);
  return transport::connect_tcp(std::move(*std::get<transport::TcpListener*>(listener)), rank, addresses, num_signals,
                                timeout);
}

/// Ranks of several processes whose devices write into each other's memory; on "cpu", what stands for that.
ContextPtr make_ipc_context(const Listener& listener, int rank, const std::vector<std::string>& addresses,
                            const std::string& device, const std::string& attention, int put_blocks, std::string name,
                            int64_t slot_bytes, double timeout, double connect_timeout, const plan::CostModel& cost) {
  const auto options = context_options(std::move(name), slot_bytes, timeout, cost);
  const auto num_ranks = static_cast<int>(addresses.size());
  const runtime::HeapNeeds needs = runtime::heap_needs(num_ranks, slot_bytes);
  const auto limit = Milliseconds(static_cast<int64_t>(connect_timeout * 1e3));
  const auto deadline = std::chrono::steady_clock::now() + limit;
  const py::gil_scoped_release release;
  runtime::Device mine = runtime::make_device(device, attention, options.timeout, put_blocks);
  require<DeviceError>(mine.streams != nullptr, "transport 'cuda-ipc' needs libdistca_cuda, which is not there: ",
                       runtime::cuda_library_problem());
  auto control =
      connect_control(listener, rank, addresses, transport::control_words(num_ranks, needs.num_signals), limit);
  auto transport = transport::share_heaps("cuda-ipc", std::move(control), std::move(mine.streams), needs.heap_bytes,
                                          needs.num_signals, deadline);
  return register_context(std::move(transport), options, {}, std::move(mine.backend));
}

const transport::NvshmemLibrary& need_nvshmem() {
  const transport::NvshmemLibrary* const library = transport::nvshmem_library();
  require(library != nullptr, "transport 'nvshmem' is not to be had here: ", transport::nvshmem_library_problem());
  return *library;
}

std::pair<std::string, std::string> nvshmem_status() {
  const transport::NvshmemLibrary* const library = transport::nvshmem_library();
  return {library != nullptr ? library->version() : "", transport::nvshmem_library_problem()};
}

py::bytes make_nvshmem_id() {
  const transport::NvshmemId id = need_nvshmem().unique_id();
  return {reinterpret_cast<const char*>(id.data()), id.size()};
}

std::string nvshmem_problem(int rank, int num_ranks, int device) {
  const transport::NvshmemLibrary& library = need_nvshmem();
  return library.problem({rank, num_ranks, device});
}

void join_nvshmem(int rank, int num_ranks, int device, const std::string& unique_id) {
  const transport::NvshmemLibrary& library = need_nvshmem();
  transport::NvshmemId id;
  require(unique_id.size() == id.size(), "NVSHMEM's unique id has ", id.size(), " bytes, not ", unique_id.size());
  std::memcpy(id.data(), unique_id.data(), unique_id.size());
  const py::gil_scoped_release release;
  library.join({rank, num_ranks, device}, id);
}

ContextPtr make_nvshmem_context(int rank, int num_ranks, int device, const std::string& attention, std::string name,
                                int64_t slot_bytes, double timeout, double connect_timeout, const plan::CostModel& cost,
                                const Listener& listener, const std::vector<std::string>& addresses, int put_blocks) {
  const transport::NvshmemLibrary& library = need_nvshmem();
  const auto options = context_options(std::move(name), slot_bytes, timeout, cost);
  const transport::NvshmemGroup group{.rank = rank, .num_ranks = num_ranks, .device = device};
  const runtime::HeapNeeds needs = runtime::heap_needs(num_ranks, slot_bytes);
  const py::gil_scoped_release release;
  auto control = connect_control(listener, rank, addresses, needs.num_signals,
                                 Milliseconds(static_cast<int64_t>(connect_timeout * 1e3)));
  runtime::Device mine = runtime::make_device(message("cuda:", device), attention, options.timeout, put_blocks);
  auto transport = library.connect(group, needs.heap_bytes, needs.num_signals, needs.send_arena_bytes,
                                   std::move(control), std::move(mine.streams));
  return register_context(std::move(transport), options, {}, std::move(mine.backend));
}

/// Throws the error of the core that the Python exception stands for.
[[noreturn]] void throw_as_ours(const py::error_already_set& error) {
  const std::string text = py::str(error.value());
  const py::module_ errors = py::module_::import("distca.errors");
  if (error.matches(errors.attr("PlanMismatchError"))) throw PlanMismatchError(text);
  if (error.matches(errors.attr("PeerDiedError"))) throw PeerDiedError(text);
  if (error.matches(errors.attr("PeerLeftError"))) throw PeerLeftError(text);
  if (error.matches(errors.attr("PeerTimeoutError"))) throw PeerTimeoutError(text);
  if (error.matches(PyExc_KeyboardInterrupt)) PyErr_SetInterrupt();  // once more, where Python can raise it
  const std::string name = py::str(error.type().attr("__name__"));
  throw OperatingSystemError(message("the exchange between the ranks failed: ", name, text.empty() ? "" : ": ", text));
}

using AllToAll = std::function<void(py::memoryview, std::vector<int64_t>, py::memoryview, std::vector<int64_t>)>;
using Abandon = std::function<void(std::string, std::string)>;

ContextPtr make_torch_context(int rank, int num_ranks, AllToAll all_to_all, Abandon abandon, std::string name,
                              int64_t slot_bytes, double timeout, const plan::CostModel& cost) {
  const auto options = context_options(std::move(name), slot_bytes, timeout, cost);
  const runtime::HeapNeeds needs = runtime::heap_needs(num_ranks, slot_bytes);
  transport::Collective collective;
  collective.name = "torch";
  // Operators run without the GIL.
  collective.all_to_all = [all_to_all = std::move(all_to_all)](
                              std::span<std::byte> send, std::span<const int64_t> send_bytes,
                              std::span<std::byte> receive, std::span<const int64_t> receive_bytes) {
    const py::gil_scoped_acquire gil;
    const auto view = [](std::span<std::byte> bytes) {
      return py::memoryview::from_memory(bytes.data(), static_cast<py::ssize_t>(bytes.size()));
    };
    try {
      all_to_all(view(send), {send_bytes.begin(), send_bytes.end()}, view(receive),
                 {receive_bytes.begin(), receive_bytes.end()});
    } catch (const py::error_already_set& error) {
      throw_as_ours(error);
    }
  };
  collective.abandon = [abandon = std::move(abandon)](const Error& why) {
    const py::gil_scoped_acquire gil;
    bool is_interrupted = false;
    for (bool is_done = false; !is_done;) {
      is_done = true;
      try {
        abandon(why.kind(), why.what());
      } catch (py::error_already_set& error) {
        if (error.matches(PyExc_KeyboardInterrupt)) {  // of Ctrl-C before or meanwhile: the peers are told all the same
          is_done = std::exchange(is_interrupted, true);
        } else {
          error.discard_as_unraisable("distca: a context is abandoned");
        }
      }
    }
    if (is_interrupted) PyErr_SetInterrupt();  // once more, where Python can raise it
  };
  return register_context(
      transport::make_collective(rank, num_ranks, needs.heap_bytes, needs.num_signals, std::move(collective)), options,
      {});
}

/// Puts rows without gaps, in the memory of the context's device, and signals, as a step does.
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

/// Plans as address and number of their words.
void replan(runtime::Context& context, const std::shared_ptr<runtime::Recording>& recording,
            const std::vector<std::pair<uintptr_t, size_t>>& plans, bool check_only) {
  std::vector<std::span<const int64_t>> words;
  for (const auto& [address, count] : plans) words.emplace_back(reinterpret_cast<const int64_t*>(address), count);
  context.replan(recording, words, check_only);
}

void bind_context(py::module_& m) {
  py::class_<runtime::Recording, std::shared_ptr<runtime::Recording>>(m, "Recording")
      .def_property_readonly("num_steps", [](const runtime::Recording& r) { return r.steps().size(); });
  py::class_<runtime::Context, ContextPtr>(m, "Context")
      .def_property_readonly("name", [](const runtime::Context& c) { return c.options().name; })
      .def_property_readonly("rank", &runtime::Context::rank)
      .def_property_readonly("num_ranks", &runtime::Context::num_ranks)
      .def_property_readonly("transport", &runtime::Context::transport_name)
      .def_property_readonly("slot_bytes", [](const runtime::Context& c) { return c.options().slot_bytes; })
      .def_property_readonly("step", &runtime::Context::step)
      .def_property_readonly("device", [](const runtime::Context& c) { return c.backend().device(); })
      .def(
          "attention",
          [](const runtime::Context& c, int64_t q_heads, int64_t kv_heads, int64_t dim, int64_t v_dim, int64_t dtype) {
            require(dtype >= 0 && dtype < kNumDTypes, "context: dtype number ", dtype);
            const HeadShape heads{q_heads, kv_heads, dim, v_dim, static_cast<DType>(dtype)};
            return std::make_pair(c.backend().attention(heads), c.backend().plan_independent(heads));
          },
          py::arg("q_heads"), py::arg("kv_heads"), py::arg("dim"), py::arg("v_dim"), py::arg("dtype"),
          "What computes attention over such heads, and whether its bits do not depend on the plan.")
      .def("abandon", &runtime::Context::abandon, py::arg("step"), py::arg("why"),
           py::call_guard<py::gil_scoped_release>())
      .def("refuse", &runtime::Context::refuse, py::arg("why"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("num_calls", &runtime::Context::num_calls)
      .def("set_trace", &runtime::Context::set_trace, py::arg("on"))
      .def("take_trace",
           [](runtime::Context& c) {
             std::vector<std::tuple<std::string, bool, uint64_t, int64_t, int64_t, int64_t, int64_t, int64_t>> spans;
             for (const runtime::Span& s : c.take_trace())
               spans.emplace_back(s.name, s.is_wait, s.step, s.slot, s.phase, s.peer, s.begin_ns, s.end_ns);
             return spans;
           })
      .def("take_copies",
           [](runtime::Context& c) {
             std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t>> copies;
             for (const runtime::Copy& copy : c.take_copies())
               copies.emplace_back(copy.peer, copy.bytes, copy.begin_ns, copy.end_ns);
             return copies;
           })
      .def("take_transfers",
           [](runtime::Context& c) {
             std::vector<std::tuple<int, int64_t, int64_t, int64_t>> transfers;
             if (auto* const link = dynamic_cast<transport::LinkTransport*>(&c.transport()))
               for (const transport::Transfer& t : link->take_transfers())
                 transfers.emplace_back(t.peer, t.bytes, t.begin_ns, t.end_ns);
             return transfers;
           })
      .def("set_fill_with_nan", &runtime::Context::set_fill_with_nan, py::arg("on"),
           py::call_guard<py::gil_scoped_release>())
      .def("check", &runtime::Context::check, py::call_guard<py::gil_scoped_release>())
      .def("begin_recording", &runtime::Context::begin_recording, py::arg("headroom"), py::arg("rounds"),
           py::call_guard<py::gil_scoped_release>())
      .def("end_recording", &runtime::Context::end_recording, py::call_guard<py::gil_scoped_release>())
      .def("drop_recording", &runtime::Context::drop_recording, py::call_guard<py::gil_scoped_release>())
      .def("replan", &replan, py::arg("recording"), py::arg("plans"), py::kw_only(), py::arg("check_only"),
           py::call_guard<py::gil_scoped_release>())
      .def("replay", &runtime::Context::replay, py::arg("recording"), py::call_guard<py::gil_scoped_release>())
      .def("mark_died", [](runtime::Context& c) { transport::mark_died(c.transport()); })
      .def("send_rows", &send_rows, py::arg("peer"), py::arg("address"), py::arg("num_rows"), py::arg("row_bytes"),
           py::arg("word"), py::arg("value"), py::call_guard<py::gil_scoped_release>())
      .def(
          "quiet", [](runtime::Context& c) { c.transport().quiet(); }, py::call_guard<py::gil_scoped_release>())
      .def(
          "exchange", [](runtime::Context& c) { c.transport().exchange(false, [] {}); },
          py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void bind_contexts(py::module_& m) {
  bind_context(m);
  m.def("make_loopback", &make_loopback_contexts, py::kw_only(), py::arg("names"), py::arg("slot_bytes"),
        py::arg("timeout"), py::arg("cost"), py::arg("reorder_seed") = std::nullopt, py::arg("progress_thread") = false,
        py::arg("link") = std::nullopt, py::arg("device") = "cpu", py::arg("attention") = "auto",
        py::arg("replay") = std::nullopt, py::arg("streams") = false, py::arg("hosts") = 1, py::arg("put_blocks") = 0);
  m.def("connect_ipc", &make_ipc_context, py::kw_only(), py::arg("listener").none(false), py::arg("rank"),
        py::arg("addresses"), py::arg("device"), py::arg("attention"), py::arg("put_blocks"), py::arg("name"),
        py::arg("slot_bytes"), py::arg("timeout"), py::arg("connect_timeout"), py::arg("cost"));
  m.def("connect_nvshmem", &make_nvshmem_context, py::kw_only(), py::arg("rank"), py::arg("num_ranks"),
        py::arg("device"), py::arg("attention"), py::arg("name"), py::arg("slot_bytes"), py::arg("timeout"),
        py::arg("connect_timeout"), py::arg("cost"), py::arg("listener").none(false), py::arg("addresses"),
        py::arg("put_blocks"));
  m.def("connect_shm", &make_shm_context, py::kw_only(), py::arg("listener"), py::arg("rank"), py::arg("addresses"),
        py::arg("name"), py::arg("slot_bytes"), py::arg("timeout"), py::arg("connect_timeout"), py::arg("cost"),
        py::arg("reorder_seed") = std::nullopt, py::arg("progress_thread") = false, py::arg("link") = std::nullopt);
  m.def("make_torch", &make_torch_context, py::kw_only(), py::arg("rank"), py::arg("num_ranks"), py::arg("all_to_all"),
        py::arg("abandon"), py::arg("name"), py::arg("slot_bytes"), py::arg("timeout"), py::arg("cost"));
  m.def("remove_context", &runtime::remove_context, py::arg("name"), py::call_guard<py::gil_scoped_release>());
  m.def("find_context", &runtime::find_context, py::arg("name"));
  m.def("nvshmem_status", &nvshmem_status,
        "Version of NVSHMEM and an empty text, or an empty text and why there is no libdistca_nvshmem.");
  m.def("nvshmem_unique_id", &make_nvshmem_id);
  m.def("nvshmem_problem", &nvshmem_problem, py::arg("rank"), py::arg("num_ranks"), py::arg("device"),
        "Why this process cannot be that rank of NVSHMEM on that device; empty where nothing is known against it.");
  m.def("nvshmem_join", &join_nvshmem, py::arg("rank"), py::arg("num_ranks"), py::arg("device"), py::arg("unique_id"),
        "Begins NVSHMEM with these ranks; all of them call it.");
}

}  // namespace distca::python
