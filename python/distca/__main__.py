"""`python -m distca`: the command line."""

import atexit
from typing import NoReturn

from distca.connect.collections_paused import collections_paused
from distca.connect.rank_process import exit_now

with collections_paused():
    from distca.apps import cli


def main() -> NoReturn:
    """Runs a command, and exits at once: to take apart all that it has imported would take a second."""
    code = cli.main()
    atexit._run_exitfuncs()  # they remove temporary folders, such as that of the socket of a fork server
    exit_now(code)


if __name__ == "__main__":
    main()
