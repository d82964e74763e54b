"""`python -m distca`: the command line."""

import gc
from typing import NoReturn

gc.disable()  # collections while modules are imported take a third of the time and find nothing
from distca.apps import cli  # noqa: E402
from distca.connect.rank_process import exit_now  # noqa: E402

gc.freeze()
gc.enable()


def main() -> NoReturn:
    """Runs a command, and exits at once: to take apart all that it has imported would take a second."""
    exit_now(cli.main())


if __name__ == "__main__":
    main()
