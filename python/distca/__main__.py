"""`python -m distca`: the command line."""

from typing import NoReturn

from distca.apps import cli
from distca.connect.rank_process import exit_now


def main() -> NoReturn:
    """Runs a command, and exits at once: to take apart all that it has imported would take a second."""
    exit_now(cli.main())


if __name__ == "__main__":
    main()
