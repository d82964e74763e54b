"""distca: core attention disaggregation for PyTorch.

Core attention is ``softmax(QK^T)V`` inside packed documents. distca cuts it into tasks and gives every rank the same
attention time. The rest of the model is untouched. The method is that of Zhuang et al., "Efficient Long-context
Language Model Training by Core Attention Disaggregation", arXiv 2510.18121.
"""

import logging as _logging
import typing as _typing
from importlib import import_module as _import_module
from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version

from distca.checkpoint import save_core_attention
from distca.connect.init import init
from distca.connect.launch import RankError, launch
from distca.connect.loopback import loopback
from distca.context import Context, check
from distca.current import using
from distca.documents import GatheredDocuments, PaddedPieces, exchange_halos, gather_documents
from distca.errors import (
    CapacityError,
    ContextPoisonedError,
    DeviceError,
    DistcaError,
    InvalidArgumentError,
    OperatingSystemError,
    PeerDiedError,
    PeerLeftError,
    PeerTimeoutError,
    PlanFormatError,
    PlanMismatchError,
)
from distca.heads import Heads
from distca.merging import merge_states
from distca.ops import attention, core_attention
from distca.planner.cost import CostModel
from distca.planner.halves import Half, halves
from distca.planner.layout import PADDING, Chunk, Layout
from distca.planner.memory import MemoryReport
from distca.planner.plan import Plan, Plans
from distca.planner.plan_ahead import PlanAhead
from distca.planner.planning import memory_report, plan, plans
from distca.planner.scores import Scores
from distca.planner.stats import ArenaBytes, PlanStats, Task, Transfer
from distca.recording import Recording
from distca.registry import get_context
from distca.scans import scan_documents
from distca.serving import serve, serve_ping_pong
from distca.steps import Step, attend, collect, dispatch
from distca.trace.trace import Link, Trace, read_trace, write_trace

if _typing.TYPE_CHECKING:
    from distca import pipeline as pipeline
    from distca.pingpong.ping_pong import PingPong
    from distca.simulator.simulate import StrategyResult, simulate

_logging.getLogger("distca").addHandler(_logging.NullHandler())  # whoever wants to read it configures logging

try:
    __version__ = _version("distca")
except _PackageNotFoundError:  # imported from a source tree that was never installed
    __version__ = "unknown"

__all__ = [
    "PADDING",
    "ArenaBytes",
    "CapacityError",
    "Chunk",
    "Context",
    "ContextPoisonedError",
    "CostModel",
    "DeviceError",
    "DistcaError",
    "GatheredDocuments",
    "Half",
    "Heads",
    "InvalidArgumentError",
    "Layout",
    "Link",
    "MemoryReport",
    "OperatingSystemError",
    "PaddedPieces",
    "PeerDiedError",
    "PeerLeftError",
    "PeerTimeoutError",
    "Plan",
    "PlanAhead",
    "PlanFormatError",
    "PlanMismatchError",
    "PlanStats",
    "Plans",
    "RankError",
    "Recording",
    "PingPong",
    "Scores",
    "Step",
    "StrategyResult",
    "attend",
    "collect",
    "dispatch",
    "Task",
    "Trace",
    "Transfer",
    "attention",
    "core_attention",
    "check",
    "exchange_halos",
    "gather_documents",
    "get_context",
    "halves",
    "init",
    "launch",
    "loopback",
    "memory_report",
    "merge_states",
    "plan",
    "plans",
    "read_trace",
    "save_core_attention",
    "scan_documents",
    "serve",
    "serve_ping_pong",
    "simulate",
    "using",
    "write_trace",
]


# Modules that take long to import, and what is looked up in them when it is first asked for.
_LATER = {
    "PingPong": "distca.pingpong.ping_pong",  # loads DDP and FSDP
    "StrategyResult": "distca.simulator.simulate",
    "simulate": "distca.simulator.simulate",
}


if not _typing.TYPE_CHECKING:  # type checkers would take any name for one that is there

    def __getattr__(name: str) -> _typing.Any:
        if name == "pipeline":
            return _import_module("distca.pipeline")
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(_import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER, "pipeline"})
