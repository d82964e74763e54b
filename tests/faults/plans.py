"""Faults of the planner."""

from faults.fault import Fault

EXACT = "tests/runtime/test_exactness.py"
STEPS = "tests/runtime/test_steps.py"
PLAN = "tests/plan/test_plan.py"
PLAN_MEMORY = "tests/plan/test_plan_memory.py"
SCHEDULER = "tests/plan/test_scheduler.py"
HEAD_PARALLEL = "tests/plan/test_head_parallel.py"
ALTERED = "tests/runtime/test_altered_plans.py"
GRADIENTS = "cpp/plan/key_gradients.cpp"
ARRANGEMENT = "cpp/plan/arrangement.cpp"
TABLES = "cpp/plan/slice_tables.cpp"
SHARD = "cpp/plan/shard.cpp"
FUZZ = "tests/plan/test_plan_fuzz.py"
CONSISTENCY = "tests/plan/test_consistency.py"
REDUCE_DTYPE = "tests/plan/test_reduce_dtype.py"
ROUNDS = "tests/runtime/test_rounds_of_rows.py"
ROUNDS_IN = "tests/plan/test_rounds_in.py"
ROUNDED = "tests/runtime/test_rounded_contributions.py"

FAULTS = [
    # ---- the plan
    Fault(
        "speeds of ranks that do not serve count as planned",
        "python/distca/planner/stats.py",
        "return sum(self.speeds[rank] for rank in self._servers) if self._servers else sum(self.speeds)",
        "return sum(self.speeds)",
        (PLAN,),
    ),
    Fault(
        "queries are sent from the row before",
        TABLES,
        "0, t.server, kind, t.home_row, -1,",
        "0, t.server, kind, t.home_row - (t.home_row > 0), -1,",
        (PLAN, STEPS),
    ),
    Fault(
        "a block of the local tensor starts a row late",
        TABLES,
        "fill(local.begin, local.end, p.row + (local.begin * block_rows_ - p.begin), false);",
        "fill(local.begin, local.end, p.row + (local.begin * block_rows_ - p.begin) + (local.begin > 0), false);",
        (PLAN, STEPS),
    ),
    Fault(
        "extents of the arena overlap",
        ARRANGEMENT,
        "    part += round_up(bytes, kExtentAlignment);",
        "    part += bytes / kExtentAlignment * kExtentAlignment;",
        (PLAN, STEPS),
    ),
    Fault(
        "a first partial is added twice",
        "cpp/runtime/row_arithmetic.h",
        "e.starts ? values_of_term(t++)",
        "e.starts ? values_of_term(t)",
        (STEPS, EXACT),
    ),
    Fault(
        "a partial replaces the sum",
        TABLES,
        ": ReceiveAction::kAdd;",
        ": ReceiveAction::kAssign;",
        (PLAN, STEPS),
    ),
    Fault(
        "rounded contributions are read as fp32",
        "cpp/runtime/reduce_table.cpp",
        "e.narrow = !plan::is_partial(kind);",
        "e.narrow = false;",
        (ROUNDED,),
    ),
    Fault(
        "sums of rounded contributions are rounded after each",
        "cpp/runtime/row_arithmetic.h",
        "for (int64_t d = 0; d < n; ++d) sum[d] += term[d];",
        """for (int64_t d = 0; d < n; ++d)
          sum[d] = e.narrow ? bf16_to_float(float_to_bf16(sum[d] + term[d])) : sum[d] + term[d];""",
        (ROUNDED,),
    ),
    Fault(
        "contributions are rounded although fp32 is asked for",
        GRADIENTS,
        "const bool narrow = of.is_narrow && !is_own(s);",
        "const bool narrow = !is_own(s);",
        (REDUCE_DTYPE, PLAN),
    ),
    Fault(
        "the planner weighs rounded contributions as fp32",
        SHARD,
        "(e + dtype_bytes(options.reduce_dtype))",
        "(e + 4)",
        (REDUCE_DTYPE,),
    ),
    Fault(
        "terms of a sum may be of two dtypes",
        "cpp/plan/consistency_messages.cpp",
        "check_plan(terms[i]->tensor == first.tensor,",
        "check_plan(true,",
        (CONSISTENCY,),
    ),
    Fault(
        "results of a round go home before they are computed",
        TABLES,
        "const int64_t round_in = a_.groups[r.group].round;",
        "const int64_t round_in = 0;",
        (PLAN,),
    ),
    Fault(
        "a home is told after the first round of rows that its results are there",
        "cpp/runtime/dispatcher.cpp",
        "if (round > 0 || last_home_[static_cast<size_t>(peer)] < after.end)",
        "if (true)",
        (ROUNDS,),
    ),
    Fault(
        "keys of a later round are not awaited",
        "cpp/runtime/dispatcher.cpp",
        "protocol_.await_rows(step.slice.waits(step.phase), Direction::kIn, rounds);",
        "protocol_.await_rows(step.slice.waits(step.phase), Direction::kIn, {0, 1});",
        (ROUNDS,),
    ),
    Fault(
        "all rounds of rows have one signal",
        "cpp/runtime/signals.h",
        "kKinds * slot + 3 + round",
        "kKinds * slot + 3 + 0 * round",
        (ROUNDS,),
    ),
    Fault(
        "a group of many bytes comes first",
        ARRANGEMENT,
        "order.push_back(by_bytes[2 * i + 1]);",
        "order.insert(order.begin(), by_bytes[2 * i + 1]);",
        (ROUNDS_IN,),
    ),
    Fault(
        "an altered plan is not noticed",
        "cpp/plan/validate.cpp",
        "  check_plan(static_cast<int64_t>(digest(used)) == h.checksum,",
        "  check_plan(static_cast<int64_t>(digest(used)) != 0,",
        (ALTERED,),
    ),
    Fault(
        "tables are not part of the digest that ranks compare",
        "cpp/plan/tables.h",
        "    if (id != kBlocks) d.add(",
        "    if (id == kSegments) d.add(",
        (PLAN, FUZZ),
    ),
    Fault(
        "a row may come from nowhere",
        "cpp/plan/consistency_messages.cpp",
        "        check_plan(p.row == next, ",
        "        check_plan(p.row >= next, ",
        (CONSISTENCY,),
    ),
    Fault(
        "a plan for backward may be of another layout",
        "cpp/runtime/context_plans.cpp",
        "  if ((!are_labelled && f.layout_digest != b.layout_digest) ||",
        "  if (f.magic == 0 ||",
        ("tests/runtime/test_plan_backward.py",),
    ),
    Fault(
        "a shard is always the last rows",
        SHARD,
        "b = inner;",
        "b = end;",
        (SCHEDULER,),
    ),
    Fault(
        "what a shard leaves may be shorter than wanted",
        SHARD,
        "    if (a > begin) a = std::max(a, begin + min_rows);",
        "",
        (SCHEDULER,),
    ),
    Fault(
        "ranks give away more than they must",
        "cpp/plan/scheduler.cpp",
        "  limit_ = load_limits(total, speed_, options_.tolerance_ppm);",
        "  limit_ = load_limits(total, speed_, 0);",
        (SCHEDULER,),
    ),
    Fault(
        "bytes between nodes count once where rows are exchanged for heads",
        "cpp/plan/head_parallel.cpp",
        "weighted_bytes(missing(g, of_ranks_, m.rank), between);",
        "weighted_bytes(missing(g, of_ranks_, m.rank), 0);",
        (HEAD_PARALLEL,),
    ),
    Fault(
        "gradients of keys count as sums of several servers always",
        "cpp/plan/head_parallel.cpp",
        "key_row_ = groups.size() == 1 ? prices_.sole_key_row : prices_.key_row;",
        "key_row_ = prices_.key_row;",
        (HEAD_PARALLEL,),
    ),
    Fault(
        "short segments are exchanged for heads too",
        "cpp/plan/head_parallel.cpp",
        "/ std::ssize(placements) >= options.min_rows &&",
        "/ std::ssize(placements) >= 0 &&",
        (HEAD_PARALLEL,),
    ),
    Fault(
        "keys that the rows of a group see several times count several times",
        "cpp/plan/head_parallel.cpp",
        "if (keys_.empty() || begin > keys_.back().second)",
        "if (true)",
        (HEAD_PARALLEL,),
    ),
    Fault(
        "segments of several homes are one piece though small tasks are dear",
        "cpp/plan/head_parallel.cpp",
        "if (options.cost.is_additive() && !runs.empty()",
        "if (!runs.empty()",
        (HEAD_PARALLEL,),
    ),
    Fault(
        "groups of ranks never end where nodes do",
        "cpp/plan/head_parallel.cpp",
        "if (within_nodes && !has_nodes_) continue;",
        "if (within_nodes) continue;",
        (HEAD_PARALLEL,),
    ),
    Fault(
        "a rank may have any number of tasks",
        "cpp/plan/head_parallel.cpp",
        "static constexpr int64_t kMostTasks = 4096;",
        "static constexpr int64_t kMostTasks = 1 << 20;",
        (HEAD_PARALLEL,),
    ),
    Fault(
        "where memory binds, no more rows are exchanged for heads",
        "cpp/plan/draft.cpp",
        "if (least_memory != fewest_bytes) drafts.push_back(",
        "if (false) drafts.push_back(",
        (HEAD_PARALLEL,),
    ),
    Fault(
        "the draft of the more bytes is taken",
        "cpp/plan/draft.cpp",
        "return bytes(a) < bytes(b);",
        "return bytes(a) > bytes(b);",
        (HEAD_PARALLEL,),
    ),
    Fault(
        "a row more or less is worth many bytes",
        "cpp/plan/draft.cpp",
        "kMarginPpm = 1000;",
        "kMarginPpm = 0;",
        (HEAD_PARALLEL,),
    ),
    Fault(
        "fewer bytes are worth a larger load where small tasks are dear",
        "cpp/plan/draft.cpp",
        "if (!balanced || !options_.cost.is_additive()) {",
        "if (!balanced) {",
        (HEAD_PARALLEL,),
    ),
    Fault(
        "a draft that is not balanced may be taken for its bytes",
        "cpp/plan/draft.cpp",
        "if (balanced != is_balanced(b)) return balanced;",
        "",
        (HEAD_PARALLEL,),
    ),
    Fault(
        "where rows at home do not fit, nothing else is tried",
        "cpp/plan/draft.cpp",
        "        too_large_.push_back(std::move(least));\n      }",
        "        too_large_.push_back(std::move(least));\n        return;\n      }",
        (HEAD_PARALLEL,),
    ),
    Fault(
        "of drafts that do not fit, the first one that can be made to fit is taken",
        "cpp/plan/draft.cpp",
        "if (!best_ || comparison_.is_better(draft, *best_)) best_",
        "if (!best_) best_",
        (SCHEDULER,),
    ),
    Fault(
        "a rank may pass its capacity a little",
        "cpp/plan/draft.cpp",
        "      if (bytes <= options_.capacity) continue;",
        "      if (bytes <= options_.capacity + 64) continue;",
        (PLAN_MEMORY,),
    ),
    Fault(
        "small tasks are dear in the statistics alone",
        "cpp/plan/scheduler.cpp",
        "is_additive_(options.cost.is_additive()),",
        "is_additive_(true),",
        (SCHEDULER,),
    ),
    Fault(
        "every rank sends to rank 0 first",
        "cpp/plan/slice_tables.cpp",
        "std::partition_point(begin, end, [&](const SendRow& s) { return s.peer < rank_; }), end)",
        "begin, end)",
        (PLAN,),
    ),
    Fault(
        "a plan asks the context that happens to be the default",
        "python/distca/planner/planning.py",
        "here = None if context is None else _context_of(layout, context)",
        'here = _context_of(layout, context if context is not None else "default")',
        ("tests/runtime/test_wrong_plans.py::test_planning_reads_the_context_that_it_is_given_and_no_other",),
    ),
    Fault(
        "ranks whose cost models differ are told of nothing",
        "cpp/plan/origin.cpp",
        '  if (a.cost_digest != b.cost_digest) say("another cost model");\n',
        "",
        ("tests/plan/test_origin.py",),
    ),
    Fault(
        "the words that say how a plan was made begin one too late",
        "cpp/plan/origin.cpp",
        "words.begin() + kArguments, number",
        "words.begin() + kArguments + 1, number",
        ("tests/plan/test_origin.py",),
    ),
    Fault(
        "the default heap is smaller than it is said to be",
        "python/distca/planner/memory.py",
        "max(6 * max_tokens * row_bytes",
        "max(5 * max_tokens * row_bytes",
        ("tests/plan/test_heap.py",),
    ),
    Fault(
        "a pickled plan is taken without a look",
        "python/distca/planner/plan.py",
        '        _C.validate_plan(memoryview(state["_words"]).cast("q"))\n',
        "",
        ("tests/plan/test_pickling.py",),
    ),
]
