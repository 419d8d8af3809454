"""What calls may ask for, argument by argument: what reaches the requests, and what is refused in which words."""

import random
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from books import check_scheduler
from checksum import checksum_engine, checksum_parts, expected
from loops import in_loop

from fengine.api.engine import Engine
from fengine.api.generate_input import GenerateReqInput, split_batch
from fengine.api.server_args import ServerArgs
from fengine.core.request import Request, derive_seed
from fengine.core.sampling_params import GRAMMARS, SamplingParams
from fengine.errors import CapacityError, ContextLengthError, InvalidRequestError, UnsupportedFeatureError

GREEDY = {"temperature": 0, "max_new_tokens": 4}
NAN, INF = float("nan"), float("inf")


def identity(logits: Any, params: Any) -> Any:
    return logits


@pytest.fixture(scope="module")
def engine() -> Any:
    with checksum_engine() as made:
        made.register_logit_processor("identity", identity)
        yield made


@pytest.fixture
def asked(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Any:
    """asked(**arguments): the requests that a call would queue; nothing is queued."""

    def ask(**arguments: Any) -> list[Request]:
        requests: list[Request] = []
        with monkeypatch.context() as patch:
            patch.setattr(engine._parts.core, "submit", lambda states: requests.extend(t.request for t in states))
            stream: Any = engine.generate(**arguments, stream=True)
            stream._collector.open = set()
        return requests

    return ask


# -- what reaches a request --------------------------------------------------------------------------------------------


def test_a_plain_request_carries_nothing(asked: Any) -> None:
    off = {
        "frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1, "logit_bias": {}, "min_new_tokens": 0,
        "n": 1, "custom_params": {"a": 1}, "stop_regex": None, "no_stop_trim": False, "stream_interval": None,
    }  # fmt: skip
    for sampling in (None, {}, off, dict.fromkeys(off)):
        (request,) = asked(input_ids=[1, 2], sampling_params=sampling, return_logprob=True, logprob_start_len=-1)
        assert request.params.bare
        assert request.cache_salt is None and request.priority == 0
    (request,) = asked(
        input_ids=[1], logprob_start_len=0, top_logprobs_num=5, token_ids_logprob=[3]
    )  # no return_logprob
    assert request.params.bare


def test_everything_asked_for_is_in_the_parameters(asked: Any) -> None:
    sampling = {
        "frequency_penalty": 0.5, "presence_penalty": -1, "repetition_penalty": 1.25, "min_new_tokens": 0,
        "logit_bias": {"7": 1, 3: np.float32(-2.5)}, "custom_params": {"deep": [1, {"x": 2}]},
    }  # fmt: skip
    (request,) = asked(
        input_ids=[1, 2, 3], sampling_params=sampling, return_logprob=True, logprob_start_len=1, top_logprobs_num=2,
        token_ids_logprob=[5, 4, 5], return_hidden_states="last", custom_logit_processor="identity",
        cache_salt="mine", priority=3,
    )  # fmt: skip
    assert request.params == SamplingParams(
        frequency_penalty=0.5, presence_penalty=-1.0, repetition_penalty=1.25, logit_bias=((3, -2.5), (7, 1.0)),
        processor=identity, custom_params={"deep": [1, {"x": 2}]}, return_logprob=True, logprob_start=1,
        top_logprobs=2, logprob_ids=(5, 4, 5), hidden="last",
    )  # fmt: skip
    assert (request.cache_salt, request.priority) == ("mine", 3)
    sampling["custom_params"]["deep"][1]["x"] = 9
    assert request.params.custom_params == {"deep": [1, {"x": 2}]}


def test_hidden_states_and_start_in_their_forms(asked: Any) -> None:
    for value, mode in ((False, None), (None, None), (True, "full"), ("full", "full"), ("last", "last")):
        (request,) = asked(input_ids=[1], return_hidden_states=value)
        assert request.params.hidden == mode
    for start, wanted in ((None, None), (-1, None), (0, 0), (2, 2), (3, None)):  # 3: behind the last prompt token
        (request,) = asked(input_ids=[1, 2, 3], return_logprob=True, logprob_start_len=start)
        assert request.params.logprob_start == wanted


def test_lists_give_each_prompt_its_own_and_scalars_are_for_all(asked: Any) -> None:
    requests = asked(
        input_ids=[[1], [2], [3]], sampling_params=[{"temperature": 0}, {"top_k": 5}, None],
        return_logprob=[True, True, False], logprob_start_len=[0, -1, 0], top_logprobs_num=2,
        token_ids_logprob=[[1], None, [2]], return_hidden_states=[False, "last", True],
        custom_logit_processor=[None, identity, None], cache_salt=["a", None, "b"], priority=[1, None, 2],
    )  # fmt: skip
    params = [request.params for request in requests]
    assert [e.logprob_start for e in params] == [0, None, None]
    assert [e.top_logprobs for e in params] == [2, 2, 0]
    assert [e.logprob_ids for e in params] == [(1,), (), ()]
    assert [e.hidden for e in params] == [None, "last", "full"]
    assert [e.processor for e in params] == [None, identity, None]
    assert [r.cache_salt for r in requests] == ["a", None, "b"] and [r.priority for r in requests] == [1, 0, 2]
    assert [r.params.top_k for r in requests] == [1, 5, 1 << 30]
    requests = asked(input_ids=[[1], [2]], return_logprob=True, token_ids_logprob=[3, 4])
    assert [r.params.logprob_ids for r in requests] == [(3, 4)] * 2


def test_samples_are_prompt_major_with_seeds_and_ids_of_their_own(asked: Any, engine: Engine) -> None:
    first = next(engine._context.indices) + 1
    requests = asked(input_ids=[[1], [2, 3]], sampling_params={"n": 3}, rid="b")
    assert [r.token_ids for r in requests] == [[1]] * 3 + [[2, 3]] * 3
    assert [r.seed for r in requests] == [derive_seed(0, first + p, s) for p in range(2) for s in range(3)]
    assert len({r.rid for r in requests}) == 6 and not any("_" in r.rid for r in requests)
    assert len({id(r.token_ids) for r in requests}) == 6
    one, two, *_ = seeds = [r.seed for r in asked(input_ids=[1], sampling_params={"n": 4, "sampling_seed": 9})]
    assert one == 9 and two == derive_seed(9, 1) and len(set(seeds)) == 4
    assert [r.rid for r in asked(input_ids=[[1], [2]], rid="b")] == ["b_0", "b_1"]


def test_each_sample_owns_what_its_processor_sees(asked: Any) -> None:
    sampling = {"n": 2, "custom_params": {"seen": []}}
    one, two = asked(input_ids=[1], sampling_params=sampling, custom_logit_processor=identity)
    one.params.custom_params["seen"].append(1)
    assert two.params.custom_params == {"seen": []}


# -- what is refused ---------------------------------------------------------------------------------------------------

PROCESSOR = '{"callable": "80049503"}'  # what SGLang's to_str() gives looks like this
BAD: list[tuple[dict[str, Any], str]] = [
    # values that Python itself cannot compare or convert
    ({"sampling_params": {"logit_bias": ((1, 2, 3),)}}, "logit_bias must be a dict"),
    ({"sampling_params": {"logit_bias": (1, 2)}}, "logit_bias must be a dict"),
    ({"return_hidden_states": np.zeros(2)}, "return_hidden_states must be False, True"),
    ({"cache_salt": np.zeros(2)}, "cache_salt must be a string"),
    ({"sampling_params": {"n": 2}, "token_ids_logprob": [np.array([1])]}, "Cannot use list token_ids_logprob"),
    ({"sampling_params": {"x" * 10**6: 1}}, r"unknown sampling parameter 'x{79}\. Known"),
    # section 2: sampling parameters
    *(({"sampling_params": {name: bad}}, rf"{name} must be in \[-2, 2\], got") for bad in (2.1, -3, NAN, INF)
      for name in ("frequency_penalty", "presence_penalty")),
    *(({"sampling_params": {"repetition_penalty": bad}}, r"repetition_penalty must be in \(0, 2\]")
      for bad in (0, -1, 2.5, NAN, INF, 1e-320)),
    *(({"sampling_params": {name: bad}}, f"{name} must be a number") for bad in ("1", True, [1])
      for name in ("frequency_penalty", "presence_penalty", "repetition_penalty")),
    ({"sampling_params": {"min_new_tokens": -1}}, r"min_new_tokens must be in \[0, max_new_tokens\(128\)\], got -1"),
    ({"sampling_params": {"min_new_tokens": 9, "max_new_tokens": 8}}, r"must be in \[0, max_new_tokens\(8\)\], got 9"),
    ({"sampling_params": {"min_new_tokens": 129}}, "min_new_tokens must be in"),
    ({"sampling_params": {"min_new_tokens": 1}}, "min_new_tokens is unavailable when skip_tokenizer_init=True"),
    ({"sampling_params": {"min_new_tokens": 1.5}}, "min_new_tokens must be an integer"),
    ({"sampling_params": {"stop_regex": "a"}}, "stop_regex is unavailable when skip_tokenizer_init=True"),
    ({"sampling_params": {"stop_regex": ["a"] * 33}}, "at most 32 stop_regex"),
    ({"sampling_params": {"stop_regex": "a" * 257}}, "stop_regex is 257 bytes, over the 256-byte limit"),
    ({"sampling_params": {"stop_regex": "("}}, "not a regular expression"),
    ({"sampling_params": {"stop_regex": r"(a)\1"}}, "back-reference"),
    ({"sampling_params": {"stop_regex": 5}}, "stop_regex must be a string"),
    *(({"sampling_params": {"n": bad}}, "n must be in") for bad in (0, -1, 10**9)),
    *(({"sampling_params": {"n": bad}}, "n must be an integer") for bad in (1.5, "2", True)),
    ({"sampling_params": {"stream_interval": 0}}, "stream_interval must be at least 1"),
    ({"sampling_params": {"no_stop_trim": 1}}, "no_stop_trim must be True or False"),
    ({"sampling_params": {"beam_width": 0}}, "beam_width must be at least 1, got 0"),
    ({"sampling_params": {"json_schema": "{}", "regex": "a"}}, "Only one of json_schema, regex, ebnf, or"),
    ({"sampling_params": {"regex": np.zeros(2)}}, "regex must be a string"),
    *(({"sampling_params": {name: "x"}}, f"{name} is unavailable when skip_tokenizer_init=True") for name in GRAMMARS),
    *(({"sampling_params": {"logit_bias": {key: 1}}}, r"logit_bias must has keys in \[0, 96\], got") for key in
      ("97", 97, -1, "-1", "x", "", 1.5, None, True, 2**70, "9" * 30, "１")),
    *(({"sampling_params": {"logit_bias": {"5": bad}}}, "logit_bias")
      for bad in (NAN, INF, -INF, "1", None, True, 1e39)),
    ({"sampling_params": {"logit_bias": {str(i): 1 for i in range(1025)}}}, "at most 1024"),
    ({"sampling_params": {"logit_bias": [1]}}, "logit_bias must be a dict"),
    ({"sampling_params": {"logit_bias": {"5": 1, 5: 2}}}, "logit_bias has token 5 twice"),
    ({"sampling_params": {"custom_params": [1]}}, "custom_params must be a dict"),
    ({"sampling_params": {"custom_params": {"f": identity}}}, "must be JSON-like"),
    ({"sampling_params": {"custom_params": {"x": [NAN]}}}, "must be finite"),
    # section 1.2, 1.8 and 3.1: arguments
    ({"logprob_start_len": 4}, r"logprob_start_len=4 is higher than the number of input tokens \(3\)"),
    *(({"logprob_start_len": bad}, "logprob_start_len must be") for bad in (-2, 1.5, "0", True)),
    *(({"top_logprobs_num": bad}, r"top_logprobs_num must be in \[0, 97\]") for bad in (-1, 98, 10**9)),
    *(({"top_logprobs_num": bad}, "top_logprobs_num must be an integer") for bad in ("1", 1.0, True)),
    *(({"token_ids_logprob": [1, bad]}, r"token_ids_logprob\[1\] is .*; token ids must be in \[0, 96\]")
      for bad in (-1, 97, 2**63)),
    *(({"token_ids_logprob": bad}, "one prompt must be a flat list of integers") for bad in ([[0]], [[0], [1, 2]])),
    *(({"token_ids_logprob": bad}, "token_ids_logprob") for bad in ([1.0], ["1"], [True], 5, "5")),
    *(({"return_hidden_states": bad}, "return_hidden_states must be False, True") for bad in ("all", 1, 0.5)),
    ({"custom_logit_processor": PROCESSOR}, r"(?s)not the name of a registered processor.*register_logit_processor"),
    *(({"custom_logit_processor": bad}, "custom_logit_processor must be a callable") for bad in (5, type, b"x")),
    *(({"cache_salt": bad}, "cache_salt must be a string") for bad in (5, b"x", "x" * 5000)),
    *(({"priority": bad}, "priority must be") for bad in (1.5, "1", 2**31, True)),
    ({"stream": 1}, "stream must be True or False"),
    *(({"routed_dp_rank": bad}, rf"routed_dp_rank={bad} out of range \[0, 1\)") for bad in (1, -1)),
    ({"session_id": "s", "session_params": {"id": "s"}}, "session_id and session_params cannot both be set"),
    ({"session_params": {"id": "nope"}}, "session id nope does not exist"),
    ({"session_id": "s", "sampling_params": {"n": 2}}, "n must be 1, got 2"),
    ({"rid": 5}, "rid must be a string"),
    ({"image_data": "x.png"}, r"image_data\[0\] is 'x.png', but this model takes no images"),
    ({"lora_path": "a"}, "LoRA adapter 'a' was requested, but LoRA is not enabled"),
]  # fmt: skip
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"return_routed_experts": True}, "return_routed_experts"),
    ({"require_reasoning": True}, "require_reasoning"),
    ({"bootstrap_host": "h"}, "bootstrap_host"),
    ({"kv_hints": {}}, "kv_hints"),
    ({"sampling_params": {"watermark": "x"}}, "watermark"),
    ({"sampling_params": {"beam_width": 2}}, "beam_width"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [(a, InvalidRequestError, m) for a, m in BAD] + [(a, UnsupportedFeatureError, m) for a, m in REFUSED],
    ids=lambda value: str(value).partition(" at 0x")[0][:70],
)
def test_bad_input_is_refused_and_nothing_is_queued(engine: Engine, arguments: dict, kind: type, message: str) -> None:
    before = engine.stats()["finished"]
    with pytest.raises(kind, match=message) as error:
        engine.generate(input_ids=[1, 2, 3], **arguments)
    assert isinstance(error.value, ValueError)
    batch = {name: value for name, value in arguments.items() if not isinstance(value, list)}
    if batch == arguments and "stream" not in batch:
        with pytest.raises(kind, match=message):
            engine.generate(input_ids=[[1, 2, 3], [1, 2, 3]], **batch)
    in_loop(engine._parts.core)
    assert engine.stats()["finished"] == before and engine.stats()["waiting"] == engine.stats()["running"] == 0


BAD_BATCHES = [
    ({"sampling_params": [{"n": 1}, {"n": 2}]}, "The parallel_sample_num should be the same for all samples"),
    ({"sampling_params": {"n": 2}, "return_logprob": [True, False]}, "Cannot use list return_logprob with parallel"),
    ({"sampling_params": {"n": 2}, "logprob_start_len": [0, 0]}, "Cannot use list logprob_start_len with parallel"),
    ({"sampling_params": {"n": 2}, "top_logprobs_num": [1, 1]}, "Cannot use list top_logprobs_num with parallel"),
    ({"sampling_params": {"n": 2}, "token_ids_logprob": [[1], [2]]}, "Cannot use list token_ids_logprob with parallel"),
    ({"sampling_params": [{"top_k": 1}, {"top_k": True}]}, "^prompt 1: top_k must be an integer, got True"),
    ({"sampling_params": [{"top_k": 1}, {"top_k": 1.0}]}, "^prompt 1: top_k must be an integer, got 1.0"),
    ({"sampling_params": [{}]}, "sampling_params has 1 entries for 2 prompts"),
    ({"top_logprobs_num": [1, 2, 3]}, "top_logprobs_num has 3 entries for 2 prompts"),
    ({"token_ids_logprob": [[1]]}, "token_ids_logprob has 1 entries for 2 prompts"),
    ({"token_ids_logprob": [[1], [-1]]}, r"(?s)prompt 1: token_ids_logprob\[0\] is -1, out-of-vocabulary"),
    ({"return_hidden_states": [True]}, "return_hidden_states has 1 entries"),
    ({"rid": ["a"]}, "rid has 1 entries"),
    ({"rid": ["a", "a"]}, r"Duplicate request IDs detected within the request: \['a'\]"),
    ({"token_ids_logprob": [[1], [97]]}, r"(?s)prompt 1: token_ids_logprob\[0\] is 97"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_BATCHES, ids=[str(b[0])[:60] for b in BAD_BATCHES])
def test_bad_batches_are_refused(engine: Engine, arguments: dict, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        engine.generate(input_ids=[[1], [2]], **arguments)


def test_integers_of_5000_digits_are_refused_by_name(engine: Engine) -> None:
    """Python writes no more than 4,300 digits, also not into a message."""
    for name in ("temperature", "top_k", "max_new_tokens", "n", "ignore_eos", "sampling_seed", "stream_interval"):
        with pytest.raises(InvalidRequestError, match=f"{name} must be .*, got one that cannot be shown"):
            engine.generate(input_ids=[1], sampling_params={name: 10**5000})
    for arguments in ({"priority": 10**5000}, {"top_logprobs_num": 10**5000}, {"token_ids_logprob": [-(10**5000)]}):
        with pytest.raises(InvalidRequestError, match=f"{next(iter(arguments))}.* one that cannot be shown"):
            engine.generate(input_ids=[1], **arguments)


def test_a_text_that_cannot_be_read_is_refused_by_name(engine: Engine) -> None:
    class Text(str):
        def __str__(self) -> str:
            raise RuntimeError("it is none")

    with pytest.raises(InvalidRequestError, match="rid is 'a', which cannot be read: it is none"):
        engine.abort(Text("a"))


def test_no_float_gets_past_that_is_not_finite(engine: Engine) -> None:
    draw = random.Random(1)
    names = ["temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"]
    for name in names:
        for bad in (NAN, INF, -INF, torch.tensor(NAN), np.float64(INF)):
            sampling = {name: bad, draw.choice(names[:1]): 1.0} if name != "temperature" else {name: bad}
            with pytest.raises(InvalidRequestError, match=name):
                engine.generate(input_ids=[1], sampling_params=sampling)


def test_deprecated_rank_warns_and_rank_zero_is_fine(engine: Engine) -> None:
    with pytest.warns(DeprecationWarning, match="data_parallel_rank"):
        output = engine.generate(input_ids=[1], sampling_params=GREEDY, data_parallel_rank=0)
    assert output["output_ids"] == expected([1], 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engine.generate(input_ids=[1], sampling_params=GREEDY, routed_dp_rank=0)["output_ids"] == expected(
            [1], 4
        )


# -- what the engine's settings allow ----------------------------------------------------------------------------------


def over(args: ServerArgs, **options: Any) -> Engine:
    engine = Engine.from_parts(checksum_parts(**options), args)
    return engine


def test_features_must_be_switched_on() -> None:
    with checksum_engine() as made:
        plain = Engine.from_parts(made._parts, ServerArgs(model_path="x"))
        for arguments, words in (
            ({"return_hidden_states": True}, "not configured to return hidden states. Please set"),
            ({"return_hidden_states": "last"}, "not configured to return hidden states. Please set"),
            ({"custom_logit_processor": identity}, "not configured to enable custom logit processor. Please set"),
            ({"priority": 1}, "set enable_priority_scheduling=True"),
        ):
            with pytest.raises(InvalidRequestError, match=words):
                plain.generate(input_ids=[1], **arguments)
        last = Engine.from_parts(made._parts, ServerArgs(model_path="x", return_hidden_states_mode="last"))
        with pytest.raises(InvalidRequestError, match='return_hidden_states_mode="full"'):
            last.generate(input_ids=[1], return_hidden_states=True)


def test_preferred_parameters_hold_where_the_call_is_silent() -> None:
    with checksum_engine(context=64) as made:
        for preferred in ('{"temperature": 0, "max_new_tokens": 3}', {"temperature": 0, "max_new_tokens": 3}):
            engine = Engine.from_parts(made._parts, ServerArgs(model_path="x", preferred_sampling_params=preferred))
            assert engine.generate(input_ids=[5])["output_ids"] == expected([5], 3)
            assert engine.generate(input_ids=[5], sampling_params={"max_new_tokens": 6})["output_ids"] == expected(
                [5], 6
            )
            assert len(engine.generate(input_ids=[5] * 62)["output_ids"]) == 2  # a default is cut to what fits
            for given in (
                {"max_new_tokens": 3},
                [{"max_new_tokens": 3}],
            ):  # and not what is asked for, if it is as much
                with pytest.raises(ContextLengthError, match="Lower max_new_tokens"):
                    engine.generate(
                        input_ids=[[5] * 62] if isinstance(given, list) else [5] * 62, sampling_params=given
                    )
        args = ServerArgs(model_path="x", preferred_sampling_params={"n": 2, "temperature": 0})
        engine = Engine.from_parts(made._parts, args)
        assert len(engine.generate(input_ids=[5])) == 2


def test_auto_truncate_cuts_with_a_warning_and_is_off_by_default() -> None:
    with checksum_engine(context=64, pool=256) as made:
        with pytest.raises(ContextLengthError, match=r"The input \(70 tokens\) is longer than the model's context"):
            made.generate(input_ids=[1] * 70)
        with pytest.raises(
            ContextLengthError, match="Requested token count exceeds the model's maximum context length"
        ):
            made.generate(input_ids=[1] * 60, sampling_params={"max_new_tokens": 5})
        engine = Engine.from_parts(made._parts, ServerArgs(model_path="x", allow_auto_truncate=True))
        with pytest.warns(UserWarning, match=r"the input \(70 tokens\) was truncated to its first 63 tokens"):
            output = engine.generate(input_ids=list(range(70)), sampling_params=GREEDY)
        assert output["meta_info"]["prompt_tokens"] == 63 and output["output_ids"] == expected(list(range(63)), 1)
        with pytest.warns(UserWarning, match="was truncated to its first 64 tokens"):  # it is only read
            read = engine.generate(input_ids=list(range(70)), sampling_params={"max_new_tokens": 0})
        assert read["meta_info"]["prompt_tokens"] == 64


def test_a_prompt_larger_than_the_pool_says_so() -> None:
    with checksum_engine(pool=32, tokens=16) as made:
        with pytest.raises(CapacityError, match=r"Input length \(40 tokens\) exceeds the maximum allowed length \(31"):
            made.generate(input_ids=[1] * 40)


# -- the cache and the queue -------------------------------------------------------------------------------------------


def test_salts_keep_prefix_hits_apart(engine: Engine) -> None:
    prompt = [7] * 20

    def cached(salt: str | None) -> int:
        output = engine.generate(input_ids=prompt, sampling_params=GREEDY, cache_salt=salt)
        assert output["output_ids"] == expected(prompt, 4)
        return output["meta_info"]["cached_tokens"]

    assert engine.flush_cache().success
    assert [cached("a"), cached("b"), cached(None)] == [0, 0, 0]
    assert [cached("a"), cached("b"), cached(None), cached("c")] == [16, 16, 16, 0]
    both = engine.generate(input_ids=[prompt] * 2, sampling_params=GREEDY, cache_salt=["d", "e"])
    assert [o["meta_info"]["cached_tokens"] for o in both] == [0, 0]
    in_loop(engine._parts.core, lambda: check_scheduler(engine._parts.core.stepper.scheduler))


def test_a_salted_page_never_meets_an_unsalted_one_even_at_page_size_one() -> None:
    with checksum_engine(page_size=1) as made:
        for salt in (None, "1", "a"):
            outputs = made.generate(input_ids=[[1, 2, 3], [1, 2, 3]], sampling_params=GREEDY, cache_salt=salt)
            assert [o["meta_info"]["cached_tokens"] for o in outputs] == [0, 2]


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_priorities_order_the_queue(policy: str) -> None:
    with checksum_engine(rows=1, tokens=64, policy=policy) as made:
        made.pause_generation("in_place")
        stream = made.generate(
            input_ids=[[i] for i in range(5)], sampling_params=GREEDY, priority=[0, 2, 1, 2, -1], stream=True
        )
        made.continue_generation()
        done = [c["index"] for c in stream if c["meta_info"]["finish_reason"] is not None]
        assert done == [1, 3, 2, 0, 4]
        made.server_args.schedule_low_priority_values_first = True
        made.server_args.default_priority_value = 1
        made.pause_generation("in_place")
        stream = made.generate(
            input_ids=[[i] for i in range(3)], sampling_params=GREEDY, priority=[2, None, 0], stream=True
        )
        made.continue_generation()
        assert [c["index"] for c in stream if c["meta_info"]["finish_reason"] is not None] == [2, 1, 0]


def test_what_an_early_end_is_banned_with(asked: Any, monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    """min_new_tokens bans eos and stop ids also where ignore_eos takes them from what ends the request."""
    monkeypatch.setattr("fengine.api.input_processor._refuse_without_text", lambda *_: None)
    monkeypatch.setattr(engine._parts, "eos_ids", frozenset({8}))
    sampling = {"min_new_tokens": 2, "stop_token_ids": [9]}
    (ends,) = asked(input_ids=[1], sampling_params=sampling)
    (goes_on,) = asked(input_ids=[1], sampling_params=sampling | {"ignore_eos": True})
    (free,) = asked(input_ids=[1], sampling_params={"ignore_eos": True, "stop_token_ids": [9]})
    assert (ends.stop_ids, ends.early_ids) == ({8, 9}, set())
    assert (goes_on.stop_ids, goes_on.early_ids) == (set(), {8, 9})
    assert free.params.bare and not free.stop_ids


def test_flags_may_be_scalars_of_numpy_and_torch(asked: Any, engine: Engine) -> None:
    for yes in (np.True_, torch.tensor(True), True):
        (request,) = asked(input_ids=[1], sampling_params={"ignore_eos": yes}, return_logprob=yes)
        assert request.params.ignore_eos is True
    for bad in (1, "yes", np.array([True]), torch.empty((), dtype=torch.bool, device="meta")):
        with pytest.raises(InvalidRequestError, match="ignore_eos must be True or False"):
            engine.generate(input_ids=[1], sampling_params={"ignore_eos": bad})


def test_logprobs_that_no_memory_holds_are_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fengine.api.call_options.MAX_LOGPROBS", 1000)
    many: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 5, "token_ids_logprob": [1] * 15}
    sampling = {"temperature": 0, "max_new_tokens": 10}
    engine.generate(input_ids=[1] * 40, sampling_params=sampling, logprob_start_len=0, **many)  # (40 + 10) * 20
    for ids, more in (([1] * 41, {}), ([1], {"n": 5})):
        with pytest.raises(InvalidRequestError, match=r"ask for 1[01][02]0 logprobs .*, more than 1000"):
            engine.generate(input_ids=ids, sampling_params=sampling | more, logprob_start_len=0, **many)


def test_shared_parameters_are_checked_once_also_under_preferred_ones(engine: Engine, monkeypatch: Any) -> None:
    context = replace(engine._context, preferred={"max_new_tokens": 2})
    prompts, _ = split_batch(GenerateReqInput(input_ids=[[1]] * 9), {"n": 2})
    assert len({id(p.sampling_params) for p in prompts}) == 1 and prompts[0].sampling_params == {"n": 2}
    monkeypatch.setattr(engine, "_context", context)
    given = engine.generate(input_ids=[[1]] * 3, sampling_params=[{}, {"max_new_tokens": 3}, None])
    assert [len(output["output_ids"]) for output in given] == [2, 3, 2]


def test_many_ids_with_one_twice_are_told_at_once(engine: Engine) -> None:
    """In one pass: comparing all with all would take minutes."""
    rids = [str(i) for i in range(100_000)]
    with pytest.raises(InvalidRequestError, match=r"Duplicate request IDs detected within the request: \['7'\]"):
        engine.generate(input_ids=[[1]] * 100_001, rid=[*rids, "7"])
