"""`distca bench overlap`: what ping-pong hides of the traffic over an emulated link."""

from distca.apps.bench.overlap.benchmark import run
from distca.apps.bench.overlap.sweep import sweep

__all__ = ["run", "sweep"]
