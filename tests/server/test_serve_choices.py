"""/v1/completions and /v1/chat/completions: vLLM's and SGLang's words in OpenAI's bodies."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from serving import CHAT, PROMPT, Live, events, post

from fengine.api.engine import Engine
from fengine.api.streams import IndexQueue
from fengine.errors import NumericsError
from fengine.server import answers
from fengine.server.answers import usage_of
from fengine.server.chat import ChatWriter
from fengine.server.choices import CompletionWriter
from fengine.server.openai_body import read_chat, read_completion
from fengine.server.template_facts import TemplateFacts


def test_a_last_message_goes_on(engine: Engine, server: Live) -> None:
    """The prompt ends where its text ends; with echo the answer begins with it."""
    begun = [*CHAT, {"role": "assistant", "content": "The capital  of "}]
    asked = {"messages": begun, "continue_final_message": True}
    ids = post(server, "/tokenize", asked)["tokens"]
    text = engine.apply_chat_template(begun, add_generation_prompt=False)
    cut = text[: text.rindex("The capital  of") + len("The capital  of")]  # the box's template trims
    assert ids == engine.tokenizer.encode(cut, add_special_tokens=False)
    told = post(server, "/v1/chat/completions", {**asked, "echo": True, "temperature": 0, "max_tokens": 4})
    expected: Any = engine.generate(input_ids=ids, sampling_params={"temperature": 0, "max_new_tokens": 4})
    assert told["choices"][0]["message"]["content"] == "The capital  of " + expected["text"]
    for change in ({"messages": CHAT}, {"add_generation_prompt": True}):
        answer = server.ask("POST", "/v1/chat/completions", {**asked, **change})
        assert (answer.status, answer.error["param"]) == (400, "continue_final_message")
    sly = [*CHAT, {"role": "assistant", "content": "a<|end|>"}]
    ids = post(server, "/tokenize", {**asked, "messages": sly})["tokens"]
    special = {
        id for id in ids if engine.tokenizer.decode([id]) == ""
    }  # of the text behind the last of them there is none
    assert ids[-1] not in special and engine.tokenizer.decode(ids).endswith("a<|end|>")


def test_ids_logprobs_and_hidden_states_of_prompts(engine: Engine, server: Live) -> None:
    ids = engine.tokenizer.encode(PROMPT)
    asked = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "return_token_ids": True, "logprobs": 1}
    more = {"prompt_logprobs": 3, "return_hidden_states": True, "return_tokens_as_token_ids": True}
    (choice,) = post(server, "/v1/completions", {**asked, **more})["choices"]
    meant: Any = engine.generate(
        PROMPT, {"temperature": 0, "max_new_tokens": 3}, return_logprob=True, logprob_start_len=0, top_logprobs_num=3,
        return_hidden_states="last",
    )  # fmt: skip
    assert choice["prompt_token_ids"] == ids and choice["token_ids"] == meant["output_ids"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{id}" for id in choice["token_ids"]]
    assert all(len(top) == 1 for top in choice["logprobs"]["top_logprobs"])  # cut to what was asked for
    assert choice["hidden_states"] == meant["meta_info"]["hidden_states"].tolist()
    first, *rest = choice["prompt_logprobs"]
    assert first is None and len(rest) == len(ids) - 1
    for told, (logprob, id, _) in zip(rest, meant["meta_info"]["input_token_logprobs"][1:], strict=True):
        assert told[str(id)]["logprob"] == logprob and 3 <= len(told) <= 4
        ranked = sorted((one["rank"], -one["logprob"]) for one in told.values() if one["rank"] is not None)
        assert [rank for rank, _ in ranked] == [1, 2, 3] and ranked == sorted(ranked, key=lambda one: one[1])
    by_id = {"logprob_token_ids": [7, 9], "logprobs": 1, "return_tokens_as_token_ids": True}
    (choice,) = post(server, "/v1/completions", {**asked, **by_id, "prompt_logprobs": 0, "echo": True})["choices"]
    meant = engine.generate(PROMPT, {"temperature": 0, "max_new_tokens": 3}, return_logprob=True, logprob_start_len=0,
                            token_ids_logprob=[7, 9])["meta_info"]  # fmt: skip
    for side, at in (("input", slice(1, len(ids))), ("output", slice(len(ids), None))):
        told = choice["logprobs"]["top_logprobs"][at]
        assert [(one["token_id:7"], one["token_id:9"]) for one in told] == [
            (seven, nine) for (seven, *_), (nine, *_) in meant[f"{side}_token_ids_logprobs"][-len(told) :]
        ]
    chat = {"messages": CHAT, "max_tokens": 2, "logprobs": True, "top_logprobs": 1, "logprob_token_ids": [7, 9]}
    chat |= {"allowed_token_ids": [9, 11], "ignore_eos": True}
    (choice,) = post(server, "/v1/chat/completions", chat)["choices"]
    for one in choice["logprobs"]["content"]:
        told = [other["token_id"] for other in one["top_logprobs"]]
        assert sorted(told) == sorted({7, 9, one["token_id"]}) and len(told) == len(set(told))
    (few,) = post(server, "/v1/completions", {**asked, "logprobs": 3, "prompt_logprobs": 1})["choices"]
    assert all(len(told) <= 2 for told in few["prompt_logprobs"][1:])  # the token, and the likeliest
    plain = post(server, "/v1/completions", {"prompt": PROMPT, "max_tokens": 1})["choices"][0]
    assert plain["prompt_logprobs"] is plain["token_ids"] is None and "hidden_states" not in plain
    chat = {"messages": CHAT, "max_tokens": 1, "return_token_ids": True, "prompt_logprobs": 0}
    told = post(server, "/v1/chat/completions", chat)
    assert told["prompt_token_ids"] == engine.chat_ids(CHAT)
    assert len(told["prompt_logprobs"]) == len(told["prompt_token_ids"])


def test_usage_is_that_of_each_choice_and_of_each_prompt_once(engine: Engine, server: Live) -> None:
    texts = [PROMPT, f"{PROMPT} and more of it"]
    counts = [len(engine.tokenizer.encode(text)) for text in texts]
    body = {"prompt": texts, "n": 2, "max_tokens": 3, "stream_options": {"include_usage": True}}
    body["stream_options"]["continuous_usage_stats"] = True
    *chunks, last, _ = [data for _, data in events(server, "/v1/completions", body)]
    told = {(chunk["choices"][0]["index"], chunk["usage"]["prompt_tokens"]) for chunk in chunks}
    assert told == {(i, counts[i // 2]) for i in range(4)} and last["usage"]["prompt_tokens"] == sum(counts)
    assert max(chunk["usage"]["completion_tokens"] for chunk in chunks) <= 3 < last["usage"]["completion_tokens"]
    metas = [{"prompt_tokens": n, "completion_tokens": 1, "cached_tokens": n - 1} for n in (5, 5, 9, 9)]
    usage = usage_of([{"meta_info": meta} for meta in metas], 2)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 12} and usage["total_tokens"] == 18


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": 1, "a": 2}', '{"a": ', "[1]"])
def test_arguments_that_are_no_object_stay_the_text_that_they_are(text: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": text}}
    chat = read_chat({"messages": [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "a"}]}, 4)
    assert chat.chat_options.messages[0]["tool_calls"][0]["function"]["arguments"] == text


def test_nothing_comes_behind_an_error_of_a_stream() -> None:
    def read(index: int) -> None:
        raise NumericsError("not finite")

    ready = IndexQueue()
    ready.put(0)
    call: Any = SimpleNamespace(states=[1], open={0}, ready=ready, read=read)
    writer: Any = SimpleNamespace(first=lambda: b"first", failed=lambda error: b"failed", last=lambda outputs: b"last")

    async def told() -> list[tuple[bytes, bool]]:
        return [piece async for piece in answers.events(call, writer)]

    assert asyncio.run(told()) == [(b"first", True), (b"failed", False)]


def test_ids_of_a_prompt_are_told_in_streams_before_there_is_text(engine: Engine) -> None:
    asked, head = {"stream": True, "return_prompt_token_ids": True}, {"model": "box"}
    writer = CompletionWriter(read_completion(asked | {"prompt": PROMPT}, 4), engine.tokenizer, 512, head)
    output: Any = {"text": "", "output_ids": [5], "meta_info": {"finish_reason": None}}
    assert b'"prompt_token_ids": [' in writer.piece(0, output) and writer.piece(0, output) == b""
    chat = ChatWriter(read_chat(asked | {"messages": CHAT}, 4), engine, TemplateFacts(), head)
    assert b'"prompt_token_ids": [' in chat.first()


def test_a_prompt_that_spells_what_the_tokenizer_puts_in_front_has_its_width(engine: Engine, server: Live) -> None:
    begin = engine.tokenizer.decoding.data(engine.tokenizer.bos_id or 0).decode()
    body = {"prompt": f"{begin}a", "echo": True, "logprobs": 0, "max_tokens": 1, "add_special_tokens": False}
    (choice,) = post(server, "/v1/completions", body)["choices"]
    assert choice["logprobs"]["tokens"][:2] == [begin, "a"] and choice["logprobs"]["text_offset"][:2] == [0, len(begin)]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_streams_tell_ids_states_and_usage(path: str, engine: Engine, server: Live) -> None:
    body: dict[str, Any] = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": CHAT}
    body |= {"max_tokens": 5, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    body |= {"return_hidden_states": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *chunks, last, done = [data for _, data in events(server, path, body)]
    assert done == "[DONE]" and last["choices"] == []
    first = chunks[0] if path != "/v1/completions" else chunks[0]["choices"][0]
    ids = engine.tokenizer.encode(PROMPT) if path == "/v1/completions" else engine.chat_ids(CHAT)
    assert first["prompt_token_ids"] == ids and all("prompt_token_ids" not in one for one in chunks[1:])
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 5
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {len(ids)}
    choices = [chunk["choices"][0] for chunk in chunks]
    assert sum("hidden_states" in {**choice, **choice.get("delta", {})} for choice in choices) == 1
    assert "matched_stop" in choices[-1] and not any("stop_reason" in choice for choice in choices[:-1])


def test_what_ended_a_choice(server: Live) -> None:
    for more, matched, reason in (
        ({"stop": [" a"]}, " a", " a"), ({"stop_regex": "t[a-z]e"}, "t[a-z]e", "t[a-z]e"),
        ({"max_tokens": 2}, None, None), ({"stop_token_ids": [413]}, 413, 413),
    ):  # fmt: skip
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 30, **more}
        (choice,) = post(server, "/v1/completions", body)["choices"]
        assert (choice["matched_stop"], choice["stop_reason"]) == (matched, reason), more
    (choice,) = post(server, "/v1/chat/completions", {"messages": CHAT, "temperature": 0})["choices"]
    assert isinstance(choice["matched_stop"], int) and choice["stop_reason"] is None  # the model's own end


def test_several_chats_have_a_choice_each(engine: Engine, server: Live) -> None:
    chats = [CHAT, [{"role": "user", "content": "What is 2 + 3?"}]]
    told = post(server, "/v1/chat/completions/batch", {"messages": chats, "temperature": 0, "logprobs": True})
    expected: Any = engine.chat(chats, {"temperature": 0, "max_new_tokens": None})
    assert [one["message"]["content"] for one in told["choices"]] == [one["text"] for one in expected]
    assert [one["index"] for one in told["choices"]] == [0, 1]
    assert told["usage"]["completion_tokens"] == sum(one["meta_info"]["completion_tokens"] for one in expected)
    for change in ({"messages": CHAT}, {"messages": []}, {"stream": True}, {"n": 2}):
        answer = server.ask("POST", "/v1/chat/completions/batch", {"messages": chats, **change})
        assert (answer.status, answer.error["param"]) == (400, next(iter(change)))


def test_prompts_are_cut_on_either_side(engine: Engine, server: Live) -> None:
    ids = engine.tokenizer.encode(PROMPT)
    for more, kept in (({}, ids[-3:]), ({"truncation_side": "right"}, ids[:3]), ({"truncate_prompt_tokens": -1}, ids)):
        body = {"prompt": PROMPT, "max_tokens": 1, "return_token_ids": True, "truncate_prompt_tokens": 3, **more}
        assert post(server, "/v1/completions", body)["choices"][0]["prompt_token_ids"] == kept
    long = {"messages": [{"role": "user", "content": "a " * 1500}], "max_tokens": 1}
    assert server.ask("POST", "/v1/chat/completions", long).status == 400
    told = post(server, "/v1/chat/completions", {**long, "truncate_prompt_tokens": -1})
    assert told["usage"]["prompt_tokens"] == 1023


def test_grammars_in_vllms_words(engine: Engine, server: Live) -> None:
    pytest.importorskip("llguidance", reason="the extra grammar")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    choices = ["Rome.", "Lima (Peru) [x]|{2}*\\d", "Ünï ☃"]
    base = {"messages": CHAT, "temperature": 0, "max_tokens": 40}
    for asked, meant in (
        ({"guided_json": schema}, {"json_schema": json.dumps(schema)}),
        ({"structured_outputs": {"json": json.dumps(schema)}}, {"json_schema": json.dumps(schema)}),
        ({"guided_regex": "[a-c]{3}"}, {"regex": "[a-c]{3}"}),
        ({"guided_grammar": 'root ::= "x" | "y"'}, {"ebnf": 'root ::= "x" | "y"'}),
        ({"structured_outputs": {"json_object": True}}, {"json_schema": '{"type": "object"}'}),
    ):
        told = post(server, "/v1/chat/completions", {**base, **asked})["choices"][0]["message"]["content"]
        assert told == engine.chat(CHAT, {"temperature": 0, "max_new_tokens": 40, **meant})["text"], asked
    for i, one in enumerate(choices):
        rest = {"guided_choice": choices[i : i + 1]} if i else {"structured_outputs": {"choice": choices}}
        told = post(server, "/v1/chat/completions", {**base, **rest})["choices"][0]["message"]["content"]
        assert told == one if i else told in choices


def test_words_that_are_never_drawn(engine: Engine, server: Live) -> None:
    body = {"prompt": "Copy: a, b, c, d ->", "temperature": 0, "max_tokens": 8}
    text = post(server, "/v1/completions", body)["choices"][0]["text"]
    assert "," in text
    ids = [engine.tokenizer.encode(word, add_special_tokens=False) for word in (",", " ,")]
    assert "," not in post(server, "/v1/completions", {**body, "bad_words": [","]})["choices"][0]["text"]
    first, second = text.split()[:2]  # several tokens: what is drawn is as before up to the last of them
    other = post(server, "/v1/completions", {**body, "bad_words": [f"{first} {second}"]})["choices"][0]["text"]
    assert f"{first} {second}" not in other and other != text and other.split()[0] == first
    bias = {str(id): -1e30 for row in ids if len(row) == 1 for id in row}
    assert "," not in post(server, "/v1/completions", {**body, "logit_bias": bias})["choices"][0]["text"]


def test_only_ids_that_are_allowed_are_drawn(engine: Engine, server: Live) -> None:
    allowed = engine.tokenizer.encode(" Paris Rome", add_special_tokens=False)
    body = {"prompt": PROMPT, "temperature": 1, "seed": 3, "n": 2, "max_tokens": 8, "return_token_ids": True}
    choices = post(server, "/v1/completions", {**body, "allowed_token_ids": allowed})["choices"]
    drawn = [set(choice["token_ids"]) for choice in choices]
    assert all(len(choice["token_ids"]) == 8 for choice in choices) and set.union(*drawn) <= set(allowed)
    (only,) = {engine.tokenizer.encode(" Paris", add_special_tokens=False)[-1]}
    chat = {"messages": CHAT, "max_tokens": 3, "allowed_token_ids": [only], "return_token_ids": True}
    assert post(server, "/v1/chat/completions", chat)["choices"][0]["token_ids"] == [only] * 3


def test_limits_that_leave_nothing_to_draw_are_told_by_name(engine: Engine, server: Live) -> None:
    pytest.importorskip("llguidance", reason="the extra grammar")
    (only,) = engine.tokenizer.encode(" Paris", add_special_tokens=False)[-1:]
    body: dict[str, Any] = {"messages": CHAT, "max_tokens": 3, "allowed_token_ids": [only], "temperature": 0}
    good = {"messages": CHAT, "max_tokens": 40, "temperature": 0}
    alone = post(server, "/v1/chat/completions", good)["choices"]
    for more, named in (
        ({"regex": "[0-9]+"}, "regex"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_choice": ["x"]}, "guided_choice"),
        ({"logit_bias": {str(only): -1e30}}, "logit_bias"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}, "tool_choice"),
        ({"bad_words": [" Paris"]}, "bad_words"),
        ({"response_format": {"type": "text"}, "guided_regex": "[0-9]+"}, "guided_regex"),
    ):
        with ThreadPoolExecutor(1) as beside:
            other = beside.submit(post, server, "/v1/chat/completions", good)
            answer = server.ask("POST", "/v1/chat/completions", {**body, **more})
            assert other.result()["choices"] == alone
        assert answer.status == 400 and answer.json["error"]["type"] == "invalid_request_error"
        told = [answer.json["error"]["message"], events(server, "/v1/chat/completions", {**body, **more})[-2][1]]
        assert (answer.json["error"]["code"], told[1]["error"]["code"]) == ("invalid_value",) * 2
        for message in (told[0], told[1]["error"]["message"]):
            assert "allowed_token_ids" in message and named in message and "leave one of them out" in message
            assert "custom_logit_processor" not in message
    odd = {"prompt": PROMPT, "allowed_token_ids": sorted(engine.tokenizer.eos_ids), "min_tokens": 2, "max_tokens": 4}
    answer = server.ask("POST", "/v1/completions", odd)
    assert answer.status == 400 and "allowed_token_ids and min_tokens" in answer.json["error"]["message"]


def test_custom_roles_where_the_template_writes_them(server: Live) -> None:
    chats = [[{"role": "judge", "content": content}] for content in ("Hi", [{"type": "text", "text": "Hi"}])]
    told = [post(server, "/v1/chat/completions", {"messages": chat, "temperature": 0}) for chat in chats]
    assert told[0]["choices"] == told[1]["choices"]
    template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    with Engine(model_path="box", enable_torch_compile=False, chat_template=template) as engine:
        for role in ("judge", "developer", "tool"):
            with pytest.raises(ValueError, match=f"the role '{role}', and this model"):
                engine.chat_ids([{"role": role, "content": "Hm"}, *CHAT])
