"""Faults in what makes packed rows of padded batches."""

from faults.fault import Fault

UNPAD = "python/distca/integrations/hf_unpad.py"
PADDED = "python/distca/integrations/hf_padded.py"
TESTS = "tests/integrations/test_hf_unpad.py"

FAULTS = [
    Fault(
        "unpad: a document that is shared has no row of its own",
        PADDED,
        "most = min(len(a), len(b) - 1)",
        "most = min(len(a), len(b))",
        (TESTS,),
    ),
    Fault(
        "unpad: generation without a cache is collective",
        UNPAD,
        "GenerationMixin.generate = _generate_locally",
        "",
        (TESTS,),
    ),
    Fault(
        "unpad: holes inside of documents are packed away",
        PADDED,
        "end - first != len(places),",
        "False,",
        (TESTS,),
    ),
    Fault(
        "unpad: a branch follows the document before it, not the one with the row before its own",
        PADDED,
        "while own[above][1] >= shared:",
        "while False:",
        ("tests/integrations/test_families.py", TESTS),
    ),
    Fault(
        "unpad: rows of the documents before are not those of a branch",
        PADDED,
        "above = rows[-1][:begin] if begin else _NONE",
        "above = rows[0][:begin] if begin else _NONE",
        ("tests/integrations/test_families.py", TESTS),
    ),
    Fault(
        "unpad: a few rows are shared",
        PADDED,
        "if shared < _FEWEST_SHARED:",
        "if shared < 1:",
        (TESTS,),
    ),
    Fault(
        "unpad: routers' logits stay packed",
        PADDED,
        "return self._padded(value)\n        return value",
        "return value\n        return value",
        (TESTS,),
    ),
    Fault(
        "unpad: positions of text among four axes do not tell documents apart",
        PADDED,
        "position_ids[0] if len(position_ids) == 4 else None",
        "None",
        (TESTS,),
    ),
    Fault(
        "unpad: a pooler gets packed rows",
        UNPAD,
        "    here.is_done = True\n    return here.batch.padded(args[0]), *args[1:]",
        "    here.is_done = True\n    return None",
        (TESTS,),
    ),
    Fault(
        "unpad: a rank that evaluates meets one that trains",
        UNPAD,
        "    if len(set(of_ranks)) == 1:",
        "    if True:",
        (TESTS,),
    ),
    Fault(
        "unpad: the cache of a planned call is nobody's",
        UNPAD,
        "if not torch.is_grad_enabled() and _would_make_cache(model, given):",
        "if False:",
        (TESTS,),
    ),
    Fault(
        "unpad: an empty cache in training leaves attention to each rank",
        UNPAD,
        "makes_cache = not all(_is_empty(cache) for cache in caches)",
        "makes_cache = bool(caches)",
        (TESTS,),
    ),
    Fault(
        "lengths: an error of one rank does not reach the others",
        "python/distca/planner/exchange.py",
        "    except Exception as error:  # whatever",
        "    except InvalidArgumentError as error:  # whatever",
        (TESTS,),
    ),
    Fault(
        "lengths: they travel over the group of all collectives",
        "python/distca/planner/private_group.py",
        "self._backend: Any = connected(name, members.index(dist.get_rank()), len(members), limit, device)",
        "self._backend: Any = dist.group.WORLD",
        (TESTS,),
    ),
]
