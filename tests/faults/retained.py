"""Faults of what servers keep from forward to backward."""

from faults.fault import Fault

PLAN = "tests/plan/test_plan.py"
ROUNDS_IN = "tests/plan/test_rounds_in.py"
RETAIN = "tests/runtime/test_retain.py"
RETAIN_MISTAKES = "tests/runtime/test_retain_mistakes.py"
ARRANGEMENT = "cpp/plan/arrangement.cpp"
DISPATCHER = "cpp/runtime/dispatcher.cpp"
TABLES = "cpp/plan/slice_tables.cpp"

FAULTS = [
    Fault(
        "retained keys are not copied",
        DISPATCHER,
        "    keep(TensorKind::kK, g.retained_k, g.forward_k);",
        "",
        (RETAIN,),
    ),
    Fault(
        "retained keys are read from the arena in backward",
        "cpp/runtime/server_tasks.cpp",
        "  if (backward && g.retained_k >= 0) {",
        "  if (false) {",
        (RETAIN,),
    ),
    Fault(
        "keys that save the fewest bytes are kept first",
        ARRANGEMENT,
        "    std::sort(by_bytes.begin(), by_bytes.end());",
        "    std::sort(by_bytes.rbegin(), by_bytes.rend());",
        (RETAIN,),
    ),
    Fault(
        "rounds decide which keys are kept of those that save the same",
        ARRANGEMENT,
        "by_bytes.emplace_back(-bytes, a_.groups[i].task_begin, i);",
        "by_bytes.emplace_back(-bytes, 0, i);",
        (ROUNDS_IN,),
    ),
    Fault(
        "more is retained than is allowed",
        ARRANGEMENT,
        "      if (end > retain_bytes_[s]) continue;",
        "      if (end > retain_bytes_[s] + 20'000) continue;",
        (PLAN, RETAIN),
    ),
    Fault(
        "servers wait for keys that they have retained",
        TABLES,
        "      if (!g.is_retained()) wait(Phase::kBackward, Direction::kIn, g.round, rows.rank);",
        "      wait(Phase::kBackward, Direction::kIn, g.round, rows.rank);",
        (PLAN, RETAIN),
    ),
    Fault(
        "the size of what forward has kept is not checked",
        "cpp/torch/core_attention.cpp",
        "given.has_value() && given->numel() == h.retained_bytes,",
        "given.has_value(),",
        (RETAIN_MISTAKES,),
    ),
]
