"""`python -m fengine.api.rank FD`: another rank of an engine, which talks to rank 0 over that socket."""

import signal
import socket
import sys

from fengine.api.features import FEATURES
from fengine.engine.build import follow
from fengine.engine.follower import Follower

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides
    follow(Follower(socket.socket(fileno=int(sys.argv[1]))), FEATURES)
