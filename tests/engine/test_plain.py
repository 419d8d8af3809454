"""Commands and steps are plain data: an engine whose every command and step goes through JSON draws the same bits."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from fengine.api.engine import Engine
from fengine.core.plain import Handles, from_plain, to_plain
from fengine.core.request import Adapter, Request
from fengine.core.sampling_params import SamplingParams
from fengine.core.scheduler_output import SchedulerOutput
from fengine.errors import UnsupportedFeatureError
from fengine.structured_output.backend import Source
from fengine.worker.input_batch import InputBatch

PROMPTS = ["What is the capital of France?", "Tell me a story about a fox.", "hello", "1 2 3 4 5 6 7"] * 2
SCHEMA = '{"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}'
SAMPLING: list[dict[str, Any]] = [
    {"max_new_tokens": 20, "temperature": 0.8, "top_p": 0.9},
    {"max_new_tokens": 20, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {"5": 2.0}},
    {"max_new_tokens": 30, "json_schema": SCHEMA},
    {"max_new_tokens": 12, "min_new_tokens": 6, "ignore_eos": True, "stop": ["zzz"]},
] * 2


def push(logits: Any, params: Any) -> Any:
    logits[:, 11] += params[0]["much"]
    logits[:, len(params[0]["__req__"].output_ids)] -= 2
    return logits


def ask(engine: Engine) -> list[Any]:
    engine.register_logit_processor("push", push)
    outputs: Any = engine.generate(
        PROMPTS, SAMPLING, return_logprob=True, top_logprobs_num=[0, 2] * 4, logprob_start_len=[0, -1, 2, 1] * 2
    )
    params = {"max_new_tokens": 12, "custom_params": {"much": 3.0}}
    outputs += engine.generate(PROMPTS, params, custom_logit_processor="push", return_hidden_states="last")
    keys = (
        "output_token_logprobs",
        "input_token_logprobs",
        "input_top_logprobs",
        "output_top_logprobs",
        "finish_reason",
    )
    return [[o["output_ids"], *(o["meta_info"].get(key) for key in keys)] for o in outputs]


def start(**options: Any) -> Engine:
    return Engine(
        model_path="box", device="cpu", enable_torch_compile=False, random_seed=3, max_total_tokens=320,
        enable_custom_logit_processor=True, enable_return_hidden_states=True, chunked_prefill_size=24, **options,
    )  # fmt: skip


def handles_of(engine: Engine) -> Handles:
    def adapter(name: str, number: int) -> Adapter:
        raise AssertionError("no adapters here")

    grammars = engine._context.grammars
    return Handles(engine._context.processors, lambda kind, text: grammars.compile(Source(kind, text)), adapter)


def sent(value: Any, handles: Handles) -> Any:
    """What another process would read."""
    return from_plain(type(value), json.loads(json.dumps(to_plain(value, handles))), handles)


@pytest.fixture(params=[{}, {"disable_overlap_schedule": True}, {"speculative_algorithm": "NGRAM"}], ids=str)
def options(request: Any) -> Iterator[dict[str, Any]]:
    yield request.param


def test_steps_that_went_through_json_have_the_same_bits(options: dict[str, Any]) -> None:
    with start(**options) as engine:
        want, preempted = ask(engine), engine.stats()["preemptions"]
    with start(**options) as engine:
        handles, core, steps, names = handles_of(engine), engine._parts.core, [], set()
        stage, put = core.stepper.input_batch.stage, core.inbox.put

        def staged(output: SchedulerOutput) -> Any:
            steps.append(sent(output, handles))
            return stage(steps[-1])

        def putting(name: str, arguments: dict[str, Any], attached: Any = None, reply: Any = None) -> None:
            there = json.loads(json.dumps(to_plain(arguments, handles)))
            if name == "add":
                there["requests"] = [from_plain(Request, request, handles) for request in there["requests"]]
                for request, state in zip(there["requests"], attached, strict=True):
                    assert to_plain(request, handles) == to_plain(state.request, handles)
            names.add(name)
            put(name, there, attached, reply)

        core.stepper.input_batch.stage = staged  # type: ignore[method-assign]
        core.inbox.put = putting  # type: ignore[method-assign]
        assert ask(engine) == want
        assert len(steps) > 30 and engine.stats()["preemptions"] == preempted
        engine.pause_generation()
        engine.continue_generation()
        assert engine.flush_cache().success and engine.get_server_info()["weight_version"] == "default"
        assert names >= {"add", "pause", "resume", "flush_cache", "get_stats"}


def test_a_request_comes_back_as_it_went() -> None:
    loads = {("a", 3): Adapter("a", 3, None)}
    handles = Handles({}, lambda kind, text: (kind, text), lambda name, number: loads[name, number])
    request = Request("r", 2, [1, 2], SamplingParams(regex="a+", grammar=("regex", "a+")), 7, 9, frozenset({5}))
    request.adapter = loads["a", 3]
    back = sent(request, handles)
    assert back.adapter is request.adapter and back.params == request.params and back.stop_ids == {5}


def test_a_processor_without_a_name_stays_in_its_process() -> None:
    handles = Handles({"push": push}, lambda kind, text: None, lambda name, number: Adapter(name, number, None))
    made = {"much": 1.0, "__req__": object()}  # by the last call: the next one makes another
    told = to_plain(SamplingParams(processor=push, custom_params=made), handles)
    assert told == {"processor": "push", "custom_params": {"much": 1.0}}
    with pytest.raises(UnsupportedFeatureError, match="stays in this process; .*parallel.dp_size=1"):
        to_plain(SamplingParams(processor=lambda logits, params: logits), handles)


def test_who_gets_a_row_slot_is_not_asked_what_its_holder_before_wanted() -> None:
    """Ranks but the first do not hear that an engine is idle, and of who has left."""
    batch = InputBatch(2, 8, 4, (), 0, None)
    for params in (SamplingParams(logprob_start=0), SamplingParams(top_logprobs=2), SamplingParams()):
        batch.admit(Request("r", 1, [1], params, 0, 2, frozenset(), row=1))
        assert {name for name, count in batch.asked.items() if count} == set(params.asks)
    assert not batch.asking and not batch.extras.rows
