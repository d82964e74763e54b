"""A module that turns Python's garbage collector off, as programs of training do."""

import gc

gc.disable()


def is_collecting() -> tuple[bool, bool]:
    return gc.isenabled(), gc.get_threshold()[0] > 0
