"""Faults of the largest logits."""

from faults.fault import Fault

STEPS = "tests/runtime/test_max_logits.py"
LAYERS = "tests/runtime/test_max_logits_of_layers.py"
KERNELS = "tests/cuda/test_kernels_on_host.py"
MEGATRON = "tests/integrations/test_megatron.py"
FORWARD = "cpp/attention/cpu_forward.cpp"
DISPATCHER = "cpp/runtime/dispatcher.cpp"
SERVER = "cpp/runtime/server_tasks.cpp"
OPERATORS = "python/distca/ops.py"
STEP = "python/distca/steps.py"
FINDER = "python/distca/max_logits.py"

FAULTS = [
    Fault(
        "largest logits: that of a row is the base of its exponents",
        "cpp/attention/micro_softmax.h",
        "store(state.row_max + lane, larger(load(state.row_max + lane), found));",
        "store(state.row_max + lane, new_base);",
        (STEPS,),
    ),
    Fault(
        "largest logits: that of a row is of its last step of keys",
        "cpp/attention/micro_softmax.h",
        "store(state.row_max + lane, larger(load(state.row_max + lane), found));",
        "store(state.row_max + lane, found);",
        (STEPS,),
    ),
    Fault(
        "largest logits: rows without numbers do not count",
        FORWARD,
        "if (std::isnan(row_sum[i])) return row_sum[i];",
        "",
        (STEPS,),
    ),
    Fault(
        "largest logits: a number replaces NaN",
        FORWARD,
        "while (!std::isnan(now) && !(raised <= now)) {",
        "while (!(raised <= now)) {",
        (STEPS,),
    ),
    Fault(
        "largest logits: rows of the padding of a tile count",
        FORWARD,
        "largest_score(rows_of(t), buffers.row_max",
        "largest_score(kTileRows, buffers.row_max",
        (STEPS,),
    ),
    Fault(
        "largest logits: heads of a group count from the first one on",
        SERVER,
        "task.max_logits = arena.max_logits.found_for(t.home) + heads.begin * arena.heads.group_heads();",
        "task.max_logits = arena.max_logits.found_for(t.home);",
        (STEPS,),
    ),
    Fault(
        "largest logits: a server finds them for itself",
        SERVER,
        "arena.max_logits.found_for(t.home)",
        "arena.max_logits.found_for(slice.header().rank)",
        (STEPS,),
    ),
    Fault(
        "largest logits: they begin at 0",
        DISPATCHER,
        "backend_.fill(step.max_logits.found(), step.max_logits.extent_of_found(), Fill::kMinusInfinity);",
        "backend_.fill(step.max_logits.found(), step.max_logits.extent_of_found(), Fill::kZero);",
        (STEPS,),
    ),
    Fault(
        "largest logits: what a server found goes where another's belongs",
        DISPATCHER,
        "m.target_of(protocol_.rank())",
        "m.target_of(home)",
        (STEPS,),
    ),
    Fault(
        "largest logits: a home forgets its own",
        DISPATCHER,
        "max_logits_.assign(1, step.max_logits.found_for(protocol_.rank()));",
        "max_logits_.assign(1, step.max_logits.found_for((protocol_.rank() + 1) % protocol_.num_ranks()));",
        (STEPS,),
    ),
    Fault(
        "largest logits: a home believes ranks that only sent it rows to compute",
        DISPATCHER,
        "if (w.direction == static_cast<int64_t>(Direction::kOut)) max_logits_.push_back(",
        "max_logits_.push_back(",
        (STEPS,),
    ),
    Fault(
        "largest logits: a step that fails returns those of some rows",
        DISPATCHER,
        """if (step.max_logits.is_asked())
    protocol_.poison(step.max_logits.row(step.returned_max_logits), step.max_logits.extent_of_row());""",
        "",
        (STEPS,),
    ),
    Fault(
        "largest logits: ranks do not compare whether they ask",
        "cpp/runtime/protocol.cpp",
        "return uint64_t{finds_max_logits} << 63 | cap << 32",
        "return cap << 32",
        (STEPS,),
    ),
    Fault(
        "largest logits: more heads than there is room for",
        "cpp/torch/core_attention.cpp",
        "require(heads.q_heads <= runtime::MaxLogits::kMostHeads,",
        "require(heads.q_heads >= 0,",
        (STEPS,),
    ),
    Fault(
        "largest logits: the host takes the first that it is told",
        "cpp/runtime/backend.cpp",
        "if (!(term[i] <= to[i]) && !std::isnan(to[i])) to[i] = term[i];",
        "if (std::isnan(term[i])) to[i] = term[i];",
        (STEPS,),
    ),
    Fault(
        "largest logits: flash attention is asked for them",
        "cpp/torch/core_attention.cpp",
        "require(context->backend().finds_max_logits(), kNoMaxLogits);",
        "",
        (STEPS,),
    ),
    Fault(
        "largest logits: they are differentiable",
        OPERATORS,
        "ctx.mark_non_differentiable(*others)",
        "",
        (STEPS,),
    ),
    Fault(
        "largest logits: those of a step in parts are differentiable",
        STEP,
        "ctx.mark_non_differentiable(*max_logits)",
        "",
        (STEPS,),
    ),
    Fault(
        "largest logits: a server asks for none",
        "python/distca/serving.py",
        "return ops.core_attention_all(q, k, v, plan.tensor, retained_bytes=0, max_logits=max_logits, **keywords)",
        "return ops.core_attention_all(q, k, v, plan.tensor, retained_bytes=0, **keywords)",
        (STEPS,),
    ),
    Fault(
        "largest logits: Megatron gets those of the last micro-batch",
        "python/distca/integrations/megatron.py",
        "self.current_max_attn_logits = found if before is None else torch.maximum(before, found)",
        "self.current_max_attn_logits = found",
        (MEGATRON,),
    ),
    Fault(
        "largest logits: the GPU's kernel takes a capped one for one without a cap",
        "cuda/attention/tables.h",
        "if (entry.map.cap != 0.f) return mapped;",
        "",
        (KERNELS,),
    ),
    Fault(
        "largest logits: the GPU's kernel multiplies by a negative scale",
        "cuda/attention/tables.h",
        "return entry.scale < 0.f ? -entry.scale * mapped : entry.scale * mapped;",
        "return entry.scale * mapped;",
        (KERNELS,),
    ),
    Fault(
        "largest logits: the GPU's work list forgets where they go",
        "cuda/attention/work_list.cpp",
        "entry.max_logits = task.max_logits;",
        "",
        (KERNELS,),
    ),
    Fault(
        "largest logits: the GPU's kernel compares all words as if they had a sign",
        "cuda/attention/tables.h",
        "return {word, word <= 0x7fffffffu};",
        "return {word, true};",
        (STEPS,),
    ),
    Fault(
        "largest logits: nobody counts the steps that did not ask",
        "cpp/runtime/context.cpp",
        "if constexpr (kIsForward) num_without_max_logits_ += tensors.max_logits == nullptr ? 1 : 0;",
        "",
        (LAYERS,),
    ),
    Fault(
        "largest logits: those of before count again",
        FINDER,
        "self.clear()",
        "pass",
        (LAYERS,),
    ),
    Fault(
        "largest logits: steps of layers that a stage lacks count",
        FINDER,
        "if key != NO_LAYER_OF_STAGE:",
        "if True:",
        ("tests/pipeline/test_mixed_models.py",),
    ),
    Fault(
        "largest logits: a rank that serves asks for none where the context finds them",
        "python/distca/serving.py",
        "max_logits = max_logits or finder_of(context) is not None",
        "max_logits = max_logits",
        (LAYERS,),
    ),
    Fault(
        "largest logits: the GPU counts those that it is told by another part of the table",
        "cuda/runtime/home_rows.cu",
        "largest_kernel<<<blocks, kThreads, 0, stream>>>(table.counts() + part,",
        "largest_kernel<<<blocks, kThreads, 0, stream>>>(table.counts(),",
        (STEPS,),
    ),
]
