"""Hostile chat templates end soon, as their own request's error; tests/slow tries all of them."""

import random
from collections.abc import Iterator
from pathlib import Path

import hostile_templates as hostile
import pytest

from fengine.errors import ChatTemplateError, InvalidRequestError
from fengine.tokenizer import chat
from fengine.tokenizer.chat import LIMITS, ChatTemplate, check_messages
from fengine.tokenizer.trial import Limits, Refused, Trials

SOME = random.Random(1).sample(sorted(hostile.RUNAWAY), 8)


@pytest.fixture(scope="module")
def child() -> Iterator[Trials]:
    """With little time and memory: what is endless ends in no time."""
    trial = Trials("fengine.tokenizer.templates", 1, Limits(0.05, 96 << 20))
    yield trial
    trial.close()


def ask(child: Trials, source: str) -> str:
    given = {"messages": hostile.CHAT, "bos_token": "<s>", "add_generation_prompt": True}
    return child.ask([source, given, hostile.MAX_CHARS])


def test_no_file_of_the_working_directory_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    trial = Trials("fengine.tokenizer.templates")
    assert ask(trial, "{{ bos_token }}") == "<s>"
    trial.close()


@pytest.mark.parametrize("name", SOME)
def test_runaway_templates_end(child: Trials, name: str) -> None:
    with pytest.raises(Refused) as caught:
        ask(child, hostile.RUNAWAY[name])
    assert len(str(caught.value)) < 2100


@pytest.mark.parametrize("name", hostile.EITHER)
def test_templates_of_moderate_greed_end(child: Trials, name: str) -> None:
    try:
        assert len(ask(child, hostile.EITHER[name])) <= hostile.MAX_CHARS
    except Refused as error:
        assert len(str(error)) < 2100


@pytest.mark.parametrize("name", hostile.WALKS)
def test_nothing_outside_is_seen(name: str) -> None:
    with pytest.raises(ChatTemplateError, match="unsafe|cannot be compiled|no loader|undefined"):
        render(hostile.WALKS[name])


def render(source: str, max_chars: int = hostile.MAX_CHARS) -> str:
    return ChatTemplate(source).render(
        check_messages(hostile.CHAT), {}, {}, add_generation_prompt=True, max_chars=max_chars
    )


def test_the_limits_are_those_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LIMITS.seconds <= 2 and LIMITS.memory <= 256 << 20
    monkeypatch.setattr(chat, "LIMITS", LIMITS._replace(seconds=0.2))  # to wait for
    for source, told in (
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more time than 0.2 s"),
        ("{{ 'x' * 10**9 }}", "more memory than 256 MiB"),
        ("{{ 'x' * 20000 }}", "wrote 20000 characters"),
        ("x" * 300_000, "has 300000 characters"),
    ):
        with pytest.raises(ChatTemplateError, match=told):
            render(source)
    assert render("{{ messages[0].content }}") == "Hello!"  # another child has begun


def test_numbers_without_end_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="more than 4096 bits"):
        check_messages([{"role": "user", "content": "x", "n": 1 << 20_000}])
