"""Benchmarks: ratios between peers that are timed in alternation in the same run."""
