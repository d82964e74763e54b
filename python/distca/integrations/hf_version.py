"""The versions of transformers that distca takes. Importing this module raises ImportError if another is installed.

It comes before imports from transformers, whose other versions lack some of the names.
"""

from __future__ import annotations

import importlib.metadata
import re

#: As in the extra `train` of pyproject.toml.
NEEDED = "transformers>=5.4,<6"
_FIRST, _BEFORE = (5, 4), (6, 0)


def _check() -> None:
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return  # the import itself says it, or it is a copy of which nothing is known
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and not _FIRST <= (int(found[1]), int(found[2])) < _BEFORE:
        raise ImportError(
            f"`distca train` and distca.integrations.hf need {NEEDED}; this is {version}: pip install '{NEEDED}'"
        )


_check()
