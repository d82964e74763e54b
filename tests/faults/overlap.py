"""Faults of the measure of overlap."""

from faults.fault import Fault

OVERLAP = "tests/apps/test_overlap.py"
CAUSES = "tests/tracing/test_causes.py"
BENCH = "tests/apps/test_bench.py"
ROOM = "python/distca/apps/bench/overlap/"

FAULTS = [
    Fault(
        "what messages cost without rows counts as exposed traffic",
        ROOM + "paired.py",
        "return _differences(self.link, self.one_byte, phase)",
        "return _differences(self.link, self.without, phase)",
        (OVERLAP,),
    ),
    Fault(
        "an interval holds the median half of the times",
        ROOM + "paired.py",
        "_LEVEL = 0.95",
        "_LEVEL = 0.5",
        (OVERLAP,),
    ),
    Fault(
        "a phase begins when its last rank begins",
        ROOM + "paired.py",
        "min(span.begin for span in spans)",
        "max(span.begin for span in spans)",
        (OVERLAP,),
    ),
    Fault(
        "rows of backward count as traffic of forward",
        ROOM + "paired.py",
        "one.name == phase and one.begin <= sent.begin < one.end",
        "one.begin <= sent.begin < one.end",
        (OVERLAP,),
    ),
    Fault(
        "in theory all rows of a rank travel at once",
        ROOM + "schedule.py",
        "free[rank] = max(now[rank], free[rank]) + taken",
        "free[rank] = now[rank] + taken",
        (OVERLAP,),
    ),
    Fault(
        "in theory a slot is free when its results are sent",
        ROOM + "schedule.py",
        'freed[half, rank] = max(now[rank] + link.latency, gone.get((half, "out", rank), 0.0))',
        "freed[half, rank] = 0.0",
        (OVERLAP,),
    ),
    Fault(
        "in theory tasks of own rows wait for rows of others",
        ROOM + "schedule.py",
        "first = min((wait.begin for wait in waits), default=part.begin) - part.begin",
        "first = 0.0",
        (OVERLAP,),
    ),
    Fault(
        "ranks that sleep have no link of one byte a message",
        ROOM + "slept.py",
        "distca.Link(speed, LATENCY, signal_only=True)",
        "distca.Link(speed, LATENCY)",
        (OVERLAP,),
    ),
    Fault(
        "a benchmark goes on although a rank failed",
        "python/distca/apps/bench/ranks.py",
        "    if errors:\n        raise errors[0]\n",
        "",
        (BENCH,),
    ),
    Fault(
        "a link carries what ranks send in the mean",
        "python/distca/apps/bench/ranks.py",
        "return max(sent)",
        "return sum(sent) // len(sent)",
        (BENCH,),
    ),
    Fault(
        "results count as sent when their rank dispatched",
        "python/distca/trace/causes.py",
        '"rows that come home": "attend"',
        '"rows that come home": "dispatch"',
        (CAUSES,),
    ),
    Fault(
        "a wait for own rows is blamed on a peer",
        "python/distca/trace/causes.py",
        "there = span.begin",
        "there = span.end",
        (CAUSES,),
    ),
    Fault(
        "an exchange waits for its first rank",
        "python/distca/trace/causes.py",
        "max(span.begin, exchanges.get((span.step, number), span.begin))",
        "min(span.begin, exchanges.get((span.step, number), span.begin))",
        (CAUSES,),
    ),
]
