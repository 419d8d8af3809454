"""Results: SGLang's keys and shapes from requests and records made by hand, and lists of floats that are arrays."""

import hashlib
import json
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from checksum import checksum_engine, expected
from hypothesis import given
from hypothesis import strategies as st

from fengine.api.engine import Engine
from fengine.api.hidden_states import FloatList
from fengine.api.outputs import images_of, output_of
from fengine.api.server_args import ServerArgs
from fengine.core.images import Image, ImageSpan
from fengine.core.request import Request, SamplingParams
from fengine.engine.request_state import RequestOutput, RequestState
from fengine.worker.step_input import StepInput

BASE = {
    "id", "finish_reason", "prompt_tokens", "completion_tokens", "reasoning_tokens", "cached_tokens",
    "cached_tokens_details", "weight_version", "weight_versions", "num_retractions",
}  # fmt: skip
FINAL = {"e2e_latency", "response_sent_to_client_ts"}
METRICS = {
    "request_received_ts", "first_token_latency", "queue_time", "forward_entry_time", "prefill_finished_time",
    "decode_throughput", "request_finished_ts", "api_server_dispatch_finish_ts",
}  # fmt: skip
LOGPROBS = {"input_token_logprobs", "output_token_logprobs", "output_token_logprobs_length"}


def made(
    params: SamplingParams | None = None, drawn: int = 3, unasked: tuple[float, int] | None = None, **found: Any,
) -> RequestState:  # fmt: skip
    """A finished state: prompt 1 2 3, then tokens 10, 11, ... with logprobs -0.0, -0.5, ..."""
    request = Request(
        rid="r", prompt_len=3, token_ids=[1, 2, 3, *range(10, 10 + drawn)], params=params or SamplingParams(), seed=0,
        max_new_tokens=9, stop_ids=frozenset(), logprobs=[-0.5 * i for i in range(drawn)],
        unasked=unasked, num_cached=2, num_preempted=1, versions=(("default", 0),),
    )  # fmt: skip
    output = RequestOutput("abcdef", drawn, {"type": "length", "length": drawn})
    state = RequestState(request, None, False, lambda _: None, output=output, **found)
    state.started, state.first_token = state.submitted + 1, state.submitted + 2
    state.finished = state.submitted + 4
    return state


def shown(
    state: RequestState, output: RequestOutput | None = None, before: RequestOutput | None = None, **more: bool
) -> dict[str, Any]:
    context: Any = SimpleNamespace(
        parts=SimpleNamespace(tokenizer="of the text" if more.pop("has_text", True) else None),
        args=SimpleNamespace(enable_metrics=more.pop("metrics", False)),
    )
    return output_of(context, state, output or state.output, before or RequestOutput(), **more)


def test_the_keys_of_a_plain_result() -> None:
    output = shown(made())
    meta = output["meta_info"]
    assert list(output) == ["text", "output_ids", "meta_info"] and set(meta) == BASE | FINAL
    assert (output["text"], output["output_ids"]) == ("abcdef", [10, 11, 12])
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 3, 2)
    assert meta["cached_tokens_details"] == {"device": 2, "host": 0} and meta["num_retractions"] == 1
    assert meta["weight_version"] == "default"
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 3}]
    assert meta["e2e_latency"] == pytest.approx(4)
    assert json.loads(json.dumps(output))["output_ids"] == [10, 11, 12]
    assert list(shown(made(), has_text=False)) == ["output_ids", "meta_info"]


def test_metrics_add_times_that_fit_together() -> None:
    state = made()
    meta = shown(state, metrics=True)["meta_info"]
    assert set(meta) == BASE | FINAL | METRICS
    assert meta["queue_time"] == pytest.approx(1) and meta["first_token_latency"] == pytest.approx(2)
    assert meta["decode_throughput"] == pytest.approx(1.0)  # two tokens in the two seconds behind the first
    at = meta["request_received_ts"]
    moments = [meta[k] - at for k in ("forward_entry_time", "prefill_finished_time", "request_finished_ts")]
    assert moments == pytest.approx([1, 2, 4])
    state.started = state.first_token = None  # aborted while it waited
    assert set(shown(state, metrics=True)["meta_info"]) == BASE | FINAL | METRICS - {
        "queue_time", "forward_entry_time", "first_token_latency", "prefill_finished_time", "decode_throughput",
    }  # fmt: skip


def test_what_runs_has_no_finish_and_no_times() -> None:
    meta = shown(made(), RequestOutput("abc", 2))["meta_info"]
    assert set(meta) == BASE and meta["finish_reason"] is None and meta["completion_tokens"] == 2


def test_versions_of_weights_in_spans() -> None:
    state = made()
    state.request.versions = (("v1", 0), ("v2", 2))
    meta = shown(state)["meta_info"]
    assert meta["weight_version"] == "v2"
    assert meta["weight_versions"] == [
        {"version": "v1", "start": 0, "end": 2}, {"version": "v2", "start": 2, "end": 3},
    ]  # fmt: skip
    assert shown(state, RequestOutput("a", 1))["meta_info"]["weight_version"] == "v1"


def test_logprobs_of_the_output_alone() -> None:
    meta = shown(made(SamplingParams(return_logprob=True)))["meta_info"]
    assert set(meta) == BASE | FINAL | LOGPROBS
    assert meta["input_token_logprobs"] == [] and meta["output_token_logprobs_length"] == 3
    assert meta["output_token_logprobs"] == [(-0.0, 10, None), (-0.5, 11, None), (-1.0, 12, None)]
    assert all(type(entry) is tuple for entry in meta["output_token_logprobs"])


def full() -> RequestState:
    found: dict[str, Any] = dict(
        input_logprobs=[(None, 2), (-1.5, 3)],
        input_top=[None, [(-1.0, 7), (-2.0, 8)]],
        input_ids=[None, [(-3.0, 5)]],
        output_top=[[(-0.1, 10), (-2.5, 4)]] * 4,  # one more than is shown yet
        output_ids=[[(-9.0, 5)]] * 4,
    )
    return made(SamplingParams(return_logprob=True, logprob_start=1, top_logprobs=2, logprob_ids=(5,)), **found)


def test_logprobs_of_all_kinds() -> None:
    meta = shown(full())["meta_info"]
    assert meta["input_token_logprobs"] == [(None, 2, None), (-1.5, 3, None)]
    assert meta["input_top_logprobs"] == [None, [(-1.0, 7, None), (-2.0, 8, None)]]
    assert meta["output_top_logprobs"] == [[(-0.1, 10, None), (-2.5, 4, None)]] * 3
    assert meta["input_token_ids_logprobs"] == [None, [(-3.0, 5, None)]]
    assert meta["output_token_ids_logprobs"] == [[(-9.0, 5, None)]] * 3


def test_a_delta_holds_what_is_new_of_text_ids_and_output_logprobs() -> None:
    output = shown(full(), RequestOutput("abcdef", 3), RequestOutput("abcd", 1))
    meta = output["meta_info"]
    assert (output["text"], output["output_ids"], meta["completion_tokens"]) == ("ef", [11, 12], 3)
    assert [token for _, token, _ in meta["output_token_logprobs"]] == [11, 12]
    assert meta["output_token_logprobs_length"] == 3  # so far: SGLang's readers add up chunks by it
    assert len(meta["output_top_logprobs"]) == len(meta["output_token_ids_logprobs"]) == 2


def test_a_request_for_no_tokens_tells_of_the_one_that_was_drawn() -> None:
    asked = SamplingParams(return_logprob=True, logprob_ids=(5,))
    state = made(asked, drawn=0, unasked=(-0.25, 42), output_ids=[[(-1.0, 5)]])
    meta = shown(state)["meta_info"]
    assert meta["output_token_logprobs"] == [(-0.25, 42, None)] and meta["completion_tokens"] == 0
    assert meta["output_token_ids_logprobs"] == [[(-1.0, 5, None)]]


def test_the_hash_of_pictures_tells_their_order() -> None:
    one, two = (Image(key, tokens, 1, {}) for key, tokens in ((b"b", 2), (b"a", 3)))
    for shown, keys in (((one, two), b"ba"), ((two, one), b"ab")):
        told = images_of(tuple(ImageSpan(9 * i, image) for i, image in enumerate(shown)))
        assert told == {"image_tokens": 5, "pixels_sha256": hashlib.sha256(keys).hexdigest()}


def test_of_several_stages_that_fail_a_row_the_first_tells() -> None:
    stages = tuple(SimpleNamespace(errors=lambda found=found: found) for found in ({1: "first"}, {1: "last", 2: "own"}))
    assert StepInput({}, np.zeros(0), stages=cast(Any, stages)).errors() == {1: "first", 2: "own"}


def test_hidden_states_full_and_last() -> None:
    states = [np.arange(6, dtype=np.float32).reshape(3, 2), np.float32([6, 7]), np.float32([8, 9])]
    hidden = shown(made(SamplingParams(hidden="full"), hidden=states))["meta_info"]["hidden_states"]
    assert hidden == [[[0, 1], [2, 3], [4, 5]], [6, 7], [8, 9]] and type(hidden) is list
    for i, state in enumerate(hidden):  # as SGLang's example does
        hidden[i] = torch.tensor(state, dtype=torch.bfloat16)
    joined = torch.cat([state.unsqueeze(0) if state.ndim == 1 else state for state in hidden])
    assert joined.tolist() == [[2 * i, 2 * i + 1] for i in range(5)]
    assert shown(made(SamplingParams(hidden="last"), hidden=states))["meta_info"]["hidden_states"] == [8, 9]
    assert shown(made(SamplingParams(hidden="last"), 1, hidden=states[:1]))["meta_info"]["hidden_states"] == [4, 5]
    seen = shown(made(SamplingParams(hidden="full"), hidden=states), RequestOutput("", 2))["meta_info"]["hidden_states"]
    assert len(seen) == 2
    read = shown(made(SamplingParams(hidden="full"), 0, hidden=states[:1]), RequestOutput("", 0))["meta_info"]
    assert read["hidden_states"] == [[[0, 1], [2, 3], [4, 5]]]  # those of a prompt that is only read
    assert "hidden_states" not in shown(full())["meta_info"]


# -- FloatList ---------------------------------------------------------------------------------------------------------

floats = st.floats(width=32, allow_nan=False)
nested = st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(floats, min_size=n, max_size=n), min_size=1, max_size=4))


@given(nested, st.integers(-4, 3), st.slices(4))
def test_a_float_list_reads_as_the_list(values: list[list[float]], i: int, part: slice) -> None:
    made = FloatList.of(np.array(values, np.float32))
    assert made == values and values == made and not made != values and made.tolist() == values
    assert len(made) == len(values) and bool(made) is True and [list(row) for row in made] == values
    assert made[part] == values[part] if values[part] else not made[part]
    if -len(values) <= i < len(values):
        row, item = made[i], made[i][0]
        assert row == values[i] and type(item) is float and item == values[i][0] == made[i, 0]
        assert all(type(x) is float for x in row) and row.index(values[i][-1]) == values[i].index(values[i][-1])
        assert row.count(item) == values[i].count(item) and item in row and values[i] in made
    assert made != values[:-1] and made != [*values, values[0]] and made != "x" and (made == 5) is False
    assert json.loads(json.dumps({"h": made}, default=FloatList.tolist)) == {"h": values}
    assert isinstance(made, list) and isinstance(made, np.ndarray)
    assert json.loads(json.dumps(made, indent=1, default=FloatList.tolist)) == values


def test_a_float_list_is_an_array() -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    made = FloatList.of(values)
    assert np.shares_memory(made, values) and made.shape == (2, 3) and made.dtype == np.float32
    assert torch.equal(torch.tensor(made), torch.from_numpy(values)) and torch.from_numpy(made).shape == (2, 3)
    assert (made + 1) == [[1, 2, 3], [4, 5, 6]] and float(made.sum()) == 15
    assert made != [[0, 1], [2, 3, 4]]  # ragged
    assert np.allclose(made, values) and (made > -1).all() and made.max() == 5 and type(made.sum()) is np.float32
    np.testing.assert_allclose(made + 1, values + 1)
    with pytest.raises(ValueError, match="not in list"):
        made[0].index(9.0)
    with pytest.raises(TypeError):
        hash(made)


# -- through an engine -------------------------------------------------------------------------------------------------


def test_metrics_are_in_results_only_where_they_are_switched_on() -> None:
    with checksum_engine() as engine:
        assert set(engine.generate(input_ids=[5])["meta_info"]) == BASE | FINAL | METRICS
        plain = Engine.from_parts(engine._parts, ServerArgs(model_path="x", weight_version="step-7"))
        meta = plain.generate(input_ids=[5], sampling_params={"temperature": 0, "max_new_tokens": 2})["meta_info"]
        assert set(meta) == BASE | FINAL
        assert meta["weight_versions"] == [{"version": "step-7", "start": 0, "end": 2}]


def test_waiting_shows_in_the_queue_time() -> None:
    """The second request's first step comes behind the first one's end."""
    with checksum_engine(rows=1) as engine:
        params = {"temperature": 0, "max_new_tokens": 20}
        first, second = (o["meta_info"] for o in engine.generate(input_ids=[[1], [2]], sampling_params=params))
        assert 0 <= first["queue_time"] < first["first_token_latency"] < first["e2e_latency"]
        assert second["forward_entry_time"] > first["prefill_finished_time"]
        assert second["queue_time"] > first["queue_time"]


def test_zero_tokens_with_logprobs_give_one_entry() -> None:
    with checksum_engine() as engine:
        params = {"temperature": 0, "max_new_tokens": 0}
        output = engine.generate(input_ids=[1, 2], sampling_params=params, return_logprob=True)
        drawn = engine.generate(input_ids=[1, 2], sampling_params=params | {"max_new_tokens": 1}, return_logprob=True)
        meta = output["meta_info"]
        assert output["output_ids"] == [] and meta["finish_reason"] == {"type": "length", "length": 0}
        assert meta["output_token_logprobs"] == drawn["meta_info"]["output_token_logprobs"]
        assert [t for _, t, _ in meta["output_token_logprobs"]] == expected([1, 2], 1)
