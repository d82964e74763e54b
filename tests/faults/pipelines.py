"""Faults of pipelines: tick tables, plans of ticks, and ticks under way."""

from faults.fault import Fault

TABLE = "tests/pipeline/test_tick_table.py"
PLANS = "tests/pipeline/test_pipeline_plans.py"
MEMORY = "tests/pipeline/test_pipeline_memory.py"
AHEAD = "tests/pipeline/test_plans_ahead.py"
MODEL = "tests/pipeline/test_pipelined_model.py"
MISALIGNED = "tests/pipeline/test_misaligned_ticks.py"
HALVED_PLANS = "tests/pipeline/test_halved_plans.py"
HALVED_MODEL = "tests/pipeline/test_halved_model.py"
MISALIGNED_HALVES = "tests/pipeline/test_misaligned_halves.py"
SERVED = "tests/operators/test_served_ping_pong.py"
MESHES = "tests/pipeline/test_meshes.py"
TENSOR_FAULTS = "tests/pipeline/test_tensor_faults.py"
SCORES = "tests/runtime/test_scores_of_documents.py"
FEATURES = "tests/runtime/test_core_features.py"

FAULTS = [
    Fault(
        "a backward tick comes a tick too late",
        "python/distca/pipeline/tick_table.py",
        "first is None or done_by_last[first] < forward_ticks",
        "first is None or done_by_last[first] < forward_ticks - 1",
        (TABLE,),
    ),
    Fault(
        "interleaved chunks go backward in the order of forward",
        "python/distca/pipeline/tick_table.py",
        'chunk if phase == "forward" else chunks - 1 - chunk',
        "chunk",
        (TABLE,),
    ),
    Fault(
        "the last stage hands its chunks to nobody",
        "python/distca/pipeline/tick_table.py",
        "        if not 0 <= position < self.stages * self.chunks:",
        "        if not 0 <= position < self.stages * self.chunks or neighbour == self.stages - 1:",
        (TABLE,),
    ),
    Fault(
        "a stage may hold one micro-batch more than its limit",
        "python/distca/pipeline/tick_table.py",
        "n - backward[s] < most[s]",
        "n - backward[s] <= most[s]",
        (TABLE,),
    ),
    Fault(
        "a limited table is searched among too few states",
        "python/distca/pipeline/tick_table.py",
        "_KEPT = 256",
        "_KEPT = 2",
        (TABLE,),
    ),
    Fault(
        "the first stage goes backward before the second",
        "python/distca/pipeline/tick_table.py",
        "given = (*backward[1:], microbatches)",
        "given = (microbatches,) * stages",
        (TABLE,),
    ),
    Fault(
        "mirrored ranks may have other speeds",
        "python/distca/pipeline/step_planner.py",
        "if speeds is not None and any(speeds[rank] != speeds[other] for rank, other in enumerate(servers)):",
        "if speeds is not None and len(speeds) < len(servers):",
        (PLANS,),
    ),
    Fault(
        "a mirrored schedule keeps its servers",
        "python/distca/pipeline/step_planner.py",
        "                self._mirror[rank] = other",
        "                self._mirror[rank] = rank",
        (PLANS,),
    ),
    Fault(
        "shallow stages have rows in all steps",
        "python/distca/pipeline/plans.py",
        "        if work is None or self.layers[stage] <= step:",
        "        if work is None:",
        (PLANS,),
    ),
    Fault(
        "a rank holds as many rows of every micro-batch",
        "python/distca/pipeline/memory.py",
        "to[tick] += self._rows[work.microbatch]",
        "to[tick] += self._rows[0]",
        (MEMORY,),
    ),
    Fault(
        "what is run again is not counted",
        "python/distca/pipeline/memory.py",
        "redone * again.activations",
        "0 * again.activations",
        (MEMORY,),
    ),
    Fault(
        "1F1B frees a micro-batch before it warms up",
        "python/distca/pipeline/memory.py",
        "taken[warm - 1 :]",
        "taken[warm - 2 :]",
        (MEMORY,),
    ),
    Fault(
        "an iteration ends only when all loaders have ended",
        "python/distca/pipeline/plans_ahead.py",
        "return ENDED in counts",
        "return max(counts) == ENDED",
        (AHEAD,),
    ),
    Fault(
        "other documents of another stage are not seen",
        "python/distca/pipeline/plans_ahead.py",
        "if self._loaded is not None and self._loaded != told[self._place]:",
        "if self._loaded is not None and len(self._loaded) != len(told[self._place]):",
        (AHEAD,),
    ),
    Fault(
        "recomputation takes the plan of the forward tick",
        "python/distca/pipeline/tick_plan.py",
        "        plans, step = ticks.plans, tick.take_forward(half)\n        backward = tick.number",
        "        plans, step = ticks.plans, tick.take_forward(half)\n        backward = 0",
        (MODEL,),
    ),
    Fault(
        "a tick may be left before its end",
        "python/distca/pipeline/current_tick.py",
        "        if taken == num_steps:\n            return",
        "        if taken <= num_steps:\n            return",
        (MISALIGNED,),
    ),
    # ---- halves
    Fault(
        "each half has the plans of the other",
        "python/distca/pipeline/plans.py",
        "len(self.parts) * step + self.parts.index(half)",
        "len(self.parts) * step + self.parts[::-1].index(half)",
        (HALVED_PLANS,),
    ),
    Fault(
        "what is run again of a half is a whole step",
        "python/distca/pipeline/plans.py",
        "made if part is None else made.for_parts(part)",
        "made",
        (HALVED_MODEL,),
    ),
    Fault(
        "only one half is run again on ranks that serve",
        "python/distca/calls.py",
        "        if mirrored.begins_step:",
        "        if mirrored.begins_step and half != 0:",
        (SERVED,),
    ),
    Fault(
        "groups are run again once backward has begun in them",
        "python/distca/calls.py",
        "    group_of_last = {end - 1: range(begin, end) for begin, end in groups}",
        "    group_of_last = {begin: range(begin, end) for begin, end in groups}",
        (SERVED,),
    ),
    Fault(
        "a half may end before its steps",
        "python/distca/pipeline/current_tick.py",
        "        if taken == needed:\n            return",
        "        if taken <= needed:\n            return",
        (MISALIGNED_HALVES,),
    ),
    Fault(
        "nobody asks whether a half has taken its steps",
        "python/distca/pingpong/ping_pong.py",
        "                leaf.check_half_over()",
        "                pass",
        (MISALIGNED_HALVES,),
    ),
    Fault(
        "nobody says whether plans and model have halves",
        "python/distca/pipeline/tick_plan.py",
        "        self._check_halves(tick.name)\n        plans, step",
        "        plans, step",
        (MISALIGNED_HALVES,),
    ),
    Fault(
        "a half without rows gets no gradient",
        "python/distca/planner/halves.py",
        "    return torch.cat([*own, parts[0].new_zeros(zeros)], dim)",
        "    return torch.cat([*(t if t.numel() else t.detach() for t in own), parts[0].new_zeros(zeros)], dim)",
        (HALVED_PLANS,),
    ),
    Fault(
        "rows of padding get those of the first document",
        "python/distca/planner/halves.py",
        "    of_row = torch.full((halves[0]._whole.num_rows(rank),), len(rows))",
        "    of_row = torch.zeros(halves[0]._whole.num_rows(rank), dtype=torch.int64)",
        (HALVED_PLANS,),
    ),
    Fault(
        "halves of another micro-batch are taken",
        "python/distca/pipeline/halves.py",
        "if not all(half.is_of(layout) for half in pair) or",
        "if",
        (HALVED_PLANS,),
    ),
    Fault(
        "the end of recomputation is told as an error",
        "python/distca/errors.py",
        "    except _StopRecomputationError:",
        "    except KeyboardInterrupt:",
        ("tests/operators/test_save_core_attention.py",),
    ),
    Fault(
        "plans with labels may have any rows in backward",
        "cpp/runtime/context_plans.cpp",
        "    return same_document && x.begin == y.begin && x.end == y.end;",
        "    return are_labelled || (same_document && x.begin == y.begin && x.end == y.end);",
        ("tests/pipeline/test_labels.py",),
    ),
    Fault(
        "a label is not in the digest",
        "cpp/plan/plan.cpp",
        "  header.label = label_words(options.label);",
        "  header.label = label_words(options.label.substr(0, 4));",
        ("tests/plan/test_join.py",),
    ),
    Fault(
        "a pipeline has the stages of all tensor ranks",
        "python/distca/connect/place.py",
        "    own = [pipe for pipe in pipelines if pipe[0] in ranks]",
        "    own = [[rank for rank in pipe if rank in ranks] or ranks[:1] for pipe in pipelines]",
        (MESHES,),
    ),
    Fault(
        "pipelines may mix tensor ranks",
        "python/distca/connect/place.py",
        "        if len({tensor_rank_of[rank] for rank in pipe}) > 1:",
        "        if len({tensor_rank_of[rank] for rank in pipe}) > 2:",
        (MESHES,),
    ),
    Fault(
        "key heads may be shared by tensor ranks whose query heads need two",
        "python/distca/heads.py",
        "(self.kv % tensor_ranks and tensor_ranks % self.kv)",
        "(self.kv % tensor_ranks and tensor_ranks < self.kv)",
        (MESHES,),
    ),
    Fault(
        "a tensor rank that hangs up has not died",
        "python/distca/connect/fault_watch.py",
        "        if not content:\n            self._hear(",
        "        if not content:\n            str(",
        (TENSOR_FAULTS,),
    ),
    Fault(
        "other tensor ranks are not told of a fault",
        "cpp/runtime/protocol_faults.cpp",
        "if (on_fault_ && fault_.code != FaultCode::kElsewhere)",
        "if (on_fault_ && fault_.code == FaultCode::kElsewhere)",
        (TENSOR_FAULTS,),
    ),
    Fault(
        "a process keeps news of other contexts to itself",
        "cpp/runtime/protocol_faults.cpp",
        "  if (!transport_->is_collective()) tell_peers(fault);  // otherwise",
        "  if (transport_->is_collective()) tell_peers(fault);  // otherwise",
        (TENSOR_FAULTS,),
    ),
    Fault(
        "messages name a peer by the global rank of this rank",
        "cpp/runtime/protocol.cpp",
        'std::string Protocol::name_of(int64_t rank) const { return message("rank ", rank, global_name(rank)); }',
        'std::string Protocol::name_of(int64_t rank) const { return message("rank ", rank, global_name(0)); }',
        (TENSOR_FAULTS,),
    ),
    # ---- documents of other layers in one plan
    Fault(
        "a stage takes the layers of the first one",
        "python/distca/pipeline/plans.py",
        "sum(self.layers) * work.chunk + sum(self.layers[:stage]) + step",
        "sum(self.layers) * work.chunk + step",
        (PLANS,),
    ),
    Fault(
        "a second chunk takes the layers of the first one",
        "python/distca/pipeline/plans.py",
        "sum(self.layers) * work.chunk + sum(self.layers[:stage]) + step",
        "sum(self.layers[:stage]) + step",
        (PLANS,),
    ),
    Fault(
        "all documents have the first mask in the planner",
        "cpp/plan/options.h",
        "scores[static_cast<size_t>(scores_of(number))].mask()};",
        "scores[0].mask()};",
        (SCORES,),
    ),
    Fault(
        "a server takes the first scores for all documents",
        "cpp/runtime/server_tasks.cpp",
        "  group.scores = g.scores;",
        "  group.scores = 0;",
        (SCORES,),
    ),
    Fault(
        "a server takes the scale of its own call where the plan has one",
        "cpp/runtime/server_tasks.cpp",
        "s.scale == plan::kOfTheCall ? scores.scale : plan::score_value(s.scale)",
        "scores.scale",
        (SCORES,),
    ),
    Fault(
        "a call may have another scale than the plan",
        "cpp/runtime/context_plans.cpp",
        '    if (row.scale != plan::kOfTheCall) check("scale", s, row.scale, scores.scale);',
        "",
        (SCORES,),
    ),
    Fault(
        "ranks compare scales that the plan says",
        "cpp/runtime/context_plans.cpp",
        "  if (first.scale != plan::kOfTheCall) scores.scale = 0.f;",
        "",
        (SCORES,),
    ),
    Fault(
        "a sink leaves the output as it is",
        "cpp/attention/sinks.cpp",
        "1.f / (1.f + std::exp(sinks[h] - without))",
        "1.f",
        (FEATURES,),
    ),
    Fault(
        "a replay keeps the sinks of its recording",
        "cpp/runtime/dispatcher.cpp",
        "step.phase == Phase::kForward && step.scores.sinks != nullptr)",
        "step.phase == Phase::kForward && step.scores.sinks != nullptr && !recording_)",
        ("tests/runtime/test_recording.py",),
    ),
]
