"""Two halves of a micro-batch that take turns, so that rows travel behind compute."""
