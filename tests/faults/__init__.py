"""The faults that planted_faults.py plants, each with the tests that should notice it."""

from faults import attention, plans, steps, training

FAULTS = [*steps.FAULTS, *plans.FAULTS, *attention.FAULTS, *training.FAULTS]
