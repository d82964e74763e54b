"""The cost of tasks, which plans balance."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from distca import _C
from distca.errors import InvalidArgumentError

_RATE_UNIT = 1024
_MOST = 2**20
_PHASES = ("forward", "backward")


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Time of a task in integer units of your choice. Plans balance it. The default counts visible pairs.

    Args:
        per_pair: units for each visible (query, key) pair of a head, 0 to 2**20.
        per_row: units for each query row of a head, 0 to 2**20.
        rates: factors on ``per_pair`` by the size of the task, in 1024ths, 1 to 2**20. ``rates[i][j]`` is for ``2**i``
            query rows that see ``2**j`` keys. Sizes in between are interpolated linearly; sizes beyond take the last
            rate. Empty: 1 for all sizes.
        unit_ns: nanoseconds of a unit on the measured device, or None if unknown. No plan depends on it.

    Examples:
        >>> layout, heads = distca.Layout.from_documents([[100], [10]]), distca.Heads(q=1, kv=1, dim=64)
        >>> distca.plan(layout, heads).stats.load_before  # visible pairs
        [5050, 55]
        >>> cost = distca.CostModel(per_pair=1, per_row=20)  # a row takes as long as 20 pairs besides
        >>> distca.plan(layout, heads, cost=cost).stats.load_before
        [7050, 255]
    """

    per_pair: int = 1
    per_row: int = 0
    rates: tuple[tuple[int, ...], ...] = ()
    unit_ns: float | None = dataclasses.field(default=None, compare=False)

    @functools.cached_property
    def core(self) -> _C.CostModel:
        """The core's object of this cost model. Raises InvalidArgumentError if a value is out of range."""
        widths = {len(line) for line in self.rates}
        if len(widths) > 1:
            raise InvalidArgumentError(f"cost model: lines of {sorted(widths)} rates; all must be equally long")
        numbers = [("per_pair", self.per_pair), ("per_row", self.per_row)]
        numbers += [("a rate", rate) for line in self.rates for rate in line]
        for name, number in numbers:
            if not isinstance(number, int) or abs(number) >= 2**63:
                raise InvalidArgumentError(f"cost model: {name} is {number!r}; integers up to {_MOST} are allowed")
        return _C.CostModel(
            per_pair=self.per_pair,
            per_row=self.per_row,
            rates=[rate for line in self.rates for rate in line],
            num_keys_octaves=widths.pop() if widths else 0,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def load(cls, source: str | Path, *, phases: Sequence[str] = _PHASES) -> CostModel:
        """Loads a cost model by name, or from a file that `distca profile` wrote.

        Args:
            source: ``"pairs"``, the name of a table that comes with distca (``cpu-avx512``, ``h200``), or a path.
            phases: the phases whose time counts: ``"forward"``, ``"backward"`` or both.

        Raises:
            InvalidArgumentError: the phases are others, or the source is no such file or name.
        """
        if source == "pairs":
            return cls()
        if not phases or not set(phases) <= set(_PHASES):
            raise InvalidArgumentError(f"cost model: phases = {list(phases)}; {', '.join(_PHASES)} or both are allowed")
        known = {entry.name.removesuffix(".json"): entry for entry in (files("distca.planner") / "costs").iterdir()}
        try:
            text = known[str(source)].read_text() if str(source) in known else Path(source).read_text()
            content = json.loads(text)
        except OSError as error:
            names = ", ".join(["pairs", *sorted(known)])
            raise InvalidArgumentError(f"cost model: {source} is neither a file nor one of {names}") from error
        except ValueError as error:
            raise InvalidArgumentError(
                f"cost model: {source} was not written by `distca profile`: {error}"  # !r has all bytes of the file
            ) from error
        return cls.of_table(content, phases=phases, name=str(source))

    @classmethod
    def of_table(cls, content: Any, *, phases: Sequence[str] = _PHASES, name: str = "table") -> CostModel:
        """Makes a cost model from the content of a file of `distca profile`.

        Args:
            content: the file's content, as JSON has it.
            phases: as in `load`.
            name: what messages call it.

        Raises:
            InvalidArgumentError: it is no such content.
        """
        try:
            points = {
                (int(p["q_rows"]), int(p["kv_rows"])): sum(float(p[f"{phase}_ns"]) for phase in phases)
                for p in content["points"]
            }
            q_heads = int(content["heads"][0])
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise InvalidArgumentError(f"cost model: {name} was not written by `distca profile`: {error!r}") from error
        return cls.from_points(points, q_heads)

    @classmethod
    def from_points(cls, points: Mapping[tuple[int, int], float], q_heads: int) -> CostModel:
        """Makes a cost model from times of tasks: the last ``q_rows`` rows of a causal document of ``kv_rows``.

        Args:
            points: nanoseconds, more than zero, by ``(q_rows, kv_rows)``, which are powers of two.
            q_heads: query heads of the tasks that were timed.

        Raises:
            InvalidArgumentError: there are no points, or one is out of range.
        """
        per_pair: dict[int, dict[int, float]] = {}
        for (q_rows, kv_rows), nanoseconds in points.items():
            power = all(n > 0 and n & (n - 1) == 0 for n in (q_rows, kv_rows))
            if not power or q_rows > kv_rows or not 0 < nanoseconds < float("inf"):
                raise InvalidArgumentError(
                    f"cost model: {nanoseconds} ns for {q_rows} rows and {kv_rows} keys; positive times of powers of "
                    f"two, no more rows than keys, are allowed"
                )
            pairs = q_rows * kv_rows - q_rows * (q_rows - 1) // 2
            per_pair.setdefault(kv_rows, {})[q_rows] = nanoseconds / (pairs * q_heads)
        if not per_pair:
            raise InvalidArgumentError("cost model: there are no points")
        unit = min(min(of_keys.values()) for of_keys in per_pair.values())
        columns = {}
        for kv_rows, of_keys in per_pair.items():
            rates = {q: min(_MOST, round(_RATE_UNIT * value / unit)) for q, value in of_keys.items()}
            columns[kv_rows] = _octaves(_never_rising(rates))
        height = max(len(column) for column in columns.values())
        filled = {kv: [*column, *column[-1:] * (height - len(column))] for kv, column in columns.items()}
        lines = [_octaves({kv: filled[kv][row] for kv in filled}) for row in range(height)]
        return cls(rates=tuple(map(tuple, lines)), unit_ns=unit)


def _never_rising(rates: Mapping[int, int]) -> dict[int, int]:
    """Makes rates fall with the rows. More rows take no more time each; a measurement that says otherwise is noise."""
    least = _MOST
    result = {}
    for q_rows in sorted(rates):
        least = min(least, rates[q_rows])
        result[q_rows] = least
    return result


def _octaves(rates: Mapping[int, int]) -> list[int]:
    """A rate for each power of two from 1 to the largest key, interpolated linearly between the given ones."""
    known = sorted((n.bit_length() - 1, rate) for n, rate in rates.items())
    line: list[Any] = [known[0][1]] * known[0][0]
    for (begin, first), (end, last) in zip(known, known[1:], strict=False):
        line += [first + (last - first) * (i - begin) // (end - begin) for i in range(begin, end)]
    return [*line, known[-1][1]]
