"""`python -m fengine.server` is `fengine serve`."""

import sys

from fengine.eval.commands.serve import main

if __name__ == "__main__":
    sys.exit(main())
