"""The commands around a model at one's desk: chat, bench, env."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

pytest.importorskip("hydra")

from rich.console import Console

from fengine import run
from fengine.api.engine import Engine
from fengine.core.request import derive_seed
from fengine.eval.cli.compose import parse, points
from fengine.eval.commands import bench
from fengine.eval.commands.chat import Chat
from fengine.eval.runs.config import RUN

SMALL = ["compile.enabled=false", "cache.max_total_tokens=4096"]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(model_path="box", enable_torch_compile=False, max_total_tokens=4096) as engine:
        yield engine


def talk(engine: Any, *lines: str, words: tuple[str, ...] = (), terminal: bool = False) -> tuple[Chat, str]:
    """What is on the screen after these lines."""
    screen, left = io.StringIO(), iter(lines)
    config = points(parse(["sampling.max_new_tokens=12", *words], RUN), RUN)[0].config
    chat = Chat(engine, config, Console(file=screen, force_terminal=terminal, width=80))

    def read() -> str:
        for line in left:
            return line
        raise EOFError

    chat.run(read)
    return chat, screen.getvalue()


def test_turns_are_those_of_the_engine(engine: Engine) -> None:
    chat, screen = talk(engine, "What is 2 + 3?", "Who are you?", words=("seed=4", "chat.system=Be brief."))
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 3?"}]
    for number in range(2):
        drawn = {"max_new_tokens": 12, "sampling_seed": derive_seed(4, number), "temperature": 1.0}
        said = engine.chat(turns, drawn)["text"]
        assert said in screen.replace("\n", " ")
        turns += [{"role": "assistant", "content": said}, {"role": "user", "content": "Who are you?"}]
    assert chat.messages == turns[1:-1]


def test_the_same_words_and_seed_are_the_same_answer(engine: Engine) -> None:
    words = ("sampling.temperature=1.5",)
    first = talk(engine, "Tell me a story.", words=words)[0].messages
    again, _ = talk(engine, "Hello", "Tell me a story.", "/reset", "/seed 0", "Tell me a story.", words=words)
    other, _ = talk(engine, "/seed 1", "Tell me a story.", words=words)
    assert again.messages == first != other.messages


@pytest.mark.parametrize("typed", ["", "x", "--5", "1.5", "9" * 19])
def test_a_seed_that_is_none_is_told(engine: Engine, typed: str) -> None:
    chat, screen = talk(engine, "/seed 3", f"/seed {typed}")
    assert chat.seed == 3 and "/seed takes a whole number" in screen and repr(typed) in screen.replace("\n", "")


def test_what_is_typed_beside_words(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    chat, screen = talk(
        engine, "Hello", f"/save {path}", "/undo", "/system Hm", "/frob", "/save /no/such/dir/x", "/exit", "x"
    )
    assert (
        chat.messages == [] and chat.system == "Hm" and "there are /reset" in screen and "cannot be written" in screen
    )
    saved = json.loads(path.read_text())["messages"]
    assert [turn["role"] for turn in saved] == ["user", "assistant"]


def test_what_does_not_fit_is_told_and_not_kept(engine: Engine) -> None:
    chat, screen = talk(engine, "word " * 3000, "Hello")
    assert "/reset forgets" in screen and len(chat.messages) == 2


class Thinker:
    """An engine whose answer is a thought and then some words, in pieces; its prompts end as the template says."""

    class tokenizer:  # noqa: N801
        encode_chat = staticmethod(lambda messages, **values: [len(messages)])
        template_of = staticmethod(lambda tools: ("... <think> ...", frozenset()))
        backend = Backend(WordLevel())
        decode = staticmethod(lambda ids, skip: "<|assistant|>")

    def generate(self, **call: Any) -> Iterator[dict[str, Any]]:
        whole = "<think>two and two</think>\n\nIt is *4*.\x1b[2J"
        for end in range(1, len(whole) + 1, 3):
            done = {"type": "stop"} if end + 3 > len(whole) else None
            yield {"text": whole[: len(whole) if done else end], "meta_info": {"finish_reason": done}}


def test_thoughts_are_not_kept_and_terminals_are_not_told_what_to_do() -> None:
    for terminal in (False, True):
        chat, screen = talk(Thinker(), "2+2?", terminal=terminal)
        assert chat.messages[1]["content"] == "It is *4*.\x1b[2J" and "\x1b[2J" not in screen
        assert "4" in screen and "</think>" not in screen


def test_a_chat_asks_the_adapter_and_forgets_its_system_message() -> None:
    asked = list[Any]()

    class Listener(Thinker):
        class tokenizer(Thinker.tokenizer):  # noqa: N801
            encode_chat = staticmethod(lambda messages, **values: asked.append(messages[0]) or [1])

        def generate(self, **call: Any) -> Iterator[dict[str, Any]]:
            asked.append(call.get("lora_path"))
            return super().generate(**call)

    words = ("adapter=a", 'lora.paths=["a=/x"]', "chat.system=Be brief.")
    talk(Listener(), "Hi", "/reset", "/system", "Hi", words=words)
    told, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
    assert asked == [told, "a", user, "a"]


@pytest.mark.parametrize(
    "words", [["prompts=x"], ["out=x"], ["chat.enabled=true"], ["trace=steps"], ["sampling.sampling_seed=5"]]
)
def test_a_chat_has_no_files(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["chat", *words]) == run.USAGE and "a chat has no" in capsys.readouterr().err


# -- bench -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["latency", "throughput", "serve"])
def test_bench_measures_all_its_tokens(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if kind == "serve":
        pytest.importorskip("starlette", reason="the extra serve")
    out, sizes = tmp_path / "b.json", ["bench.requests=3", "bench.input=9", "bench.output=5", "bench.rounds=2"]
    assert run.main(["bench", kind, *sizes, "bench.streams=2", f"bench.out={out}", *SMALL]) == run.OK
    assert "3 requests, 9 tokens in, 5 out, 2 rounds" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert found["kind"] == kind and "python" in found["environment"]
    rounds = found["rounds"]["fengine"]
    assert len(rounds) == 2 and all(one["tok_s"] > 0 and 0 < one["first_s"] <= one["seconds"] for one in rounds)
    if kind != "latency":
        assert rounds[0]["tok_s"] * rounds[0]["seconds"] == pytest.approx(15)


def test_bench_beside_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["bench.requests=2", "bench.input=4", "bench.output=3", "bench.rounds=1", "bench.beside=transformers"]
    assert run.main(["bench", "throughput", *sizes, *SMALL]) == run.OK
    assert "times as many tokens a second" in capsys.readouterr().out


def test_its_work_is_the_same_whenever_it_is_made() -> None:
    given = bench.DEFAULTS | {"requests": 5, "input": 7}
    work = bench.work_of(given, 100)
    assert work == bench.work_of(given, 100) != bench.work_of(given | {"seed": 1}, 100)
    drawn = list[tuple[int, int]]()
    found = bench.beside(lambda prompts, count: drawn.append((len(prompts), count)), "latency")(None, work, 1)
    assert drawn == [(1, 1)] * 5 + [(1, work.output)] * 5, "first tokens, too: fengine's speed is of those behind them"
    assert found.keys() == {"seconds", "tok_s", "first_s"}
    assert [len(ids) for ids in work.prompts] == [7] * 5 and {*sum(work.prompts, [])} <= {*range(16, 100)}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "takes one of"),
        (["speed"], "takes one of"),
        (["serve", "bench.beside=transformers"], "no server"),
        (["latency", "bench.output=1"], "from 2"),
        (["latency", "bench.frob=1"], "bench.frob"),
        (["serve", "serve.max_samples=3"], "serve.max_samples=3"),
        (["serve", "bench.out=/nowhere/x.json", "model.path=nowhere"], "/nowhere/x.json cannot be written"),
    ],
)
def test_wrong_words_of_a_bench(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["bench", *words]) == run.USAGE and said in capsys.readouterr().err


# -- env ---------------------------------------------------------------------------------------------------------------


def test_env(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FENGINE_API_KEY", "a-secret")
    monkeypatch.setenv("HF_TOKEN", "another-secret")
    assert run.main(["env", "--json"]) == run.OK
    told = capsys.readouterr().out
    found = json.loads(told)
    assert {"fengine", "python", "cpu", "torch", "gpus", "compiler", "packages", "environment"} <= set(found)
    assert "torch" in found["packages"] and "secret" not in told
    assert run.main(["env"]) == run.OK and "python:" in capsys.readouterr().out
    assert run.main(["env", "--frob"]) == run.USAGE
