"""What `distca doctor` says of one thing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One line: what was looked for, what was found, whether it is as it should be, and else what to do.

    What is `absent`, or not in use, may be fine and is not called ok.
    """

    name: str
    found: str
    fine: bool = True
    advice: str = ""
    absent: bool = False

    def __str__(self) -> str:
        mark = "!! " if not self.fine else "-- " if self.absent else "ok "
        return f"{mark}{self.name:<19}{self.found}" + (f"\n     -> {self.advice}" if self.advice else "")
