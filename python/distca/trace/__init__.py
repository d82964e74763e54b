"""Traces: what the ranks did, when, and for how long."""
