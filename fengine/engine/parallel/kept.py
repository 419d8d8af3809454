"""`Kept`: what all replicas were told and have read, so that one that is started again comes to be as the others are,
or takes no requests."""

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from fengine.engine.memory import checked_tags
from fengine.engine.parallel.routing import Replica, refusal
from fengine.errors import EngineDeadError

logger = logging.getLogger("fengine")
NAMES = ("pause", "label_weights", "keep_weights", "update_from_disk", "use_whitespace", "load", "unload")
CHANGES = ("updates", "files")  # parts whose calls come to every replica in one order
READING = ("updates", "files", "adapters")  # parts whose calls may change what a replica has read

Command = list[Any]  # part, name, given, arguments


class Kept:
    """Modifies: itself, and which replicas are taken for others than the rest. In the lock of `Replicas`."""

    def __init__(self, replicas: Sequence[Replica], at_start: Sequence[str], own: dict[str, Any]) -> None:
        """`at_start`: adapters that each has loaded when it is ready; `own`: what this process has read, too."""
        self.replicas, self.at_start, self.own = replicas, at_start, own
        self._commands: dict[Any, Command] = {}
        self._released: set[str] = set()  # tags of memory
        self._read: dict[str, Any] | None = None  # of those that are not strange
        self._under_way = 0  # calls of READING

    @property
    def commands(self) -> list[Command]:
        """For one that is ready, one after another."""
        return list(self._commands.values())

    def begin(self, command: Command) -> object:
        """Before all are told. Returns what `end` takes."""
        part, name, *_ = command
        trial = object()
        if [part, name] == ["core", "resume"]:
            self._commands.pop(("pause", "core"), None)
        if name in NAMES or part == "memory":
            self._commands[trial] = command  # for one that starts meanwhile
        self._under_way += part in READING
        return trial

    def end(self, trial: object, command: Command, asked: Sequence[tuple[Replica, Future[Any]]]) -> None:
        """After all have answered. What only some have done makes these strange: who asked was told of the refusal."""
        part, name, given, _ = command
        known = self._commands.pop(trial, None) is not None
        alive = [(each, answer) for each, answer in asked if not isinstance(answer.exception(), EngineDeadError)]
        done = [each for each, answer in alive if refusal(answer) is None]
        if done and len(done) == len(alive):
            self._read = min(done, key=lambda each: each.strange is not None).read
            for each in done if part in READING else ():
                each.catching_up = []  # what it could not do then does not count any more
            if known and part != "memory":
                self._keep((given[0] if part == "adapters" else name, part), command)
            if part == "memory" and name in ("release", "resume"):
                self._keep_memory(name, set(checked_tags(*given)))
        self._under_way -= part in READING
        self.compare()

    def _keep(self, key: tuple[Any, str], command: Command) -> None:
        """Instead of what was kept before, behind all else."""
        self._commands.pop(key, None)
        if command[1] != "unload" or key[0] in self.at_start:  # others are not loaded then
            self._commands[key] = command

    def _keep_memory(self, name: str, tags: set[str]) -> None:
        self._released = self._released | tags if name == "release" else self._released - tags
        self._commands.pop("memory", None)
        if self._released:
            self._commands["memory"] = ["memory", "release", (sorted(self._released),), {}]

    def compare(self) -> None:
        """Looks which of the replicas have read other files than the rest, as soon as nothing changes that."""
        for each in self.replicas if not self._under_way else ():
            if each.facts is not None and each.caught_up:
                self._read = self._read or each.read
                before, each.strange = each.strange, differing(self._read | self.own, each.read)
                if each.strange != before and each.fault is not None:
                    logger.warning("replica %d takes no requests: it %s", each.rank, each.fault)


def differing(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """What of files by name is not the same, in words. Pure."""
    names = [name for name in ours | theirs if ours.get(name) != theirs.get(name)]
    if not names:
        return None
    return (
        f"has not what the others have: {', '.join(names[:3])} changed since they were read; "
        "give all replicas the same again, or create a new engine"
    )
