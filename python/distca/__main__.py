"""`python -m distca`: the command line."""

import sys

from distca.train.cli import main

if __name__ == "__main__":
    sys.exit(main())
