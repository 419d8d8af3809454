"""`python -m fengine.server` is `fengine serve`."""

import sys

from fengine.server.command import main

if __name__ == "__main__":
    sys.exit(main())
