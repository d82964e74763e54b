"""distca: core attention disaggregation for PyTorch.

Core attention of packed documents is cut into tasks, every rank gets the same attention time, and the rest of the model
is untouched (Zhuang et al., "Efficient Long-context Language Model Training by Core Attention Disaggregation",
arXiv 2510.18121).
"""

from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version

from distca.checkpoint import save_core_attention
from distca.context import Context, get_context, init, loopback
from distca.cost import CostModel
from distca.errors import (
    CapacityError,
    ContextPoisonedError,
    DeviceError,
    DistcaError,
    InvalidArgumentError,
    OperatingSystemError,
    PeerDiedError,
    PeerTimeoutError,
    PlanFormatError,
    PlanMismatchError,
)
from distca.heads import Heads
from distca.launch import RankError, launch
from distca.ops import attention, core_attention, serve
from distca.plan_ahead import PlanAhead
from distca.planning import PADDING, ArenaBytes, Layout, Plan, Plans, PlanStats, Task, Transfer, plan, plans

try:
    __version__ = _version("distca")
except _PackageNotFoundError:  # imported from a source tree that was never installed
    __version__ = "unknown"

__all__ = [
    "PADDING",
    "ArenaBytes",
    "CapacityError",
    "Context",
    "ContextPoisonedError",
    "CostModel",
    "DeviceError",
    "DistcaError",
    "Heads",
    "InvalidArgumentError",
    "Layout",
    "OperatingSystemError",
    "PeerDiedError",
    "PeerTimeoutError",
    "Plan",
    "PlanAhead",
    "PlanFormatError",
    "PlanMismatchError",
    "PlanStats",
    "Plans",
    "RankError",
    "Task",
    "Transfer",
    "attention",
    "core_attention",
    "get_context",
    "init",
    "launch",
    "loopback",
    "plan",
    "plans",
    "save_core_attention",
    "serve",
]
