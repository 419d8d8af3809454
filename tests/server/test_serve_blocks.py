"""/v1/responses and /v1/messages: the same chat's answer, as blocks."""

import json
import re
from typing import Any

import pytest
from serving import CHAT, Live, events, post

from fengine.api.engine import Engine
from fengine.server import responses
from fengine.server.chat import Block, ChatWriter
from fengine.server.errors import ApiError
from fengine.server.messages import MessageWriter, to_chat
from fengine.server.openai_body import read_chat, read_completion
from fengine.server.responses import ResponseWriter
from fengine.server.template_facts import TemplateFacts
from fengine.server.tool_calls import FORMATS


def test_what_a_tool_or_an_output_has_in_messages() -> None:
    tool: dict[str, Any] = {"name": "f", "input_schema": {"type": "object"}, "strict": True, "defer_loading": False}
    body: dict[str, Any] = {"messages": CHAT, "max_tokens": 1, "tools": [tool], "cache_salt": "a",
                            "cache_control": {"type": "ephemeral"}}  # fmt: skip
    form = {"type": "json_schema", "schema": {"type": "array"}}
    told = to_chat(body | {"output_config": {"format": form, "effort": "max"}})
    assert told["tools"][0]["function"]["strict"] is True and told["cache_salt"] == "a"
    assert told["response_format"] == {"type": "json_schema", "json_schema": {"schema": {"type": "array"}}}
    assert read_chat(told | {"tool_choice": "none"}, 1).chat_options.reasoning_effort == "max"
    keeps: dict[str, Any] = {"type": "clear_thinking_20251015", "keep": "all"}  # as Claude Code asks each time
    for edits in ([], [keeps], [keeps | {"keep": {"type": "all"}}]):
        assert to_chat(body | {"context_management": {"edits": edits}}) == to_chat(body)
    for change in (
        {"context_management": {"edits": [keeps, {"type": "clear_tool_uses_20250919"}]}},
        {"context_management": {"edits": [keeps | {"keep": {"type": "thinking_turns", "value": 1}}]}},
        {"context_management": {"edits": [keeps | {"trigger": 3}]}},
        {"tools": [tool | {"defer_loading": True}]},
        {"tools": [tool | {"input_examples": [{}]}]},
        {"tool_choice": {"type": "auto", "names": ["f"]}},
        {"tool_choice": {"type": ["auto"]}},
        {"thinking": {"type": "enabled", "budget": 3}},
        {"output_config": {"format": {"type": "xml"}}},
        {"output_config": {"length": 3}},
        {"system": [{"type": "text", "text": "a", "citations": [{}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "name": "f", "caller": {"type": "code"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "a"}], "name": "f"}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f"}], "tool_calls": "f"}]},
        {"messages": [{"role": "assistant", "content": "a", "reasoning_content": "b"}]},
    ):
        with pytest.raises(ApiError):
            to_chat(body | change)


def test_a_templates_own_switch_goes_before_thinking() -> None:
    body = {"messages": [], "max_tokens": 1, "thinking": {"type": "enabled"}}
    switches = {"enable_thinking": False, "other": 1}
    assert to_chat(body)["chat_template_kwargs"] == {"enable_thinking": True, "thinking": True}
    asked = to_chat(body | {"chat_template_kwargs": switches})
    assert asked["chat_template_kwargs"] == switches | {"thinking": True} and asked["separate_reasoning"] is True


def test_that_a_tool_has_failed_is_the_templates_to_read() -> None:
    results = [
        {"type": "tool_result", "tool_use_id": "1", "content": "no", "is_error": failed} for failed in (1 > 0, 0 > 1)
    ]
    told = to_chat({"messages": [{"role": "user", "content": results}], "max_tokens": 1})["messages"]
    assert [message.get("is_error") for message in told] == [True, None]


def test_a_null_in_a_message_is_nothing() -> None:
    thought: dict[str, Any] = {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm"}]}
    thought |= {"reasoning_content": None, "tool_calls": None}
    (told,) = to_chat({"messages": [thought], "max_tokens": 1})["messages"]
    assert told == {"role": "assistant", "content": "", "reasoning_content": "Hm"}


def test_a_summary_is_the_thought_where_there_is_no_other() -> None:
    summary = [{"type": "summary_text", "text": "Hm"}]
    items = [{"type": "reasoning", "summary": summary}, {"role": "assistant", "content": "a"}]
    (told,) = responses.to_chat({"input": items})["messages"]
    assert (told["reasoning_content"], told["content"]) == ("Hm", "a")


@pytest.mark.parametrize("content", [False, 0, {}])
def test_a_result_of_a_tool_that_is_no_text(server: Live, content: object) -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": content}
    told = server.ask("POST", "/v1/messages", {"messages": [{"role": "user", "content": [result]}], "max_tokens": 1})
    assert told.status == 400 and "content" in told.json["error"]["message"]


@pytest.mark.parametrize("alone", [True, False])
def test_one_call_where_one_is_asked_for(alone: bool) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    choice = {"type": "auto", "disable_parallel_tool_use": alone}
    assert to_chat({"messages": [], "max_tokens": 1, "tool_choice": choice})["parallel_tool_calls"] is not alone
    chosen = {"type": "function", "function": {"name": "f"}} if alone else "required"
    chat = read_chat({"messages": [{"role": "user", "content": "a"}], "tools": [tool], "tool_choice": chosen}, 4)
    assert chat.chat_options.parallel is not alone


def test_whether_one_call_is_asked_for_is_not_guessed() -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": "false"}
    with pytest.raises(ApiError, match="disable_parallel_tool_use must be"):
        to_chat({"messages": [], "max_tokens": 1, "tool_choice": choice})


def test_responses_are_chats(engine: Engine, server: Live) -> None:
    openai = pytest.importorskip("openai", reason="openai's client, of the extra dev")
    chat = [{"role": "system", "content": "Be brief."}, *CHAT]
    expected: Any = engine.chat(chat, {"temperature": 0, "max_new_tokens": None})
    asked: Any = {"model": "box", "instructions": "Be brief.", "temperature": 0}
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        for given in (
            CHAT[0]["content"],
            CHAT,
            [{"role": "user", "content": [{"type": "input_text", "text": CHAT[0]["content"]}]}],
        ):
            told = client.responses.create(input=given, **asked)
            assert (told.output_text, told.status, told.store) == (expected["text"], "completed", False)
            assert told.usage.output_tokens == expected["meta_info"]["completion_tokens"]
            type(told).model_validate(told.to_dict())  # every field that the client's type has
        with client.responses.stream(input=CHAT[0]["content"], **asked) as stream:
            kinds = [event.type for event in stream]
            assert stream.get_final_response().output_text == expected["text"]
        assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added",
                             "response.content_part.added"]  # fmt: skip
        assert kinds[-4:] == ["response.output_text.done", "response.content_part.done", "response.output_item.done",
                              "response.completed"]  # fmt: skip
        cut = client.responses.create(input="a", max_output_tokens=2, include=["message.output_text.logprobs"],
                                      top_logprobs=3, model="box", extra_body={"ignore_eos": True})  # fmt: skip
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert [len(one.top_logprobs) for one in cut.output[0].content[0].logprobs] == [3, 3]
        short = client.responses.create(input="a", max_output_tokens=2, model="box", stream=True)
        (ended,) = (event.item for event in short if event.type == "response.output_item.done")
        assert cut.output[0].status == ended.status == "incomplete" and told.output[0].status == "completed"
        streamed = list(
            client.responses.create(input="a", include=["message.output_text.logprobs"], stream=True, **asked)
        )
        told = [one for event in streamed if event.type == "response.output_text.delta" for one in event.logprobs]
        (done,) = (event for event in streamed if event.type == "response.output_text.done")
        names = [one.token for one in done.logprobs]  # the last is the model's end, which has no text of its own
        assert [one.token for one in told] == names[: len(told)] and len(told) in (len(names), len(names) - 1)
    body = {"input": "a", "structured_outputs": {"regex": "[0-9]{3}"}}
    assert re.fullmatch("[0-9]{3}", post(server, "/v1/responses", body)["output"][0]["content"][0]["text"])
    again = [{"input": "A long story " * 20, "max_output_tokens": 1, "cache_salt": salt} for salt in ("a", "a", "b")]
    cached = [post(server, "/v1/responses", body)["usage"]["input_tokens_details"]["cached_tokens"] for body in again]
    assert cached[0] == cached[2] == 0 < cached[1]
    told = [post(server, "/generate", {"text": "A long story " * 20, "extra_key": key}) for key in ("xa", "xa", "xb")]
    cached = [one["meta_info"]["cached_tokens"] for one in told]
    assert cached[0] == cached[2] == 0 < cached[1]
    assert read_completion({"prompt": "a", "extra_key": "k"}, 1).arguments["cache_salt"] == "k"


def test_tools_in_responses_and_messages(server: Live) -> None:
    """A forced call, whole and as events; and its result, which goes into the next chat."""
    pytest.importorskip("llguidance", reason="the extra grammar")
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
              "additionalProperties": False}  # fmt: skip
    function = {"type": "function", "name": "weather", "parameters": schema}
    body: dict[str, Any] = {"input": "Warm?", "tools": [function], "tool_choice": "required", "seed": 1,
                            "parallel_tool_calls": False}  # fmt: skip
    (call,) = post(server, "/v1/responses", body)["output"]
    assert (call["type"], call["name"]) == ("function_call", "weather")
    assert json.loads(call["arguments"])["city"] in ("Paris", "Rome")
    streamed = events(server, "/v1/responses", body)
    assert [data["delta"] for name, data in streamed if name.endswith("arguments.delta")] == [call["arguments"]]
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm"}]}
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "21"}
    given = [{"role": "user", "content": "Warm?"}, thought, call, result]
    assert post(server, "/v1/responses", {"input": given, "max_output_tokens": 2})["output"][0]["type"] == "message"

    tool = {"name": "weather", "input_schema": schema}
    body = {"messages": [{"role": "user", "content": "Warm?"}], "max_tokens": 200, "tools": [tool], "temperature": 0}
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        told = post(server, "/v1/messages", {**body, "tool_choice": choice | {"disable_parallel_tool_use": True}})
        (block,) = told["content"]
        assert (told["stop_reason"], block["name"]) == ("tool_use", "weather")
        assert block["input"]["city"] in ("Paris", "Rome")
    choice = {"type": "any", "disable_parallel_tool_use": True}
    streamed = events(server, "/v1/messages", {**body, "tool_choice": choice})
    parts = "".join(data["delta"]["partial_json"] for name, data in streamed if name == "content_block_delta")
    assert json.loads(parts)["city"] in ("Paris", "Rome") and streamed[-2][1]["delta"]["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "21"}]}
    turns = [*body["messages"], {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm"}, block]},
             {"role": "user", "content": [result, {"type": "text", "text": "So?"}]}]  # fmt: skip
    assert post(server, "/v1/messages", {**body, "messages": turns, "max_tokens": 2})["content"]


def test_logprobs_of_a_response_are_as_many_however_it_comes(engine: Engine) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    asked = {"messages": CHAT, "stream": True, "logprobs": True, "tools": tools}
    told = []
    for pieces in (["<tool_c"], ["<tool", "_c"], [*"<tool_c"]):
        facts = TemplateFacts(next(form for form in FORMATS if form.name == "hermes"))
        writer = ResponseWriter(ChatWriter(read_chat(asked, 1), engine, facts, {}), {}, "box")
        for i, piece in enumerate(pieces):
            ids = [5] * len(piece)
            meta = {"output_token_logprobs": [(-1.0, 5, None)] * len(piece)}
            meta |= {"finish_reason": {"type": "length"} if i == len(pieces) - 1 else None}
            writer.piece(0, {"text": piece, "output_ids": ids, "meta_info": meta})
        told.append([(block.text, len(block.logprobs)) for block in writer.found])
    assert told == [[("<tool_c", 7)]] * 3


@pytest.mark.parametrize(
    ("name", "text", "blocks"),
    [
        ("hermes", 'a <tool_call>{"name": "f"}</tool_call> b <tool_call>{"name": "f"}</tool_call>'
         "<tool_call>{</tool_call> c", ["a", "{}", "  b", "{}", " <tool_call>{</tool_call> c"]),
        ("granite", 'a<|tool_call|>[{"name": "f"}]<tool_call>[{"name": "f"}] b', ["a", "{}", "{}", " b"]),
    ],
)  # fmt: skip
def test_what_follows_a_call_is_told_behind_it_however_it_comes(
    name: str, text: str, blocks: list[str], engine: Engine
) -> None:
    asked = {"messages": CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]}
    for size in (1, 5, 41, 200):
        facts = TemplateFacts(next(form for form in FORMATS if form.name == name))
        writer = MessageWriter(ChatWriter(read_chat(asked, 1), engine, facts, {}), {}, "box")
        for at in range(0, len(text), size):
            finish = {"type": "stop"} if at + size >= len(text) else None
            writer.piece(0, {"text": text[at : at + size], "output_ids": [], "meta_info": {"finish_reason": finish}})
        assert [block.text for block in writer.found] == blocks


@pytest.mark.parametrize(("kind", "told"), [("call", ("tool_use", None)), ("text", ("stop_sequence", "END"))])
def test_behind_a_call_a_stop_string_is_not_the_reason(kind: Any, told: Any) -> None:
    nothing: Any = None
    writer = MessageWriter(nothing, {}, "box")
    writer.found = [Block(kind, 0, text="{}")]
    meta = {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 1}
    answer = writer.answer({"meta_info": meta | {"finish_reason": {"type": "stop", "matched": "END"}}})
    assert (answer["stop_reason"], answer["stop_sequence"]) == told
    assert (answer["usage"]["input_tokens"], answer["usage"]["cache_read_input_tokens"]) == (2, 1)


def test_an_aborted_message_names_no_reason_of_the_models() -> None:
    nothing: Any = None
    meta = {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 1, "finish_reason": {"type": "abort"}}
    for found in ([], [Block("text", 0, text="Hm")], [Block("call", 0, text="{}")]):
        writer = MessageWriter(nothing, {}, "box")
        writer.found = found
        answer = writer.answer({"meta_info": meta})
        assert answer["stop_reason"] is answer["stop_sequence"] is None and answer["usage"]["output_tokens"] == 2
        assert b'"delta": {"stop_reason": null, "stop_sequence": null}' in writer.ending({"meta_info": meta})
    closing = [MessageWriter(nothing, {}, "box").step("close", Block(kind, 0), "") for kind in ("reasoning", "text")]
    assert ["signature_delta" in str(one) for one in closing] == [True, False]  # as Anthropic ends a thought


def test_messages_are_chats(engine: Engine, server: Live) -> None:
    chat = [{"role": "system", "content": "Be\nbrief."}, *CHAT]
    expected: Any = engine.chat(chat, {"temperature": 0, "max_new_tokens": 30})
    system = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]
    body = {"messages": CHAT, "system": system, "max_tokens": 30, "temperature": 0}
    told = post(server, "/v1/messages", body)
    assert told["content"] == [{"type": "text", "text": expected["text"]}] and told["stop_reason"] == "end_turn"
    usage, meta = told["usage"], expected["meta_info"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == meta["prompt_tokens"]
    streamed = events(server, "/v1/messages", body)
    names = [name for name, _ in streamed]
    assert names == [data["type"] for _, data in streamed] and names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    said = [data["delta"]["text"] for name, data in streamed if name == "content_block_delta"]
    assert "".join(said) == expected["text"]
    begun = [*CHAT, {"role": "assistant", "content": [{"type": "text", "text": expected["text"][:5]}]}]
    told = post(server, "/v1/messages", body | {"messages": begun})
    assert told["content"] == [{"type": "text", "text": expected["text"][5:]}]
    word = expected["text"][1:3]
    stopped = post(server, "/v1/messages", {**body, "stop_sequences": [word]})
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", word)
    assert post(server, "/v1/messages", {**body, "max_tokens": 1})["stop_reason"] == "max_tokens"
    for change in (
        {"messages": []},
        {"max_tokens": None},
        {"max_tokens": -1},
        {"messages": [{"role": "user", "content": [{}]}]},
    ):
        answer = server.ask("POST", "/v1/messages", {**body, **change})
        assert answer.status == 400 and answer.json["type"] == "error" and answer.json["error"]["message"]
