"""A scheduler's calls as lines of JSON, and their replay: a report of a user becomes a test. No torch.

    {"scheduler": {...}}                        its settings
    {"add": {...}}  {"abort": rid}              requests as they come and go
    {"retract": n}  {"flush": 0}  {"idle": 0}   what commands did between two steps
    {"nothing": 0}                              rows were preempted, and no step came of it
    {"guess": {rid: [...]}, "wait": {rid: [...]}, "schedule": {...}}  a step, as `SchedulerOutput`; what was guessed
    {"update": n, "draws": [...], "bad": [...]} what came of step n; the draws that were not finite

No text is told: ids and salts stand there as keyed hashes, whose key nobody keeps. Equal ones stay equal, which is all
that a scheduler looks at."""

import json
import logging
import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, TextIO

from fengine.config import Policy
from fengine.core.kv_pages import PagePool
from fengine.core.prefix_cache import PrefixCache
from fengine.core.request import Adapter, Request
from fengine.core.sampling_params import SamplingParams
from fengine.core.scheduler import Scheduler
from fengine.core.scheduler_output import SchedulerOutput
from fengine.core.simulated_device import SimulatedDevice
from fengine.core.speculation import Ask, Speculation, known_ids
from fengine.core.window_pages import WindowPages, Windows
from fengine.errors import FengineError, InputFileError, InvariantError, StorageError

logger = logging.getLogger("fengine")
SEEN = ("logprob_start", "hidden", "pool", "min_new_tokens")  # that a scheduler heeds, with "lockstep" and "whole"
NOW = ("num_scored", "num_seen", "num_cached")  # what steps change in a request beside the scheduler
WAITS = ("try_from", "gain", "hope_from", "rest_until")  # that a proposer sets in a request's `Drafting`
BITS = 48  # of a hash
SPECULATION = ("most", "step_tokens", "full", "waits", "mixed", "hope", "toll", "crowd")


class Hashes:
    """What stands for an id or a salt. Modifies: itself, a memo."""

    def __init__(self) -> None:
        self.key, self.known = os.urandom(32), {}

    def of(self, value: Hashable) -> int:
        if value not in self.known:
            digest = blake2b(repr(value).encode(), key=self.key, digest_size=BITS // 8).digest()
            self.known[value] = int.from_bytes(digest, "big")
        return self.known[value]

    def all(self, values: Iterable[int]) -> list[int]:
        return [self.of(value) for value in values]


class RecordedScheduler(Scheduler):
    """Writes what it is asked and what it answers to a file. When that cannot be written, the recording ends."""

    def __init__(self, path: Path, pool: PagePool, cache: PrefixCache | None, **settings: Any) -> None:
        """Errors: StorageError if the file cannot be opened, or holds something."""
        try:
            mode = "x" if path.is_file() and path.stat().st_size else "w"  # nothing is written over
            self._file: TextIO | None = path.open(mode, encoding="utf-8", buffering=1)
        except (OSError, ValueError) as error:
            kept = isinstance(error, FileExistsError)
            told = "holds something, and is never written over" if kept else f"cannot be written: {error}"
            raise StorageError(f"scheduler.record={str(path)!r:.200} {told}; name another file.") from error
        self._hashes, self._told, self._guesses, self._waits, self._scheduling = Hashes(), {}, {}, {}, False
        speculation: Speculation | None = settings.get("speculation")
        if speculation is not None:
            settings["speculation"] = replace(speculation, propose=self._noted(speculation), reveal=None)
        plain = {name: value for name, value in settings.items() if name not in ("policy", "speculation")}
        guesses = None if speculation is None else [getattr(speculation, name) for name in SPECULATION]
        policy = settings.get("policy", Policy.fcfs).value
        more = {"pages": pool.num_pages, "cached": cache is not None, "policy": policy, "speculation": guesses}
        more |= {"windows": list(pool.windows)} if isinstance(pool, WindowPages) else {}
        self._write({"scheduler": plain | more})
        super().__init__(pool, cache, **settings)

    def add(self, request: Request) -> None:
        super().add(request)
        self._write({"add": self._request(request)})

    def abort(self, rid: str) -> Request | None:
        found = super().abort(rid)
        if found is not None:
            self._write({"abort": rid})
        return found

    def retract(self) -> int:
        count = super().retract()
        self._write({"retract": count})
        return count

    def flush_cache(self) -> None:
        super().flush_cache()
        self._write({"flush": 0})

    def schedule(self) -> SchedulerOutput | None:
        self._tell_changes()
        self._guesses.clear()
        self._waits.clear()
        self._scheduling = True
        preemptions = self._rows.num_preemptions
        output = super().schedule()
        self._scheduling = False
        if output is not None:
            self._write({"guess": self._guesses, "wait": self._waits, "schedule": plain_step(output, self._hashes.of)})
        elif self._rows.num_preemptions > preemptions:
            self._write({"nothing": 0})
        return output

    def released(self) -> list[int]:
        slots = super().released()
        if slots and not self._scheduling:
            self._write({"idle": 0})
        return slots

    def update(
        self, output: SchedulerOutput, tokens: list[int], logprobs: list[float], faults: Mapping[str, str] | None = None
    ) -> list[Request]:
        bad = [i for i, logprob in enumerate(logprobs) if logprob != logprob]
        draws = [-1 if token < 0 else self._hashes.of(token) for token in tokens]  # -1: what was to draw it failed
        self._tell_changes()
        finished = super().update(output, tokens, logprobs, faults)
        self._write({"update": output.step, "draws": draws, "bad": bad, "faults": sorted(faults or ())})
        return finished

    def _noted(self, speculation: Speculation) -> Any:
        def noted(asks: Sequence[Ask]) -> Sequence[Sequence[int]]:
            found = speculation.propose(asks)
            for ask, guess in zip(asks, found, strict=True):
                if guess := known_ids(guess, ask.most, speculation.vocab_size):
                    self._guesses[ask.request.rid] = self._hashes.all(guess)
                self._waits[ask.request.rid] = [getattr(ask.drafting, name) for name in WAITS]
            return found

        return noted

    def _tell_changes(self) -> None:
        """What steps have found out about requests' prompts since they were last told."""
        for rid, request in self._requests.items():
            if not request.params.bare and (now := [getattr(request, name) for name in NOW]) != self._told.get(rid):
                self._told[rid] = now
                self._write({"now": rid, "values": now})
        if len(self._told) > 2 * len(self._requests) + 64:
            self._told = {rid: now for rid, now in self._told.items() if rid in self._requests}

    def _request(self, request: Request) -> dict[str, Any]:
        params, of = request.params, self._hashes.of
        asked = {name: getattr(params, name) for name in SEEN} | {"lockstep": params.lockstep, "whole": not params.bare}
        return {
            "rid": request.rid, "ids": self._hashes.all(request.token_ids), "new": request.max_new_tokens,
            "stop": self._hashes.all(sorted(request.stop_ids)), "priority": request.priority,
            "salt": None if request.cache_salt is None else str(of(request.cache_salt)),
            "adapter": request.adapter and [request.adapter.number, request.adapter.pinned],
            "asked": asked,
        }  # fmt: skip

    def _write(self, event: dict[str, Any]) -> None:
        if self._file is not None:
            try:
                self._file.write(json.dumps(event, separators=(",", ":")) + "\n")
            except OSError as error:
                logger.warning("the recording at %s ends here, torn: %s", self._file.name, error)
                self._file = None


def plain_step(output: SchedulerOutput, of: Callable[[int], int]) -> dict[str, Any]:
    """A step without its parameters and texts. `of` gives what stands for an id. Pure."""
    step, fed = asdict(replace(output, new_rows=[], requests=[])), set(output.fed)
    del step["requests"]
    step["token_ids"] = [0 if i in fed else of(token) for i, token in enumerate(output.token_ids)]
    step["drafts"] = [[draft.index, [of(token) for token in draft.token_ids]] for draft in output.drafts]
    step["new_pages"] = [[*pages[:3], *([list(pages[3])] if pages[3] else [])] for pages in output.new_pages]
    step["adapters"] = [list(pair) for pair in output.adapters]
    step["new_rows"] = [[new.row, new.rid, new.adapter_slot, new.first_scored, new.num_seen] for new in output.new_rows]
    return step


class Replay:
    """A recording through a scheduler of its own and a simulated device. Modifies: itself."""

    def __init__(self, settings: dict[str, Any]) -> None:
        given = dict(settings)
        pages, cached, guesses = given.pop("pages"), given.pop("cached"), given.pop("speculation")
        windows = Windows(*given.pop("windows")) if "windows" in given else None
        pool = PagePool(pages) if windows is None else WindowPages(pages, windows)
        policy = Policy(given.pop("policy"))
        if guesses is not None:
            guesses = Speculation(self._propose, vocab_size=1 << BITS, **dict(zip(SPECULATION, guesses, strict=True)))
        cache = PrefixCache(pool, given["page_size"]) if cached else None
        self.scheduler = Scheduler(pool, cache, policy=policy, speculation=guesses, **given)
        of = self.scheduler._requests.__getitem__
        self.device = SimulatedDevice(given["page_size"], pages, of, lambda *_: (self.draws.pop(0), 0.0), windows)
        self.adapters: dict[int, Adapter] = {}  # by the number of the load
        self.guesses: dict[str, list[int]] = {}
        self.waits: dict[str, list[float]] = {}
        self.steps: dict[int, SchedulerOutput] = {}  # in flight
        self.draws: list[int] = []  # of the step that is executed, in the device's order
        self.results: dict[int, dict[str, Any]] = {}  # updates that are still to come, by step

    def run(self, events: Sequence[dict[str, Any]]) -> int:
        """Returns how many steps there were. Errors: InvariantError for the first that is another now, or reads KV that
        is not its own."""
        self.results = {event["update"]: event for event in events if "update" in event}
        count = 0
        for number, event in enumerate(events, 2):
            try:
                count += self._take(event)
            except (FengineError, KeyError, TypeError, ValueError) as error:
                raise InvariantError(f"line {number}: {type(error).__name__}: {error}") from error
        return count

    def _take(self, event: dict[str, Any]) -> bool:
        """Whether it was a step."""
        scheduler = self.scheduler
        if "add" in event:
            scheduler.add(_request(event["add"], self.adapters))
        elif "abort" in event:
            scheduler.abort(event["abort"])
        elif "retract" in event:
            scheduler.retract()
        elif "flush" in event:
            scheduler.flush_cache()
        elif "idle" in event:
            self.device.release(scheduler.released())
        elif "nothing" in event:
            if scheduler.schedule() is not None:
                raise InvariantError("a step is scheduled where there was none")
        elif "now" in event:
            for name, value in zip(NOW, event["values"], strict=True):
                setattr(scheduler._requests[event["now"]], name, value)
        elif "update" in event:
            draws, bad = event["draws"], set(event["bad"])
            logprobs = [float("nan") if i in bad else 0.0 for i in range(len(draws))]
            output = self.steps.pop(event["update"])
            scheduler.update(output, draws, logprobs, dict.fromkeys(event["faults"], "as recorded"))
        else:
            self._step(event)
        return "schedule" in event

    def _step(self, event: dict[str, Any]) -> None:
        recorded, self.guesses, self.waits = event["schedule"], event["guess"], event.get("wait", {})
        output = self.scheduler.schedule()
        now = None if output is None else json.loads(json.dumps(plain_step(output, lambda token: token)))
        if output is None or now != recorded:
            keys = [key for key in recorded if now is None or now[key] != recorded[key]]
            told = f"step {recorded['step']} is scheduled otherwise now: {', '.join(keys)}"
            raise InvariantError(f"{told}; a recording replays under the scheduler that wrote it")
        self.steps[output.step] = output
        if (result := self.results.get(output.step)) is not None:  # else the recording ends before
            self.draws = _in_order(output, result["draws"])
            self.device.execute(output)

    def _propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        for ask in asks:
            for name, value in zip(WAITS, self.waits.get(ask.request.rid, ()), strict=False):
                setattr(ask.drafting, name, value)
        return [self.guesses.get(ask.request.rid, []) for ask in asks]


def _in_order(output: SchedulerOutput, draws: Sequence[int]) -> list[int]:
    """The draws of rows that sample, each row's behind its drafts with it. Pure."""
    behind, at = {}, len(output.rows)
    for draft in output.drafts:
        behind[draft.index] = draws[at : at + len(draft.token_ids)]
        at += len(draft.token_ids)
    return [token for i, samples in enumerate(output.samples) if samples for token in (draws[i], *behind.get(i, ()))]


def _request(told: dict[str, Any], adapters: dict[int, Adapter]) -> Request:
    """Modifies: adapters."""
    asked = dict(told["asked"])
    lockstep, whole = asked.pop("lockstep"), asked.pop("whole")
    params = SamplingParams(**asked, processor=len if lockstep else None, logit_bias=((0, 0.0),) if whole else ())
    request = Request(told["rid"], len(told["ids"]), list(told["ids"]), params, 0, told["new"], frozenset(told["stop"]))
    request.cache_salt, request.priority = told["salt"], told["priority"]
    if told["adapter"] is not None:
        number, pinned = told["adapter"]
        request.adapter = adapters.setdefault(number, Adapter(str(number), number, None, pinned))
    return request


def replay(path: Path) -> tuple[int, int]:
    """Replays a recording; a last line that was torn off is left out. Returns its requests and steps. Errors:
    InputFileError; InvariantError, see `Replay.run`."""
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise OSError("it is no file")
        events = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
        again = Replay(events[0]["scheduler"])
    except OSError as error:
        raise InputFileError(f"{path} cannot be read: {error.strerror or error}") from error
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise InputFileError(f"{path} is no recording, as scheduler.record=FILE makes one: {error!r:.200}") from error
    return sum("add" in event for event in events), again.run(events[1:])
