"""`python -m fengine.api.rank FD`: another rank or replica of an engine, which talks to the first process over that
socket."""

import signal
import socket
import sys
import tempfile

from fengine.api.features import FEATURES
from fengine.api.replica import serve
from fengine.engine.build import follow
from fengine.engine.parallel.child import Link

if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # which may come to all processes: the first one decides
        signal.signal(number, signal.SIG_IGN)
    link = Link(socket.socket(fileno=int(sys.argv[1])))
    start = link.told.get()
    tempfile.tempdir = start["folder"]  # what it leaves, killed at any moment, goes with all
    if "replica" in start:
        serve(link, start)
    else:
        follow(link, start, FEATURES)
