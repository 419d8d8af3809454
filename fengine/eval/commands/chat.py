"""`fengine chat`: a conversation in the terminal with an engine of this process. No torch before the model is loaded.
Exit codes:  0 ended by /exit or the end of input, 1 the engine died, 2 usage or configuration."""

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

from fengine.core.request import derive_seed
from fengine.errors import ConfigError, EngineClosedError, EngineDeadError, FengineError
from fengine.eval.cli import command, compose
from fengine.eval.cli.engines import EngineCache
from fengine.eval.cli.view import LiveView, PlainView, clean
from fengine.eval.runs.answering import given_sampling
from fengine.eval.runs.config import RUN, RunConfig
from fengine.eval.runs.folder import write_file
from fengine.eval.runs.run import load, refuse_demands, render_of
from fengine.server.template_facts import parser_of, thought_facts

USAGE = """
Usage:  fengine chat [group=option] [key=value] ...

A conversation with a model. Whole turns are kept, and nothing leaves this process.

    fengine chat                                           the model in the box
    fengine chat model=qwen3-0.6b chat.system="Be brief." seed=3
    fengine chat model=qwen3-8b chat.template_kwargs='{"enable_thinking": false}'

While it runs:

    /reset        forgets all turns
    /undo         takes the last turn back
    /seed N       draws otherwise
    /system TEXT  another system message
    /save FILE    writes the turns as {"messages": ...}, as prompts=FILE reads
    /exit         ends it; Ctrl-C ends an answer

The bits of an answer depend on turns, settings and seed only: the same words and the same seed, the same answer.
"""
OTHER = ("prompts", "out", "return_logprob", "trace", "resume", "max_errors", "show", "chat.enabled",
         "sampling.sampling_seed")  # fmt: skip
HELP = "/reset  /seed N  /system TEXT  /undo  /save FILE  /exit"


def work(words: Sequence[str]) -> int:
    """The exit code. Errors: FengineError."""
    for word in words:
        if (key := word.partition("=")[0]) in OTHER or key.partition(".")[0] in OTHER:
            raise ConfigError(f"{word:.200}: a chat has no {key}; fengine chat --help tells what it has")
    given = compose.parse(words, RUN)
    (point,) = compose.points(given, RUN)
    console = Console(highlight=False, markup=False, emoji=False)
    view = LiveView(console) if console.is_terminal else PlainView()
    refuse_demands(point.config, None, view)
    with EngineCache() as engines:
        engine = load(point.config.engine, engines, view)
        if engine.tokenizer is None:
            raise ConfigError("a chat needs texts: set model.skip_tokenizer_init=false")
        view.note(HELP)
        prompt = Text("› ", style="bold cyan") if console.is_terminal else ""
        Chat(engine, point.config, console).run(lambda: console.input(prompt))
    return command.OK


@dataclass
class Chat:
    """One conversation. Modified by its methods."""

    engine: Any
    config: RunConfig
    console: Console
    messages: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.seed, self.system = self.config.seed, self.config.chat.system
        self.render = render_of(self.engine, self.config.chat)
        self.sampling = given_sampling(self.config)
        facts = thought_facts(self.engine.tokenizer)
        if facts.channels is not None or facts.hidden:  # special tokens
            self.sampling["skip_special_tokens"] = False

    def run(self, read: Callable[[], str]) -> None:
        """Answers lines until they end or /exit. Errors: EngineDeadError, EngineClosedError."""
        while True:
            try:
                line = read().strip()
            except (EOFError, KeyboardInterrupt):
                return self.console.print() if self.console.is_terminal else None  # the shell's prompt has its own line
            if line.startswith("/"):
                if line == "/exit":
                    return
                self.command(*line[1:].partition(" ")[::2])
            elif line:
                self.answer(line)

    def command(self, name: str, value: str) -> None:
        if name == "reset":
            self.messages.clear()
        elif name == "undo":
            del self.messages[-2:]
        elif name == "seed":
            if not re.fullmatch(r"-?\d{1,18}", value):
                self._tell(f"/seed takes a whole number of at most 18 digits, as in /seed 7, not {value!r}")
                return
            self.seed = int(value)
        elif name == "system":
            self.system = value or None
        elif name == "save" and value:
            try:
                content = json.dumps({"messages": self._turns()}, ensure_ascii=False) + "\n"
                write_file(Path(os.path.expanduser(value)), content)
            except FengineError as error:
                self._tell(str(error))
                return
        else:
            self._tell(f"there are {HELP}")
            return
        self._tell("done")

    def _turns(self) -> list[dict[str, Any]]:
        return [*([] if self.system is None else [{"role": "system", "content": self.system}]), *self.messages]

    def answer(self, line: str) -> None:
        """One turn; it is kept only if there is an answer. Errors: EngineDeadError, EngineClosedError."""
        self.messages.append({"role": "user", "content": line})
        try:
            text = self._streamed(self.render(self._turns(), with_system=False))
        except (EngineDeadError, EngineClosedError):
            raise
        except FengineError as error:
            self._tell(f"{type(error).__name__}: {error}; /reset forgets what was said")
            text = ""
        if text:
            self.messages.append({"role": "assistant", "content": text})
        else:
            self.messages.pop()

    def _streamed(self, ids: list[int]) -> str:
        """The answer, shown as it grows: its thoughts dimmed, the rest as Markdown in a terminal."""
        seed, parser = derive_seed(self.seed, len(self.messages) // 2), parser_of(self.engine.tokenizer, ids)
        outputs = self.engine.generate(
            input_ids=ids, sampling_params=self.sampling | {"sampling_seed": seed}, lora_path=self.config.adapter,
            stream=True,
        )  # fmt: skip
        thought = text = ""
        shown = self.console if self.console.is_terminal else Console(quiet=True)
        with Live(console=shown, auto_refresh=False, vertical_overflow="visible") as live:
            for piece, last in pieces(outputs):
                delta = parser.feed(piece, last)
                thought, text = thought + delta.reasoning, text + delta.content
                live.update(Text(clean(thought), style="dim") if not text else Markdown(clean(text)), refresh=True)
        if not self.console.is_terminal:
            self.console.print(Text(clean(text)), soft_wrap=True)
        return text

    def _tell(self, text: str) -> None:
        self.console.print(Text(clean(text), style="dim"), soft_wrap=not self.console.is_terminal)


def pieces(outputs: Iterator[dict[str, Any]]) -> Iterator[tuple[str, bool]]:
    """What each output adds, and whether it is the last. An interruption ends the request and the answer."""
    told = ""
    try:
        for output in outputs:
            text = output["text"]
            yield text[len(told) :], output["meta_info"]["finish_reason"] is not None
            told = text
    except KeyboardInterrupt:
        yield "", True
    finally:
        getattr(outputs, "close", lambda: None)()
