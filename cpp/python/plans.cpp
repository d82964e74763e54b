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

using BranchTuple = std::pair<int64_t, int64_t>;
using SharedTuple = std::tuple<int64_t, int64_t, int64_t, int64_t>;  // document, of, begin, end

std::shared_ptr<plan::Layout> layout_from_tuples(const std::vector<std::vector<SegmentTuple>>& ranks,
                                                 const std::vector<BranchTuple>& branches,
                                                 const std::vector<SharedTuple>& shared) {
  std::vector<std::vector<plan::Segment>> segments(ranks.size());
  for (size_t r = 0; r < ranks.size(); ++r)
    for (const auto& [document, begin, end] : ranks[r]) segments[r].push_back({document, begin, end});
  std::vector<plan::Branch> given;
  for (const auto& [document, parent] : branches) given.push_back({document, parent});
  std::vector<plan::SharedRows> rows;
  for (const auto& [document, of, begin, end] : shared) rows.push_back({document, 0, of, begin, end});
  return std::make_shared<plan::Layout>(std::move(segments), std::move(given), std::move(rows));
}

std::shared_ptr<plan::Layout> with_bidirectional(const plan::Layout& layout, const std::vector<SegmentTuple>& rows) {
  std::vector<std::pair<int64_t, BidirectionalRows>> given;
  for (const auto& [document, begin, end] : rows) given.push_back({document, {begin, end}});
  return std::make_shared<plan::Layout>(layout.with_bidirectional(given));
}

std::vector<SegmentTuple> bidirectional_of(const plan::Layout& layout) {
  std::vector<SegmentTuple> rows;
  for (int64_t document = 0; layout.has_bidirectional() && document < layout.num_documents(); ++document)
    for (const BidirectionalRows& one : layout.bidirectional(document)) rows.emplace_back(document, one.begin, one.end);
  return rows;
}

std::shared_ptr<plan::Plan> make_plan(std::shared_ptr<plan::Layout> layout, const plan::PlanOptions& options,
                                      const std::optional<std::vector<TaskTuple>>& tasks) {
  const py::gil_scoped_release release;
  if (!tasks) return std::make_shared<plan::Plan>(std::move(layout), options);
  std::vector<plan::GivenTask> given;
  for (const auto& [document, q_begin, q_end, kv_head_begin, kv_head_end, server] : *tasks)
    given.push_back({document, q_begin, q_end, kv_head_begin, kv_head_end, server});
  return std::make_shared<plan::Plan>(std::move(layout), options, given);
}

/// A plan with the schedule of another one. `servers[r]` computes what rank r computes there.
std::shared_ptr<plan::Plan> make_plan_like(const plan::Plan& like, std::shared_ptr<plan::Layout> layout,
                                           const plan::PlanOptions& options, const std::vector<int64_t>& servers) {
  const py::gil_scoped_release release;
  require(std::ssize(servers) == like.layout().num_ranks(), "plan: ", servers.size(), " servers for a schedule of ",
          like.layout().num_ranks(), " ranks");
  std::vector<plan::GivenTask> given;
  for (const plan::Task& t : like.tasks())
    given.push_back(
        {t.document, t.q_begin, t.q_end, t.kv_head_begin, t.kv_head_end, servers[static_cast<size_t>(t.server)]});
  return std::make_shared<plan::Plan>(std::move(layout), options, given);
}

/// q_heads, kv_heads, dim, v_dim and the number of a dtype.
using HeadsTuple = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>;

void set_heads(plan::PlanOptions& options, const HeadsTuple& heads) {
  const auto& [q_heads, kv_heads, dim, v_dim, dtype] = heads;
  options.heads = {q_heads, kv_heads, dim, v_dim, static_cast<DType>(dtype)};
}

/// The number of a mask, a window, and the scale and softcap if the plan has them.
using ScoresTuple = std::tuple<int64_t, int64_t, std::optional<double>, std::optional<double>>;

void set_scores(plan::PlanOptions& options, const std::vector<ScoresTuple>& scores) {
  options.scores.clear();
  for (const auto& [mask_kind, window, scale, softcap] : scores) {
    const auto word = [](const std::optional<double>& value) {
      return value ? plan::score_word(static_cast<float>(*value)) : plan::kOfTheCall;
    };
    options.scores.push_back({mask_kind, window, word(scale), word(softcap)});
  }
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
  py::dict head_parallel;
  for (size_t document = 0; document < p.head_parallel().size(); ++document)
    if (const int32_t size = p.head_parallel()[document].group_size; size > 1) head_parallel[py::int_(document)] = size;
  d["head_parallel"] = head_parallel;
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

/// The words of a slice, validated.
std::span<const int64_t> validated(const py::buffer_info& info) {
  require<PlanFormatError>(info.itemsize == 8 && info.ndim == 1 && info.strides[0] == 8,
                           "plan tensor: a contiguous buffer of 64-bit words is expected");
  const std::span words(static_cast<const int64_t*>(info.ptr), static_cast<size_t>(info.size));
  plan::validate(words);
  return words;
}

/// The visible pairs of rows and keys of a slice's tasks, in all query heads.
int64_t computed_pairs(const py::buffer& words) {
  const py::buffer_info info = words.request();
  const plan::SliceView slice(validated(info));
  int64_t pairs = 0;
  for (const plan::TaskRow& t : slice.tasks()) {
    const plan::GroupRow& g = slice.groups()[static_cast<size_t>(t.group)];
    pairs += plan::visible_pairs({g.kv_end, slice.mask_of(g)}, t.q_begin, t.q_end) * (g.kv_head_end - g.kv_head_begin);
  }
  return pairs * slice.heads().group_heads();
}

void bind_layout(py::module_& m) {
  py::class_<plan::Layout, std::shared_ptr<plan::Layout>>(m, "Layout")
      .def(py::init(&layout_from_tuples), py::arg("ranks"), py::arg("branches"), py::arg("shared"))
      .def_static("from_documents", &plan::Layout::from_documents, py::arg("lengths"))
      .def_static("packed", &plan::Layout::packed, py::arg("lengths"), py::arg("ranks"), py::arg("tokens_per_rank"))
      .def_static("head_tail", &plan::Layout::head_tail, py::arg("lengths"), py::arg("ranks"), py::arg("longer_than"),
                  py::arg("context"))
      .def_static("spread", &plan::Layout::spread, py::arg("lengths"), py::arg("ranks"))
      .def_static(
          "join",
          [](const std::vector<std::pair<std::shared_ptr<plan::Layout>, std::vector<int64_t>>>& parts,
             int64_t num_ranks) {
            std::vector<plan::Layout::Part> of_layout;
            for (const auto& [layout, ranks] : parts) of_layout.push_back({layout, ranks});
            return std::make_shared<plan::Layout>(plan::Layout::join(of_layout, num_ranks));
          },
          py::arg("parts"), py::arg("num_ranks"))
      .def_property_readonly("first_rows",
                             [](const plan::Layout& l) {
                               std::vector<int64_t> rows;
                               for (int64_t d = 0; d < l.num_documents(); ++d) rows.push_back(l.first_row(d));
                               return rows;
                             })
      .def_property_readonly("clusters",
                             [](const plan::Layout& l) {
                               std::vector<int64_t> clusters;
                               for (int64_t d = 0; d < l.num_documents(); ++d) clusters.push_back(l.cluster(d));
                               return clusters;
                             })
      .def_property_readonly("shared",
                             [](const plan::Layout& l) {
                               std::vector<SharedTuple> rows;
                               for (const plan::SharedRows& s : l.shared())
                                 rows.emplace_back(s.document, s.of, s.begin, s.end);
                               return rows;
                             })
      .def("with_bidirectional", &with_bidirectional, py::arg("rows"))
      .def_property_readonly("bidirectional", &bidirectional_of)
      .def_property_readonly("has_bidirectional", &plan::Layout::has_bidirectional)
      .def_property_readonly("has_shared", &plan::Layout::has_shared)
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
             int64_t q_end) {
            return cost.cost({length, {{static_cast<MaskKind>(mask_kind), window}, {}}}, q_begin, q_end);
          },
          py::arg("mask_kind"), py::arg("window"), py::arg("length"), py::arg("q_begin"), py::arg("q_end"));
  using plan::PlanOptions;
  py::class_<PlanOptions>(m, "PlanOptions")
      .def(py::init([] { return PlanOptions{.key_block_rows = attention::kKeyBlockRows}; }))
      .def_property("heads", nullptr, &set_heads)
      .def_property("scores", nullptr, &set_scores)
      .def_readwrite("scores_of_document", &PlanOptions::scores_of_document)
      .def_readwrite("cost", &PlanOptions::cost)
      .def_readwrite("tolerance_ppm", &PlanOptions::tolerance_ppm)
      .def_readwrite("min_rows", &PlanOptions::min_rows)
      .def_readwrite("balance", &PlanOptions::balance)
      .def_readwrite("split_heads", &PlanOptions::split_heads)
      .def_readwrite("servers", &PlanOptions::servers)
      .def_readwrite("speeds", &PlanOptions::speeds)
      .def_readwrite("ranks_per_node", &PlanOptions::ranks_per_node)
      .def_property("forward_only", nullptr,
                    [](PlanOptions& options, bool forward_only) {
                      options.objective = forward_only ? plan::Objective::kForward : plan::Objective::kAll;
                    })
      .def_readwrite("capacity", &PlanOptions::capacity)
      .def_readwrite("overlap", &PlanOptions::overlap)
      .def_readwrite("round_bytes", &PlanOptions::round_bytes)
      .def_property("reduce_dtype", nullptr,
                    [](PlanOptions& options, int64_t dtype) { options.reduce_dtype = static_cast<DType>(dtype); })
      .def_readwrite("retain_bytes", &PlanOptions::retain_bytes)
      .def_readwrite("label", &PlanOptions::label);
  py::class_<plan::Plan, std::shared_ptr<plan::Plan>>(m, "Plan")
      .def(py::init(&make_plan), py::arg("layout"), py::arg("options"), py::arg("tasks") = std::nullopt)
      .def("scheduled_alike", &make_plan_like, py::arg("layout"), py::arg("options"), py::arg("servers"))
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
             const std::vector<int64_t> rounds = p.rounds_of_tasks();
             for (const plan::Task& t : p.tasks()) {
               tasks.append(py::make_tuple(t.document, t.q_begin, t.q_end, t.kv_begin, t.kv_end, t.kv_head_begin,
                                           t.kv_head_end, t.home, t.server, rounds[tasks.size()]));
             }
             return tasks;
           })
      .def("transfers",
           [](const plan::Plan& p) {
             py::list transfers;
             for (const plan::Transfer& t : p.transfers()) {
               transfers.append(py::make_tuple(2 * static_cast<int64_t>(t.phase) + static_cast<int64_t>(t.direction),
                                               t.source, t.target, t.document, t.begin, t.end, t.kv_head_begin,
                                               t.kv_head_end, static_cast<int64_t>(t.tensor), t.bytes, t.round));
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
  m.def(
      "validate_plan", [](const py::buffer& words) { validated(words.request()); }, py::arg("words"),
      "Throws PlanFormatError unless the words are a whole, unaltered slice of a plan.");
  m.def("computed_pairs", &computed_pairs, py::arg("words"),
        "Pairs of a row and a key that a slice's rank computes, in all query heads. Throws as validate_plan does.");
}

}  // namespace distca::python
