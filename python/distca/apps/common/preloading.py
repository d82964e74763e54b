"""The first import of a process that ranks are forked from: it collects no garbage, and ends at once.

What it forks does collect. To take apart all that it has imported would take it seconds, for which a pipe behind the
command that started it would wait.
"""

import atexit
import os

from distca.connect.collections_paused import pause_collections
from distca.connect.rank_process import exit_now

os.register_at_fork(after_in_child=pause_collections())
atexit.register(exit_now, 0)
