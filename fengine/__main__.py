"""`python -m fengine` is `python -m fengine.run`."""

import sys

from fengine.run import main

if __name__ == "__main__":
    sys.exit(main())
