"""The model in the box as an agent: real calls, their results and answers, asked as clients' libraries ask."""

import json
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
import serving
from serving import Live, live

from fengine.api.engine import Engine
from fengine.worker.hub import BOX

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import box_tools  # noqa: E402

engine, server = serving.engine, serving.server  # fixtures


def told(name: str, says: str, **types: str) -> dict[str, Any]:
    """A tool as LangChain's `bind_tools` describes it: properties first."""
    properties = {key: {"type": kind} for key, kind in types.items()}
    parameters = {"properties": properties, "required": list(types), "type": "object"}
    return {"type": "function", "function": {"name": name, "description": says, "parameters": parameters}}


TOOLS = {
    "get_capital": lambda country: {"France": "Paris", "Peru": "Lima"}[country],
    "get_weather": lambda city: f"sunny in {city}",
    "add": lambda a, b: a + b,
    "multiply": lambda a, b: a * b,
}
CAPITAL = told("get_capital", "Get the capital of a country.", country="string")
WEATHER = told("get_weather", "Get the weather of a city.", city="string")
ADD = told("add", "Add two numbers.", a="integer", b="integer")
MULTIPLY = told("multiply", "Multiply two numbers.", a="integer", b="integer")


def chat(server: Live, messages: list[Any], tools: list[Any], **more: Any) -> dict[str, Any]:
    body = {"model": "box", "messages": messages, "tools": tools, "temperature": 0.0, "max_tokens": 120, **more}
    return server.ask("POST", "/v1/chat/completions", body).json["choices"][0]


def agent(server: Live, asked: str, tools: list[Any], **more: Any) -> tuple[list[list[str]], str]:
    """(the calls of each turn, the answer), with messages as LangChain and litellm send them back."""
    messages: list[Any] = [{"role": "user", "content": asked}]
    turns = []
    while calls := (choice := chat(server, messages, tools, **more))["message"].get("tool_calls"):
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None and len(turns) < 4
        turns.append([f"{call['function']['name']}{call['function']['arguments']}" for call in calls])
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        for call in calls:
            result = TOOLS[call["function"]["name"]](**json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(result)})
    return turns, choice["message"]["content"]


def test_an_agent_of_two_tools(server: Live) -> None:
    france, sums = 'get_capital{"country": "France"}', 'add{"a": 47, "b": 38}'
    assert agent(server, "What is the capital of France?", [CAPITAL, ADD]) == (
        [[france]],
        "Paris is the capital of France.",
    )
    assert agent(server, "What is 47 + 38?", [CAPITAL, ADD]) == ([[sums]], "47 + 38 = 85")
    both, answer = "What is the capital of France and what is 47 + 38?", "Paris is the capital of France. 47 + 38 = 85"
    assert agent(server, both, [CAPITAL, ADD]) == ([[france, sums]], answer)
    assert agent(server, both, [CAPITAL, ADD], parallel_tool_calls=False) == ([[france], [sums]], answer)
    turns, answer = agent(server, "What is the weather in the capital of Peru?", [WEATHER, CAPITAL])
    assert turns == [['get_capital{"country": "Peru"}'], ['get_weather{"city": "Lima"}']] and "sunny" in answer
    assert agent(server, "Hello!", [CAPITAL, ADD])[0] == []
    assert agent(server, "What is 47 + 38?", [CAPITAL]) == ([], "47 + 38 = 85")


def test_the_choice_of_a_tool(server: Live) -> None:
    asked: list[Any] = [{"role": "user", "content": "What is 12 * 12?"}]
    message = chat(server, asked, [MULTIPLY, CAPITAL], tool_choice="none")["message"]
    assert message["content"] and "tool_calls" not in message
    pytest.importorskip("llguidance", reason="the extra grammar")
    for choice in ("required", {"type": "function", "function": {"name": "multiply"}}):
        (call,) = chat(server, asked, [MULTIPLY, CAPITAL], tool_choice=choice)["message"]["tool_calls"]
        assert call["function"] == {"name": "multiply", "arguments": '{"a": 12, "b": 12}'}


def test_the_sdk_with_the_older_functions_and_streams(server: Live) -> None:
    openai = pytest.importorskip("openai", reason="openai's client, of the extra dev")
    asked: Any = [{"role": "user", "content": "What is 47 + 38?"}]
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        functions: Any = {"model": "box", "functions": [CAPITAL["function"], ADD["function"]], "temperature": 0}
        message = client.chat.completions.create(messages=asked, **functions).choices[0].message
        assert (message.function_call.name, message.function_call.arguments) == ("add", '{"a": 47, "b": 38}')
        asked += [message.model_dump(exclude_none=True), {"role": "function", "name": "add", "content": "85"}]
        assert client.chat.completions.create(messages=asked, **functions).choices[0].message.content == "47 + 38 = 85"
        chunks = client.chat.completions.create(
            model="box", messages=asked[:1], tools=[CAPITAL, ADD], temperature=0, stream=True
        )
        calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
        assert [(call.function.name, call.function.arguments) for call in calls] == [("add", '{"a": 47, "b": 38}')]


def test_the_model_is_trained_on_what_the_template_writes(engine: Engine) -> None:
    """As text by transformers, and as ids by our tokenizer."""
    transformers = pytest.importorskip("transformers")
    theirs, ours, draw = transformers.AutoTokenizer.from_pretrained(BOX), engine.tokenizer, Random(1)
    assert ours is not None and theirs.chat_template == box_tools.CHAT_TEMPLATE
    for _ in range(40):
        case = box_tools.training_case(draw)
        parts = box_tools.segments(case)
        text = theirs.apply_chat_template(case.messages, tools=case.tools, tokenize=False)
        assert text == theirs.bos_token + "".join(part for part, _ in parts) + "\n"
        trained = [theirs.bos_token_id, *(i for part, _ in parts for i in ours.encode(part, add_special_tokens=False))]
        assert engine.chat_ids(case.messages, case.tools, False)[: len(trained)] == trained


def test_tools_that_a_template_does_not_read_are_ignored() -> None:
    plain = (
        "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}<|assistant|>\n"
    )
    with Engine(model_path="box", enable_torch_compile=False, chat_template=plain) as engine, live(engine) as server:
        hi = {"model": "box", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "temperature": 0}
        bare, told = (server.ask("POST", "/v1/chat/completions", hi | more).json for more in ({}, {"tools": [ADD]}))
        assert bare["usage"] == told["usage"] and bare["choices"] == told["choices"]


@pytest.mark.parametrize("kind", ["add", "capital", "sort", "chain"])
def test_held_out_calls(kind: str, server: Live) -> None:
    """A few of each; `scripts/box_eval.py` has the shares of many."""
    right = []
    for case in box_tools.held_out(kind, 6, seed=4):
        at = next(i for i, message in enumerate(case.messages) if message["role"] == "assistant")
        calls = chat(server, case.messages[:at], case.tools)["message"].get("tool_calls") or []
        found = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
        want = [(call["function"]["name"], call["function"]["arguments"]) for call in case.messages[at]["tool_calls"]]
        right.append(found == want)
    assert sum(right) >= 5, right
