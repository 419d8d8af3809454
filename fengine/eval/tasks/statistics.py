"""Figures over rows with standard errors, and paired differences of two runs. No torch, no numpy, no global state.

Rows are taken as independent draws from the questions that could have been asked (E. Miller, "Adding Error Bars to
Evals", arXiv 2411.00640). Sums are correctly rounded and draws come from a seeded generator of the standard library,
so the same scores in the same order give the same bits anywhere."""

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from fengine.eval.tasks.task import Metric, Scores, finite

RESAMPLES = 1000
SEED = 20260101
MAX_BLOCKS = 2000  # rows, or blocks of neighbours, that a bootstrap draws from
CONFIDENT = 1.959963984540054  # standard errors on either side of 95 % of a normal distribution
NAN = float("nan")


def mean(values: Iterable[float | bool]) -> Metric:
    """The mean and its standard error s/√n, s² with n - 1 in its denominator; of booleans that is √(p(1-p)/(n-1)).
    Pure. Without values the mean is nan; with a single one the standard error is."""
    numbers = array("d", values)
    n = len(numbers)
    if n == 0:
        return Metric(NAN, NAN, 0)
    average = _sum(numbers) / n
    if n == 1:
        return Metric(average, NAN, 1)
    squares = _sum(array("d", ((value - average) * (value - average) for value in numbers)))
    return Metric(average, math.sqrt(squares / (n - 1) / n), n)


def _sum(numbers: Sequence[float]) -> float:
    """Correctly rounded; where floats end, infinite or nan. Pure."""
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):
        return sum(numbers)


def interval(value: float, stderr: float, n: int) -> tuple[float, float]:
    """95 % from low to high. Of a share, which its standard error gives away, Wilson's (E. B. Wilson, 1927), which
    stays within 0 and 1. Pure."""
    if n > 1 and math.isclose(stderr * stderr * (n - 1), value * (1 - value), rel_tol=1e-9, abs_tol=1e-15):
        spread = CONFIDENT * CONFIDENT / n
        margin = math.sqrt(spread * (value * (1 - value) + spread / 4))
        return (value + spread / 2 - margin) / (1 + spread), (value + spread / 2 + margin) / (1 + spread)
    return value - CONFIDENT * stderr, value + CONFIDENT * stderr


def means(scores: Iterable[Scores]) -> dict[str, Metric]:
    """The mean of every score that is a number or a boolean; texts are left out. Rows may lack a score. Pure."""
    columns: dict[str, array[float]] = {}
    for row in scores:
        for name, value in row.items():
            if not isinstance(value, str):
                columns.setdefault(name, array("d")).append(value)
    return {name: mean(values) for name, values in columns.items()}


class Blocks:
    """Rows of numbers, summed up in at most MAX_BLOCKS blocks of as many neighbours each, whatever their count. Memory
    does not grow with the rows. Modifies: itself, by `add`."""

    def __init__(self, width: int) -> None:
        self.sums = [array("d") for _ in range(width)]
        self.n = 0
        self._size = 1  # rows in a full block
        self._filled = 0  # rows in the last block

    def add(self, values: Sequence[float]) -> None:
        if self._filled == self._size or self.n == 0:
            if len(self.sums[0]) == MAX_BLOCKS:
                # two neighbours become one block; MAX_BLOCKS is even
                self.sums = [array("d", map(float.__add__, column[::2], column[1::2])) for column in self.sums]
                self._size *= 2
            for column in self.sums:
                column.append(0.0)
            self._filled = 0
        for column, value in zip(self.sums, values, strict=True):
            column[-1] += value
        self._filled += 1
        self.n += 1

    def totals(self) -> list[float]:
        return [math.fsum(column) for column in self.sums]


def bootstrap(
    blocks: Blocks, figures: Callable[[Sequence[float]], Sequence[float]], *, seed: int = SEED
) -> list[float]:
    """The standard errors of figures of the column sums: their standard deviations over RESAMPLES resamples (B. Efron,
    1979). Up to MAX_BLOCKS rows single rows are drawn, beyond that blocks of neighbours. nan for fewer than two. Pure.
    """
    count = len(blocks.sums[0])
    if count < 2:
        return [NAN] * len(figures(blocks.totals()))
    draw = Random(seed).random  # the one method whose sequence Python promises never to change
    found: list[Sequence[float]] = []
    for _ in range(RESAMPLES):
        picks = [int(draw() * count) for _ in range(count)]
        found.append(figures([math.fsum(map(column.__getitem__, picks)) for column in blocks.sums]))
    return [mean(column).stderr * math.sqrt(RESAMPLES) for column in zip(*found, strict=True)]


def perplexities(scores: Iterable[Scores]) -> dict[str, Metric]:
    """`word_perplexity` and `byte_perplexity`, exp(-Σ loglikelihood / Σ words or bytes), and `bits_per_byte`, the
    binary logarithm of the latter, from the scores that `scoring.perplexity_scores` gives. Pure."""
    blocks = Blocks(3)
    for row in scores:
        blocks.add([float(row[name]) for name in ("loglikelihood", "words", "bytes")])
    if blocks.n == 0:
        return dict.fromkeys(PERPLEXITIES, Metric(NAN, NAN, 0))
    values, errors = _perplexities(blocks.totals()), bootstrap(blocks, _perplexities)
    figures = [Metric(value, error, blocks.n) for value, error in zip(values, errors, strict=True)]
    return dict(zip(PERPLEXITIES, figures, strict=True))


PERPLEXITIES = ("word_perplexity", "byte_perplexity", "bits_per_byte")


def _perplexities(sums: Sequence[float]) -> list[float]:
    total, words, size = sums
    if min(words, size) <= 0:  # of no text that a run has read
        return [NAN] * len(PERPLEXITIES)
    return [_exp(-total / words), _exp(-total / size), -total / size / math.log(2)]


def _exp(value: float) -> float:
    return math.exp(value) if value < 709.0 else math.inf


@dataclass(frozen=True)
class Delta:
    """b - a over the `n` rows that both runs have: its standard error, 95 % interval, and how many rows went up and
    down (None for figures that no single row has)."""

    value: float
    stderr: float
    low: float
    high: float
    n: int
    up: int | None = None
    down: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON has no nan: None in its place. Pure."""
        return finite(vars(self))


def paired(rows: Iterable[tuple[Scores, Scores]]) -> dict[str, Delta]:
    """For every numeric score that both runs have of a row, the mean difference b - a, with the standard error of the
    differences themselves: what the two runs share, such as hard questions, drops out. Perplexities are compared by
    the figures of their sums, resampling both runs' rows together. `rows` pairs scores of the same row id. Pure."""
    columns: dict[str, array[float]] = {}
    blocks = Blocks(6)
    for a, b in rows:
        if not any(isinstance(run.get(name, ""), str) for run in (a, b) for name in _SUMMED):
            blocks.add([float(run[name]) for run in (a, b) for name in _SUMMED])
        for name, value in a.items():
            other = b.get(name)
            if name not in _SUMMED and not isinstance(value, str) and other is not None and not isinstance(other, str):
                columns.setdefault(name, array("d")).append(other - value)
    deltas = {name: _delta(mean(values), values) for name, values in columns.items()}
    if blocks.n:
        errors, values = bootstrap(blocks, _perplexity_deltas), _perplexity_deltas(blocks.totals())
        for name, value, error in zip(PERPLEXITIES, values, errors, strict=True):
            deltas[name] = _delta(Metric(value, error, blocks.n), None)
    return deltas


_SUMMED = ("loglikelihood", "words", "bytes")


def _perplexity_deltas(sums: Sequence[float]) -> list[float]:
    return [b - a for a, b in zip(_perplexities(sums[:3]), _perplexities(sums[3:]), strict=True)]


def _delta(metric: Metric, differences: Sequence[float] | None) -> Delta:
    margin, ways = CONFIDENT * metric.stderr, ()
    if differences is not None:
        ways = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    return Delta(metric.value, metric.stderr, metric.value - margin, metric.value + margin, metric.n, *ways)
