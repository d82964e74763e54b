"""Faults in what `distca verify` computes and in how it judges."""

from faults.fault import Fault

CASES = "python/distca/apps/verify/cases.py"
JUDGE = "python/distca/apps/verify/verify.py"
REFERENCE = "python/distca/apps/verify/reference.py"
RANKS = "python/distca/apps/verify/ranks.py"
TESTS = ("tests/apps/test_verify.py",)

FAULTS = [
    Fault(
        "verify: rows of a window see one key more",
        CASES,
        "(row - key < self.window)",
        "(row - key <= self.window)",
        TESTS,
    ),
    Fault(
        "verify: an image's rows see each other beyond the window",
        CASES,
        "return seen if self.window is None else seen & (row - key < self.window)",
        "return seen if self.window is None or self.bidirectional else seen & (row - key < self.window)",
        TESTS,
    ),
    Fault(
        "verify: a branch begins with rows of another document",
        CASES,
        "keys = [firsts[of] + row for of, begin, end",
        "keys = [firsts[0] + row for of, begin, end",
        TESTS,
    ),
    Fault("verify: errors of nothing but the mean count", JUDGE, "max(rms, largest)", "rms", TESTS),
    Fault("verify: errors of nothing but the largest count", JUDGE, "max(rms, largest)", "largest", TESTS),
    Fault("verify: NaN is no error", JUDGE, "if not error <= 1]", "if error > 1]", TESTS),
    Fault(
        "verify: padding is not looked at",
        JUDGE,
        "for rank, one in enumerate(of_ranks) for run in one.runs)",
        "for rank, one in enumerate(of_ranks) for run in one.runs[2:])",
        TESTS,
    ),
    Fault(
        "verify: bits of ranks are not those of one rank",
        JUDGE,
        "not all(map(torch.equal, results[:3], one_rank[:3]))",
        "not all(map(torch.equal, results[:2], one_rank[:2]))",
        TESTS,
    ),
    Fault(
        "verify: the backward that is not deterministic is not looked at",
        JUDGE,
        "for run in (results, *runs[2:])",
        "for run in (results,)",
        TESTS,
    ),
    Fault("verify: a rank that raises is not available", JUDGE, "None if is_absent else False", "None", TESTS),
    Fault(
        "verify: every kernel may refuse a case",
        RANKS,
        'returned.refusal, returned.is_fault = str(error), where.attention != "flash"',
        "returned.refusal = str(error)",
        TESTS,
    ),
    Fault(
        "verify: a kernel may hang",
        RANKS,
        "faulthandler.dump_traceback_later(timeout + _GRACE_SECONDS, exit=True)",
        "pass",
        TESTS,
    ),
    Fault(
        "verify: gradients of sinks are held to their own size",
        JUDGE,
        "terms = self._right.terms_of_dsinks(inputs).square().sum(0).sqrt()",
        "terms = self._right.dsinks.abs()",
        TESTS,
    ),
    Fault(
        "verify: heads that one rank could not compute are compared",
        JUDGE,
        "if alone is not None and alone.refusal:",
        "if False:",
        TESTS,
    ),
    Fault(
        "verify: the reference has no gradient of lse",
        REFERENCE,
        "dlse = torch.zeros_like(lse) if inputs.dlse is None else inputs.dlse.double()",
        "dlse = torch.zeros_like(lse)",
        TESTS,
    ),
    Fault(
        "verify: sinks have no part in the rounded reference",
        REFERENCE,
        "total = total + torch.exp(inputs.sinks[:, None, None] - largest)",
        "pass",
        TESTS,
    ),
    Fault("verify: padding is zero in the inputs", RANKS, "chosen[rows < 0] = torch.nan", "pass", TESTS),
]
