"""The sizes that CUDA steps are padded to, and the graphs that are captured of them."""

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch

GRAPH_TOKENS = 8192  # larger steps gain nothing from a graph
GRAPH_ROOM = 512 << 20  # bytes that a graph captured while requests run must leave free
SHORT_ROWS = 64  # steps of so few rows are short: they are captured over both inputs, so that none waits for a copy


class Bucket(NamedTuple):
    """A padded step size. `graph` says whether it is captured, `adapters` whether some row has an adapter."""

    tokens: int
    rows: int
    graph: bool
    adapters: bool = False

    @property
    def inputs(self) -> int:
        """How many static inputs it is captured over."""
        return 2 if self.graph and self.tokens == self.rows <= SHORT_ROWS else 1


class Buckets:
    """Every padded size of an engine. Immutable."""

    def __init__(
        self, rows: int, tokens: int, graphs: bool, adapters: bool, prefill_graphs: bool = True,
        graph_rows: int | None = None,
    ) -> None:  # fmt: skip
        """Captured with `graphs`: steps with prompts if `prefill_graphs`, decode steps of at most `graph_rows` rows."""
        self.decode = decode_sizes(rows)
        self.mixed_rows = sorted({min(32, rows), rows})
        self.tokens = token_sizes(max(tokens, rows))
        self.adapters = adapters
        self.prefill_tokens = GRAPH_TOKENS if graphs and prefill_graphs else 0
        self.graph_rows = 0 if not graphs else rows if graph_rows is None else graph_rows

    def of(self, tokens: int, rows: int, adapters: bool = False) -> Bucket:
        """The smallest bucket that holds a step. One token a row is a decode step."""
        if tokens == rows:
            size = self.decode[bisect_left(self.decode, rows)]
            return Bucket(size, size, size <= self.graph_rows, adapters)
        size = self.tokens[bisect_left(self.tokens, tokens)]
        rows = self.mixed_rows[bisect_left(self.mixed_rows, rows)]
        return Bucket(size, rows, size <= self.prefill_tokens, adapters)

    def all(self) -> list[Bucket]:
        """Largest first, so that the graphs' shared pool is sized once."""
        decode = [Bucket(s, s, s <= self.graph_rows) for s in self.decode]
        fewer = [0, *self.mixed_rows]  # a step with more rows than this has more tokens still
        mixed = [
            Bucket(s, r, s <= self.prefill_tokens)
            for s in self.tokens
            for least, r in zip(fewer, self.mixed_rows, strict=False)
            if s > least
        ]
        adapted = [b._replace(adapters=True) for b in decode + mixed if self.adapters]
        return sorted(decode + mixed + adapted, key=lambda b: (b.tokens, b.rows, b.adapters), reverse=True)


def decode_sizes(rows: int) -> list[int]:
    """1, 2, 4, then multiples of 8 to 64, of 64 beyond; the last one is `rows`. Tiles are of 64 rows: 80 rows take as
    long as 128, or longer."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 4096, 64)]
    return [s for s in sizes if s < rows] + [rows]


def token_sizes(tokens: int) -> list[int]:
    """Steps with prompt chunks: from 256 on at most 1.25x apart, multiples of 16."""
    small = [16, 32, 64, 128, 192]
    large = [base * eighths // 8 for base in (256, 512, 1024, 2048, 4096, 8192) for eighths in (8, 10, 12, 14)]
    return [s for s in (*small, *large, 16384) if s < tokens] + [tokens]


@contextmanager
def beside(stream: torch.cuda.Stream, main: torch.cuda.Stream) -> Iterator[None]:
    """Work goes to `stream`, then to `main` again, as before; both of the current device. In a short step
    `torch.cuda.stream`, which asks for the device and its stream, would take as long as what it launches."""
    torch.cuda.set_stream(stream)
    try:
        yield
    finally:
        torch.cuda.set_stream(main)


class Graphs:
    """Captured graphs by key. Modifies: itself. No graph's own memory is read from outside: all share one pool."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.captured: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self.beside: dict[Hashable, Any] = {}  # by key what must live as long as a graph does
        self.room = True  # for graphs that are captured while requests run
        self.pool: Any = None
        self.side = torch.cuda.Stream(device)  # of captures: one, because cuBLAS keeps a workspace for each stream

    def clear(self) -> None:
        self.captured.clear()
        self.beside.clear()
        self.room, self.pool = True, None  # a pool ends with the last of its graphs

    def forget(self, dead: Callable[[Any], bool]) -> None:
        """Graphs whose keys are dead."""
        self.captured = {key: graph for key, graph in self.captured.items() if not dead(key)}

    def replay(self, key: Hashable) -> bool:
        """False: there is no such graph."""
        graph = self.captured.get(key)
        if graph is not None:
            graph.replay()
        return graph is not None

    def capture(self, key: Hashable, run: Callable[[], object]) -> None:
        """Nothing runs: the graph reads whatever lies in its inputs when it is replayed."""
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.current_blas_handle()  # each thread has its own, and must not make it in a capture
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):  # not `torch.cuda.graph`, which collects garbage for each of many graphs
            graph.capture_begin(self.pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                with suppress(torch.AcceleratorError):  # which would stand before what went wrong
                    graph.capture_end()  # the stream is needed again
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self.side)
        self.captured[key] = graph

    def capture_late(self, key: Hashable, run: Callable[[], object]) -> None:
        """While requests run, and only where memory is left; where it fails, its steps go on to run."""
        if self.room:
            with suppress(torch.OutOfMemoryError, torch.AcceleratorError):
                self.room = False
                if torch.cuda.mem_get_info(self.device)[0] >= GRAPH_ROOM:
                    self.capture(key, run)
                    self.room = True
