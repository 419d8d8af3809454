"""A draft model changes no bit, whatever it guesses; and it is right as often as its logits are the target's."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints
import torch
from safetensors.torch import load_file, save_file

from fengine import Engine
from fengine.config import checks
from fengine.core.recording import RecordedScheduler, replay
from fengine.engine import build
from fengine.errors import ConfigError, UnsupportedFeatureError
from fengine.speculative import draft, proposers
from fengine.speculative.chain import Chain
from fengine.speculative.pace import Cost

IDS = [[5, 9, 7, 60, 3], [8] * 19, [11, 12], [100, 3, 90] * 9, [44]]
Folder = pytest.TempPathFactory


@pytest.fixture(scope="module")
def target(tmp_path_factory: Folder) -> str:
    return str(tiny_checkpoints.write(tmp_path_factory.mktemp("target"), "qwen3", head_dim=16))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: Folder) -> str:
    """Another family, with other weights."""
    return str(tiny_checkpoints.write(tmp_path_factory.mktemp("stranger"), "llama", seed=5))


@pytest.fixture(scope="module")
def near(tmp_path_factory: Folder, target: str) -> str:
    """The target with a little noise on its weights."""
    folder, generator = tmp_path_factory.mktemp("near"), torch.Generator().manual_seed(3)
    tensors = load_file(Path(target) / "model.safetensors")
    noisy = {name: x + 0.01 * torch.randn(x.shape, generator=generator) for name, x in tensors.items()}
    save_file(noisy, folder / "model.safetensors")
    (folder / "config.json").write_text((Path(target) / "config.json").read_text())
    return str(folder)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: Folder, stranger: str) -> str:
    """Gives no finite logit."""
    folder = tmp_path_factory.mktemp("broken")
    tensors = load_file(Path(stranger) / "model.safetensors")
    tensors["model.norm.weight"][:] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((Path(stranger) / "config.json").read_text())
    return str(folder)


def answers(
    path: str, draft_model: str | None, page_size: int = 8, **settings: Any
) -> tuple[list[Any], dict[str, Any]]:
    """(of each request its tokens with logprobs and how it ended, the engine's counters). Cold and over a cache."""
    guess: dict[str, Any] = {} if draft_model is None else {
        "speculative_algorithm": "STANDALONE", "speculative_draft_model_path": draft_model,
        "speculative_adaptive": False,
    }  # fmt: skip
    guess |= settings
    params: list[dict[str, Any]] = [
        {"temperature": 0.8 * (i % 3), "max_new_tokens": 30, "top_p": 0.95, "ignore_eos": True} for i in range(len(IDS))
    ]
    params[1]["stop_token_ids"], params[2]["repetition_penalty"] = [17, 40], 1.2
    with Engine(model_path=path, skip_tokenizer_init=True, page_size=page_size, **guess) as engine:
        found: list[Any] = []
        for _ in range(2):
            found += engine.generate(input_ids=IDS, sampling_params=params, return_logprob=True)
        found.append(engine.generate(input_ids=IDS[3], sampling_params=params[4], return_logprob=True))
        stats = engine.stats()
    return [(o["meta_info"]["output_token_logprobs"], o["meta_info"]["finish_reason"]) for o in found], stats


@pytest.fixture(scope="module")
def want(target: str) -> list[Any]:
    return answers(target, None)[0]


@pytest.mark.parametrize(
    ("name", "steps"),
    [("target", 1), ("target", 3), ("target", 7), ("near", 1), ("near", 7), ("stranger", 3), ("stranger", 7),
     ("broken", 3)],
)  # fmt: skip
def test_no_draft_changes_a_bit(
    name: str,
    steps: int,
    target: str,
    want: list[Any],
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
) -> None:
    guesses = {"speculative_num_steps": steps}
    found, stats = answers(target, request.getfixturevalue(name), **guesses)
    assert found == want
    drafts, correct = stats["draft_tokens"], stats["correct_draft_tokens"]
    assert caplog.text.count("its logits are not finite") == (name == "broken")  # once, however many requests
    if name == "target":  # the same logits and the same noise: whatever the temperature, every guess is right
        assert drafts == correct > 100
    elif name == "near":
        assert drafts / 4 < correct < drafts
    elif name == "stranger":
        assert correct < drafts
    else:
        assert drafts == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"max_total_tokens": 96, "max_running_requests": 3},
        {"chunked_prefill_size": 8, "max_running_requests": 4},
        {"disable_radix_cache": True},
        {"disable_overlap_schedule": False},
    ],
    ids=["preempted", "chunked", "no cache", "overlap"],
)
def test_no_schedule_changes_a_bit(settings: dict[str, Any], target: str, stranger: str, want: list[Any]) -> None:
    for guess in (target, stranger):
        found, stats = answers(target, guess, speculative_num_steps=4, **settings)
        assert found == want and stats["draft_tokens"] > 0
        assert (stats["preemptions"] > 0) == ("max_total_tokens" in settings)
        assert guess != target or stats["draft_tokens"] == stats["correct_draft_tokens"]


@pytest.mark.parametrize(
    "settings",
    [{"disable_overlap_schedule": True}, {"disable_overlap_schedule": False},
     {"max_total_tokens": 96, "max_running_requests": 3}],
    ids=["plain", "overlap", "preempted"],
)  # fmt: skip
def test_a_request_rests_where_its_guesses_do_not_pay(
    settings: dict[str, Any],
    target: str,
    stranger: str,
    want: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if a guess were cheap: a good draft guesses nearly all, a bad one hardly tries. Recordings are replayed."""
    monkeypatch.setattr(proposers, "_cost", lambda *_: Cost(0.1, 0.1, 0.25, 0.005))
    tried = {}
    for guess in (target, stranger):
        steps = tmp_path / f"{len(tried)}.jsonl"
        monkeypatch.setattr(build, "Scheduler", partial(RecordedScheduler, steps))
        found, stats = answers(target, guess, speculative_num_steps=4, **settings | {"speculative_adaptive": True})
        assert found == want and replay(steps)[0] == len(found)
        tried[guess] = stats["draft_tokens"], stats["correct_draft_tokens"]
    assert tried[target][0] == tried[target][1] > 150 and 0 < tried[stranger][0] < tried[target][0] / 2


@pytest.mark.parametrize("catch_up", [4096, 30])
def test_of_many_new_rows_a_few_are_tried_for_all(
    catch_up: int, target: str, stranger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the draft takes several tries to have seen their prompts."""
    monkeypatch.setattr(proposers, "_cost", lambda *_: Cost(0.1, 0.1, 0.25, 0.005))
    monkeypatch.setattr(draft, "CATCH_UP", catch_up)
    drafts = checks._resolved_drafts
    monkeypatch.setattr(checks, "_resolved_drafts", lambda *given: drafts(*given[:-1], True))
    guessed: list[int] = []
    run = Chain.run
    monkeypatch.setattr(Chain, "run", lambda self, arrays, *rest: (
        guessed.append(len(arrays["kv_len_R"])), run(self, arrays, *rest))[1])  # fmt: skip
    params: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True, "temperature": 0}

    def drawn(more: dict[str, Any]) -> tuple[list[Any], list[int]]:
        with Engine(model_path=target, skip_tokenizer_init=True, **more) as engine:
            guessed.clear()
            outputs: Any = engine.generate(input_ids=[[9 + i] * 16 for i in range(16)], sampling_params=params)
        return [output["output_ids"] for output in outputs], guessed.copy()

    want = drawn({})[0]
    for path in (stranger, target):
        more = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": path}
        found, rows = drawn(more)
        tries = 1 if catch_up == 4096 else 3
        assert found == want and 0 < max(rows[:tries]) <= 4, rows
        if path == target:
            assert max(rows) > 8 or (catch_up == 30 and sum(rows) > 60)
        else:
            assert max(rows) <= 4 and sum(rows) < 40


def test_a_long_prompt_is_caught_up_with_in_pieces(
    target: str, want: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:  # the guesses are those of the whole
    monkeypatch.setattr(draft, "CATCH_UP", 5)
    found, stats = answers(target, target, speculative_num_steps=3)
    assert found == want
    assert stats["draft_tokens"] == stats["correct_draft_tokens"] > 60


def test_where_pages_are_small_the_usual_number_of_guesses_is_that_of_a_page(target: str, want: list[Any]) -> None:
    found, stats = answers(target, target, page_size=2)
    assert found == want and stats["draft_tokens"] == stats["correct_draft_tokens"] > 60


def test_bad_settings_are_refused_by_name(target: str, tmp_path: Path) -> None:
    other = tiny_checkpoints.write(tmp_path, "llama", vocab_size=90)
    with pytest.raises(ConfigError, match="vocabulary of 90.*of 131"):
        answers(target, str(other))
    with pytest.raises(ConfigError, match="num_draft_tokens.*page_size"):
        answers(target, target, speculative_num_steps=9)
    with pytest.raises(ConfigError, match="give 4, or leave one"):
        answers(target, target, speculative_num_steps=3, speculative_num_draft_tokens=9)
    with pytest.raises(ConfigError, match="speculation.draft is None"):
        Engine(model_path=target, speculative_algorithm="STANDALONE")
    with pytest.raises(ConfigError, match="speculation.draft is.*belongs to standalone and eagle3"):
        Engine(model_path=target, speculative_algorithm="NGRAM", speculative_draft_model_path=target)
    with pytest.raises(UnsupportedFeatureError, match="NGRAM, STANDALONE, EAGLE3"):
        Engine(model_path=target, speculative_algorithm="EAGLE", speculative_draft_model_path=target)
    with pytest.raises(UnsupportedFeatureError, match="eagle_topk=4.*trees of drafts .chains only"):
        answers(target, target, speculative_eagle_topk=4)
