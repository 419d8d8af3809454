"""The recorded steps of an engine are scheduled again as they were, and tell no texts."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("greenlet")
pytest.importorskip("hydra")

import simulated_engine
from simulated_plan import plan_of
from simulated_run import violation
from tiny_adapters import random_adapter

from fengine import Engine
from fengine.config import (
    Algorithm,
    CacheConfig,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from fengine.core.admission import LPM_PATIENCE, LPM_WINDOW
from fengine.core.kv_pages import PagePool
from fengine.core.prefix_cache import PrefixCache
from fengine.core.recording import RecordedScheduler, Replay, replay
from fengine.core.request import Request, SamplingParams
from fengine.core.speculation import Speculation
from fengine.errors import ConfigError, InputFileError, InvariantError, StorageError
from fengine.run import main
from fengine.worker.hub import resolve_model


def recorded(seeds: range) -> Iterator[int]:
    """Those of images are not."""
    return (seed for seed in seeds if not plan_of(seed).settings.image_rows)


SEEDS = list(recorded(range(100)))


def record(path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    path.unlink(missing_ok=True)
    monkeypatch.setattr(simulated_engine, "Scheduler", partial(RecordedScheduler, path))
    plan = plan_of(seed)
    usual = replace(plan.settings, patience=LPM_PATIENCE, window=LPM_WINDOW)  # a recording does not tell of others
    assert violation(replace(plan, settings=usual)) is None
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording with pages that requests share, preemptions and aborts."""
    with pytest.MonkeyPatch.context() as patch:
        for seed in recorded(range(70, 1000)):  # now it is 77
            path = tmp_path_factory.mktemp("recorded") / "steps.jsonl"
            events = record(path, seed, patch)
            steps = [event["schedule"] for event in events if "schedule" in event]
            if any(step["preempted"] for step in steps) and sum("abort" in event for event in events) > 1:
                return path
    raise AssertionError("no schedule preempts and aborts")


def test_recorded_schedules_are_scheduled_again_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among them drafts, adapters, aborts, retractions, failing rows, prompts with logprobs and dying engines; more of
    them in tests/slow."""
    check_replays(SEEDS[:30], tmp_path, monkeypatch)


def check_replays(seeds: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    for seed in seeds:
        events = record(tmp_path / "steps.jsonl", seed, monkeypatch)
        requests, steps = replay(tmp_path / "steps.jsonl")
        assert requests == sum("add" in event for event in events)
        assert steps == sum("schedule" in event for event in events)
        seen |= {key for event in events for key, value in event.items() if value}
        seen |= {key for event in events for key, value in event.get("schedule", {}).items() if value}
    assert seen >= {"add", "abort", "retract", "now", "guess", "bad", "preempted", "drafts", "adapters", "fed"}


def test_no_id_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = record(tmp_path / "steps.jsonl", SEEDS[3], monkeypatch)
    again = record(tmp_path / "steps.jsonl", SEEDS[3], monkeypatch)
    prompts, other = ([e["add"]["ids"] for e in found if "add" in e] for found in (events, again))
    assert prompts and min(min(ids) for ids in prompts) > 1000  # ids of the plan are below 12
    assert prompts != other  # the key is another each time
    stands_for = dict(zip((t for ids in prompts for t in ids), (t for ids in other for t in ids), strict=True))
    assert [[stands_for[token] for token in ids] for ids in prompts] == other  # equal ids stay equal


def test_what_a_change_of_weights_takes_back_was_told(tmp_path: Path) -> None:
    pool, path = PagePool(16), tmp_path / "steps.jsonl"
    scheduler = RecordedScheduler(path, pool, PrefixCache(pool, 2), page_size=2, max_running_requests=2,
                                  max_step_tokens=8)  # fmt: skip
    for params in (SamplingParams(), SamplingParams(hidden="full")):
        scheduler.abort("first")
        request = Request("first" if params.bare else "r", 6, [1, 2, 3, 4, 5, 6], params, 0, 8, frozenset())
        scheduler.add(request)
        assert (step := scheduler.schedule()) is not None
        scheduler.update(step, [7], [-1.0])
    assert request.num_cached == 4
    request.num_cached = 0  # as the engine does
    scheduler.schedule()
    assert [e["values"][2] for e in map(json.loads, path.read_text().splitlines()) if "now" in e] == [0, 4, 0]


def test_a_step_that_is_another_now_is_told_by_its_line(busy: Path, tmp_path: Path) -> None:
    lines = busy.read_text().splitlines()
    number = next(i for i, line in enumerate(lines) if '"preempted":["' in line)
    event = json.loads(lines[number])
    event["schedule"]["preempted"] = []
    changed = tmp_path / "changed.jsonl"
    changed.write_text("\n".join([*lines[:number], json.dumps(event), *lines[number + 1 :]]))
    with pytest.raises(InvariantError, match=f"line {number + 1}: .*step {event['schedule']['step']} .*: preempted"):
        replay(changed)


def test_a_scheduler_with_a_fault_does_not_pass(busy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = PagePool.allocate
    monkeypatch.setattr(PagePool, "allocate", lambda pool, count: (allocate(pool, count) or [])[::-1])
    with pytest.raises(InvariantError, match="scheduled otherwise now"):
        replay(busy)


def test_a_page_that_somebody_reads_is_found_by_the_device(busy: Path) -> None:
    """The recorded steps are wrong themselves: pages of a running request are given to another one."""
    lines = [json.loads(line) for line in busy.read_text().splitlines()]
    page = next(pages[2][0] for line in lines if "schedule" in line for pages in line["schedule"]["new_pages"])
    again = Replay(lines[0]["scheduler"])
    execute = again.device.execute

    def shared(output):  # type: ignore[no-untyped-def]
        output.new_pages = [(row, first, [page] * len(pages), own) for row, first, pages, own in output.new_pages]
        return execute(output)

    again.device.execute = shared  # type: ignore[method-assign]
    with pytest.raises(InvariantError, match="reads wrong KV|two rows write"):
        again.run(lines[1:])


def test_a_torn_recording_is_replayed_as_far_as_it_goes(busy: Path, tmp_path: Path) -> None:
    torn = tmp_path / "torn.jsonl"
    for share in (0.2, 0.5, 0.9):
        text = busy.read_text()
        torn.write_text(text[: int(len(text) * share)])
        replay(torn)


def test_a_line_that_was_damaged_is_not_left_out(busy: Path, tmp_path: Path) -> None:
    lines = busy.read_text().splitlines()
    (tmp_path / "other").write_text("\n".join([*lines[:5], lines[5][:-3], *lines[6:], ""]))
    with pytest.raises(InputFileError, match="Expecting"):
        replay(tmp_path / "other")


@pytest.mark.parametrize("content", ["", "hello", "{}", "[" * 9999 + "\n", "[1]\n", '{"scheduler": {"page_size": 1}}'])
def test_what_is_no_recording_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "other").write_text(content)
    with pytest.raises(InputFileError):
        replay(tmp_path / "other")


def test_the_command(busy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(busy)]) == 0
    assert "reads its own KV" in capsys.readouterr().out
    assert main(["replay", str(tmp_path / "nothing")]) != 0
    assert main(["replay"]) == 2
    os.mkfifo(tmp_path / "pipe")
    for word in ("replay", "verify", "report"):
        assert main([word, str(tmp_path / "pipe")]) == main([word, "/"]) == 2
    assert main(["env", "x"]) == main(["-m", "prompts=[a]", "seed=glob(*)"]) == 2
    assert main([f"sampling.json_schema=@{tmp_path / 'pipe'}"]) == 2
    assert main(["replay", "--help"]) == 0


def test_an_engine_records_its_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "steps.jsonl"
    path.touch()  # as mktemp does
    config = EngineConfig(
        ModelConfig(path="box", device="cpu"), cache=CacheConfig(max_total_tokens=512),
        scheduler=SchedulerConfig(max_running_requests=3, record=str(path)),
    )  # fmt: skip
    with Engine.from_config(config) as engine:
        engine.generate(["hello", "hello you", "hello you there"], {"max_new_tokens": 12})
        engine.generate("hello you there, again", {"max_new_tokens": 8, "regex": "[a-z ]*"})
        engine.flush_cache()
        engine.generate("hello", {"max_new_tokens": 3}, return_logprob=True, logprob_start_len=0)
    assert replay(path)[0] == 5
    assert "hello" not in (kept := path.read_text())
    with pytest.raises(StorageError, match="scheduler.record=.* holds something, .*name another file"):
        Engine.from_config(config)
    assert path.read_text() == kept
    config = replace(config, scheduler=replace(config.scheduler, record="/dev/full"))
    with caplog.at_level("WARNING"), Engine.from_config(config) as engine:
        engine.generate("hello", {"max_new_tokens": 3})
    assert "the recording at /dev/full ends here, torn" in caplog.text
    for odd in ("~", str(tmp_path), str(tmp_path / "a\0b"), "x" * 5000):
        with pytest.raises((ConfigError, StorageError), match="scheduler.record="):
            Engine.from_config(replace(config, scheduler=SchedulerConfig(record=odd)))


def test_a_request_whose_guesses_rest_takes_no_share_of_them_in_a_replay(tmp_path: Path) -> None:
    """The model guesses for itself, and so is wrong of the row with an adapter only."""
    path, adapter = tmp_path / "steps.jsonl", random_adapter(tmp_path / "adapter", resolve_model("box"), 2)
    config = EngineConfig(
        ModelConfig(path="box", device="cpu"), cache=CacheConfig(max_total_tokens=256),
        scheduler=SchedulerConfig(max_running_requests=2, max_step_tokens=8, record=str(path)),
        speculation=SpeculationConfig(Algorithm.standalone, num_draft_tokens=5, draft="box"),
        lora=LoraConfig(paths=(f"a={adapter}",)),
    )  # fmt: skip
    with Engine.from_config(config) as engine:
        engine.generate(["hello"] * 2, {"max_new_tokens": 16, "temperature": 0}, lora_path=["a", None])
    assert replay(path)[0] == 2


def test_a_draw_that_failed_behind_a_guess_is_none_in_a_replay_either(tmp_path: Path) -> None:
    """Where a grammar fails behind a guess, the draw has no token, the guess in front of it is kept."""
    path, nan = tmp_path / "steps.jsonl", float("nan")
    scheduler = RecordedScheduler(path, PagePool(16), None, page_size=2, max_running_requests=2, max_step_tokens=8,
                                  speculation=Speculation(lambda asks: [[8, 9]] * len(asks), 2, 8, 100))  # fmt: skip
    scheduler.add(Request("r", 3, [1, 2, 3], SamplingParams(), 0, 8, frozenset()))
    for tokens, logprobs in (([7], [0.0]), ([8, -1, 5], [0.0, nan, 0.0]), ([8, 9, 7], [0.0, 0.0, 0.0])):
        assert (step := scheduler.schedule()) is not None
        scheduler.update(step, tokens, logprobs)
    assert scheduler._requests["r"].token_ids[3:] == [7, 8, 8, 9, 7]
    assert replay(path) == (1, 3)
