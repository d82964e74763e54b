"""`python -m distca`: the command line."""

import sys

from distca.apps.cli import main

if __name__ == "__main__":
    sys.exit(main())
