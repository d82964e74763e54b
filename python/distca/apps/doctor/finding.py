"""One finding of `distca doctor`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One line: what was looked for, what was found, whether that is fine, and otherwise what to do.

    Attributes:
        name: what was looked for.
        found: what was found.
        fine: whether it is as it should be.
        advice: what to do, or what is missing; empty if there is nothing to say.
        absent: whether it is missing or not in use. It may be fine all the same, but is not called ok.
    """

    name: str
    found: str
    fine: bool = True
    advice: str = ""
    absent: bool = False

    def __str__(self) -> str:
        mark = "!! " if not self.fine else "-- " if self.absent else "ok "
        return f"{mark}{self.name:<19}{self.found}" + (f"\n     -> {self.advice}" if self.advice else "")
