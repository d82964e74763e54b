"""Checks that this process may open the files that its ranks need. Memory, sockets and pipes count as files."""

from __future__ import annotations

import os
import resource

from distca.errors import OperatingSystemError


def check_open_files(what: str, more: int) -> None:
    """Raises OperatingSystemError if this process may not open so many more files; `what` says what they are for."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    if limit != resource.RLIM_INFINITY and used + more > limit:
        enough = 1 << (used + more - 1).bit_length()
        raise OperatingSystemError(
            f"{what} may take {more} open files beside the {used} of this process, whose limit is {limit}: raise it "
            f"with `ulimit -n {enough}`"
        )
