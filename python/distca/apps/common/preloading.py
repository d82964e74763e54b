"""The first import of a process that ranks are forked from: pauses collections there, and not in what it forks."""

import os

from distca.connect.collections_paused import collections_paused

_paused = collections_paused()
_paused.__enter__()
os.register_at_fork(after_in_child=lambda: _paused.__exit__(None, None, None))
