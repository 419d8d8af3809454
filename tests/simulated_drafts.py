"""Who guesses for a simulated engine: with knowledge of what comes, from copies, or as a model does, whose guesses lie
on the device before the host knows them."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from simulated_plan import PIECES

from fengine.core.request import Request
from fengine.core.scheduler_output import SchedulerOutput
from fengine.core.speculation import Ask, Late, Proposer, Speculation, gain_of, tolls
from fengine.errors import InvariantError
from fengine.speculative.ngram import follow, ngram_proposer
from fengine.speculative.proposers import first_of

if TYPE_CHECKING:
    from simulated_engine import World

MOST = 6  # drafts of a row
HOPE, TOLL, CROWD = 0.6, 0.2, 0.05


class Drafts:
    """The proposer of a world, and the guesses that lie on its device. Modifies: itself."""

    def __init__(self, world: "World") -> None:
        self.world, self.solo, self.settings = world, world.solo, world.settings
        self.feeds = True  # whether steps can be fed with guesses that the host does not know
        self.lying: dict[int, list[int]] = {}  # on the device, by row slot
        self.unread: dict[Request, list[int]] = {}  # what the host will read of them

    def speculation(self) -> Speculation | None:
        s = self.settings
        if s.guess is None:
            return None
        propose: Any = {"ngram": self._copies(ngram_proposer(1, 4)), "both": self._both()}
        if s.guess not in ("model", "both"):
            return Speculation(propose.get(s.guess, self._propose), MOST, max(s.budget, 4), len(PIECES))
        return Speculation(
            propose.get(s.guess, self._guess), MOST, max(s.budget, 4), len(PIECES), full=s.full, waits=True,
            mixed=s.guess == "both", hope=HOPE, toll=TOLL, crowd=CROWD,
            reveal=None if s.guess == "both" else self.reveal,
        )  # fmt: skip

    def fed(self, output: SchedulerOutput) -> SchedulerOutput:
        """The step as the device sees it: with the guesses that lie there."""
        if not output.guessed:
            return output
        ids = list(output.token_ids)
        for (index, draft), end in zip(output.drafts, self._ends(output), strict=True):
            if any(draft) or any(ids[end - len(draft) : end]):
                raise InvariantError(f"the host feeds {draft} where guesses lie on the device")
            ids[end - len(draft) : end] = self.lying[output.rows[index]][: len(draft)]
        return replace(output, token_ids=ids)

    @staticmethod
    def _ends(output: SchedulerOutput) -> list[int]:
        """Where the tokens of each row with drafts end."""
        ends = list(accumulate(output.counts))
        return [ends[index] for index, _ in output.drafts]

    def reveal(self) -> dict[Request, list[int]]:
        """What has been guessed last; waits for the device."""
        self.world.machine.pause()
        found, self.unread = self.unread, {}
        return found

    def _propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        found = []
        for ask in asks:
            request, job = ask.request, self.world.jobs[ask.request.rid]
            right = self.solo.follow(job, request, self.world.device.weights, ask.skip + ask.most)[ask.skip :]
            good = {"right": 99, "wrong": 0}.get(self.settings.guess or "", len(request.token_ids) * 7 % 5)
            ids = len(PIECES) + (not self.settings.guess.startswith("model"))  # guesses of others may be any numbers
            found.append(right[:good] + [(token + 1) % ids for token in right[good:]])
        return found

    @staticmethod
    def _copies(propose: Proposer) -> Proposer:
        """Proposes what stands behind an earlier copy of the last token, and learns of each try once."""

        def checked(asks: Sequence[Ask]) -> Sequence[Sequence[int]]:
            found = propose(asks)
            for ask, proposal in zip(asks, found, strict=True):
                ids, count = ask.request.token_ids, ask.skip + len(proposal)
                ends = [end for end in range(1, len(ids)) if ids[end - 1] == ids[-1]] if proposal else []
                if proposal and all(follow(ids, end, count)[ask.skip :] != proposal for end in ends):
                    raise InvariantError(f"{proposal} stands nowhere behind {ids}")
                if ask.drafting.last is not None:
                    raise InvariantError("a try is learnt from twice")
            return found

        return checked

    def _both(self) -> Proposer:
        """Each of two proposers is told of its own tries."""
        copied: list[Sequence[int]] = []
        ngram = self._copies(ngram_proposer(1, 4))

        def noted(asks: Sequence[Ask]) -> Sequence[Sequence[int]]:
            copied[:] = ngram(asks)
            return copied

        propose = first_of(noted, self._guess)

        def checked(asks: Sequence[Ask]) -> Sequence[Sequence[int]]:
            tried = [(a.drafting.memo.last[0], a.drafting.last[0]) for a in asks
                     if a.drafting.memo and a.drafting.memo.last and a.drafting.last]  # fmt: skip
            due = [drafting.proposed + count for drafting, count in tried]
            found = propose(asks)
            if [drafting.proposed for drafting, _ in tried] != due:
                raise InvariantError("a try is told to who has not made it")
            for ask, proposal in zip(asks, copied, strict=True):
                memo, rests = ask.drafting.memo, ask.drafting.rest_until
                if memo.last[0] is not (memo.ngram if proposal else memo.model):
                    raise InvariantError("a try is told to the other proposer")
                if rests != min(memo.ngram.rest_until, memo.model.rest_until):
                    raise InvariantError("a proposer is not asked when it wants to be")
            return found

        return checked

    def _guess(self, asks: Sequence[Ask]) -> list[list[int]]:
        """As a model does, which needs every token, and is asked where it pays. What it guesses takes the place of
        what it guessed before, and is not known at once where a step can be fed with it."""
        self.reveal()
        tried, gain = [], 0.0
        for i, ask in enumerate(asks):
            known, drafting = len(ask.request.token_ids), ask.drafting
            odd = hash((known, ask.request.seed))
            drafting.gain, drafting.hope_from = (0.05, 0.3, 0.6, 2.0)[odd % 4], known + odd % 11
            if drafting.last is not None and not drafting.last[1]:
                drafting.rest_until = drafting.try_from = known - 1 + odd % 7
            drafting.last = None
            gain += gain_of(drafting, known - 1, HOPE)
            if ask.tried and not ask.skip and known >= drafting.try_from:
                tried.append(i)
        found: list[list[int]] = [[] for _ in asks]
        if gain <= tolls(len(asks), TOLL, CROWD) or not tried:
            return found
        guesses = self._propose([asks[i] for i in tried])
        late = self.feeds and all(asks[i].late for i in tried)
        for i, guess in zip(tried, guesses, strict=True):
            request = asks[i].request
            if (bad := request.seed + len(request.token_ids) * 3 % 16) < len(guess):  # its numbers are not finite
                guess = [*guess[:bad], *[-1] * (len(guess) - bad)]
            self.lying[request.slot] = [max(token, 0) for token in guess]
            self.unread[request] = guess
            found[i] = [0] * len(guess) if late else [token for token in guess if token >= 0]
        if late:
            return [Late(proposal) for proposal in found]
        self.reveal()
        return found
