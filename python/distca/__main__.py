"""`python -m distca`: the command line."""

from multiprocessing import util
from typing import Any, NoReturn

from distca.connect.collections_paused import collections_paused
from distca.connect.rank_process import exit_now

with collections_paused():
    from distca.apps import cli


def main() -> NoReturn:
    """Runs a command, and exits at once: to take apart all that it has imported would take a second."""
    code = cli.main()
    multiprocessing: Any = util
    multiprocessing._run_finalizers()  # removes the temporary folder with the fork server's socket
    exit_now(code)


if __name__ == "__main__":
    main()
