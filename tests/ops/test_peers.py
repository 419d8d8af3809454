"""Exchanges between ranks over sockets: what each gives comes whole, and no wait outlives the one that it is for."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fengine.ops import peers

SHAPES = [(3,), (), (0, 4), (700_000,), (2, 5), (64, 64), (1,)]  # one of them is larger than a socket holds


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_get_what_all_give(size: int) -> None:
    """In exchanges one after another, whoever is ahead."""
    sockets = peers.mesh(size)
    given = [[torch.full(shape, 10 * rank + i, dtype=torch.float32).bfloat16() for i, shape in enumerate(SHAPES)]
             for rank in range(size)]  # fmt: skip
    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(lambda rank: [peers.swap(x, rank, sockets[rank]) for x in given[rank]], range(size)))
    for each in found:
        assert all(
            torch.equal(got, torch.stack(want)) for got, want in zip(each, zip(*given, strict=True), strict=True)
        )
    for own in sockets:
        peers.close(own)


@pytest.fixture
def pair() -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    own, other = peers.mesh(2)
    yield own, other
    peers.close(own)


def end_inside(own: tuple[int, ...], other: tuple[int, ...], end: Callable[[], None]) -> None:
    """Rank 0 has sent its part, and waits for the other's, when `end` is called."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(peers.swap, torch.ones(2), 0, own)
        os.set_blocking(other[0], True)
        assert len(os.read(other[0], 8)) == 8
        os.write(other[0], b"half")
        end()
        with pytest.raises(peers.RankGoneError, match="a rank has ended"):
            waiting.result(60)
    with pytest.raises(peers.RankGoneError):
        peers.swap(torch.ones(2), 0, own)


def test_a_rank_that_ends_inside(pair: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    end_inside(*pair, lambda: peers.close(pair[1]))


def test_a_rank_that_is_given_up_inside(pair: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    end_inside(*pair, lambda: peers.release(pair[0]))
    peers.close(pair[1])
