"""Tables of a page of documentation that a benchmark writes: between two comments that name the benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from distca.errors import InvalidArgumentError


def rewrite(page: Path, benchmark: str, lines: Sequence[str]) -> None:
    """Puts lines in place of what stands between ``<!-- benchmark: begin -->`` and ``<!-- benchmark: end -->``.

    Raises:
        InvalidArgumentError: the page cannot be read or written, or does not have both comments once and in order.
    """
    begin, end = (f"<!-- {benchmark}: {word} -->\n" for word in ("begin", "end"))
    try:
        text = page.read_text()
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            raise InvalidArgumentError(f"--page {page}: {begin.strip()} and then {end.strip()} are expected there")
        head, tail = text[: text.index(begin) + len(begin)], text[text.index(end) :]
        page.write_text("\n".join([head, *lines, "", tail]))
    except OSError as error:
        raise InvalidArgumentError(f"--page {page}: {error.strerror}") from error
