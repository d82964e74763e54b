"""Faults of the simulator's strategies."""

from faults.fault import Fault

RINGS = "tests/simulator/test_context_parallel.py"
DEALT = "tests/simulator/test_whole_documents.py"
ROOM = "python/distca/simulator/strategies/"

FAULTS = [
    Fault(
        "differencing joins the largest parts",
        ROOM + "karmarkar_karp.py",
        "pairs = zip(one.parts, reversed(other.parts), strict=True)",
        "pairs = zip(one.parts, other.parts, strict=True)",
        (DEALT,),
    ),
    Fault(
        "the cost of a document is its tokens",
        ROOM + "karmarkar_karp.py",
        "2 * weights * length + 2 * model.layers * model.q_heads * model.head_dim * length**2",
        "2 * weights * length",
        (DEALT,),
    ),
    Fault(
        "a ring passes no gradients on",
        ROOM + "ring.py",
        "if not forward and step > 0:",
        "if False:",
        (RINGS,),
    ),
    Fault(
        "a ring passes keys on in its last step",
        ROOM + "ring.py",
        "travels = rows[source] if step < size - 1 else 0",
        "travels = rows[source]",
        (RINGS,),
    ),
    Fault(
        "a later rank's keys are seen in a ring",
        ROOM + "ring.py",
        "theirs.get(document, []) if e <= begin)",
        "theirs.get(document, []))",
        (RINGS,),
    ),
    Fault(
        "a step of a ring does not wait for its messages",
        "python/distca/simulator/machine.py",
        "self.wait_until(passed, call)",
        "self.wait_until(self.now, call)",
        (RINGS,),
    ),
    Fault(
        "Ulysses does not repeat key/value heads",
        ROOM + "ulysses.py",
        "kv = max(heads.kv, ranks)",
        "kv = heads.kv",
        (RINGS,),
    ),
    Fault(
        "backward of Ulysses sends nothing",
        ROOM + "ulysses.py",
        "(homeward.T.contiguous(), inward.T.contiguous())",
        "(0 * homeward, 0 * inward)",
        (RINGS,),
    ),
]
