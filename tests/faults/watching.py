"""Faults that make a step take memory it should not, and faults of a trace's figures."""

from faults.fault import Fault

MEMORY = "tests/runtime/test_allocations.py"
TIMELINE = "tests/tracing/test_timeline.py"

FAULTS = [
    Fault(
        "the name of a context leaks in every call",
        "cpp/torch/memory.h",
        "  ~Text() { torch_delete_string(handle_); }",
        "  ~Text() = default;",
        (MEMORY,),
    ),
    Fault(
        "the record of a step in parts is allocated anew",
        "cpp/torch/memory.h",
        "return std::allocate_shared<T>(Reusing<T>(), std::forward<Args>(args)...);",
        "return std::make_shared<T>(std::forward<Args>(args)...);",
        (MEMORY,),
    ),
    Fault(
        "rows that a rank copies itself count as hidden",
        "python/distca/trace/timeline.py",
        "cover((*moving, *trace.copies), *here)",
        "cover(moving, *here)",
        (TIMELINE,),
    ),
    Fault(
        "a rank that is through early does not idle",
        "python/distca/trace/timeline.py",
        "idle=_seconds(waits) + window.seconds - (step.end - step.begin),",
        "idle=_seconds(waits),",
        (TIMELINE,),
    ),
]
