"""Ends garbage collections in the process that imports this: the first import of one that ranks are forked from.

Collections while modules are imported take a third of the time and find nothing. Ranks turn them on again.
"""

import gc

gc.disable()
