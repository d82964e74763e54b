"""Faults of recordings."""

from faults.fault import Fault

RECORDING = ("tests/runtime/test_recording.py",)

FAULTS = [
    Fault(
        "ranks do not compare the plans of a replay",
        "cpp/runtime/protocol.cpp",
        "      calls_.add(static_cast<int64_t>(word));",
        "      calls_.add(static_cast<int64_t>(word & 0));",
        RECORDING,
    ),
    Fault(
        "a recorded step goes through the rounds of its plan",
        "cpp/runtime/recording.cpp",
        "  return recorded;",
        "  return needed;",
        RECORDING,
    ),
    Fault(
        "a recording is replayed twice with one plan",
        "cpp/runtime/context.cpp",
        "  planned_ = nullptr;\n  guarded(",
        "  guarded(",
        RECORDING,
    ),
    Fault(
        "a plan that does not fit has taken step numbers",
        "cpp/runtime/protocol.cpp",
        "  at_ = before_;",
        "",
        RECORDING,
    ),
    Fault(
        "a replan does not compare the scale that its plan says with that of the recorded call",
        "cpp/runtime/context.cpp",
        "    accept(slices[i], steps[i].scores);\n",
        "",
        RECORDING,
    ),
    Fault(
        "a replay takes what the recorded plan left of the scale, not what its own plan leaves",
        "cpp/runtime/context.cpp",
        "[make, this](Recording::Step& s) {\n    s.number = make(s.slice, accept(s.slice, s.scores),",
        "[make, accepted](Recording::Step& s) {\n    s.number = make(s.slice, accepted,",
        RECORDING,
    ),
    Fault(
        "a recording that a refused call has broken off counts as a second refused call",
        "python/distca/recording.py",
        "if core.num_calls == self._calls_before:",
        "if True:",
        RECORDING,
    ),
    Fault(
        "backward tells the number of a recorded forward step",
        "python/distca/caller.py",
        "if context is None or context._is_recording or torch._C._current_graph_task_id() != -1:",
        "if context is None or torch._C._current_graph_task_id() != -1:",
        RECORDING,
    ),
    Fault(
        "autocast casts in a recording whose replays do not",
        "python/distca/inputs.py",
        'check_done_again(context, f"autocast casts {name}", f"pass {name} in {dtype}")',
        "pass",
        RECORDING,
    ),
    Fault(
        "a recording has a gradient of sinks that its replays do not compute",
        "python/distca/inputs.py",
        "if here is None or not here._is_recording:",
        "if True:",
        RECORDING,
    ),
    Fault(
        "steps whose attention ATen computes are recorded",
        "cuda/runtime/device_backend.cpp",
        """require(!queue_->is_recording(), "record: attention is ", aten_->attention(heads),
            ", which cannot be recorded; attention=\\"own\\" can");""",
        "",
        ("tests/cuda/test_emulated_graphs.py",),
    ),
    Fault(
        "steps join the tape of a recording that could not begin",
        "cpp/runtime/protocol.cpp",
        "stream_->set_tape(nullptr);\n    throw;",
        "throw;",
        ("tests/cuda/test_emulated_graphs.py",),
    ),
    Fault(
        "a recorded step that is dropped is a fault",
        "cpp/runtime/context.cpp",
        "s != nullptr && !open_recording_)",
        "s != nullptr)",
        RECORDING,
    ),
    Fault(
        "a replan reads a plan tensor that has gaps",
        "python/distca/recording.py",
        "tensor.dtype != torch.int64 or not tensor.is_contiguous():",
        "tensor.dtype != torch.int64:",
        RECORDING,
    ),
    Fault(
        "a recording does not keep the memory of its queries",
        "cpp/torch/core_attention.cpp",
        "keep_memory(*context, {&q, &k, &v, &out, &lse}, {&sinks, &max_logits}, kept);",
        "",
        RECORDING,
    ),
]
