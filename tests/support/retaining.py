"""Plans under which servers retain keys and values from forward to backward."""

from __future__ import annotations

from typing import Any

import distca

HEADS = distca.Heads(4, 2, 16, 24)
ALL = 2**40  # bytes: more than any server can be asked to retain


def plan_of(layout: distca.Layout, heads: distca.Heads = HEADS, retain_bytes: Any = ALL, **options: Any) -> distca.Plan:
    """A plan that moves as many tasks as balance asks for, under which each server retains up to `retain_bytes`."""
    return distca.plan(layout, heads, **{"tolerance": 0.0, "min_rows": 1, "retain_bytes": retain_bytes} | options)
