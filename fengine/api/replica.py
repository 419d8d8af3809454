"""An engine as one of several replicas: it hears requests and commands of the first process, and tells of progress."""

import os
import queue
import threading
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from safetensors.torch import load_file

from fengine.api.features import FEATURES
from fengine.config import EngineConfig
from fengine.core.plain import from_plain
from fengine.core.request import Request
from fengine.engine.build import build
from fengine.engine.parallel.child import NOTHING, Link
from fengine.engine.parallel.kept import READING
from fengine.engine.parallel.progress import decoded, kind_and_text, progress, with_images
from fengine.engine.parallel.ranks import ENDED
from fengine.engine.parts import Parts
from fengine.engine.request_state import RequestState
from fengine.engine.weights.incoming import Unsent
from fengine.engine.weights.updates import UpdateResult
from fengine.errors import EngineDeadError, FengineError
from fengine.lora.shared import Replicated
from fengine.structured_output.backend import Grammars, Source
from fengine.structured_output.schema import Whitespace
from fengine.tokenizer.detokenizer import token_texts


class Server:
    """Modifies: itself, the engine."""

    def __init__(self, link: Link, parts: Parts) -> None:
        self.link, self.parts = link, parts
        self.adapters = None if parts.adapters is None else Replicated(parts.adapters, parts.config.lora)
        self.owners = {"adapters": self.adapters, "files": SimpleNamespace(update=self._update)}
        self.sent: dict[RequestState, dict[str, Any]] = {}
        self.fresh: queue.SimpleQueue[RequestState] = queue.SimpleQueue()
        self._use_whitespace(list(Whitespace()))
        parts.core.handlers["use_whitespace"] = self._use_whitespace
        threading.Thread(target=self._tell, name="fengine-progress", daemon=True).start()
        threading.Thread(target=self._end, name="fengine-end", daemon=True).start()

    def _use_whitespace(self, whitespace: list[Any] | None) -> None:
        """Of grammars; None: they are off."""
        parts, kind = self.parts, None if whitespace is None else Whitespace(*whitespace)
        grammars = Grammars(lambda: token_texts(parts.tokenizer, parts.spec.vocab_size), kind)
        self.handles = replace(NOTHING, grammar=lambda kind, text: grammars.compile(Source(kind, text)))
        if self.adapters is not None:
            self.handles = replace(self.handles, adapter=self.adapters.of)

    def _update(self, path: str, told: list[list[Any]], version: str | None, abort: bool) -> UpdateResult:
        """From a file of the first process's. `told`: of each tensor its name, and why it is not in the file."""
        tensors = load_file(path)
        named = [(name, Unsent(why) if why else tensors[str(index)]) for index, (name, why) in enumerate(told)]
        return self.parts.updates.update_from_tensor(named, None, version=version, abort=abort)

    def _end(self) -> None:
        """With an engine that has died, of which the first process is told why: it may start another one."""
        self.parts.core.threads[-1].join()
        self.link.say(error=str(self.parts.core.inbox.end).removesuffix(ENDED))
        if self.parts.ranks is not None:
            self.parts.ranks.close()
        os._exit(1)

    def run(self) -> None:
        """Until the process ends."""
        while True:
            told = self.link.told.get()
            if "add" in told:
                for plain, live in told["add"]:
                    self._add(plain, live)
            if "abort" in told:
                with suppress(FengineError):
                    self.parts.core.abort_rids(None if told["abort"] is None else set(told["abort"]))
            if "ask" in told:
                threading.Thread(target=self._answer, args=told["ask"], daemon=True).start()

    def _add(self, plain: Any, live: bool) -> None:
        state = RequestState(from_plain(Request, plain, NOTHING), None, live, self.fresh.put)
        self.sent[state] = {}
        try:
            state.request = with_images(from_plain(Request, plain, self.handles), decoded)
            self.parts.core.submit([state])
        except FengineError as error:
            state.error = error
            self.fresh.put(state)

    def _answer(self, *asked: list[Any]) -> None:
        """One after another: each may depend on those before."""
        for number, part, name, given, arguments in asked:
            try:
                if part == "core":
                    value = self.parts.core.stats() if name == "get_stats" else self.parts.core.call(name, **arguments)
                else:
                    value = getattr(self.owners.get(part) or getattr(self.parts, part), name)(*given, **arguments)
                self.link.say(answer=number, value=value, **self._read(part))
            except EngineDeadError:
                return  # `_end` tells why, of all
            except Exception as error:  # whatever it is: who asked waits
                self.link.say(answer=number, failed=kind_and_text(error), **self._read(part))

    def _read(self, part: str) -> dict[str, Any]:
        """What may have changed by a call of that part."""
        try:
            return {"read": read_by(self.parts)} if part in READING else {}
        except Exception as error:  # who asked waits
            return {"read": {"what it reads": f"{type(error).__name__}: {error}"}}

    def _tell(self) -> None:
        """What is new of all requests that have news, in one line."""
        while True:
            news = [self.fresh.get()]
            with suppress(queue.Empty):
                while True:
                    news.append(self.fresh.get_nowait())
            told = []
            for state in dict.fromkeys(news):
                if state in self.sent and not isinstance(state.error, EngineDeadError):  # which `_end` tells of all
                    done = state.done
                    told.append((state.request.rid, progress(state, self.sent[state])))
                    if done:
                        del self.sent[state]
            with suppress(OSError):
                self.link.say(progress=told)
            news = state = None  # an idle engine keeps nothing of the requests that it had


def read_by(parts: Parts) -> dict[str, Any]:
    """By name, what the model, the adapters and the tokenizer were read from that an engine computes with. Pure."""
    origin, adapters = parts.weights.origin, parts.adapters
    found: dict[str, Any] = {"config.json": repr(parts.spec), "weights": origin and str(origin.directory)}
    found |= {"tensors": parts.weights.writes, "tokenizer": parts.tokenizer and parts.tokenizer.sha256}
    if origin is not None:
        found |= {str(origin.directory / name): rest for name, *rest in origin.stamp}
    if adapters is not None:
        found |= {f"LoRA adapter {name!r}": sha for name, sha in adapters.digests().items()}
    return found


def serve(link: Link, start: dict[str, Any]) -> None:
    """Until the process ends. What fails at the start is told."""
    try:
        parts = build(from_plain(EngineConfig, start["config"], NOTHING), FEATURES)
    except FengineError as error:
        link.say(failed_start=(type(error).__name__, f"replica {start['replica']}: {error}"))
        return
    with link.telling():
        server = Server(link, parts)
        places = parts.weights.places.items()
        facts = {
            "pool_tokens": parts.pool_tokens, "compile_seconds": parts.compile_seconds, "phases": dict(parts.phases),
            "kv_bytes": parts.kv_bytes, "kv_dtype": str(parts.kv_dtype).removeprefix("torch."),
            "stats": parts.core.stats(),
            "weights": [(name, list(place.shape), str(place.leaf.dtype)) for name, place in places],
        }  # fmt: skip
        link.say(ready=facts, read=read_by(parts))
        server.run()
