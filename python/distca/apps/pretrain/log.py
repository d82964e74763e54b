"""What a run tells: a line a step, `log.jsonl` and TensorBoard events in its folder."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from distca.errors import InvalidArgumentError

#: Floating-point operations a second of a GPU's matrix units in bfloat16, dense, by a part of its name: data sheets.
_PEAKS = {"H200": 989e12, "H100": 989e12, "H800": 989e12, "A100": 312e12, "B200": 2250e12}


@dataclass(frozen=True)
class Step:
    """The figures of a step.

    Attributes:
        step: steps taken, with this one.
        loss: mean over all targets of all data ranks.
        grad_norm: of all gradients before clipping.
        lr: learning rate of the step.
        tokens: tokens of all data ranks.
        seconds: of the step on rank 0.
        flops: floating-point operations of all ranks, without recomputation.
        imbalance_before, imbalance_after: the largest attention load over the mean, every row at home and as planned.
        bytes: bytes that attention moves between ranks.
        eval_loss: after this step, on documents held out.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    seconds: float
    flops: float
    imbalance_before: float | None = None
    imbalance_after: float | None = None
    bytes: int | None = None
    eval_loss: float | None = None


def peak_flops(device: str) -> float | None:
    """The peak of a GPU by its name; None if it is not known."""
    return next((peak for name, peak in _PEAKS.items() if name in device), None)


class RunLog:
    """Writes the figures of steps, on rank 0. A resumed run keeps those of the steps before `start`.

    Args:
        run_dir: the folder of the run; None writes nothing.
        steps: steps of the whole run.
        start: steps that were taken before.
        peak: floating-point operations a second of all ranks together, or None.
    """

    def __init__(self, run_dir: Path | None, *, steps: int, start: int, peak: float | None) -> None:
        self._run_dir, self._steps, self._start, self._peak = run_dir, steps, start, peak
        self._board: Any = None

    def __enter__(self) -> RunLog:
        if self._run_dir is not None:
            path = self._run_dir / "log.jsonl"
            path.write_bytes(b"".join(line + b"\n" for line in _lines_until(path, self._start)))
            self._file = open(path, "a", encoding="utf-8")
            if importlib.util.find_spec("tensorboard") is not None:
                from torch.utils.tensorboard import SummaryWriter

                self._board = SummaryWriter(str(self._run_dir / "tensorboard"), purge_step=self._start + 1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._run_dir is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()

    def say(self, text: str) -> None:
        """Prints a line."""
        if self._run_dir is not None:
            print(text, flush=True)

    def step(self, step: Step) -> None:
        """Writes a step."""
        if self._run_dir is None:
            return
        figures = {name: value for name, value in asdict(step).items() if value is not None}
        figures["tokens_per_second"] = step.tokens / step.seconds
        if self._peak is not None:
            figures["mfu"] = step.flops / step.seconds / self._peak
        self._file.write(json.dumps(figures) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in figures.items():
                if name != "step":
                    self._board.add_scalar(name, value, step.step)
        parts = [
            f"step {step.step}/{self._steps}",
            f"loss {step.loss:.4f}",
            f"grad norm {step.grad_norm:.3f}",
            f"lr {step.lr:.2e}",
            f"{figures['tokens_per_second']:,.0f} tokens/s",
            f"{step.seconds:.2f} s",
        ]
        if step.imbalance_before is not None:
            parts.append(f"imbalance {step.imbalance_before:.2f} -> {step.imbalance_after:.2f}")
        if "mfu" in figures:
            parts.append(f"MFU {figures['mfu']:.1%}")
        if step.eval_loss is not None:
            parts.append(f"evaluation loss {step.eval_loss:.4f}")
        self.say(" | ".join(parts))


def _lines_until(path: Path, step: int) -> list[bytes]:
    """The lines up to a step, of a log that may have been cut off by a kill.

    Raises:
        InvalidArgumentError: a line is damaged, or the file cannot be read.
    """
    try:
        *whole, _ = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InvalidArgumentError(
            f"{path} cannot be read: {error.strerror}; move it away, or name another --run-dir (RUN_DIR)"
        ) from None
    kept = []
    for number, line in enumerate(whole, 1):
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, TypeError, KeyError):
            raise InvalidArgumentError(
                f"line {number} of {path} is damaged: delete it, or name another --run-dir (RUN_DIR)"
            ) from None
    return kept
