"""Faults of the search for set-ups, of the interval and the verdict, and of `distca plan --compare`."""

from faults.fault import Fault

SEARCH = "tests/simulator/test_search.py"
COMMAND = "tests/apps/test_simulate_search.py"
ROOM = "python/distca/simulator/"
COMPARE = "python/distca/apps/plan/compare.py"

FAULTS = [
    Fault(
        "the search takes the slowest set-up",
        ROOM + "search.py",
        "return total if total < limit else None",
        "return total if total < limit or limit < math.inf else None",
        (SEARCH,),
    ),
    Fault(
        "the search leaves out set-ups whose bound is near the best",
        ROOM + "search.py",
        "work + end * len(cases) >= best[0]",
        "2 * (work + end * len(cases)) >= best[0]",
        (SEARCH,),
    ),
    Fault(
        "a set-up that does not fit is the best",
        ROOM + "search.py",
        "if max(program.memory.total for program in programs) > cases[0].cluster.device.memory:",
        "if max(program.memory.states for program in programs) > cases[0].cluster.device.memory:",
        (SEARCH,),
    ),
    Fault(
        "recomputation is left out where nothing fits without it",
        ROOM + "search.py",
        "(recompute and without in fits)",
        "(recompute and without not in fits)",
        (SEARCH,),
    ),
    Fault(
        "sequences are dealt to one micro-batch too few",
        ROOM + "search.py",
        "each = len(sequences) // (parallelism.micro_batches * parallelism.data)",
        "each = len(sequences) // parallelism.data",
        (SEARCH,),
    ),
    Fault(
        "a bound counts the activations of all stages",
        ROOM + "bounds.py",
        "case.activation_bytes(int(rows), min(shape.micro_batches, shape.pipeline))",
        "case.activation_bytes(int(rows), shape.micro_batches * shape.pipeline)",
        (SEARCH,),
    ),
    Fault(
        "a bound takes the mean rate of products",
        ROOM + "bounds.py",
        "return everything * (1 - _ROUNDING)",
        "return everything * 1.5",
        (SEARCH,),
    ),
    Fault(
        "the interval has the error on the wrong side",
        ROOM + "validation.py",
        "return Interval(modelled / (1 + error), modelled / (1 - error))",
        "return Interval(modelled * (1 - error), modelled * (1 + error))",
        (SEARCH,),
    ),
    Fault(
        "the interval has the least error",
        ROOM + "validation.py",
        'unlike=max(abs(one["error"]) for one in steps)',
        'unlike=min(abs(one["error"]) for one in steps)',
        (SEARCH,),
    ),
    Fault(
        "distca pays if the errors allow it",
        ROOM + "verdict.py",
        "return self.interval.least > 1",
        "return self.interval.most > 1",
        (SEARCH, COMMAND),
    ),
    Fault(
        "equal attention is no reason",
        ROOM + "verdict.py",
        "max(pairs) <= (1 + LITTLE) * sum(pairs) / len(pairs)",
        "max(pairs) < sum(pairs) / len(pairs)",
        (SEARCH, COMMAND),
    ),
    Fault(
        "the comparison counts the bytes of weights",
        COMPARE,
        "moved = network.bytes_inside + network.bytes_between - weights.bytes_inside - weights.bytes_between",
        "moved = network.bytes_inside + network.bytes_between",
        (COMMAND,),
    ),
    Fault(
        "the comparison says nothing to gain of unequal ranks",
        COMPARE,
        "alone.attention <= 1 + LITTLE",
        "alone.attention >= 1",
        (COMMAND,),
    ),
]
