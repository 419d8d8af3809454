"""`python -m fengine.serve` is `fengine serve`."""

import sys

from fengine.serve.command import main

if __name__ == "__main__":
    sys.exit(main())
