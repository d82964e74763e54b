"""Benchmarks: ratios between peers that take turns in the same run."""
