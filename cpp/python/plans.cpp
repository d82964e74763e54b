// Layouts, cost models and plans for Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "attention/attention.h"
#include "common/error.h"
#include "plan/plan.h"
#include "plan/validate.h"
#include "python/bindings.h"

namespace py = pybind11;

namespace distca::python {
namespace {

using SegmentTuple = std::tuple<int64_t, int64_t, int64_t>;
using TaskTuple = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>;

std::shared_ptr<plan::Layout> layout_from_tuples(const std::vector<std::vector<SegmentTuple>>& ranks) {
  std::vector<std::vector<plan::Segment>> segments(ranks.size());
  for (size_t r = 0; r < ranks.size(); ++r)
    for (const auto& [document, begin, end] : ranks[r]) segments[r].push_back({document, begin, end});
  return std::make_shared<plan::Layout>(std::move(segments));
}

/// The number of a mask, a window, and the scale and softcap if the plan has them.
using ScoresTuple = std::tuple<int64_t, int64_t, std::optional<double>, std::optional<double>>;

std::shared_ptr<plan::Plan> make_plan(
    std::shared_ptr<plan::Layout> layout, int64_t q_heads, int64_t kv_heads, int64_t dim, int64_t v_dim, int64_t dtype,
    plan::CostModel cost, int64_t tolerance_ppm, int64_t min_rows, bool balance, int64_t capacity,
    const std::vector<ScoresTuple>& scores, std::vector<int64_t> scores_of_document, std::vector<int64_t> servers,
    std::vector<int64_t> speeds, int64_t ranks_per_node, bool forward_only, bool split_heads, bool overlap,
    std::vector<int64_t> retain_bytes, std::string label, const std::optional<std::vector<TaskTuple>>& tasks,
    const std::shared_ptr<plan::Plan>& like, const std::vector<int64_t>& servers_of_like) {
  require(dtype >= 0 && dtype < kNumDTypes, "plan: dtype number ", dtype, "; 0 to ", kNumDTypes - 1, " are allowed");
  plan::PlanOptions options;
  options.heads = {q_heads, kv_heads, dim, v_dim, static_cast<DType>(dtype)};
  options.cost = std::move(cost);
  options.scores.clear();
  for (const auto& [mask_kind, window, scale, softcap] : scores) {
    require(mask_kind >= 0 && mask_kind < kNumMaskKinds, "plan: mask number ", mask_kind, "; 0 to ", kNumMaskKinds - 1,
            " are allowed");
    const auto word = [](const std::optional<double>& value) {
      return value ? plan::score_word(static_cast<float>(*value)) : plan::kOfTheCall;
    };
    options.scores.push_back({mask_kind, window, word(scale), word(softcap)});
  }
  options.scores_of_document = std::move(scores_of_document);
  options.servers = std::move(servers);
  options.speeds = std::move(speeds);
  options.ranks_per_node = ranks_per_node;
  options.objective = forward_only ? plan::Objective::kForward : plan::Objective::kAll;
  options.split_heads = split_heads;
  options.tolerance_ppm = tolerance_ppm;
  options.min_rows = min_rows;
  options.balance = balance;
  options.key_block_rows = attention::kKeyBlockRows;
  options.retain_bytes = std::move(retain_bytes);
  options.capacity = capacity;
  options.overlap = overlap;
  options.label = std::move(label);
  const py::gil_scoped_release release;
  std::optional<std::vector<plan::GivenTask>> given;
  if (tasks) {
    given.emplace();
    for (const auto& [document, q_begin, q_end, kv_head_begin, kv_head_end, server] : *tasks)
      given->push_back({document, q_begin, q_end, kv_head_begin, kv_head_end, server});
  } else if (like) {
    require(std::ssize(servers_of_like) == like->layout().num_ranks(), "plan: ", servers_of_like.size(),
            " servers for a schedule of ", like->layout().num_ranks(), " ranks");
    given.emplace();
    for (const plan::Task& t : like->tasks())
      given->push_back({t.document, t.q_begin, t.q_end, t.kv_head_begin, t.kv_head_end,
                        servers_of_like[static_cast<size_t>(t.server)]});
  }
  return std::make_shared<plan::Plan>(std::move(layout), options, given);
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
  d["retained_bytes"] = p.arrangement().retained_bytes;
  d["saved_bytes"] = p.arrangement().saved_bytes;
  d["plan_ms"] = static_cast<double>(s.plan_ns) * 1e-6;
  return d;
}

void validate_words(const py::buffer& words) {
  const py::buffer_info info = words.request();
  require<PlanFormatError>(info.itemsize == 8 && info.ndim == 1 && info.strides[0] == 8,
                           "plan tensor: a contiguous buffer of 64-bit words is expected");
  plan::validate({static_cast<const int64_t*>(info.ptr), static_cast<size_t>(info.size)});
}

void bind_layout(py::module_& m) {
  py::class_<plan::Layout, std::shared_ptr<plan::Layout>>(m, "Layout")
      .def(py::init(&layout_from_tuples), py::arg("ranks"))
      .def_static("from_documents", &plan::Layout::from_documents, py::arg("lengths"))
      .def_static("packed", &plan::Layout::packed, py::arg("lengths"), py::arg("ranks"), py::arg("tokens_per_rank"))
      .def_static("head_tail", &plan::Layout::head_tail, py::arg("lengths"), py::arg("ranks"))
      .def_static(
          "join",
          [](const std::vector<std::pair<std::shared_ptr<plan::Layout>, std::vector<int64_t>>>& parts,
             int64_t num_ranks) {
            std::vector<plan::Layout::Part> of_layout;
            for (const auto& [layout, ranks] : parts) of_layout.push_back({layout, ranks});
            return std::make_shared<plan::Layout>(plan::Layout::join(of_layout, num_ranks));
          },
          py::arg("parts"), py::arg("num_ranks"))
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
             int64_t q_end) { return cost.cost({length, {static_cast<MaskKind>(mask_kind), window}}, q_begin, q_end); },
          py::arg("mask_kind"), py::arg("window"), py::arg("length"), py::arg("q_begin"), py::arg("q_end"));
  py::class_<plan::Plan, std::shared_ptr<plan::Plan>>(m, "Plan")
      .def(py::init(&make_plan), py::kw_only(), py::arg("layout"), py::arg("q_heads"), py::arg("kv_heads"),
           py::arg("dim"), py::arg("v_dim"), py::arg("dtype"), py::arg("cost"), py::arg("tolerance_ppm"),
           py::arg("min_rows"), py::arg("balance"), py::arg("capacity"), py::arg("scores"),
           py::arg("scores_of_document"), py::arg("servers"), py::arg("speeds"), py::arg("ranks_per_node"),
           py::arg("forward_only"), py::arg("split_heads"), py::arg("overlap"), py::arg("retain_bytes"),
           py::arg("label") = "", py::arg("tasks") = std::nullopt, py::arg("like") = nullptr,
           py::arg("servers_of_like") = std::vector<int64_t>())
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

}  // namespace

void bind_plans(py::module_& m) {
  m.attr("PLAN_FORMAT") = plan::kFormatVersion;
  m.attr("EXTENT_ALIGNMENT") = plan::kExtentAlignment;
  bind_layout(m);
  bind_plan(m);
  m.def("validate_plan", &validate_words, py::arg("words"),
        "Throws PlanFormatError unless the words are a whole, unaltered slice of a plan.");
}

}  // namespace distca::python
