"""The server, asked by the real openai client: its answers are the engine's, bit for bit, however they come."""

import asyncio
import base64
import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_adapters

openai = pytest.importorskip("openai", reason="openai's client, of the extra dev")

from serving import Live, live, until  # noqa: E402

import fengine  # noqa: E402
from fengine.api.engine import Engine  # noqa: E402
from fengine.errors import ModelLoadError  # noqa: E402
from fengine.server.app import make_app  # noqa: E402

BOX = Path(__file__).resolve().parents[2] / "fengine" / "models" / "box"

PROMPTS = ["Once upon a time", "The capital of France is", "2 + 3 =", "Ünïcödé ☃ 🐉"]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(model_path="box", enable_torch_compile=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Live]:
    with live(engine) as server:
        yield server
        until(server.quiet)


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[Any]:
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def ids_of(engine: Engine, text: str) -> list[int]:
    assert engine.tokenizer is not None
    return engine.tokenizer.encode(text)


def logprobs_of(output: dict[str, Any]) -> list[float]:
    return [logprob for logprob, _, _ in output["meta_info"]["output_token_logprobs"]]


# -- completions -------------------------------------------------------------------------------------------------------

SAMPLINGS = [
    ({"temperature": 0, "max_tokens": 24}, {"temperature": 0, "max_new_tokens": 24}),
    ({"temperature": 0.9, "seed": 7, "top_p": 0.9}, {"temperature": 0.9, "sampling_seed": 7, "top_p": 0.9,
                                                     "max_new_tokens": 16}),
    ({"seed": 1, "n": 3, "stop": [" the", "a "]}, {"sampling_seed": 1, "n": 3, "stop": [" the", "a "],
                                                   "max_new_tokens": 16}),
    ({"temperature": 0, "frequency_penalty": 1.0, "logit_bias": {"300": 2.5}, "presence_penalty": -0.5},
     {"temperature": 0, "frequency_penalty": 1.0, "logit_bias": {"300": 2.5}, "presence_penalty": -0.5,
      "max_new_tokens": 16}),
    ({"temperature": 0, "extra_body": {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 3,
                                       "ignore_eos": True, "stop_token_ids": [300]}},
     {"temperature": 0, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "min_new_tokens": 3, "ignore_eos": True,
      "stop_token_ids": [300], "max_new_tokens": 16}),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "meant"), SAMPLINGS, ids=range(len(SAMPLINGS)))
@pytest.mark.parametrize("as_ids", [False, True])
def test_completions_are_the_engines(asked: Any, meant: Any, as_ids: bool, engine: Engine, client: Any) -> None:
    rows = [ids_of(engine, prompt) for prompt in PROMPTS]
    given = {"input_ids": rows} if as_ids else {"prompt": PROMPTS}
    outputs: Any = engine.generate(**given, sampling_params=meant, return_logprob=True)
    answer = client.completions.create(model="box", prompt=rows if as_ids else PROMPTS, logprobs=0, **asked)
    assert [c.index for c in answer.choices] == list(range(len(outputs)))
    for choice, output in zip(answer.choices, outputs, strict=True):
        assert choice.text == output["text"]
        assert choice.finish_reason == output["meta_info"]["finish_reason"]["type"]
        assert choice.logprobs.token_logprobs == logprobs_of(output)  # bit for bit: floats survive JSON
    assert answer.usage.completion_tokens == sum(o["meta_info"]["completion_tokens"] for o in outputs)
    assert (
        answer.usage.prompt_tokens == sum(map(len, rows)) == answer.usage.total_tokens - answer.usage.completion_tokens
    )
    (one,) = client.completions.create(
        model="box", prompt=rows[0] if as_ids else PROMPTS[0], **{**asked, "n": 1}
    ).choices
    assert one.text == outputs[0]["text"]


@pytest.mark.parametrize(("asked", "meant"), SAMPLINGS, ids=range(len(SAMPLINGS)))
def test_a_stream_is_the_whole_in_pieces(asked: Any, meant: Any, client: Any) -> None:
    asked = {"model": "box", "prompt": PROMPTS, "logprobs": 2, "echo": True, **asked}
    asked["extra_body"] = {**asked.get("extra_body", {}), "return_token_ids": True}
    whole = client.completions.create(**asked)
    *chunks, last = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert last.choices == [] and last.usage == whole.usage
    assert {c.id for c in chunks} == {last.id} and all(c.usage is None for c in chunks)
    for choice in whole.choices:
        parts = [c.choices[0] for c in chunks if c.choices[0].index == choice.index]
        assert "".join(p.text for p in parts) == choice.text
        assert [p.finish_reason for p in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]
        assert sum((p.token_ids for p in parts), []) == choice.token_ids
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert sum((getattr(p.logprobs, name) for p in parts), []) == getattr(choice.logprobs, name), name


def test_echo_scores_the_prompt_as_lm_eval_asks(engine: Engine, client: Any) -> None:
    ids = ids_of(engine, PROMPTS[1])
    (choice,) = client.completions.create(
        model="box", prompt=ids, max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1234
    ).choices
    scores: Any = engine.generate(
        input_ids=ids, sampling_params={"temperature": 0, "max_new_tokens": 1}, return_logprob=True, logprob_start_len=0
    )
    told = choice.logprobs
    assert told.token_logprobs[0] is None is told.top_logprobs[0]
    meta = scores["meta_info"]
    triples = meta["input_token_logprobs"] + meta["output_token_logprobs"]
    assert told.token_logprobs == [logprob for logprob, _, _ in triples]
    assert told.tokens[0] == "<|begin_of_text|>" and "".join(told.tokens[1:]) == choice.text  # which outputs leave out
    assert told.text_offset == [0, *(len("".join(told.tokens[1:i])) for i in range(1, len(told.tokens)))]
    assert [next(iter(top)) for top in told.top_logprobs[1:]] == told.tokens[1:]  # the token itself stands first
    for token, logprob, top in zip(told.tokens[1:], told.token_logprobs[1:], told.top_logprobs[1:], strict=True):
        assert top[token] == logprob <= max(top.values()) and len(top) in (1, 2)
    (scored,) = client.completions.create(model="box", prompt=ids, max_tokens=0, logprobs=0, echo=True).choices
    assert scored.logprobs.token_logprobs == told.token_logprobs[:-1]
    shown = {"model": "box", "prompt": ids, "max_tokens": 0, "logprobs": 0, "echo": True}
    (raw,) = client.completions.create(**shown, extra_body={"skip_special_tokens": False}).choices
    assert raw.text == "<|begin_of_text|>" + scored.text and raw.logprobs.text_offset[1] == len("<|begin_of_text|>")
    alone = [{token: logprob} for token, logprob in zip(told.tokens[1:-1], told.token_logprobs[1:-1], strict=True)]
    assert scored.logprobs.top_logprobs == [None, *alone]  # with 0 alternatives there is the token itself


def test_echo_of_a_text_is_the_text(client: Any) -> None:
    """A bos token in front stands in no text."""
    for prompt in (PROMPTS[0], PROMPTS[3], ""):
        (choice,) = client.completions.create(model="box", prompt=prompt, max_tokens=2, logprobs=1, echo=True).choices
        assert choice.text.startswith(prompt)
        starts = choice.logprobs.text_offset
        assert starts[0] == 0 and starts == sorted(starts) and starts[-1] < len(choice.text)
        whole = [i for i, token in enumerate(choice.logprobs.tokens) if not token.startswith(("bytes:", "<|"))]
        for i in whole:
            token = choice.logprobs.tokens[i]
            assert choice.text[starts[i] : starts[i] + len(token)] == token
    several = client.completions.create(model="box", prompt=["One", "Two"], n=2, max_tokens=1, echo=True).choices
    assert [choice.text[:3] for choice in several] == ["One", "One", "Two", "Two"]


# -- chats -------------------------------------------------------------------------------------------------------------

CHAT: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


def test_chats_are_the_engines(engine: Engine, client: Any) -> None:
    params = {"temperature": 0.7, "sampling_seed": 3, "n": 2, "max_new_tokens": 12}
    outputs: Any = engine.chat(CHAT, params, return_logprob=True, top_logprobs_num=2)
    asked = {"model": "box", "messages": CHAT, "temperature": 0.7, "seed": 3, "n": 2, "max_completion_tokens": 12}
    asked |= {"logprobs": True, "top_logprobs": 2}
    answer = client.chat.completions.create(**asked)
    parts: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in client.chat.completions.create(**asked, stream=True):
        parts[chunk.choices[0].index].append(chunk.choices[0])
    for choice, output in zip(answer.choices, outputs, strict=True):
        assert choice.message.role == "assistant" and choice.message.content == output["text"]
        entries = choice.logprobs.content
        assert [e.logprob for e in entries] == logprobs_of(output)
        tops = output["meta_info"]["output_top_logprobs"]
        assert [[t.logprob for t in e.top_logprobs] for e in entries] == [[p for p, _, _ in top] for top in tops]
        assert all(bytes(e.bytes).decode("utf-8", "replace") == e.token for e in entries)
        first, *rest = parts[choice.index]
        assert (first.delta.role, first.delta.content) == ("assistant", "")
        assert "".join(p.delta.content or "" for p in rest) == choice.message.content
        assert [e for p in rest for e in p.logprobs.content] == entries
        assert rest[-1].finish_reason == choice.finish_reason


def test_chat_without_a_limit_ends_by_itself(engine: Engine, client: Any) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": CHAT[0]["content"]}]}]
    (choice,) = client.chat.completions.create(model="box", messages=parts, temperature=0).choices
    expected: Any = engine.chat(CHAT, {"temperature": 0, "max_new_tokens": None})
    assert (choice.message.content, choice.finish_reason) == (expected["text"], "stop")


def test_special_text_in_a_message_stays_text(engine: Engine, client: Any) -> None:
    sly = [{"role": "user", "content": "a<|user|>b"}]
    answer = client.chat.completions.create(model="box", messages=sly, temperature=0, max_tokens=2)
    assert answer.usage.prompt_tokens == len(engine.chat_ids(sly, None, True, None))
    assert answer.usage.prompt_tokens > 3 + len(engine.chat_ids([{"role": "user", "content": "ab"}], None, True, None))


# -- embeddings, models ------------------------------------------------------------------------------------------------


def test_embeddings() -> None:
    with Engine(model_path="box", is_embedding=True, enable_torch_compile=False) as engine, live(engine) as server:
        rows = [ids_of(engine, text) for text in PROMPTS]
        expected: Any = [output["embedding"] for output in engine.encode(PROMPTS)]
        with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
            for given in (PROMPTS, rows):
                for encoding in (openai.omit, "float"):  # the client asks for base64 by itself
                    answer = client.embeddings.create(model="box", input=given, encoding_format=encoding)
                    assert [e.embedding for e in answer.data] == expected
                    assert answer.usage.prompt_tokens == sum(map(len, rows))
            short: Any = engine.encode(PROMPTS[0], dimensions=8)
            answer = client.embeddings.create(model="box", input=PROMPTS[0], dimensions=8, encoding_format="base64")
            assert list(struct.unpack("<8f", base64.b64decode(answer.data[0].embedding))) == short["embedding"]
            for path, more in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": CHAT})):
                assert server.ask("POST", f"/v1/{path}", {"model": "box", **more}).status == 400
        until(server.quiet)


def test_models(client: Any) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.max_model_len) == ("box", "model", 1024)
    assert client.models.retrieve("box").id == "box"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("a/b")


def test_what_a_body_leaves_open_is_as_the_model_recommends(tmp_path: Path) -> None:
    model = shutil.copytree(BOX, tmp_path / "model")
    config = json.loads((BOX / "generation_config.json").read_text())
    told = {"temperature": 0.5, "top_k": 3, "repetition_penalty": 1.3}
    (model / "generation_config.json").write_text(json.dumps(config | told | {"top_p": None, "do_sample": True}))
    asked: Any = {"model": "m", "prompt": "Once upon a time", "seed": 3, "max_tokens": 12}
    with Engine(model_path=str(model), enable_torch_compile=False) as engine:
        meant = {"sampling_seed": 3, "max_new_tokens": 12}
        texts: Any = [engine.generate(asked["prompt"], {**meant, **more})["text"] for more in (told, {}, {"top_k": 1})]
        assert len(set(texts)) == 3
        for default, shown, text in (("model", told, texts[0]), ("openai", {}, texts[1])):
            with live(engine, model_name="m", sampling_defaults=default) as server:
                card = server.ask("GET", "/v1/models").json["data"][0]
                assert card["sampling_defaults"] == shown
                ask = [server.ask("POST", "/v1/completions", {**asked, **more}).json for more in ({}, {"top_k": 1})]
                assert ask[0]["choices"][0]["text"] == text
                if default == "openai":
                    assert ask[1]["choices"][0]["text"] == texts[2]
        (model / "generation_config.json").write_text(json.dumps({"temperature": -1}))
        with pytest.raises(ModelLoadError, match=r"generation_config\.json: temperature"):
            make_app(engine)


def test_an_adapter_is_a_model_and_answers_by_its_name(tmp_path: Path) -> None:
    adapter = tiny_adapters.random_adapter(tmp_path / "sql", BOX, 2)
    asked: Any = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 6}
    with Engine(model_path="box", enable_torch_compile=False, lora_paths={"sql": str(adapter)}) as engine:
        expected: Any = [
            engine.generate(asked["prompt"], {"temperature": 0, "max_new_tokens": 6}, lora_path=name)["text"]
            for name in ("sql", None)
        ]
        assert expected[0] != expected[1]
        with live(engine) as server, openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
            assert [card.id for card in client.models.list().data] == ["box", "sql"]
            for name, text in zip(("sql", "box"), expected, strict=True):
                answer = client.completions.create(model=name, **asked)
                chunks = list(client.completions.create(model=name, stream=True, **asked))
                assert answer.choices[0].text == text == "".join(chunk.choices[0].text for chunk in chunks)
                assert {answer.model, *(chunk.model for chunk in chunks)} == {name}
            until(server.quiet)


# -- tokens ------------------------------------------------------------------------------------------------------------


def test_tokens_of_texts_and_chats_and_back(engine: Engine, server: Live) -> None:
    for text in (*PROMPTS, ""):
        told = server.ask("POST", "/tokenize", {"prompt": text, "return_token_strs": True}).json
        assert told["tokens"] == ids_of(engine, text) and told["count"] == len(told["tokens"])
        assert (told["max_model_len"], len(told["token_strs"])) == (1024, told["count"])
        bare = server.ask("POST", "/tokenize", {"prompt": text, "add_special_tokens": False}).json["tokens"]
        assert server.ask("POST", "/detokenize", {"tokens": bare}).json == {"prompt": text}
    chat = server.ask("POST", "/tokenize", {"messages": CHAT, "add_generation_prompt": False}).json
    assert chat["tokens"] == engine.chat_ids(CHAT, None, False, None) and chat["token_strs"] is None
    for path, body, param in (
        ("tokenize", {}, "prompt"), ("tokenize", {"prompt": 3}, "prompt"), ("tokenize", {"prompt": "a", "x": 1}, "x"),
        ("tokenize", {"messages": []}, "messages"), ("detokenize", {"tokens": [-1]}, "tokens"),
        ("detokenize", {"tokens": [10**9]}, "tokens"), ("detokenize", {"tokens": "a"}, "tokens"),
    ):  # fmt: skip
        answer = server.ask("POST", f"/{path}", body)
        assert (answer.status, answer.error["param"]) == (400, param), answer.body
    assert server.ask("POST", "/tokenize", {"prompt": "a", "model": "no"}).status == 404
    assert server.ask("GET", "/version").json == {"version": fengine.__version__}
    assert server.ask("GET", "/ping").status == 200


# -- many at once ------------------------------------------------------------------------------------------------------


def test_64_at_once_are_as_each_alone(server: Live, client: Any) -> None:
    """Streamed or not, beside requests that are refused or dropped."""
    bodies = [
        {"model": "box", "prompt": PROMPTS[i % 4] + f" {i}", "seed": i, "temperature": [0, 1.0][i % 3 > 0],
         "max_tokens": 8 + i % 9, "logprobs": [None, 1][i % 2], "echo": i % 4 == 1}
        for i in range(64)
    ]  # fmt: skip
    alone = [client.completions.create(**body).choices for body in bodies]

    async def one(client: Any, i: int) -> list[Any]:
        if i % 8 == 0:
            with pytest.raises(openai.BadRequestError):
                await client.completions.create(**{**bodies[i], "temperature": -1})
            async for _ in await client.completions.create(**{**bodies[i], "max_tokens": 100}, stream=True):
                break  # and the connection is dropped
        if i % 2:
            return (await client.completions.create(**bodies[i])).choices
        texts = [c.choices[0] async for c in await client.completions.create(**bodies[i], stream=True)]
        last = texts[-1]
        last.text = "".join(t.text for t in texts)
        return [last]

    async def all_() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, i) for i in range(64)))

    together = asyncio.run(all_())
    assert [[c.text for c in choices] for choices in together] == [[c.text for c in choices] for choices in alone]
    assert together[1::2] == alone[1::2]


def test_metrics_count(server: Live, client: Any) -> None:
    def page() -> dict[str, float]:
        answer = server.ask("GET", "/metrics")
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        lines = [line for line in answer.body.decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    until(server.quiet)  # rows of clients that another test let go are counted when the server notices
    before = page()
    client.completions.create(model="box", prompt=[PROMPTS[0], PROMPTS[1]], max_tokens=5, temperature=0)
    assert server.ask("GET", "/of-nobody").status == 404
    until(server.quiet)
    after = page()
    assert not any("of-nobody" in name for name in after)  # a client cannot add names
    for name, more in (
        ('request_success_total{finished_reason="length"}', 2),
        ("generation_tokens_total", 10),
        ("e2e_request_latency_seconds_count", 2),
        ('e2e_request_latency_seconds_bucket{le="+Inf"}', 2),
        ("time_to_first_token_seconds_count", 2),
        ("request_generation_tokens_sum", 10),
        ("inter_token_latency_seconds_count", 8),
        ("request_inference_time_seconds_count", 2),
        ("request_params_n_sum", 2),
        ("request_params_max_tokens_sum", 10),
        ('http_requests_total{path="/v1/completions",status="200"}', 1),
        ('http_requests_total{path="other",status="404"}', 1),
    ):
        assert after[f"fengine:{name}"] - before.get(f"fengine:{name}", 0) == more, name
    for name in ("sglang:generation_tokens_total", "vllm:generation_tokens_total"):
        assert after[name + '{model_name="box"}'] == after["fengine:generation_tokens_total"]
    counted = 'vllm:request_success_total{model_name="box",finished_reason="length"}'
    assert after[counted] == after['fengine:request_success_total{finished_reason="length"}']
    assert after['sglang:time_to_first_token_seconds_bucket{model_name="box",le="+Inf"}'] >= 2
    tokens = after["fengine:request_prompt_tokens_sum"] + after["fengine:generation_tokens_total"]
    assert after['vllm:iteration_tokens_total_sum{model_name="box"}'] == tokens
    assert after['vllm:iteration_tokens_total_count{model_name="box"}'] == after["fengine:steps_total"]
    (pool,) = [name for name in after if name.startswith("vllm:cache_config_info")]
    assert f'num_gpu_blocks="{after["fengine:kv_cache_pages"]:.0f}"' in pool and 'block_size="16"' in pool
    assert after["fengine:up"] == 1 and after["fengine:http_open_rows"] == 0
    buckets = [v for k, v in after.items() if k.startswith("fengine:e2e_request_latency_seconds_bucket")]
    assert buckets == sorted(buckets)


def test_events_are_as_openai_sends_them(server: Live) -> None:
    body = {"model": "box", "messages": CHAT, "stream": True, "max_tokens": 3}
    answer = server.ask("POST", "/v1/chat/completions", body)
    assert answer.headers["content-type"].startswith("text/event-stream") and answer.headers["cache-control"]
    events = [e for e in answer.body.decode().replace("\r\n", "\n").split("\n") if e.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    assert all(json.loads(e[6:])["object"] == "chat.completion.chunk" for e in events[:-1])
    assert "usage" not in json.loads(events[0][6:])


def test_grammars_and_adapters_are_named_as_openai_names_them(engine: Engine, client: Any) -> None:
    """What the engine has of them is the engine's; here they only get there."""
    pytest.importorskip("llguidance", reason="the extra grammar")
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    asked = {"model": "box", "messages": CHAT, "temperature": 0, "max_tokens": 40}
    (choice,) = client.chat.completions.create(**asked, response_format=form).choices
    meant = {"temperature": 0, "max_new_tokens": 40, "json_schema": json.dumps(schema)}
    expected: Any = engine.chat(CHAT, meant)
    assert choice.message.content == expected["text"] and choice.finish_reason == "stop"
    assert isinstance(json.loads(choice.message.content)["n"], int)
    (choice,) = client.completions.create(
        model="box", prompt="a", extra_body={"regex": "(ab)+c"}, temperature=0
    ).choices
    assert choice.finish_reason == "length" or choice.text.endswith("c")
    with pytest.raises(openai.BadRequestError, match="regex"):
        client.completions.create(model="box", prompt="a", extra_body={"regex": "(ab"})
    with pytest.raises(openai.BadRequestError):
        both = {**form, "type": "json_object"}
        client.chat.completions.create(**asked, response_format=both, extra_body={"ebnf": 'root ::= "a"'})
