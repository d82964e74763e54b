"""Faults in what makes packed rows of padded batches."""

from faults.fault import Fault

UNPAD = "python/distca/integrations/hf_unpad.py"
TESTS = "tests/integrations/test_hf_unpad.py"

FAULTS = [
    Fault(
        "unpad: a document that is shared has no row of its own",
        UNPAD,
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
        UNPAD,
        "end - first != len(places),",
        "False,",
        (TESTS,),
    ),
    Fault(
        "unpad: a branch follows the document before it, not the one with the row before its own",
        UNPAD,
        "while own[above][1] >= shared:",
        "while False:",
        ("tests/integrations/test_families.py", TESTS),
    ),
    Fault(
        "unpad: rows of the documents before are not those of a branch",
        UNPAD,
        "above = rows[-1][:begin] if begin else empty",
        "above = rows[0][:begin] if begin else empty",
        ("tests/integrations/test_families.py", TESTS),
    ),
    Fault(
        "unpad: a few rows are shared",
        UNPAD,
        "if shared < _FEWEST_SHARED:",
        "if shared < 1:",
        (TESTS,),
    ),
    Fault(
        "unpad: routers' logits stay packed",
        UNPAD,
        "return self._padded(value)\n        return value",
        "return value\n        return value",
        (TESTS,),
    ),
]
