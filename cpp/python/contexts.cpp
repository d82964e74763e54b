// Contexts for Python.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <optional>

#include "common/error.h"
#include "plan/cost.h"
#include "python/bindings.h"
#include "python/connect.h"
#include "runtime/context.h"
#include "runtime/cuda_library.h"
#include "transport/collective.h"
#include "transport/nvshmem.h"

namespace py = pybind11;

namespace distca::python {
namespace {

std::vector<ContextPtr> make_loopback_contexts(const std::vector<std::string>& names, int64_t slot_bytes,
                                               double timeout, const plan::CostModel& cost, const std::string& device,
                                               const std::string& attention, int put_blocks) {
  const int num_ranks = num_loopback_ranks(names);
  auto options = context_options("", slot_bytes, timeout, cost);
  std::vector<runtime::Device> devices;
  for (int r = 0; r < num_ranks; ++r) {
    if (device == "cpu")
      devices.push_back({runtime::make_backend(device, attention), nullptr});
    else
      devices.push_back(runtime::make_device(device, attention, options.timeout, put_blocks));
  }
  const bool on_host = device == "cpu" && attention != "flash";
  auto transports = loopback_transports(devices, on_host, runtime::heap_needs(num_ranks, slot_bytes));
  std::vector<ContextPtr> contexts;
  for (size_t r = 0; r < devices.size(); ++r) {
    options.name = names[r];
    contexts.push_back(register_context(std::move(transports[r]), options, devices[r].backend));
  }
  return contexts;
}

ContextPtr make_shm_context(transport::ShmListener& listener, int rank, const std::vector<std::string>& addresses,
                            std::string name, int64_t slot_bytes, double timeout, double connect_timeout,
                            const plan::CostModel& cost, bool progress_thread, const std::string& cpu_isa) {
  auto options = context_options(std::move(name), slot_bytes, timeout, cost);
  auto backend = runtime::make_backend("cpu", "auto", cpu_isa);
  const py::gil_scoped_release release;
  return register_context(shm_transport(listener, rank, addresses, slot_bytes, connect_timeout, progress_thread),
                          std::move(options), std::move(backend));
}

/// Makes the context of a rank whose device, and those of ranks in other processes, write into each other's memory.
ContextPtr make_ipc_context(const Listener& listener, int rank, const std::vector<std::string>& addresses,
                            const std::string& device, const std::string& attention, int put_blocks, std::string name,
                            int64_t slot_bytes, double timeout, double connect_timeout, const plan::CostModel& cost) {
  auto options = context_options(std::move(name), slot_bytes, timeout, cost);
  const py::gil_scoped_release release;
  runtime::Device mine = runtime::make_device(device, attention, options.timeout, put_blocks);
  require<DeviceError>(mine.streams != nullptr, "transport 'cuda-ipc' needs libdistca_cuda, which is not there: ",
                       runtime::cuda_library_problem());
  return ipc_context(listener, rank, addresses, std::move(mine), std::move(options), connect_timeout);
}

const transport::NvshmemLibrary& need_nvshmem() {
  const transport::NvshmemLibrary* const library = transport::nvshmem_library();
  require(library != nullptr, "transport 'nvshmem' is not available here: ", transport::nvshmem_library_problem());
  return *library;
}

std::pair<std::string, std::string> nvshmem_status() {
  const transport::NvshmemLibrary* const library = transport::nvshmem_library();
  if (library == nullptr) return {"", transport::nvshmem_library_problem()};
  const std::string problem = library->version_problem();
  return {problem.empty() ? library->version() : "", problem};
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

/// What a rank has before its group allocates symmetric memory. That waits for all ranks without a limit, so the ranks
/// ask each other before it whether all of them are ready.
struct NvshmemRank {
  transport::NvshmemGroup group;
  runtime::ContextOptions options;
  runtime::Device device;
  std::unique_ptr<transport::Transport> control;

  ContextPtr connect() {
    require(control != nullptr, "connect: this rank has connected, or tried to, already; prepare another one");
    const runtime::HeapNeeds needs = runtime::heap_needs(group.num_ranks, options.slot_bytes);
    auto transport = need_nvshmem().connect(group, needs.heap_bytes, needs.num_signals, needs.send_arena_bytes,
                                            std::move(control), std::move(device.streams));
    return register_context(std::move(transport), options, std::move(device.backend));
  }
};

std::unique_ptr<NvshmemRank> prepare_nvshmem(int rank, int num_ranks, int device, const std::string& attention,
                                             std::string name, int64_t slot_bytes, double timeout,
                                             double connect_timeout, const plan::CostModel& cost,
                                             const Listener& listener, const std::vector<std::string>& addresses,
                                             int put_blocks) {
  need_nvshmem();
  auto options = context_options(std::move(name), slot_bytes, timeout, cost);
  const py::gil_scoped_release release;
  auto control = connect_control(listener, rank, addresses, runtime::heap_needs(num_ranks, slot_bytes).num_signals,
                                 milliseconds(connect_timeout));
  runtime::Device mine = runtime::make_device(message("cuda:", device), attention, options.timeout, put_blocks);
  return std::make_unique<NvshmemRank>(
      NvshmemRank{{rank, num_ranks, device}, std::move(options), std::move(mine), std::move(control)});
}

/// Throws the error of the core for which the Python exception stands.
[[noreturn]] void throw_as_ours(const py::error_already_set& error) {
  const std::string text = py::str(error.value());
  const py::module_ errors = py::module_::import("distca.errors");
  if (error.matches(errors.attr("PlanMismatchError"))) throw PlanMismatchError(text);
  if (error.matches(errors.attr("PeerDiedError"))) throw PeerDiedError(text);
  if (error.matches(errors.attr("PeerLeftError"))) throw PeerLeftError(text);
  if (error.matches(errors.attr("PeerTimeoutError"))) throw PeerTimeoutError(text);
  if (!error.matches(PyExc_Exception)) raise_later(error);  // Ctrl-C, or an end that a handler of a signal asks for
  const std::string name = py::str(error.type().attr("__name__"));
  throw OperatingSystemError(message("the exchange between the ranks failed: ", name, text.empty() ? "" : ": ", text));
}

using AllToAll = std::function<void(py::memoryview, std::vector<int64_t>, py::memoryview, std::vector<int64_t>)>;
using Tell = std::function<void(std::string, std::string)>;

/// Calls Python, which tells other processes of a fault. Nothing is raised.
void tell(const Tell& others, const std::string& kind, const std::string& text) {
  const py::gil_scoped_acquire gil;
  const RaiseAfterwards afterwards;
  std::optional<py::error_already_set> interrupt;
  for (bool is_done = false; !is_done;) {
    is_done = true;
    try {
      others(kind, text);
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_Exception)) {  // Ctrl-C, before or meanwhile: they are told all the same
        is_done = interrupt.has_value();
        interrupt.emplace(error);
      } else {
        error.discard_as_unraisable("distca: other processes are told of a fault");
      }
    }
  }
  if (interrupt) raise_later(*interrupt);
}

ContextPtr make_torch_context(int rank, int num_ranks, AllToAll all_to_all, Tell abandon, std::string name,
                              int64_t slot_bytes, double timeout, const plan::CostModel& cost,
                              const std::string& cpu_isa) {
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
  collective.abandon = [abandon = std::move(abandon)](const Error& why) { tell(abandon, why.kind(), why.what()); };
  return register_context(
      transport::make_collective(rank, num_ranks, needs.heap_bytes, needs.num_signals, std::move(collective)), options,
      runtime::make_backend("cpu", "auto", cpu_isa));
}

/// Takes each plan as the address and number of its words.
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
      .def("set_caller", &runtime::Context::set_caller, py::arg("layer"), py::arg("forward_step"),
           "The layer of the steps that begin from here on, and the forward step of those that are backward; empty and "
           "0 where they are not known.")
      .def("refuse", &runtime::Context::refuse, py::arg("why"), py::call_guard<py::gil_scoped_release>())
      .def(
          "set_job",
          [](runtime::Context& c, std::vector<int64_t> global_ranks, Tell on_fault) {
            runtime::Protocol::OnFault call;
            if (on_fault)
              call = [on_fault = std::move(on_fault)](const std::string& k, const std::string& t) {
                tell(on_fault, k, t);
              };
            c.set_job(std::move(global_ranks), std::move(call));
          },
          py::arg("global_ranks"), py::arg("on_fault"),
          "The global rank of each rank (empty: the ranks), and what is called with the kind and text of a fault.")
      .def("hear", &runtime::Context::hear, py::arg("kind"), py::arg("text"), py::call_guard<py::gil_scoped_release>(),
           "Takes in a fault of a process outside of the context.")
      .def_property_readonly("num_calls", &runtime::Context::num_calls)
      .def_property_readonly("num_without_max_logits", &runtime::Context::num_without_max_logits)
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
      .def("check", &runtime::Context::check, py::call_guard<py::gil_scoped_release>())
      .def("begin_recording", &runtime::Context::begin_recording, py::arg("headroom"), py::arg("rounds"),
           py::call_guard<py::gil_scoped_release>())
      .def("end_recording", &runtime::Context::end_recording, py::call_guard<py::gil_scoped_release>())
      .def("drop_recording", &runtime::Context::drop_recording, py::call_guard<py::gil_scoped_release>())
      .def("replan", &replan, py::arg("recording"), py::arg("plans"), py::kw_only(), py::arg("check_only"),
           py::call_guard<py::gil_scoped_release>())
      .def("replay", &runtime::Context::replay, py::arg("recording"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void bind_contexts(py::module_& m) {
  bind_context(m);
  m.attr("NUM_SLOTS") = runtime::kNumSlots;
  m.def("make_loopback", &make_loopback_contexts, py::kw_only(), py::arg("names"), py::arg("slot_bytes"),
        py::arg("timeout"), py::arg("cost"), py::arg("device") = "cpu", py::arg("attention") = "auto",
        py::arg("put_blocks") = 0);
  m.def("connect_ipc", &make_ipc_context, py::kw_only(), py::arg("listener").none(false), py::arg("rank"),
        py::arg("addresses"), py::arg("device"), py::arg("attention"), py::arg("put_blocks"), py::arg("name"),
        py::arg("slot_bytes"), py::arg("timeout"), py::arg("connect_timeout"), py::arg("cost"));
  py::class_<NvshmemRank>(m, "NvshmemRank")
      .def("connect", &NvshmemRank::connect, py::call_guard<py::gil_scoped_release>(),
           "Makes the rank's context, once. All ranks call it, and it waits for them.");
  m.def("prepare_nvshmem", &prepare_nvshmem, py::kw_only(), py::arg("rank"), py::arg("num_ranks"), py::arg("device"),
        py::arg("attention"), py::arg("name"), py::arg("slot_bytes"), py::arg("timeout"), py::arg("connect_timeout"),
        py::arg("cost"), py::arg("listener").none(false), py::arg("addresses"), py::arg("put_blocks"));
  m.def("connect_shm", &make_shm_context, py::kw_only(), py::arg("listener"), py::arg("rank"), py::arg("addresses"),
        py::arg("name"), py::arg("slot_bytes"), py::arg("timeout"), py::arg("connect_timeout"), py::arg("cost"),
        py::arg("progress_thread") = false, py::arg("cpu_isa") = "");
  m.def("make_torch", &make_torch_context, py::kw_only(), py::arg("rank"), py::arg("num_ranks"), py::arg("all_to_all"),
        py::arg("abandon"), py::arg("name"), py::arg("slot_bytes"), py::arg("timeout"), py::arg("cost"),
        py::arg("cpu_isa") = "");
  m.def("remove_context", &runtime::remove_context, py::arg("name"), py::call_guard<py::gil_scoped_release>());
  m.def("nvshmem_status", &nvshmem_status,
        "Version of NVSHMEM and an empty text, or an empty text and why there is no libdistca_nvshmem.");
  m.def("nvshmem_unique_id", &make_nvshmem_id);
  m.def("nvshmem_problem", &nvshmem_problem, py::arg("rank"), py::arg("num_ranks"), py::arg("device"),
        "Why this process cannot be that rank of NVSHMEM on that device; empty where nothing is known against it.");
  m.def("nvshmem_join", &join_nvshmem, py::arg("rank"), py::arg("num_ranks"), py::arg("device"), py::arg("unique_id"),
        "Begins NVSHMEM with these ranks; all of them call it.");
}

}  // namespace distca::python
