"""Schedules of an engine of several ranks: the real `Ranks` and `Follower`s, in simulated processes that fail.

A rank may be late, stop, die, fail, or compute something else, and what rank 0 tells it may come twice or in another
order. Then either nothing is wrong, or everybody who waits gets one error that names the rank or the step.
"""

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from greenlet import GreenletExit
from simulated_clients import ACTIONS
from simulated_engine import STEP, Violation, World
from simulated_plan import Plan, plan_of
from simulated_threads import FOREVER, Machine, SimulatedLock, SimulatedQueue, SimulatedThread

from fengine.config import EngineConfig, ModelConfig, ParallelConfig
from fengine.core.request import Request, SamplingParams
from fengine.core.scheduler_output import StepOutput
from fengine.engine.parallel import ranks
from fengine.engine.parallel.child import BEAT, SILENCE
from fengine.engine.parallel.follower import Follower
from fengine.engine.parallel.ranks import Ranks
from fengine.errors import EngineDeadError
from fengine.models.kv_state import KVState
from fengine.ops.peers import RankGoneError
from fengine.worker.input_batch import InputBatch

OUT_OF_ORDER = r"rank \d of \d failed: .*message \d+ .* was due"
TOLD = {
    "late": "", "silent": r"rank \d of \d gave no sign of life", "dies": r"rank \d of \d was ended",
    "fails": r"rank \d of \d failed: RuntimeError: as planned", "twice": OUT_OF_ORDER, "order": OUT_OF_ORDER,
    "differs": r"step \d+ was not the same on all ranks",
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """What happens to a rank when it has heard `at` messages."""

    kind: str
    rank: int
    at: int


@dataclass(frozen=True)
class RanksPlan(Plan):
    ranks: int = 2
    fault: Fault | None = None
    ahead: bool = False  # rank 0 does not wait for the others before it reads a step's result


def ranks_plan_of(seed: int, size: int = 1) -> RanksPlan:
    """As one without ranks, where only ranks fail, and nobody sends images."""
    plan, rng = plan_of(seed, size), random.Random(seed)
    keep = [event for event in plan.events if event.kind not in ("launch", "result", "die", "stuck")]
    events = tuple(replace(e, jobs=tuple(replace(job, pictures=()) for job in e.jobs)) for e in keep)
    ranks = rng.choice([2, 2, 3])
    fault = Fault(rng.choice([*TOLD]), rng.randrange(1, ranks), rng.randrange(20)) if rng.random() < 0.7 else None
    settings = replace(plan.settings, image_rows=0)
    return RanksPlan(seed, settings, events, ranks, fault, rng.random() < 0.5)


class Condition(SimulatedLock):
    """As `threading.Condition`."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.news: list[SimulatedThread] = []

    def wait_for(self, found: Callable[[], Any], timeout: float | None = None) -> Any:
        until = FOREVER if timeout is None else self.machine.clock + timeout
        while not found() and self.machine.clock < until:
            count, self.count, self.owner = self.count, 0, None
            self.machine.wake(self.waiters)
            self.machine.wait(self.news, until - self.machine.clock)
            while self.count:
                self.machine.wait(self.waiters, None)
            self.count, self.owner = count, self.machine.running
        return found()

    def notify_all(self) -> None:
        self.machine.wake(self.news)


class Exchange:
    """Every rank gives its value, and gets those of all; who waits for one that is gone is told."""

    def __init__(self, machine: Machine, size: int) -> None:
        self.machine, self.size = machine, size
        self.rounds: list[dict[int, Any]] = []
        self.next = [0] * size
        self.gone: set[int] = set()
        self.waiters: list[SimulatedThread] = []

    def swap(self, rank: int, value: Any) -> dict[int, Any]:
        number = self.next[rank]
        self.next[rank] += 1
        self.rounds += [{}] if number == len(self.rounds) else []
        given = self.rounds[number]
        given[rank] = value
        self.machine.wake(self.waiters)
        self.machine.pause()
        while len(given) < self.size:
            if self.gone - given.keys() or rank in self.gone:
                raise RankGoneError("a rank has ended")
            self.machine.wait(self.waiters, None)
        return given

    def leave(self, rank: int) -> None:
        self.gone.add(rank)
        self.machine.wake(self.waiters)


class Rows(InputBatch):
    """Keeps up page tables alone."""

    def admit(self, new: Request) -> None:
        super().admit(replace(new, params=SamplingParams()))


class Process:
    """A rank in threads: in place of `Child`, and of the `Link` at its other side."""

    def __init__(
        self, world: "RanksWorld", start: Any, threads: int, hear: Callable[[Any], None], ended: Callable[[str], None],
        files: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.world, self.machine, self.hear, self.ended = world, world.machine, hear, ended
        self.rank = start["group"][1]
        fault = world.plan.fault
        self.fault = fault if fault is not None and fault.rank == self.rank else None
        self.told, self.said = SimulatedQueue(self.machine), SimulatedQueue(self.machine)
        self.heard, self.closing, self.silent, self.differs = 0, False, False, False
        self.process: Any = SimpleNamespace(pid=self.rank)
        self.threads = [SimulatedThread(self.machine, body) for body in (self.run, self.listen, self.beat)]
        world.threads += self.threads
        for thread in self.threads:
            thread.start()

    # -- for rank 0 ----------------------------------------------------------------------------------------------------

    def send(self, value: Any) -> None:
        self.told.put(json.loads(json.dumps(value)))

    def listen(self) -> None:
        end = f"gave no sign of life for {SILENCE:.0f} s"
        while (told := self._next_word()) is not None:
            if told == "end":
                end = "was ended by SIGKILL"
                break
            self.hear(told)
        if not self.closing:
            self.ended(end)

    def _next_word(self) -> Any:
        try:
            return self.said.get(timeout=SILENCE)
        except Exception:
            return None

    def kill(self) -> None:
        self.closing = True
        self._end()

    close = kill

    # -- of the process ------------------------------------------------------------------------------------------------

    def say(self, **told: Any) -> None:
        self.said.put(json.loads(json.dumps(told)))

    def beat(self) -> None:
        while not self.silent and self.threads[0].is_alive():
            self.machine.sleep(BEAT)
            self.say(alive=True)

    def run(self) -> None:
        try:
            world, exchange = self.world, self.world.exchange
            self.say(loaded=True)
            self.told.get()
            weights: Any = SimpleNamespace(
                tensors=list, spec=SimpleNamespace(quantization=None), read_again=lambda: True, read=None, agreed=bool
            )
            runner: Any = SimpleNamespace(launch=partial(world.launch_at, self), drop_graphs=lambda: None)
            link: Any = SimpleNamespace(told=SimpleNamespace(get=self._hear, empty=self.told.empty), say=self.say)
            group: Any = None
            follower = Follower(link, runner, world.rows(), KVState((), ()), weights, self._new_kv, group)
            follower.commands["update_weights"] = lambda: exchange.swap(self.rank, "weights")
            follower.run()
        except RankGoneError:
            self.machine.wait([], None)
        except Exception as error:
            self.say(error=f"{type(error).__name__}: {error}")
        finally:
            if not self.machine.over:
                self._end()

    def _new_kv(self) -> KVState:
        self.world.new_kvs[self.rank] += 1
        return KVState((), ())

    def _hear(self) -> Any:
        """The next message, unless something happens first."""
        self.heard += 1
        kind = self.fault.kind if self.fault is not None and self.heard > self.fault.at else None
        if kind is not None:
            self.fault = None
            self.world.happened = kind in ("late", "silent", "dies", "fails")
            if kind == "dies":
                raise GreenletExit
            if kind == "fails":
                raise RuntimeError("as planned")
            if kind == "silent":
                self.silent = True
                self.machine.wait([], None)
            self.machine.sleep({"late": 0.3, "order": 2 * STEP}.get(kind, 0))
        found = self.told.get()
        self.world.happened = self.world.happened or kind in ("twice", "differs")
        if kind == "twice":
            self.told.items.appendleft(found)
        elif kind == "differs":
            self.differs, self.world.differs_from = True, self.world.core.stepper.steps
        elif kind == "order":
            self.world.happened = not self.told.empty()
            if self.world.happened:
                self.told.items.insert(1, found)
                found = self.told.items.popleft()
        return found

    def _end(self) -> None:
        """Its sockets close, and its threads are no more."""
        if self.rank in self.world.exchange.gone:
            return
        self.world.exchange.leave(self.rank)
        self.said.put("end")
        for thread in (self.threads[0], self.threads[2]):
            if thread is not self.machine.running and thread.is_alive():
                thread.thrown = GreenletExit()
                if thread.waiting:
                    self.machine._rouse(thread)


class RanksWorld(World):
    plan: RanksPlan

    def __init__(self, plan: RanksPlan) -> None:
        super().__init__(plan, ACTIONS)
        self.happened, self.differs_from = False, 0
        self.staged: Any = None  # the step that is launched
        self.drafts.feeds = False
        self.new_kvs = [-1, *[0] * (plan.ranks - 1)]  # how often each rank has made its pages anew
        self.exchange = Exchange(self.machine, plan.ranks)
        if plan.fault is not None and plan.fault.kind != "late":
            self.excused.add(EngineDeadError)

    @property
    def stuck(self) -> bool:
        """Whether a step may take longer than any."""
        return self.plan.fault is not None and self.plan.fault.kind in ("late", "silent")

    def run(self) -> None:
        with self._processes():
            super().run()

    @contextmanager
    def _processes(self) -> Iterator[None]:
        """Ranks are made of what is simulated."""
        threading = SimpleNamespace(Condition=partial(Condition, self.machine))
        names = {
            "Child": partial(Process, self), "threading": threading,
            "release": lambda group, device: self.exchange.leave(0), "process_group": lambda *_: ExitStack(),
        }  # fmt: skip
        nobody = SimpleNamespace(mesh=lambda size: [(-1,) * size] * size, close=lambda files: None)
        with ExitStack() as held:
            for name, value in (names | {"peers": nobody}).items():
                held.enter_context(patch.object(ranks, name, value))
            yield

    def rows(self) -> InputBatch:
        s = self.settings
        grouped = s.windows is not None and not s.windows.alone
        return Rows(s.rows, s.num_pages, s.page_size, (), s.adapter_slots, lambda slot, number: None, grouped=grouped)

    def _kv(self) -> KVState:
        self.new_kvs[0] += 1
        return super()._kv()

    def _parts(self) -> tuple[Any, Any]:
        model, parallel = ModelConfig(path="box", device="cpu"), ParallelConfig(tp_size=self.plan.ranks)
        self.ranks = Ranks(EngineConfig(model=model, parallel=parallel))
        self.ranks.join()
        rows = self.rows()

        def stage(output: Any) -> Any:
            self.staged = output
            return rows.stage(output)

        runner: Any = SimpleNamespace(params={}, launch=self._launch)
        return SimpleNamespace(stage=stage, release=self.device.release), self.ranks.over(runner, None)

    def _build(self) -> None:
        super()._build()
        self.ranks.attach(self.core)

    def _launch(self, kv: Any, step: Any) -> tuple[Any, Callable[[], StepOutput]]:
        """Of rank 0."""
        kv, result = self._execute(kv, self.staged)
        found = None if self.plan.ahead else self._shared(result())
        return kv, lambda: self._shared(result()) if found is None else found

    def _shared(self, out: StepOutput) -> StepOutput:
        self.exchange.swap(0, list(out.tokens))
        return out

    def launch_at(self, process: Process, kv: Any, step: Any) -> tuple[Any, Callable[[], Any]]:
        """Of another rank."""
        found = None if self.plan.ahead else self.exchange.swap(process.rank, None)

        def result() -> Any:
            tokens = (found or self.exchange.swap(process.rank, None))[0]
            return SimpleNamespace(tokens=[*tokens, -7] if process.differs else tokens)

        return kv, result

    def _update_weights(self) -> None:
        if self.core.refusals.get("weights") is None:
            with self.ranks.told("update_weights"):
                self.core.stepper.drain()
                self.exchange.swap(0, "weights")
        super()._update_weights()

    def _check_end(self) -> None:
        happened, dead = self.happened, isinstance(self.core.inbox.end, EngineDeadError)
        fault = self.plan.fault
        if dead and fault is not None and not re.search(TOLD[fault.kind], str(self.core.inbox.end)):
            raise Violation(f"who or what has failed is not named: {self.core.inbox.end}")
        seen = fault is None or fault.kind in ("late", "silent") or self.core.inbox.end is not None
        if fault is not None and happened and not seen and self.core.stepper.steps > self.differs_from + 2:
            raise Violation(f"nobody has seen that a rank {fault.kind}")
        if self.core.inbox.end is None and not happened and len(set(self.new_kvs)) > 1:
            raise Violation(f"of the ranks' pages some are new: {self.new_kvs}")
        if dead and not happened:
            raise Violation(f"nothing has happened, and the engine ends: {self.core.inbox.end}")
        super()._check_end()
        for _, states, _ in self.calls:
            for error in (state.error for state in states):
                if isinstance(error, EngineDeadError) and dead and "request" not in str(error)[:8]:
                    if str(error) != str(self.core.inbox.end):
                        raise Violation(f"one is told {error}, another {self.core.inbox.end}")
        self.ranks.close()
