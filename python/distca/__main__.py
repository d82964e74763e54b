"""`python -m distca`: the command line."""

import sys

from distca.cli import main

if __name__ == "__main__":
    sys.exit(main())
