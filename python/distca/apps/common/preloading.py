"""The first import of a process that ranks are forked from: pauses collections there, and not in what it forks."""

import gc
import os

_before = gc.get_threshold()


def _collect() -> None:
    if gc.get_threshold()[0] == 0:
        gc.set_threshold(*_before)


gc.set_threshold(0)
os.register_at_fork(after_in_child=_collect)
