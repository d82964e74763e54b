// distca._C: layouts, plans, transports and contexts for Python. Typed in python/distca/_C.pyi.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>

#include "attention/peak.h"
#include "common/error.h"
#include "plan/plan.h"
#include "plan/validate.h"
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

namespace py = pybind11;

namespace distca {
namespace {

using Milliseconds = std::chrono::milliseconds;
using SegmentTuple = std::tuple<int64_t, int64_t, int64_t>;
using TaskTuple = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>;

/// An error of the core becomes the class of that name in distca.errors.
void translate_errors(std::exception_ptr pending) {
  try {
    if (pending) std::rethrow_exception(pending);
  } catch (const Error& error) {
    const py::object type = py::module_::import("distca.errors").attr(error.kind());
    py::set_error(type, error.what());
  }
}

std::shared_ptr<plan::Layout> layout_from_tuples(const std::vector<std::vector<SegmentTuple>>& ranks) {
  std::vector<std::vector<plan::Segment>> segments(ranks.size());
  for (size_t r = 0; r < ranks.size(); ++r)
    for (const auto& [document, begin, end] : ranks[r]) segments[r].push_back({document, begin, end});
  return std::make_shared<plan::Layout>(std::move(segments));
}

void bind_layout(py::module_& m) {
  py::class_<plan::Layout, std::shared_ptr<plan::Layout>>(m, "Layout")
      .def(py::init(&layout_from_tuples), py::arg("ranks"))
      .def_static(
          "from_documents",
          [](const std::vector<std::vector<int64_t>>& lengths) {
            return std::make_shared<plan::Layout>(plan::Layout::from_documents(lengths));
          },
          py::arg("lengths"))
      .def_static(
          "packed",
          [](const std::vector<int64_t>& lengths, int64_t ranks, int64_t tokens_per_rank) {
            return std::make_shared<plan::Layout>(plan::Layout::packed(lengths, ranks, tokens_per_rank));
          },
          py::arg("lengths"), py::arg("ranks"), py::arg("tokens_per_rank"))
      .def_static(
          "head_tail",
          [](const std::vector<int64_t>& lengths, int64_t ranks) {
            return std::make_shared<plan::Layout>(plan::Layout::head_tail(lengths, ranks));
          },
          py::arg("lengths"), py::arg("ranks"))
      .def_property_readonly("num_ranks", &plan::Layout::num_ranks)
      .def_property_readonly("document_lengths", &plan::Layout::document_lengths)
      .def(
          "num_rows",
          [](const plan::Layout& l, int64_t rank) {
            require(rank >= 0 && rank < l.num_ranks(), "layout: rank = ", rank, "; 0 to ", l.num_ranks() - 1,
                    " are allowed");
            return l.num_rows(rank);
          },
          py::arg("rank"))
      .def(
          "segments",
          [](const plan::Layout& l, int64_t rank) {
            require(rank >= 0 && rank < l.num_ranks(), "layout: rank = ", rank, "; 0 to ", l.num_ranks() - 1,
                    " are allowed");
            std::vector<SegmentTuple> segments;
            for (const plan::Segment& s : l.ranks()[static_cast<size_t>(rank)])
              segments.emplace_back(s.document, s.begin, s.end);
            return segments;
          },
          py::arg("rank"));
}

std::shared_ptr<plan::Plan> make_plan(std::shared_ptr<plan::Layout> layout, int64_t q_heads, int64_t kv_heads,
                                      int64_t dim, int64_t v_dim, int64_t dtype, plan::CostModel cost,
                                      int64_t tolerance_ppm, int64_t min_rows, bool balance, int64_t capacity,
                                      int64_t context_epoch, int64_t mask_kind, int64_t window,
                                      std::vector<int64_t> servers, std::vector<int64_t> speeds, int64_t ranks_per_node,
                                      bool forward_only, bool split_heads, bool overlap,
                                      const std::optional<std::vector<TaskTuple>>& tasks) {
  require(dtype >= 0 && dtype < kNumDTypes, "plan: dtype number ", dtype, "; 0 to ", kNumDTypes - 1, " are allowed");
  require(mask_kind >= 0 && mask_kind < kNumMaskKinds, "plan: mask number ", mask_kind, "; 0 to ", kNumMaskKinds - 1,
          " are allowed");
  plan::PlanOptions options;
  options.schedule.heads = {q_heads, kv_heads, dim, v_dim, static_cast<DType>(dtype)};
  options.schedule.cost = std::move(cost);
  options.schedule.mask = {static_cast<MaskKind>(mask_kind), window};
  options.schedule.servers = std::move(servers);
  options.schedule.speeds = std::move(speeds);
  options.schedule.ranks_per_node = ranks_per_node;
  options.schedule.objective = forward_only ? plan::Objective::kForward : plan::Objective::kAll;
  options.schedule.split_heads = split_heads;
  options.schedule.tolerance_ppm = tolerance_ppm;
  options.schedule.min_rows = min_rows;
  options.schedule.balance = balance;
  options.key_block_rows = attention::kKeyBlockRows;
  options.capacity = capacity;
  options.context_epoch = context_epoch;
  options.overlap = overlap;
  const py::gil_scoped_release release;
  if (tasks) {
    std::vector<plan::GivenTask> given;
    for (const auto& [document, q_begin, q_end, kv_head_begin, kv_head_end, server] : *tasks)
      given.push_back({document, q_begin, q_end, kv_head_begin, kv_head_end, server});
    return std::make_shared<plan::Plan>(std::move(layout), options, given);
  }
  return std::make_shared<plan::Plan>(std::move(layout), options);
}

py::dict stats_of(const plan::Plan& p) {
  const plan::PlanStats& s = p.stats();
  py::dict d;
  d["load_before"] = s.load_before;
  d["load"] = s.load;
  d["lower_bound"] = s.load_lower_bound;
  d["binding"] = std::make_pair(static_cast<int64_t>(s.binding), s.binding_rank);
  d["wanted_slot_bytes"] = s.wanted_slot_bytes;
  d["num_servers"] = p.num_servers();
  py::dict bytes, between_nodes;
  const char* messages[] = {"forward_in", "forward_out", "backward_in", "backward_out"};
  for (size_t i = 0; i < 4; ++i) {
    bytes[messages[i]] = p.arrangement().bytes[i];
    between_nodes[messages[i]] = p.arrangement().bytes_between_nodes[i];
  }
  d["bytes"] = bytes;
  d["bytes_between_nodes"] = between_nodes;
  const char* phases[] = {"forward", "backward"};
  py::dict arenas;
  for (size_t phase = 0; phase < 2; ++phase) {
    py::list of_phase;
    for (const plan::ArenaBytes& a : p.arrangement().arenas[phase])
      of_phase.append(py::make_tuple(a.server_in, a.home_in, a.scratch));
    arenas[phases[phase]] = of_phase;
  }
  d["arena_bytes"] = arenas;
  d["plan_ms"] = static_cast<double>(s.plan_ns) * 1e-6;
  return d;
}

void bind_plan(py::module_& m) {
  py::class_<plan::CostModel>(m, "CostModel")
      .def(py::init([](int64_t per_pair, int64_t per_row, std::vector<int64_t> rates, int64_t num_keys_octaves) {
             plan::CostModel cost{per_pair, per_row, {num_keys_octaves, std::move(rates)}};
             cost.check();
             return cost;
           }),
           py::kw_only(), py::arg("per_pair"), py::arg("per_row"), py::arg("rates"), py::arg("num_keys_octaves"))
      .def(
          "cost",
          [](const plan::CostModel& cost, int64_t mask_kind, int64_t window, int64_t length, int64_t q_begin,
             int64_t q_end) { return cost.cost({static_cast<MaskKind>(mask_kind), window}, length, q_begin, q_end); },
          py::arg("mask_kind"), py::arg("window"), py::arg("length"), py::arg("q_begin"), py::arg("q_end"));
  py::class_<plan::Plan, std::shared_ptr<plan::Plan>>(m, "Plan")
      .def(py::init(&make_plan), py::kw_only(), py::arg("layout"), py::arg("q_heads"), py::arg("kv_heads"),
           py::arg("dim"), py::arg("v_dim"), py::arg("dtype"), py::arg("cost"), py::arg("tolerance_ppm"),
           py::arg("min_rows"), py::arg("balance"), py::arg("capacity"), py::arg("context_epoch"), py::arg("mask_kind"),
           py::arg("window"), py::arg("servers"), py::arg("speeds"), py::arg("ranks_per_node"), py::arg("forward_only"),
           py::arg("split_heads"), py::arg("overlap"), py::arg("tasks") = std::nullopt)
      .def_property_readonly("digest", &plan::Plan::digest)
      .def("stats", &stats_of)
      .def("byte_lower_bounds",
           [](const plan::Plan& p) {
             const plan::ByteBounds bounds = p.byte_lower_bounds();
             return std::make_pair(bounds.bytes, bounds.between_nodes);
           })
      .def("tasks",
           [](const plan::Plan& p) {
             py::list tasks;
             for (const plan::Task& t : p.tasks()) {
               tasks.append(py::make_tuple(t.document, t.q_begin, t.q_end, t.kv_begin, t.kv_end, t.kv_head_begin,
                                           t.kv_head_end, t.home, t.server));
             }
             return tasks;
           })
      .def("transfers",
           [](const plan::Plan& p) {
             py::list transfers;
             for (const plan::Transfer& t : p.transfers()) {
               transfers.append(py::make_tuple(2 * static_cast<int64_t>(t.phase) + static_cast<int64_t>(t.direction),
                                               t.source, t.target, t.document, t.begin, t.end, t.kv_head_begin,
                                               t.kv_head_end, static_cast<int64_t>(t.tensor), t.bytes));
             }
             return transfers;
           })
      .def(
          "slice",
          [](const plan::Plan& p, int64_t rank) {
            const std::vector<int64_t> words = p.slice(rank);
            return py::bytearray(reinterpret_cast<const char*>(words.data()), words.size() * sizeof(int64_t));
          },
          py::arg("rank"));
}

runtime::ContextOptions context_options(std::string name, int64_t slot_bytes, double timeout,
                                        const plan::CostModel& cost, int64_t epoch) {
  require(timeout > 0 && timeout < 1e9, "context: timeout = ", timeout, " s; a positive number of seconds is expected");
  require(slot_bytes > 0 && slot_bytes <= int64_t{1} << 46, "context: ", slot_bytes,
          " bytes a slot; 1 to 2^46 are allowed");
  runtime::ContextOptions options;
  options.name = std::move(name);
  options.slot_bytes = slot_bytes;
  options.timeout = Milliseconds(static_cast<int64_t>(timeout * 1e3));
  cost.check();
  options.cost_digest = cost.digest();
  options.epoch = epoch;
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
                                               double timeout, const plan::CostModel& cost, int64_t epoch,
                                               std::optional<uint64_t> reorder_seed, bool progress_thread,
                                               std::optional<std::tuple<double, double, bool>> link,
                                               const std::string& device, const std::string& attention,
                                               const std::optional<Replay>& replay, bool streams, int put_blocks) {
  const auto n = static_cast<int64_t>(names.size());
  require(n >= 1 && n <= 4096, "loopback: ", n, " ranks; 1 to 4096 are allowed");
  auto options = context_options("", slot_bytes, timeout, cost, epoch);
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
  if (device != "cpu" || attention != "auto") memories.assign(backends.begin(), backends.end());
  auto transports = queues.empty()
                        ? transport::make_loopback(static_cast<int>(n), needs.heap_bytes, needs.num_signals, memories)
                        : transport::make_stream_loopback(needs.heap_bytes, needs.num_signals, queues);
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
                            const plan::CostModel& cost, int64_t epoch, std::optional<uint64_t> reorder_seed,
                            bool progress_thread, std::optional<std::tuple<double, double, bool>> link) {
  const auto options = context_options(std::move(name), slot_bytes, timeout, cost, epoch);
  const runtime::HeapNeeds needs = runtime::heap_needs(static_cast<int64_t>(addresses.size()), slot_bytes);
  const py::gil_scoped_release release;
  auto transport = transport::connect_shm(std::move(listener), rank, addresses, needs.heap_bytes, needs.num_signals,
                                          Milliseconds(static_cast<int64_t>(connect_timeout * 1e3)));
  return register_context(std::move(transport), options, {reorder_seed, link, progress_thread});
}

/// Ranks of several processes whose devices write into each other's memory; on "cpu", what stands for that.
ContextPtr make_ipc_context(transport::ShmListener& listener, int rank, const std::vector<std::string>& addresses,
                            const std::string& device, const std::string& attention, int put_blocks, std::string name,
                            int64_t slot_bytes, double timeout, double connect_timeout, const plan::CostModel& cost,
                            int64_t epoch) {
  const auto options = context_options(std::move(name), slot_bytes, timeout, cost, epoch);
  const auto num_ranks = static_cast<int>(addresses.size());
  const runtime::HeapNeeds needs = runtime::heap_needs(num_ranks, slot_bytes);
  const auto limit = Milliseconds(static_cast<int64_t>(connect_timeout * 1e3));
  const auto deadline = std::chrono::steady_clock::now() + limit;
  const py::gil_scoped_release release;
  runtime::Device mine = runtime::make_device(device, attention, options.timeout, put_blocks);
  require<DeviceError>(mine.streams != nullptr, "transport 'cuda-ipc' needs libdistca_cuda, which is not there: ",
                       runtime::cuda_library_problem());
  auto control = transport::connect_shm(std::move(listener), rank, addresses, transport::control_heap_bytes(num_ranks),
                                        needs.num_signals, limit);
  auto transport = transport::share_heaps("cuda-ipc", std::move(control), std::move(mine.streams), needs.heap_bytes,
                                          needs.num_signals, deadline);
  return register_context(std::move(transport), options, {}, std::move(mine.backend));
}

const transport::NvshmemLibrary& need_nvshmem() {
  const transport::NvshmemLibrary* const library = transport::nvshmem_library();
  require(library != nullptr, "transport 'nvshmem' is not to be had here: ", transport::nvshmem_library_problem());
  return *library;
}

py::bytes make_nvshmem_id() {
  const transport::NvshmemId id = need_nvshmem().unique_id();
  return {reinterpret_cast<const char*>(id.data()), id.size()};
}

ContextPtr make_nvshmem_context(int rank, int num_ranks, const std::string& unique_id, int device,
                                const std::string& attention, std::string name, int64_t slot_bytes, double timeout,
                                const plan::CostModel& cost, int64_t epoch) {
  const transport::NvshmemLibrary& library = need_nvshmem();
  const auto options = context_options(std::move(name), slot_bytes, timeout, cost, epoch);
  transport::NvshmemGroup group{.rank = rank, .num_ranks = num_ranks, .device = device};
  require(unique_id.size() == group.unique_id.size(), "NVSHMEM's unique id has ", group.unique_id.size(),
          " bytes, not ", unique_id.size());
  std::memcpy(group.unique_id.data(), unique_id.data(), unique_id.size());
  const runtime::HeapNeeds needs = runtime::heap_needs(num_ranks, slot_bytes);
  const py::gil_scoped_release release;
  auto backend = runtime::make_backend(message("cuda:", device), attention);
  auto transport = library.connect(group, needs.heap_bytes, needs.num_signals, backend);
  return register_context(std::move(transport), options, {}, std::move(backend));
}

/// Throws the error of the core that the Python exception stands for.
[[noreturn]] void throw_as_ours(const py::error_already_set& error) {
  const std::string text = py::str(error.value());
  const py::module_ errors = py::module_::import("distca.errors");
  if (error.matches(errors.attr("PlanMismatchError"))) throw PlanMismatchError(text);
  if (error.matches(errors.attr("PeerDiedError"))) throw PeerDiedError(text);
  if (error.matches(errors.attr("PeerTimeoutError"))) throw PeerTimeoutError(text);
  if (error.matches(PyExc_KeyboardInterrupt)) PyErr_SetInterrupt();  // once more, where Python can raise it
  throw OperatingSystemError(message("the exchange between the ranks failed: ", text));
}

using AllToAll = std::function<void(py::memoryview, std::vector<int64_t>, py::memoryview, std::vector<int64_t>)>;
using Abandon = std::function<void(std::string, std::string)>;

ContextPtr make_torch_context(int rank, int num_ranks, AllToAll all_to_all, Abandon abandon, std::string name,
                              int64_t slot_bytes, double timeout, const plan::CostModel& cost, int64_t epoch) {
  const auto options = context_options(std::move(name), slot_bytes, timeout, cost, epoch);
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
    try {
      abandon(why.kind(), why.what());
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("distca: a context is abandoned");
    }
  };
  return register_context(
      transport::make_collective(rank, num_ranks, needs.heap_bytes, needs.num_signals, std::move(collective)), options,
      {});
}

/// The rows of a buffer [rows, bytes], dense in each row, as the transport takes them.
std::pair<RowView, RowExtent> rows_of_buffer(const py::buffer_info& rows) {
  require(rows.ndim == 2 && rows.itemsize == 1 && rows.strides[1] == 1, "rows: a buffer [rows, bytes] is expected");
  const RowExtent extent{rows.shape[0], 1, rows.shape[1]};
  return {{static_cast<std::byte*>(rows.ptr), rows.strides[0], rows.shape[1]}, extent};
}

void put_rows(runtime::Context& context, int peer, int64_t heap_offset, const py::buffer& buffer) {
  const py::buffer_info rows = buffer.request();
  const auto [source, extent] = rows_of_buffer(rows);
  const py::gil_scoped_release release;
  context.transport().put(peer, heap_offset, extent.head_bytes, extent.head_bytes, source, extent);
}

void bind_context(py::module_& m) {
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
      .def("set_trace", &runtime::Context::set_trace, py::arg("on"))
      .def("take_trace",
           [](runtime::Context& c) {
             std::vector<std::tuple<std::string, bool, uint64_t, int64_t, int64_t, int64_t, int64_t, int64_t>> spans;
             for (const runtime::Span& s : c.take_trace())
               spans.emplace_back(s.name, s.is_wait, s.step, s.slot, s.phase, s.peer, s.begin_ns, s.end_ns);
             return spans;
           })
      .def("take_transfers",
           [](runtime::Context& c) {
             std::vector<std::tuple<int, int64_t, int64_t, int64_t>> transfers;
             if (auto* const link = dynamic_cast<transport::LinkTransport*>(&c.transport()))
               for (const transport::Transfer& t : link->take_transfers())
                 transfers.emplace_back(t.peer, t.bytes, t.begin_ns, t.end_ns);
             return transfers;
           })
      .def("set_fill_with_nan", &runtime::Context::set_fill_with_nan, py::arg("on"))
      .def("check", &runtime::Context::check, py::call_guard<py::gil_scoped_release>())
      .def("mark_died", [](runtime::Context& c) { transport::mark_died(c.transport()); })
      .def("put", &put_rows, py::arg("peer"), py::arg("heap_offset"), py::arg("rows"))
      .def(
          "signal",
          [](runtime::Context& c, int peer, int64_t word, uint64_t value) { c.transport().signal(peer, word, value); },
          py::arg("peer"), py::arg("word"), py::arg("value"))
      .def(
          "wait",
          [](runtime::Context& c, int64_t word, uint64_t value) {
            const auto deadline = std::chrono::steady_clock::now() + c.options().timeout;
            return c.transport().wait(word, value, deadline, nullptr);
          },
          py::arg("word"), py::arg("value"), py::call_guard<py::gil_scoped_release>())
      .def(
          "exchange", [](runtime::Context& c) { c.transport().exchange(false, [] {}); },
          py::call_guard<py::gil_scoped_release>());
  m.def("make_loopback", &make_loopback_contexts, py::kw_only(), py::arg("names"), py::arg("slot_bytes"),
        py::arg("timeout"), py::arg("cost"), py::arg("epoch"), py::arg("reorder_seed") = std::nullopt,
        py::arg("progress_thread") = false, py::arg("link") = std::nullopt, py::arg("device") = "cpu",
        py::arg("attention") = "auto", py::arg("replay") = std::nullopt, py::arg("streams") = false,
        py::arg("put_blocks") = 0);
  m.def("connect_ipc", &make_ipc_context, py::kw_only(), py::arg("listener"), py::arg("rank"), py::arg("addresses"),
        py::arg("device"), py::arg("attention"), py::arg("put_blocks"), py::arg("name"), py::arg("slot_bytes"),
        py::arg("timeout"), py::arg("connect_timeout"), py::arg("cost"), py::arg("epoch"));
  m.def("connect_nvshmem", &make_nvshmem_context, py::kw_only(), py::arg("rank"), py::arg("num_ranks"),
        py::arg("unique_id"), py::arg("device"), py::arg("attention"), py::arg("name"), py::arg("slot_bytes"),
        py::arg("timeout"), py::arg("cost"), py::arg("epoch"));
  py::class_<transport::ShmListener>(m, "ShmListener")
      .def(py::init<>())
      .def_property_readonly("address", &transport::ShmListener::address);
  m.def("connect_shm", &make_shm_context, py::kw_only(), py::arg("listener"), py::arg("rank"), py::arg("addresses"),
        py::arg("name"), py::arg("slot_bytes"), py::arg("timeout"), py::arg("connect_timeout"), py::arg("cost"),
        py::arg("epoch"), py::arg("reorder_seed") = std::nullopt, py::arg("progress_thread") = false,
        py::arg("link") = std::nullopt);
  m.def(
      "share_memory", [](const std::vector<std::string>& addresses) { return transport::share_memory(addresses); },
      py::arg("addresses"));
  m.def("make_torch", &make_torch_context, py::kw_only(), py::arg("rank"), py::arg("num_ranks"), py::arg("all_to_all"),
        py::arg("abandon"), py::arg("name"), py::arg("slot_bytes"), py::arg("timeout"), py::arg("cost"),
        py::arg("epoch"));
  m.def("remove_context", &runtime::remove_context, py::arg("name"), py::call_guard<py::gil_scoped_release>());
  m.def("find_context", &runtime::find_context, py::arg("name"));
}

}  // namespace
}  // namespace distca

PYBIND11_MODULE(_C, m) {
  m.doc() = "Layouts, plans, transports and contexts of distca.";
  py::register_exception_translator(&distca::translate_errors);
  distca::bind_layout(m);
  distca::bind_plan(m);
  distca::bind_context(m);
  m.def(
      "cuda_status",
      [] {
        const distca::runtime::CudaLibrary* const library = distca::runtime::cuda_library();
        if (library == nullptr) return std::make_tuple(false, 0, distca::runtime::cuda_library_problem());
        const auto found = library->devices();
        return std::make_tuple(true, found.count, found.problem);
      },
      "Whether libdistca_cuda is there, how many GPUs it finds, and why not where there is none.");
  m.def(
      "nvshmem_status",
      [] {
        const distca::transport::NvshmemLibrary* const library = distca::transport::nvshmem_library();
        return std::make_pair(library != nullptr ? library->version() : "",
                              distca::transport::nvshmem_library_problem());
      },
      "Version of NVSHMEM and an empty text, or an empty text and why there is no libdistca_nvshmem.");
  m.def("nvshmem_unique_id", &distca::make_nvshmem_id);
  m.def("cpu_isa", [] { return std::string(distca::attention::CpuAttention().isa()); });
  m.def(
      "measure_peak_flops",
      [](int64_t dtype, int num_threads, double seconds) {
        distca::require(dtype >= 0 && dtype < distca::kNumDTypes, "peak: dtype number ", dtype);
        return distca::attention::measure_peak_flops(static_cast<distca::DType>(dtype), num_threads, seconds);
      },
      py::arg("dtype"), py::arg("num_threads"), py::arg("seconds"), py::call_guard<py::gil_scoped_release>());
  m.def(
      "validate_plan",
      [](const py::buffer& words) {
        const py::buffer_info info = words.request();
        distca::require<distca::PlanFormatError>(info.itemsize == 8 && info.ndim == 1 && info.strides[0] == 8,
                                                 "plan tensor: a contiguous buffer of 64-bit words is expected");
        distca::plan::validate({static_cast<const int64_t*>(info.ptr), static_cast<size_t>(info.size)});
      },
      py::arg("words"), "Throws PlanFormatError unless the words are a whole, unaltered slice of a plan.");
}
