"""Pipeline parallelism: every stage does the same phase in a tick, and all ranks share the attention of the tick."""

from distca.pipeline.current_tick import CurrentTick
from distca.pipeline.plans import PipelinePlans, PipelineStats, TickStats
from distca.pipeline.tick_plan import TickPlan
from distca.pipeline.tick_table import Tick, TickTable, Work, tick_table
from distca.pipeline.ticks import Ticks

__all__ = [
    "CurrentTick",
    "PipelinePlans",
    "PipelineStats",
    "Tick",
    "TickPlan",
    "TickStats",
    "TickTable",
    "Ticks",
    "Work",
    "tick_table",
]
