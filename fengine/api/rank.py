"""`python -m fengine.api.rank FD`: another rank of an engine, which talks to the first process over that socket."""

import signal
import socket
import sys

from fengine.api.features import FEATURES
from fengine.engine.build import follow
from fengine.engine.child import Link

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process decides
    link = Link(socket.socket(fileno=int(sys.argv[1])))
    follow(link, link.told.get(), FEATURES)
