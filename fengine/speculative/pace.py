"""How many guesses of a request are worth a try, by how its tries before fared. A pure function of its own tokens."""

from dataclasses import dataclass
from typing import NamedTuple

FADE = 0.85  # of what is known, with each try
SURE, HOPE = 1.0, 0.6  # guesses that a new request is taken to have made, and the share of them that was right
WAIT = 0.1  # of a long step: a row whose tokens are waited for leaves the device idle between two steps
FIRST = 0.5  # of the wait: what a first try must bring, or one behind a rest: among experts a guess costs half a step
NEVER = 1 << 40
REST, GROWTH, LONGEST = 24, 3, 512  # tokens between two tries that cannot pay; as many times more after each, at most
ALL, SCOUTS = 8, 4  # where more than so many rows are new, so many are tried first


class Cost(NamedTuple):
    """Of a try, in steps of one token."""

    guess: float = 0.0  # to make and to verify one; 0: every try pays
    wait: float = WAIT  # beside its guesses
    toll: float = 0.0  # of every row beside others: see `tolls`
    crowd: float = 0.0


@dataclass(slots=True, eq=False)
class Pace:
    """How many guesses a request is to have next, at most `most`.

    Modifies: itself.

    A guess is right with the chance that those before it were. So the k-th pays while chance ** k is above its cost.
    """

    most: int
    cost: Cost
    right: float = SURE * HOPE
    seen: float = SURE
    rest: int = 0  # tokens of the last rest
    resume_at: int = 0  # no try before so many tokens are known
    gain: float = 0.0  # tokens that a try brings, less what it costs
    size: int = 0  # guesses that bring most, 0 if none pays

    def __post_init__(self) -> None:
        self._choose()

    def learn(self, tried: int, right: int, known: int) -> None:
        """Of a try: guesses behind the first wrong one tell nothing. Where tries do not pay, it rests."""
        self.right = self.right * FADE + right
        self.seen = self.seen * FADE + min(right + 1, tried)
        self._choose()
        if right and self.rest:
            self.rest = 0
        elif self.rest or not self.size:
            self.rest = min(max(GROWTH * self.rest, REST), LONGEST)
            self.resume_at, self.right, self.seen = known + self.rest, SURE * HOPE, SURE
        self._choose()

    @property
    def new(self) -> bool:
        """Whether nothing is known of its guesses, or not any more."""
        return self.seen == SURE

    def sure(self, tried: int) -> bool:
        """Whether the next try comes even if nothing of this one is right. Pure."""
        return not self.rest and self._best(self.right * FADE, self.seen * FADE + min(1, tried))[1] > 0

    def stop(self) -> None:
        self.resume_at = NEVER

    def _choose(self) -> None:
        """Modifies: gain, size."""
        self.gain, self.size = self._best(self.right, self.seen)
        if self.rest and self.cost.guess:
            # Behind a rest nobody hopes for more: alone it is tried, beside others they wait for a new one.
            self.gain = min(self.gain, self.cost.wait)

    def _best(self, right: float, seen: float) -> tuple[float, int]:
        """(what it brings, how many guesses bring most), if so many of so many were right. Pure."""
        if not self.cost.guess:
            return float(self.most), self.most
        best, size, gain, least = 0.0, 0, 0.0, self.cost.wait * (FIRST if seen == SURE else 1)
        for count in range(1, (1 if self.rest else self.most) + 1):
            gain += (right / seen) ** count - self.cost.guess
            if gain > least:
                best, size, least = gain, count, gain
        return best, size
