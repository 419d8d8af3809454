"""A shard of a task: every n-th of its rows, from the i-th on, as a task of its own. No torch.

A row's record and seeds depend on the row alone, so that it does not matter which process computes it. The rule is
stable: row r (from 0) belongs to shard r mod n, whatever else the input holds.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from fengine.eval.tasks.task import Answer, Ask, BadRow, Metric, Row, Scores, Task


@dataclass(frozen=True)
class ShardTask:
    """`task` with the rows number, number + count, ... of it (from 0). The whole input is read all the same, so that
    what is wrong with it is found in every shard."""

    task: Task
    number: int
    count: int

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def version(self) -> str:
        return self.task.version

    def rows(self) -> Iterator[Row | BadRow]:
        return islice(self.task.rows(), self.number, None, self.count)

    def asks(self, row: Row) -> list[Ask]:
        return self.task.asks(row)

    def score(self, row: Row, answers: list[Answer]) -> Scores:
        return self.task.score(row, answers)

    def metrics(self, scores: Iterable[Scores]) -> dict[str, Metric]:
        return self.task.metrics(scores)


def shard_of(task: Task, shard: tuple[int, int] | None) -> Task:
    """The task itself where there are no shards. Pure."""
    return task if shard is None else ShardTask(task, *shard)
