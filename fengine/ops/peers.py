"""Tensors of the CPU between the ranks of one host: a pair of sockets for every two, made before their processes start.
No wait outlives the rank that it is for: whoever ends closes its sockets, and `release` ends the waits of this
process."""

import os
import select
import socket
from collections.abc import Sequence

import torch
from torch import Tensor


class RankGoneError(RuntimeError):
    """Nobody is at the other side of an exchange, or `release` was called at this one."""


def mesh(size: int) -> list[tuple[int, ...]]:
    """For each rank its sockets by the rank at their other side, as numbers of open files; -1 in its own place."""
    found = [[-1] * size for _ in range(size)]
    for rank in range(size):
        for peer in range(rank):
            one, other = socket.socketpair()
            for each in (one, other):
                each.setblocking(False)
            found[rank][peer], found[peer][rank] = one.detach(), other.detach()
    return [tuple(sockets) for sockets in found]


def swap(own: Tensor, rank: int, peers: Sequence[int]) -> Tensor:
    """[ranks, *own.shape], what every rank gives: all give as much. `peers`: sockets as of `mesh`. Pure. Errors:
    RankGoneError."""
    parts = own.new_empty((len(peers), *own.shape))
    parts[rank] = own
    lines = [part.view(-1).view(torch.uint8).numpy().data for part in parts]
    left = {file: (lines[rank], lines[peer]) for peer, file in enumerate(peers) if peer != rank and lines[rank]}
    poll = select.poll()
    for file in left:
        poll.register(file, select.POLLIN | select.POLLOUT)
    try:
        while left:
            for file, event in poll.poll():
                sending, coming = left[file]
                if event & select.POLLOUT:
                    sending = sending[os.write(file, sending) :]
                if event & ~select.POLLOUT:
                    count = os.readv(file, [coming])
                    if not count:
                        raise RankGoneError("a rank has ended")
                    coming = coming[count:]
                if sending or coming:
                    left[file] = sending, coming
                    poll.modify(file, select.POLLIN * bool(coming) | select.POLLOUT * bool(sending))
                else:  # what comes now is of the next exchange
                    del left[file]
                    poll.unregister(file)
    except OSError as error:
        raise RankGoneError(f"a rank has ended: {error}") from error
    return parts


def release(peers: Sequence[int]) -> None:
    """From any thread: no exchange over these sockets waits any more. They are to be closed."""
    for file in peers:
        if file >= 0:
            with socket.socket(fileno=os.dup(file)) as one:
                one.shutdown(socket.SHUT_RDWR)


def close(peers: Sequence[int]) -> None:
    """When nobody exchanges over them any more."""
    for file in peers:
        if file >= 0:
            os.close(file)
