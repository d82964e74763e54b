"""Pipeline parallelism: every stage does the same phase in a tick, and all ranks share the attention of the tick."""

from distca.pipeline.current_tick import CurrentTick
from distca.pipeline.memory import PipelineMemory, RankMemory, smallest_slots
from distca.pipeline.plans import PipelinePlans
from distca.pipeline.plans_ahead import PipelinePlansAhead
from distca.pipeline.stats import PipelineStats, TickStats
from distca.pipeline.tick_plan import TickPlan
from distca.pipeline.tick_table import Tick, TickTable, Work, tick_table
from distca.pipeline.ticks import Ticks, TickTime

__all__ = [
    "CurrentTick",
    "PipelineMemory",
    "PipelinePlans",
    "PipelinePlansAhead",
    "PipelineStats",
    "RankMemory",
    "Tick",
    "TickPlan",
    "TickStats",
    "TickTable",
    "TickTime",
    "Ticks",
    "Work",
    "smallest_slots",
    "tick_table",
]
