"""Faults of the simulator's strategies."""

from faults.fault import Fault

RINGS = "tests/simulator/test_context_parallel.py"
DEALT = "tests/simulator/test_whole_documents.py"
NETWORK = "tests/simulator/test_network.py"
WLB = "tests/simulator/test_wlb.py"
OPTIONS = "tests/simulator/test_distca_options.py"
HYBRID = "tests/simulator/test_hybrid_context.py"
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
        "a message to one peer does not wait for its credit",
        "python/distca/simulator/network.py",
        "torch.maximum(sent, credits[peers.target] + leaves)",
        "sent",
        (NETWORK,),
    ),
    Fault(
        "a message from one peer does not wait for that peer's port",
        "python/distca/simulator/network.py",
        "+ comes, sent[peers.source])",
        "+ comes, self.into)",
        (NETWORK,),
    ),
    Fault(
        "several messages of a rank are taken for one",
        "python/distca/simulator/network.py",
        "if bool((some.sum(-1) > 1).any()) or bool((some.sum(-2) > 1).any()):",
        "if bool((some.sum(-1) > 1).any()):",
        (NETWORK,),
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
    Fault(
        "outliers leave one by one",
        ROOM + "outliers.py",
        "if len(queue) >= self._count:",
        "if queue:",
        (WLB,),
    ),
    Fault(
        "the last outlier to arrive leaves first",
        ROOM + "outliers.py",
        "ready += [queue.popleft() for _ in range(self._count)]",
        "ready += [queue.pop() for _ in range(self._count)]",
        (WLB,),
    ),
    Fault(
        "outliers that wait at the end are lost",
        ROOM + "outliers.py",
        "ready += queues.empty()",
        "queues.empty()",
        (WLB,),
    ),
    Fault(
        "a micro-batch may be too long",
        ROOM + "outliers.py",
        "if tokens[least] + length > longest:\n            left.append(length)",
        "if False:\n            left.append(length)",
        (WLB,),
    ),
    Fault(
        "every sequence is cut by document",
        ROOM + "wlb.py",
        "if context > 1 and lengths:",
        "if False:",
        (WLB,),
    ),
    Fault(
        "a document has as many ranks as hold it",
        ROOM + "hybrid_schedule.py",
        "return 1 << (-(-length // most_tokens) - 1).bit_length()",
        "return -(-length // most_tokens)",
        (HYBRID,),
    ),
    Fault(
        "ranks stay idle in a round",
        ROOM + "hybrid_schedule.py",
        "    _fill(groups, ranks)\n    return groups, left",
        "    return groups, left",
        (HYBRID,),
    ),
    Fault(
        "a round is not trimmed",
        ROOM + "hybrid_schedule.py",
        "left += _trim(groups, loads, ranks)",
        "left += []",
        (HYBRID,),
    ),
    Fault(
        "a document joins the group with most load",
        ROOM + "hybrid_schedule.py",
        "group = min((group for group in groups if group.size == size), key=lambda group: group.load)",
        "group = max((group for group in groups if group.size == size), key=lambda group: group.load)",
        (HYBRID,),
    ),
    Fault(
        "of several steps only the first is simulated",
        "python/distca/simulator/simulate.py",
        "play(name, STRATEGIES[name].prepare_steps(cases), cases, record=record)",
        "play(name, STRATEGIES[name].prepare_steps(cases[:1]), cases, record=record)",
        ("tests/simulator/test_simulate.py",),
    ),
    Fault(
        "a move of the release is charged the keys that it needs",
        ROOM + "distca_paper.py",
        "there[home, item.server] += rows * keys * (moved or first)",
        "there[home, item.server] += min(rows, item.end) * keys * (moved or first)",
        (OPTIONS,),
    ),
    Fault(
        "the release keeps its first tolerance",
        ROOM + "distca_paper.py",
        "<= self.buffer_bytes:",
        "<= 1e30:",
        (OPTIONS,),
    ),
    Fault(
        "a server of the release begins with its own rows",
        ROOM + "distca_paper.py",
        "return AttentionWork(torch.zeros_like(seconds), seconds, there, back)",
        "return AttentionWork(seconds, torch.zeros_like(seconds), there, back)",
        (OPTIONS,),
    ),
    Fault(
        "the release moves the document with most bytes a pair",
        ROOM + "released_planner.py",
        "best = int(torch.where(gives > 0, per_pair, torch.inf).argmin())",
        "best = int(torch.where(gives > 0, per_pair, -torch.inf).argmax())",
        (OPTIONS,),
    ),
    Fault(
        "rows leave a document from its end",
        ROOM + "released_planner.py",
        "cut = item.end - rows",
        "cut = item.begin + rows",
        (OPTIONS,),
    ),
    Fault(
        "rows alone are not asked for",
        ROOM + "rows.py",
        "Ticking(case, ping_pong=True, split_heads=False)",
        "Ticking(case, ping_pong=True)",
        (OPTIONS,),
    ),
    Fault(
        "kept keys take no memory",
        ROOM + "retained.py",
        "buffers=memory.buffers + kept * self._steps",
        "buffers=memory.buffers",
        (OPTIONS,),
    ),
    Fault(
        "distca leaves documents whole whatever the context ranks",
        "python/distca/simulator/ticking.py",
        "each = max(1, -(-sum(lengths) // ranks))",
        "each = max(1, *lengths)",
        (OPTIONS,),
    ),
    Fault(
        "all steps of the command have the same documents",
        "python/distca/apps/simulate/command.py",
        "options.tokens_per_rank, next(seeds))",
        "options.tokens_per_rank, options.seed)",
        ("tests/apps/test_simulate_command.py",),
    ),
]
