"""Faults of models of transformers: recurrent layers, and attention in chunks."""

from faults.fault import Fault

RECURRENT = "tests/integrations/test_hf_recurrent.py"
FAMILIES = "tests/integrations/test_families.py"
CHUNKS = "tests/plan/test_chunks.py"

FAULTS = [
    Fault(
        "a recurrent layer goes on over the borders of documents",
        "python/distca/integrations/hf_recurrent.py",
        "    for length in lengths:\n",
        "    for length in [num_rows]:\n",
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
        "recurrent layers take documents that are cut between ranks",
        "python/distca/integrations/hf_models.py",
        "    if layout is None or cut is not None:",
        "    if False:",
        (FAMILIES,),
    ),
    Fault(
        "chunks are counted from the first row of a segment",
        "python/distca/planner/layout.py",
        "                    of_rank.append((first[document] + chunk, max(begin - start, 0), min(end - start, rows)))",
        "                    of_rank.append((first[document] + chunk - begin // rows, max(begin - start, 0), "
        "min(end - start, rows)))",
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
]
