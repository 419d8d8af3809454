"""Samplers with stages, as captured graphs: the bits of those that run, also where memory is short."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from extended_cases import Ask, outcome, run, running
from fake_cuda import use_graphs
from tiny_checkpoints import write

from fengine import Engine
from fengine.core.sampling_params import SamplingParams as Params
from fengine.engine.parts import Parts
from fengine.worker import cuda_graphs
from fengine.worker.cuda_graphs import Graphs
from fengine.worker.cuda_runner import CudaRunner

ON_GPU = [
    pytest.param(("cuda", family, dtype), marks=pytest.mark.gpu, id=f"{family}-{dtype}")
    for family, dtype in (("llama", "float32"), ("llama", "bfloat16"), ("qwen2", "bfloat16"), ("qwen3", "bfloat16"))
]
KINDS = [
    None,
    Params(frequency_penalty=0.4, presence_penalty=0.2, repetition_penalty=1.3, logit_bias=((5, 2.0),), top_logprobs=2),
    Params(logprob_start=0, top_logprobs=3),
    Params(hidden="full"),
    None,
    Params(logprob_ids=(4, 8, 15)),
    Params(pool="mean"),
    Params(min_new_tokens=9, frequency_penalty=0.5),
]


def work() -> list[Ask]:
    """Every kind of extra beside rows without; prompts long and short, greedy and sampled."""
    draw, asks = random.Random(0), []
    for i, asked in enumerate(KINDS):
        ids = [draw.randrange(3, 131) for _ in range((3, 40, 16, 33, 8)[i % 5])]
        params = ({"temperature": 0}, {"temperature": 0.9}, {"temperature": 1.2, "top_p": 0.8, "top_k": 20})[i % 3]
        new = 0 if asked is not None and asked.pool else 12 + i
        asks.append(Ask(ids, asked, new, i, frozenset({ids[0]}), params))
    return asks


@pytest.fixture(scope="module", params=[pytest.param(("cpu", "llama", "float32"), id="cpu"), *ON_GPU])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(checkpoint, device, dtype)"""
    device, family, dtype = request.param
    return write(tmp_path_factory.mktemp(family), family), device, dtype


@contextmanager
def engine(place: tuple[Path, str, str], **options: Any) -> Iterator[Parts]:
    path, device, dtype = place
    with running(path, cached=False, device=device, dtype=dtype, **options) as parts:
        yield parts


@pytest.fixture(scope="module")
def alone(place: Any) -> list[Any]:
    """Each by itself, and no forward pass is captured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Graphs, "capture_late", lambda *arguments: None)
        with engine(place, tokens=256) as parts:
            found = [outcome(run(parts, [ask])[0]) for ask in work()]
            assert place[1] == "cpu" or not late(parts.core.stepper.runner)
    return found


@pytest.fixture
def parts(place: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Parts]:
    """With graphs: on the CPU feigned ones."""
    with engine(place, tokens=24, overlap=True) as found:
        if place[1] == "cpu":
            use_graphs(found, monkeypatch)
        yield found


def late(runner: Any) -> list[Any]:
    """The keys of samplers that do more than draw: (what, rows, input, stages, likeliest)."""
    return [key for key in runner.graphs.captured if key[0] == "sample" and key[3:] != ((), None)]


def outcomes(parts: Parts) -> list[Any]:
    return [outcome(request) for request in run(parts, work())]


def counted(parts: Parts, monkeypatch: pytest.MonkeyPatch, captured: Any = None) -> dict[str, int]:
    """Counts steps whose sampler does more than draw and those that run; `captured` is called in captures."""
    inner: Any = parts.core.stepper.runner
    run_sampler, sample, counts = inner._run_sampler, inner._sample, {"steps": 0, "runs": 0}

    def running(*arguments: Any) -> Any:
        found = run_sampler(*arguments)
        if cuda_graphs.torch.cuda.is_current_stream_capturing():
            if captured is not None:
                captured()
        elif arguments[3] or arguments[4] is not None:
            counts["runs"] += 1
        return found

    def sampling(step: Any, *arguments: Any) -> Any:
        counts["steps"] += bool(step.stages) or step.top is not None
        return sample(step, *arguments)

    monkeypatch.setattr(inner, "_run_sampler", running)
    monkeypatch.setattr(inner, "_sample", sampling)
    return counts


def test_bits(parts: Parts, alone: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of sampler runs once, over each input; then it is replayed, also where other tables are made."""
    inner, counts = parts.core.stepper.runner, counted(parts, monkeypatch)
    assert isinstance(inner, CudaRunner) and inner.graphs.captured and not late(inner)
    assert outcomes(parts) == alone
    assert {key[2] for key in late(inner)} == {0, 1}
    assert len({key[3] for key in late(inner)}) > 1 and len({key[4] for key in late(inner)}) > 1
    captured, runs = set(late(inner)), counts["runs"]
    assert outcomes(parts) == alone
    new = set(late(inner)) - captured
    assert captured <= set(late(inner)) and counts["runs"] - runs == len(new) < counts["steps"] / 4


def test_tables_that_move_make_graphs_anew(parts: Parts, alone: list[Any]) -> None:
    """A wider table is another one, and graphs hold addresses."""
    assert outcomes(parts) == alone
    inner: Any = parts.core.stepper.runner
    before = inner.tables
    wide = Params(logit_bias=tuple((i, 0.5) for i in range(3, 60)), top_logprobs=2)
    want = Params(logit_bias=tuple((i, 0.5) for i in range(3, 60)), top_logprobs=2)
    first, second = (run(parts, [Ask([5, 6], asked, 9)])[0] for asked in (wide, want))
    assert inner.tables > before and outcome(first) == outcome(second)
    assert outcomes(parts) == alone


def test_large_steps_run(place: Any, alone: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "GRAPH_TOKENS", 16)
    monkeypatch.setattr("fengine.worker.cuda_runner.GRAPH_TOKENS", 16)
    with engine(place, tokens=24) as parts:
        if place[1] == "cpu":
            use_graphs(parts, monkeypatch)
        assert outcomes(parts) == alone
        inner: Any = parts.core.stepper.runner
        assert {key[1].tokens for key in inner.graphs.captured if key[0] == "forward"} == {1, 2, 4, 8, 16}
        assert late(inner) and len(inner.hidden_TD) == 16


@pytest.mark.parametrize("short", ["before", "in the capture"])
def test_without_memory_steps_go_on_to_run(
    parts: Parts, alone: list[Any], monkeypatch: pytest.MonkeyPatch, short: str
) -> None:
    tried = []

    def fail() -> None:
        tried.append(1)
        raise torch.OutOfMemoryError("a graph too many")

    counts = counted(parts, monkeypatch, fail)
    if short == "before":
        room = cuda_graphs.GRAPH_ROOM - 1
        monkeypatch.setattr(cuda_graphs.torch.cuda, "mem_get_info", lambda device: (room, 1 << 40))
    for _ in range(2):  # other graphs, and the streams, are as they were
        assert outcomes(parts) == alone
    assert not late(parts.core.stepper.runner) and len(tried) == (short != "before")
    assert counts["runs"] == counts["steps"]


def test_released_graphs_are_captured_again(parts: Parts, alone: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    inner: Any = parts.core.stepper.runner
    for tags in (["cuda_graph"], ["kv_cache"], None):
        assert outcomes(parts) == alone and late(inner)
        parts.memory.release(tags)
        assert not inner.graphs.captured
        parts.memory.resume(tags)
        assert inner.graphs.captured and not late(inner)
    assert outcomes(parts) == alone


# -- the model in the box ----------------------------------------------------------------------------------------------

STORY, COPY = "Once upon a time", "Copy: sun moon red cat sun moon red cat -> sun moon red cat sun moon"
PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
          "required": ["name", "age"]}  # fmt: skip
CASES: dict[str, list[tuple[str, int, dict[str, Any]]]] = {  # prompts, likeliest ids wanted, parameters
    "drafts": [
        (COPY, 0, {"temperature": 0}),
        (STORY, 2, {"temperature": 0.8, "frequency_penalty": 0.4}),
        (COPY, 0, {"temperature": 0, "repetition_penalty": 1.2}),
        (COPY * 3, 0, {"temperature": 0}),
        (STORY, 3, {"min_new_tokens": 6, "logit_bias": {"31": 2.0}}),
    ],
    "grammars": [
        ("Ann is 7 years old.\n", 0, {"temperature": 0, "json_schema": PERSON}),
        (STORY, 0, {"temperature": 0.9}),
        (STORY, 2, {"temperature": 1.2, "regex": r"[A-Z][a-z]{2,9}( [a-z]+){1,4}\."}),
        ("2 + 3 =", 0, {"ebnf": 'root ::= [0-9]+ ("," [0-9]+)*', "frequency_penalty": 0.5}),
    ],
}


def told(llm: Engine, asks: list[tuple[str, int, dict[str, Any]]]) -> list[Any]:
    prompts, tops, params = map(list, zip(*asks, strict=True))
    params = [{"max_new_tokens": 24, "sampling_seed": 7, **each} for each in params]
    outputs: Any = llm.generate(prompts, params, return_logprob=True, top_logprobs_num=tops)
    kept = ("output_token_logprobs", "output_top_logprobs", "finish_reason")
    return [(output["output_ids"], [output["meta_info"].get(key) for key in kept]) for output in outputs]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", CASES)
def test_the_model_in_the_box(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts beside rows that are edited, and grammars: what each gets alone, without these graphs."""
    asks = CASES[name]
    if name == "grammars":
        pytest.importorskip("llguidance", reason="grammars need the extra fengine[grammar]")
    options: dict[str, Any] = {"device": device, "disable_radix_cache": True, "disable_overlap_schedule": False}
    options |= {"max_running_requests": 8, "chunked_prefill_size": 32, "max_total_tokens": 4096}
    options |= {"speculative_algorithm": "NGRAM", "enable_torch_compile": False}
    with Engine(model_path="box", **options) as llm:
        if device == "cpu":
            want = [told(llm, [ask])[0] for ask in asks]
            use_graphs(llm._parts, monkeypatch)
        else:
            with monkeypatch.context() as patch:
                patch.setattr(Graphs, "capture_late", lambda *arguments: None)
                want = [told(llm, [ask])[0] for ask in asks]
        inner = llm._parts.core.stepper.runner
        assert not late(inner)
        drafts = llm._parts.stats()["draft_tokens"]
        for _ in range(2):
            assert told(llm, asks) == want
        assert len(late(inner)) > 2
        assert llm._parts.stats()["draft_tokens"] > drafts + 20 or name == "grammars"


def test_a_norm_with_a_bias_is_no_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer norms with biases are stored twice as wide as the hidden states that graphs hand on."""
    place = (write(tmp_path / "model", "starcoder2", vocab_size=160), "cpu", "float32")
    asks = [Ask([5, 6, 7], None, 6, 0, frozenset(), {"temperature": 0}), Ask([9], None, 4, 1, frozenset(), {})]
    with engine(place, tokens=24, overlap=True) as found:
        eager = [outcome(request) for request in run(found, asks)]
        runner = use_graphs(found, monkeypatch)
        assert runner.hidden_TD.shape[1] == found.spec.hidden_size
        assert [outcome(request) for request in run(found, asks)] == eager


def test_tables_are_written_behind_samplers_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot is given on while the sampler of the step before still waits for masks: what that draws for the request
    that has ended does not count for the one that comes."""
    pytest.importorskip("llguidance", reason="grammars need the extra fengine[grammar]")
    options: dict[str, Any] = {
        "disable_radix_cache": True,
        "disable_overlap_schedule": False,
        "max_running_requests": 2,
    }
    with Engine(model_path="box", device="cpu", enable_torch_compile=False, **options) as llm:
        penalised = {"temperature": 0, "frequency_penalty": 2.0, "max_new_tokens": 12}
        ((ids, _),) = told(llm, [("Once", 0, penalised)])
        grammar = ("Once", 0, {"regex": "[a-z ]{80,90}", "max_new_tokens": 80, "temperature": 0})
        asks = [grammar, *(("Once", 0, penalised | {"stop_token_ids": [stop]}) for stop in ids[2:9])]
        want = [told(llm, [ask])[0] for ask in asks]
        use_graphs(llm._parts, monkeypatch)
        assert told(llm, asks) == want


def test_a_sampler_that_waits_for_masks_is_launched_before_the_next_step_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as the tokens before it are known: the device has nothing to do while the host schedules."""
    pytest.importorskip("llguidance", reason="grammars need the extra fengine[grammar]")
    with Engine(model_path="box", device="cpu", enable_torch_compile=False, disable_overlap_schedule=False) as llm:
        runner, waiting = use_graphs(llm._parts, monkeypatch), list[bool]()
        launch = runner.launch

        def launching(*step: Any) -> Any:
            waiting.append(runner.behind is not None)
            return launch(*step)

        monkeypatch.setattr(runner, "launch", launching)
        told(llm, [("Once", 0, {"regex": "[a-z ]{90,99}", "max_new_tokens": 20, "temperature": 0})])
        assert len(waiting) >= 20 and not any(waiting)
