"""Faults of models of transformers: recurrent layers, attention in chunks, and layers that differ in their heads."""

from faults.fault import Fault

RECURRENT = "tests/integrations/test_hf_recurrent.py"
CUT = "tests/integrations/test_hf_recurrent_cut.py"
GATHERINGS = "tests/plan/test_gathering.py"
GATHERING = "python/distca/planner/gathering.py"
SCANS = "python/distca/scans.py"
OF_SCANS = "tests/integrations/test_hf_scans.py"
HALOS = "tests/plan/test_halos.py"
SPLITS = "tests/plan/test_head_split.py"
FAMILIES = "tests/integrations/test_families.py"
CHUNKS = "tests/plan/test_chunks.py"
HEADS = "tests/plan/test_layer_heads.py"
MODELS = "tests/integrations/test_models.py"
CALLERS = "tests/integrations/test_hf_callers.py"

FAULTS = [
    Fault(
        "a recurrent layer goes on over the borders of documents",
        "python/distca/integrations/hf_recurrent.py",
        "    for length in lengths:\n",
        "    for length in [sum(lengths)]:\n",
        (RECURRENT,),
    ),
    Fault(
        "a cache hands the state of a document to the next one",
        "python/distca/integrations/hf_recurrent.py",
        "    leaves = [None if _is_cache(leaf) else leaf for leaf in leaves]\n",
        "",
        (RECURRENT,),
    ),
    Fault(
        "a recurrent layer runs again in backward without its plan",
        "python/distca/integrations/hf_recurrent.py",
        "        refuse_recomputation(module)\n        return forward(*args, **kwargs)",
        "        return forward(*args, **kwargs)",
        (RECURRENT,),
    ),
    Fault(
        "a recurrent module that lost its forward is not noticed",
        "python/distca/integrations/hf_forward.py",
        "        missed is not None,\n",
        "        False,\n",
        (RECURRENT,),
    ),
    Fault(
        "stages plan a step for each layer without attention",
        "python/distca/apps/train/iterations.py",
        "        layers=shape.attention,\n",
        "        layers=shape.layers,\n",
        ("tests/apps/test_train_split.py",),
    ),
    Fault(
        "ranks of all stages exchange the rows of one",
        "python/distca/integrations/hf_scans.py",
        "return found.row_exchange(plan.ranks)",
        "return found.row_exchange()",
        (CUT,),
    ),
    Fault(
        "a rank without documents runs a recurrent module on nothing",
        GATHERING,
        "for piece in pieces) if here else place.new_zeros(1)\n",
        "for piece in pieces)\n",
        (CUT, GATHERINGS),
    ),
    Fault(
        "rows of a branch come back from another branch",
        GATHERING,
        "        if piece.rank == rank and piece.is_own:\n",
        "        if piece.rank == rank:\n",
        (GATHERINGS, CUT),
    ),
    Fault(
        "rows that are shared go back to where they are",
        GATHERING,
        "    give, back = _own(come), _own(go)\n",
        "    give, back = come, _own(go)\n",
        (GATHERINGS, CUT),
    ),
    Fault(
        "all cut documents go to the first rank",
        GATHERING,
        "key=lambda rank: load[rank] - has[rank])",
        "key=lambda rank: 0)",
        (GATHERINGS,),
    ),
    Fault(
        "gradients of rows that moved do not go back",
        "python/distca/connect/row_exchange.py",
        "return None, None, *_Moved.apply(ctx.exchange, ctx.shapes, *gradients)",
        "return None, None, *_Moved.apply(ctx.exchange, ctx.shapes, *map(torch.zeros_like, gradients))",
        (CUT,),
    ),
    Fault(
        "what looks like rows to one rank is taken for rows",
        "python/distca/integrations/hf_recurrent.py",
        "exchange.move(told, each, each).all(dim=0).tolist()",
        "mine",
        (CUT,),
    ),
    Fault(
        "rows in front of a piece are those of another rank's piece",
        "python/distca/planner/halos.py",
        "row_numbers((came.get(part, part.row), part) for part in before)",
        "row_numbers((part.row, part) for part in before)",
        (HALOS, CUT),
    ),
    Fault(
        "a convolution looks at the rows of the document before",
        "python/distca/planner/halos.py",
        '    zeros = torch.tensor([num_rows + sum(num_rows_of(come))], device="cpu")',
        '    zeros = torch.tensor([num_rows + sum(num_rows_of(come)) - 1], device="cpu")',
        (HALOS, RECURRENT),
    ),
    Fault(
        "rows of shared prompts go to other ranks once for each document",
        "python/distca/planner/head_split.py",
        "for p in pieces if p.rank == rank).unique()",
        "for p in pieces if p.rank == rank).sort().values",
        (SPLITS,),
    ),
    Fault(
        "the first rank computes all heads of cut documents",
        "python/distca/planner/head_split.py",
        "return range(num_heads * rank // num_ranks, num_heads * (rank + 1) // num_ranks)",
        "return range(num_heads if rank else 0, num_heads)",
        (SPLITS,),
    ),
    Fault(
        "heads of a rank that share others unevenly take them in turn",
        SCANS,
        "    if value.shape[1] == 1 or (heads.start % serves == 0 and heads.stop % serves == 0):\n",
        "    if True:\n",
        (OF_SCANS,),
    ),
    Fault(
        "parameters of heads are those of the first heads on every rank",
        SCANS,
        "kept = {name: value[mine.start : mine.stop]",
        "kept = {name: value[: len(mine)]",
        (OF_SCANS, CUT),
    ),
    Fault(
        "a rank without heads leaves the exchange of gradients out",
        SCANS,
        "computed = _nothing(here, of_heads, like)",
        "computed = _nothing(here, of_heads, like).detach()",
        (OF_SCANS,),
    ),
    Fault(
        "functions that others have replaced run over the borders of documents",
        "python/distca/integrations/hf_recurrent.py",
        "        if called == functions:\n",
        "        if True:\n",
        (RECURRENT,),
    ),
    Fault(
        "what several ranks send is put together in a wrong order",
        "python/distca/connect/row_exchange.py",
        "        return _by_rank(moved, len(parts))",
        "        return _by_rank(moved, len(parts))[::-1]",
        (OF_SCANS, CUT),
    ),
    Fault(
        "chunks are counted from the first row of a segment",
        "python/distca/planner/derived.py",
        "cut.append((first[document] + chunk, max(",
        "cut.append((first[document] + chunk - begin // rows, max(",
        (CHUNKS,),
    ),
    Fault(
        "a layer that attends in chunks takes the plan of whole documents",
        "python/distca/integrations/hf.py",
        "    return Chunk(size)",
        "    return None",
        (FAMILIES,),
    ),
    Fault(
        "queries that are scaled by the row stay so",
        "python/distca/integrations/hf.py",
        "    query = _by_position(module, query, plan)\n",
        "",
        (FAMILIES,),
    ),
    Fault(
        "all windows have the heads of the first",
        "python/distca/planner/planning.py",
        "        of_window = heads[window] if isinstance(heads, Mapping) else heads\n",
        "        of_window = next(iter(heads.values())) if isinstance(heads, Mapping) else heads\n",
        (HEADS,),
    ),
    Fault(
        "the heap is sized for the heads with the fewest bytes",
        "python/distca/heads.py",
        "(-shape.row_bytes, ",
        "(shape.row_bytes, ",
        (HEADS,),
    ),
    Fault(
        "heads by window are not divided among tensor ranks",
        "python/distca/heads.py",
        "{window: of_window.divided(tensor_ranks) for window, of_window in heads.items()}",
        "dict(heads)",
        ("tests/pipeline/test_meshes.py",),
    ),
    Fault(
        "the kernel is chosen for some layers alone",
        "python/distca/connect/options.py",
        'return "own" if "own" in choices else "flash"',
        'return "flash" if "flash" in choices else "own"',
        (HEADS,),
    ),
    Fault(
        "layers of one window that differ in their heads get the plan of the first",
        "python/distca/integrations/hf_models.py",
        "            len(first_layers) > 1,\n",
        "            False,\n",
        (MODELS,),
    ),
    Fault(
        "a base model keeps itself",
        "python/distca/integrations/hf_limits.py",
        "            weakref.WeakSet(checkpointed),\n",
        "            checkpointed,  # type: ignore[arg-type]\n",
        (CALLERS,),
    ),
    Fault(
        "the heads of a layer are those of the whole configuration",
        "python/distca/integrations/hf_models.py",
        "    config = _config_of_layer(config, layer)\n",
        "    config = _config_of_layer(config, 0)\n",
        (MODELS,),
    ),
    Fault(
        "rows that are left see what the first rows see",
        "python/distca/integrations/hf_masks.py",
        '"q_offset": offset + rows.start',
        '"q_offset": offset',
        (CALLERS,),
    ),
    Fault(
        "rows that are left have no mask but a causal one of their own",
        "python/distca/integrations/hf_masks.py",
        'skip = is_last and self._request.get("allow_is_causal_skip", True)',
        'skip = self._request.get("allow_is_causal_skip", True)',
        (CALLERS,),
    ),
    Fault(
        "a plan is taken where the model has left rows out",
        "python/distca/integrations/hf.py",
        "asked is not None and asked.is_part,",
        "False,",
        (CALLERS,),
    ),
    Fault(
        "a row alone that is not the last one sees all keys",
        "python/distca/integrations/hf_masks.py",
        "is_last = len(rows) == 1 and rows.stop ==",
        "is_last = len(rows) == 1 and rows.stop <=",
        (CALLERS,),
    ),
    Fault(
        "a batch is planned with one head shape for layers that differ",
        "python/distca/integrations/hf_batches.py",
        "isinstance(context.layer_heads, Heads) and differ_in_heads(model.config)",
        "False",
        (MODELS,),
    ),
    Fault(
        "windows of one effect are taken for each other though their layers have other heads",
        "python/distca/planner/plan.py",
        "if self._exact or len({plan.heads for plan in self.values()}) > 1:",
        "if self._exact:",
        (HEADS,),
    ),
    Fault(
        "which heads are a context's depends on the process",
        "python/distca/heads.py",
        "key=lambda shape: (-shape.row_bytes, shape.numbers)",
        "key=lambda shape: (-shape.row_bytes, -shape.dtype_number)",
        (HEADS,),
    ),
]
