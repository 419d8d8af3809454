"""Tools and thinking, asked by the real openai client: the words are scripted, the way from them is the real one."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

openai = pytest.importorskip("openai", reason="openai's client, of the extra dev")

from serving import Live, live, post, until  # noqa: E402

from fengine.api.engine import Engine  # noqa: E402
from fengine.api.io_struct import Function, Tool  # noqa: E402
from fengine.server.chat import ChatWriter  # noqa: E402
from fengine.server.config import ServerConfig  # noqa: E402
from fengine.server.openai_body import read_chat  # noqa: E402
from fengine.server.output_parser import THINKING, OutputParser  # noqa: E402
from fengine.server.parsers import FunctionCallParser  # noqa: E402
from fengine.server.responses import to_chat  # noqa: E402
from fengine.server.service import Service  # noqa: E402
from fengine.server.template_facts import TemplateFacts, ThoughtTokens  # noqa: E402
from fengine.server.tool_calls import format_of  # noqa: E402

TURNS = """{% for message in messages %}<|{{ message.role }}|>
{{ message.content }}{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|end|>
{% endfor %}"""
TEMPLATE = "{{ tools }}{# <tool_call> #}" + TURNS + "<|assistant|>\n{% if enable_thinking %}<think>\n{% endif %}"
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
        "additionalProperties": False}}},
    {"type": "function", "function": {"name": "now"}},
]  # fmt: skip
EOS = 5  # of the box
CHAT: Any = [{"role": "user", "content": "Is it warm in Paris?"}]
CALLS = 'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
CALLS += '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(
        model_path="box", enable_torch_compile=False, enable_custom_logit_processor=True, chat_template=TEMPLATE
    ) as engine:
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


def scripted(engine: Engine, text: str) -> dict[str, Any]:
    """The fields of a body whose answer is a given text."""
    assert engine.tokenizer is not None
    ids = iter([*engine.tokenizer.encode(text, add_special_tokens=False), *[EOS] * 4])

    def script(logits: Any, params: Any) -> Any:
        logits[:] = float("-inf")
        logits[:, next(ids)] = 0.0
        return logits

    engine.register_logit_processor("script", script)
    return {"model": "box", "messages": CHAT, "temperature": 0, "extra_body": {"custom_logit_processor": "script"}}


@pytest.fixture
def say(engine: Engine) -> Callable[[str], dict[str, Any]]:
    return lambda text: scripted(engine, text)


def gathered(chunks: Any) -> dict[str, Any]:
    """What the deltas of a stream's one choice add up to."""
    found: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": {}, "function_call": None}
    for chunk in chunks:
        (choice,) = chunk.choices
        for name in ("content", "reasoning_content"):
            found[name] += getattr(choice.delta, name, None) or ""
        for call in choice.delta.tool_calls or []:
            assert call.index not in found["tool_calls"] and call.id and call.type == "function"
            found["tool_calls"][call.index] = (call.function.name, call.function.arguments)
        found["function_call"] = choice.delta.function_call or found["function_call"]
        found["finish_reason"] = choice.finish_reason
    return found


def test_calls_are_parsed_whole_and_streamed(client: Any, say: Any, engine: Engine) -> None:
    whole = client.chat.completions.create(**say(CALLS), tools=TOOLS).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.content == "I look."
    told = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
    assert told == [("weather", '{"city": "Paris"}'), ("now", "{}")]
    assert len({call.id for call in whole.message.tool_calls}) == 2
    parts = gathered(client.chat.completions.create(**say(CALLS), tools=TOOLS, stream=True))
    assert parts["tool_calls"] == dict(enumerate(told)) and parts["content"] == "I look."
    assert parts["finish_reason"] == "tool_calls"
    (one,) = client.chat.completions.create(
        **say(CALLS), tools=TOOLS, parallel_tool_calls=False
    ).choices[0].message.tool_calls  # fmt: skip
    assert one.function.name == "weather"
    most = len(engine.tokenizer.encode(CALLS, add_special_tokens=False))
    cut = client.chat.completions.create(**say(CALLS), tools=TOOLS, max_completion_tokens=most).choices[0]
    assert len(cut.message.tool_calls) == 2 and cut.finish_reason == "length"  # more might have come


def test_arguments_have_the_types_of_the_tools(client: Any, say: Any, server: Live, monkeypatch: Any) -> None:
    facts = TemplateFacts(form=format_of("<tool_call> <arg_key>"))
    monkeypatch.setattr(server.service, "template_facts", lambda tools: facts)
    for kind, told in (("string", "75001"), ("integer", 75001), ("string", "Köln")):
        text = f"<tool_call>weather<arg_key>city</arg_key><arg_value>{told}</arg_value></tool_call>"
        parameters = {"type": "object", "properties": {"city": {"type": kind}}}
        tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
        (call,) = client.chat.completions.create(**say(text), tools=tools).choices[0].message.tool_calls
        assert call.function.arguments == json.dumps({"city": told}, ensure_ascii=False)
        parser = FunctionCallParser([Tool(Function("weather", parameters=parameters))], "glm")
        (item,) = parser.parse_non_stream(text)[1]
        assert json.loads(item.parameters) == {"city": told}


def test_a_format_that_is_given_goes_before_the_templates(engine: Engine) -> None:
    for name, form in (("llama3", "llama"), (None, "hermes")):
        found = Service(engine, ServerConfig(tool_call_parser=name)).template_facts(True).form
        assert found is not None and found.name == form


def test_ids_of_calls_are_those_of_the_format(client: Any, say: Any, server: Live, monkeypatch: Any) -> None:
    before = {"role": "assistant", "content": "", "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}]}  # fmt: skip
    chat = {"tools": TOOLS, "tool_choice": "required"}
    for mark, wanted in (("[TOOL_CALLS]", "[0-9a-f]{9}"), ("<|tool_calls_section_begin|>", r"functions\.now:1")):
        facts = TemplateFacts(form=format_of(mark))
        monkeypatch.setattr(server.service, "template_facts", lambda tools, facts=facts: facts)
        asked = say('[{"name": "now", "arguments": {}}]') | chat | {"messages": [*CHAT, before, *CHAT]}
        (call,) = client.chat.completions.create(**asked).choices[0].message.tool_calls
        assert re.fullmatch(wanted, call.id)


def test_calls_of_a_stream_are_counted_through(engine: Engine) -> None:
    facts = TemplateFacts(form=format_of("<|tool_calls_section_begin|>"))
    body = {"messages": CHAT, "tools": TOOLS, "stream": True}
    writer, found = ChatWriter(read_chat(body, 4), engine, facts, {"model": "box"}), []
    call = "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    for _ in range(2):
        text = f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"
        output: Any = {"text": text, "output_ids": [5], "meta_info": {"finish_reason": None}}
        if piece := writer.piece(0, output):
            found += json.loads(piece.removeprefix(b"data: "))["choices"][0]["delta"].get("tool_calls") or []
    assert [(one["index"], one["id"]) for one in found] == [(0, "functions.now:0"), (1, "functions.now:1")]


def test_calls_are_text_where_no_tools_are_offered(client: Any, say: Any) -> None:
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = client.chat.completions.create(**say(CALLS), **more).choices[0]
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (CALLS, None, "stop")


def test_a_call_that_cannot_be_read_stays_text(client: Any, say: Any) -> None:
    text = 'Hm. <tool_call>{"name": "weather", "argu'
    choice = client.chat.completions.create(**say(text), tools=TOOLS).choices[0]
    assert choice.message.content == text and choice.finish_reason == "stop"
    assert gathered(client.chat.completions.create(**say(text), tools=TOOLS, stream=True))["content"] == \
        choice.message.content  # fmt: skip


def test_the_older_functions(client: Any, say: Any) -> None:
    functions = [tool["function"] for tool in TOOLS]
    choice = client.chat.completions.create(**say(CALLS), functions=functions).choices[0]
    assert choice.finish_reason == "function_call" and choice.message.function_call.name == "weather"
    parts = gathered(client.chat.completions.create(**say(CALLS), functions=functions, stream=True))
    assert parts["function_call"].arguments == '{"city": "Paris"}' and parts["finish_reason"] == "function_call"


def test_thoughts_are_told_apart(client: Any, say: Any) -> None:
    for text, more in (
        ("<think>\nIt is July.\n</think>\n\nYes.", {}),
        ("It is July.</think>Yes.", {"enable_thinking": True}),  # the prompt begins the thought
    ):
        asked = say(text)
        asked["extra_body"] |= {"chat_template_kwargs": more}
        message = client.chat.completions.create(**asked).choices[0].message
        assert (message.reasoning_content, message.content) == ("It is July.", "Yes.")
        assert message.reasoning == message.reasoning_content
        asked = say(text)
        asked["extra_body"] |= {"chat_template_kwargs": more, "separate_reasoning": False}
        assert client.chat.completions.create(**asked).choices[0].message.content == text
        asked = say(text)
        asked["extra_body"] |= {"chat_template_kwargs": more, "include_reasoning": False}
        message = client.chat.completions.create(**asked).choices[0].message
        assert (message.reasoning_content, message.content) == (None, "Yes.")
    asked = say("It is July.</think>Yes.")
    message = client.chat.completions.create(**asked, reasoning_effort="low").choices[0].message
    assert (message.reasoning_content, message.content) == ("It is July.", "Yes.")
    asked = say("so July.</think>Yes.")
    asked["messages"] = [*CHAT, {"role": "assistant", "content": "<think>It is"}]
    asked["extra_body"] |= {"continue_final_message": True}
    message = client.chat.completions.create(**asked).choices[0].message
    assert (message.reasoning_content, message.content) == ("so July.", "Yes.")
    parts = gathered(client.chat.completions.create(**say("<think>\nIt is July.\n</think>\n\nYes."), stream=True))
    assert (parts["reasoning_content"], parts["content"]) == ("It is July.", "Yes.")
    asked = say("<think>\nIt is July.\n</think>\n\nYes.")
    asked["extra_body"] |= {"stream_reasoning": False}
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked, stream=True)]
    assert [one.reasoning_content for one in deltas if one.reasoning_content] == ["It is July."]


def test_special_tokens_are_shown_where_thoughts_are_such(engine: Engine) -> None:
    for thinks, more, shown in (("mistral", {}, False), ("mistral", {"response_format": {"type": "json_object"}}, None),
                                ("none", {}, None)):  # fmt: skip
        facts = TemplateFacts(hidden=True, thinks=THINKING.get(thinks))
        writer = ChatWriter(read_chat({"messages": CHAT, **more}, 4), engine, facts, {})
        assert writer.arguments["sampling_params"].get("skip_special_tokens") is shown


def test_a_thought_ends_where_its_limit_is(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, end = 300, 301  # of the box, which has no tokens for thoughts

    def of_words(self: ThoughtTokens, tokenizer: Any, opened: bool, thought: Any) -> None:
        self.begin, self.end, self.opened, self._open, self.count = begin, end, opened, None, 0

    body: Any = {"messages": CHAT, "max_tokens": 6, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    thinking = body | {"chat_template_kwargs": {"enable_thinking": True}}
    refused = server.ask("POST", "/v1/chat/completions", thinking | {"thinking_token_budget": 3})
    assert (refused.status, refused.error["param"]) == (400, "thinking_token_budget")
    monkeypatch.setattr(ThoughtTokens, "__init__", of_words)
    asked: Any = lambda more: post(server, "/v1/chat/completions", more)["choices"][0]["token_ids"]  # noqa: E731
    free = asked(thinking)
    assert end not in free
    for most in (0, 3, 6):
        assert asked(thinking | {"thinking_token_budget": most})[: most + 1] == [*free[:most], end][:6]
    bare = asked(body)
    assert asked(body | {"thinking_token_budget": 0}) == bare  # which begins no thought
    two = {"messages": [CHAT, [*CHAT, {"role": "assistant", "content": "<think>"}]], "continue_final_message": True}
    refused = server.ask("POST", "/v1/chat/completions/batch", thinking | two | {"thinking_token_budget": 3})
    assert refused.status == 400
    schema = {"response_format": {"type": "json_object"}, "max_tokens": 40}  # a grammar leaves no thought
    found = [post(server, "/v1/chat/completions", body | schema | more) for more in ({}, {"thinking_token_budget": 1})]
    assert found[0]["choices"] == found[1]["choices"]


def test_channels_are_told_apart_with_and_without_tools() -> None:
    """gpt-oss's template; the markers are plain text to this tokenizer."""
    text = "<|channel|>analysis<|message|>It is July.<|start|>assistant<|channel|>"
    call = text + 'commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}'
    template = "{{ tools }}{# functions #}" + TURNS + "<|start|>assistant{# <|channel|> #}"
    with (
        Engine(
            model_path="box", enable_torch_compile=False, enable_custom_logit_processor=True, chat_template=template
        ) as engine,
        live(engine) as server,
        openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client,
    ):
        final = scripted(engine, text + "final<|message|>Yes.")
        message = client.chat.completions.create(**final).choices[0].message
        assert (message.reasoning_content, message.content) == ("It is July.", "Yes.")
        final = scripted(engine, text + "final<|message|>Yes.")
        final["extra_body"] |= {"separate_reasoning": False}
        assert client.chat.completions.create(**final).choices[0].message.content == "It is July.Yes."
        choice = client.chat.completions.create(**scripted(engine, call), tools=TOOLS).choices[0]
        assert choice.message.tool_calls[0].function.arguments == '{"city": "Paris"}'
        assert choice.finish_reason == "tool_calls" and choice.message.reasoning_content == "It is July."


def test_a_loop_of_two_tools(client: Any, say: Any) -> None:
    """As an agent does: the calls are run, their results go into the chat, and the model answers."""
    answer = client.chat.completions.create(**say(CALLS), tools=TOOLS).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": f"{call.function.name}: 21"} for call in answer.tool_calls
    ]
    asked = say("It is warm.")
    asked["messages"] = [*CHAT, answer.model_dump(exclude_none=True), *results]
    last = client.chat.completions.create(**asked, tools=TOOLS).choices[0]
    assert (last.message.content, last.finish_reason) == ("It is warm.", "stop")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
def test_a_forced_call_is_held_by_a_grammar(choice: Any, client: Any) -> None:
    """What the small model would say of itself does not matter."""
    pytest.importorskip("llguidance", reason="the extra grammar")
    asked = {"model": "box", "messages": CHAT, "tools": TOOLS, "tool_choice": choice, "max_tokens": 200, "seed": 1,
             "parallel_tool_calls": False}  # fmt: skip
    answer = client.chat.completions.create(**asked).choices[0]
    (call,) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    assert call.function.name in ("weather", "now")
    if call.function.name == "weather":
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    parts = gathered(client.chat.completions.create(**asked, stream=True))
    assert parts["tool_calls"] == {0: (call.function.name, call.function.arguments)} and parts["content"] == ""


def test_allowed_tools_are_the_only_ones() -> None:
    """As chats name them, and responses."""
    now = {"type": "function", "function": {"name": "now"}}
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    for mode, forced in (("auto", 0), ("required", 1)):
        chosen = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [now]}}
        asked = {
            "input": "Hi",
            "tools": flat,
            "tool_choice": {"type": "allowed_tools", "mode": mode, "tools": flat[1:]},
        }
        for body in ({"messages": CHAT, "tools": TOOLS, "tool_choice": chosen}, to_chat(asked)):
            chat = read_chat(body, 4).chat_options
            assert (chat.tools, chat.callable, len(chat.forced), chat.parallel) == (
                [now],
                (now["function"],),
                forced,
                True,
            )


def test_strict_functions_are_held_where_a_call_begins(engine: Engine, client: Any, say: Any) -> None:
    """A model that would call with other arguments is held to the schema."""
    pytest.importorskip("llguidance", reason="the extra grammar")
    begin = '<tool_call>\n{"name": "weather", "arguments": '
    assert engine.tokenizer is not None
    ids = engine.tokenizer.encode(begin, add_special_tokens=False)
    step = iter(range(10**6))

    def begin_a_call(logits: Any, params: Any) -> Any:
        at = next(step)
        if at < len(ids):
            logits[:] = float("-inf")
            logits[:, ids[at]] = 0.0
        return logits

    engine.register_logit_processor("begin", begin_a_call)
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    answer = client.chat.completions.create(
        model="box", messages=CHAT, tools=strict, max_tokens=90, seed=2, extra_body={"custom_logit_processor": "begin"}
    ).choices[0]
    (call,) = answer.message.tool_calls[:1]
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


REFUSED = [
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": []}}},
     "tool_choice"),
    ({"tools": TOOLS[:1], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
        {"type": "function", "function": {"name": "now"}}]}}}, "tool_choice"),
    ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "tools"),
    ({"tools": TOOLS * 65}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "tools"),
    ({"tools": TOOLS, "functions": []}, "functions"),
    ({"functions": 3}, "functions"),
    ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "strin"}}}],
      "tool_choice": "required"}, "tools"),
    ({"messages": [*CHAT, {"role": "assistant", "tool_calls": 5}]}, "messages"),
    ({"messages": [*CHAT, {"role": "assistant", "tool_calls": [5]}]}, "messages"),
    ({"messages": [*CHAT, {"role": "assistant", "tool_calls": [{"function": {"name": 3}}]}]}, "messages"),
    ({"messages": [*CHAT, {"role": "assistant", "tool_calls": [{"type": "x", "function": {"name": "f"}}]}]},
     "messages"),
    ({"messages": [*CHAT, {"role": "assistant", "function_call": {}}]}, "messages"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ({"reasoning_effort": "huge"}, "reasoning_effort"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "param"), REFUSED, ids=[repr(c)[:60] for c, _ in REFUSED])
def test_what_is_wrong_is_named(change: Any, param: str, server: Live) -> None:
    answer = server.ask("POST", "/v1/chat/completions", {"model": "box", "messages": CHAT, "max_tokens": 2, **change})
    assert (answer.status, answer.error["param"]) == (400, param), answer.body


def test_forced_calls_that_are_cut_off_are_told_as_far_as_they_are_whole() -> None:
    whole = '[{"name": "a", "arguments": {"x": [1, 2]}}, {"name": "b", "arguments": {}}]'
    second = whole.index(', {"name": "b"')
    for end in range(len(whole) + 1):
        found = OutputParser(None, forced=True).feed(whole[:end], last=True)
        known = ["a", "b"] if end >= len(whole) - 1 else ["a"] if end >= second else []
        assert [call.name for call in found.calls] == known
        assert found.content == ("" if known else whole[:end])


def test_forced_calls_have_no_blanks_to_run_away_in(client: Any) -> None:
    free = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    for seed in range(3):
        answer = client.chat.completions.create(
            model="box", messages=[{"role": "user", "content": "x"}], tools=[free], tool_choice="required", seed=seed,
            temperature=2.0, max_tokens=20,
        )  # fmt: skip
        message = answer.choices[0].message
        text = message.content or message.tool_calls[0].function.arguments
        assert "\n" not in text and "  " not in text
