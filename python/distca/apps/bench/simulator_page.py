"""The table of `distca bench simulator`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def tables(content: dict[str, Any]) -> list[str]:
    """A row for each step, for each gain of balance, and for the replay."""
    details = content["details"]
    first, *steps = details["steps"]
    lines = [
        f"{content['cpu']}, {content['cores']} cores, PyTorch {content['torch']}, {details['rounds']} rounds, "
        f"`{content['command'].split(' --json')[0]}`.",
        "",
        "| step | measured | modelled | error | spread |",
        "|---|---|---|---|---|",
    ]
    for step in steps:
        of_step = f"{step['measured']:.3f} | {step['modelled']:.3f} | {100 * step['error']:+.1f} %"
        lines.append(f"| {step['name']} | {of_step} | {100 * step['spread']:.1f} % |")
    summary = {row["name"]: row["value"] for row in content["rows"]}
    for which in ("median", "largest"):
        lines.append(f"| **{which} error** | | | {summary[f'steps, {which} error']:.1f} % | |")
    lines += ["", "| balanced / not balanced | measured | modelled | error |", "|---|---|---|---|"]
    for name, (real, model) in details["balanced_over_unbalanced"].items():
        without = name.removesuffix(", no balance")
        lines.append(f"| {without} | {real:.3f} | {model:.3f} | {100 * (model / real - 1):+.1f} % |")
    lines += ["", "| replay of 8 ranks | measured | modelled | difference |", "|---|---|---|---|"]
    for name, (real, model) in details["replay_of_8_ranks"].items():
        lines.append(f"| {name} | {real:.3f} | {model:.3f} | {model - real:+.3f} |")
    longer = [step["measured_seconds"] / step["modelled_seconds"] - 1 for step in (first, *steps)]
    lines += [
        "",
        f"The first step, {first['name']}, takes {details['reference_seconds']:.3f} s, and "
        f"{details['reference_modelled_seconds']:.3f} s modelled.",
        f"Steps take {_percents(longer)} longer than modelled.",
    ]
    return lines


def _percents(shares: Sequence[float]) -> str:
    return f"{100 * min(shares):.0f} to {100 * max(shares):.0f} %"
