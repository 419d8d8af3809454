"""Conversations in OpenAI's and Anthropic's newer words are the same chats; nothing of them is lost."""

import json
import random
from typing import Any

from fengine.server import messages, responses

URL = "data:image/png;base64,aGk="


def drawn(rng: random.Random) -> list[dict[str, Any]]:
    """A chat whose turns have thoughts, texts, images, calls and their results; each word is there once."""
    chat: list[dict[str, Any]] = [{"role": "system", "content": "s"}]
    count = iter(range(10**6))
    word = lambda: f"w{next(count)}"  # noqa: E731
    for _ in range(rng.randint(1, 4)):
        said: Any = [{"type": "text", "text": word()} for _ in range(rng.randint(1, 2))]
        if rng.random() < 0.3:
            said.insert(rng.randrange(2), {"type": "image_url", "image_url": {"url": URL}})
        chat.append({"role": "user", "content": said})
        for _ in range(rng.randrange(3)):
            calls = [{"id": word(), "type": "function", "function": {"name": word(), "arguments": {"x": word()}}}
                     for _ in range(rng.randrange(3))]  # fmt: skip
            thought = word() + word() if rng.random() < 0.5 else ""
            said = "" if (calls or thought) and rng.random() < 0.4 else word()
            answer: dict[str, Any] = {"role": "assistant", "content": said}
            answer |= {"reasoning_content": thought} if thought else {}
            chat.append(answer | ({"tool_calls": calls} if calls else {}))
            shown = [
                [{"type": "text", "text": word()}, {"type": "image_url", "image_url": {"url": URL}}] for _ in calls
            ]
            chat += [{"role": "tool", "tool_call_id": call["id"], "content": word() if rng.random() < 0.7 else parts}
                     for call, parts in zip(calls, shown, strict=True)]  # fmt: skip
            if not calls:
                break
    return chat


def thoughts(answer: dict[str, Any], rng: random.Random) -> list[str]:
    """In one piece or two, or an empty one where there is none."""
    whole = answer.get("reasoning_content", "")
    cut = rng.randrange(len(whole)) if whole else 0
    return [part for part in (whole[:cut], whole[cut:]) if part or (not whole and rng.random() < 0.1)]


def inputs(parts: list[Any]) -> list[Any]:
    return [{"type": "input_image", "image_url": URL} if "text" not in part else part | {"type": "input_text"}
            for part in parts]  # fmt: skip


def as_response(chat: list[dict[str, Any]], rng: random.Random) -> dict[str, Any]:
    items = list[Any]()
    for one in chat[1:]:
        if one["role"] == "tool":
            said = one["content"] if isinstance(one["content"], str) else inputs(one["content"])
            items.append({"type": "function_call_output", "call_id": one["tool_call_id"], "output": said})
        elif one["role"] == "user":
            items.append({"role": "user", "content": inputs(one["content"])})
        else:
            items += [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": thought}]}
                      for thought in thoughts(one, rng)]  # fmt: skip
            if one["content"]:
                text = {"type": "output_text", "text": one["content"]}
                items.append({"type": "message", "role": "assistant", "content": [text]})
            items += [{"type": "function_call", "call_id": call["id"], "name": call["function"]["name"],
                       "arguments": json.dumps(call["function"]["arguments"])}
                      for call in one.get("tool_calls", ())]  # fmt: skip
    return {"input": items, "instructions": chat[0]["content"]}


def as_messages(chat: list[dict[str, Any]], rng: random.Random) -> dict[str, Any]:
    """Results of tools stand with what the user says next."""
    turns = list[Any]()
    for one in chat[1:]:
        role = "user" if one["role"] == "tool" else one["role"]
        if not turns or turns[-1]["role"] != role or turns[-1]["content"][-1]["type"] != "tool_result":
            turns.append({"role": role, "content": []})
        blocks = turns[-1]["content"]
        if one["role"] == "tool":
            blocks.append({"type": "tool_result", "tool_use_id": one["tool_call_id"], "content": one["content"]})
        elif role == "user":
            blocks += one["content"]
        else:
            blocks += [{"type": "thinking", "thinking": thought} for thought in thoughts(one, rng)]
            blocks += [{"type": "text", "text": one["content"]}] if one["content"] else []
            blocks += [{"type": "tool_use", "id": call["id"], "name": call["function"]["name"],
                        "input": call["function"]["arguments"]} for call in one.get("tool_calls", ())]  # fmt: skip
    return {"messages": turns, "system": chat[0]["content"], "max_tokens": 9}


def plain(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """In one spelling: texts as parts, arguments as objects, images by where they are, no empty thoughts."""
    found = []
    for one in chat:
        content = one["content"]
        parts = ([{"type": "text", "text": content}] if content else []) if isinstance(content, str) else content
        one = one | {"content": [part if "text" in part else URL in json.dumps(part) for part in parts]}
        for call in one.get("tool_calls", ()):
            if isinstance(call["function"]["arguments"], str):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        found.append({key: value for key, value in one.items() if key != "reasoning_content" or value})
    return found


def test_conversations_are_the_same_chats_in_all_words() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        chat = drawn(rng)
        want = plain(chat)
        assert plain(responses.to_chat(as_response(chat, rng))["messages"]) == want, seed
        assert plain(messages.to_chat(as_messages(chat, rng))["messages"]) == want, seed


def test_what_is_thought_between_calls_is_kept() -> None:
    """Also where a call stands between two thoughts."""
    call: dict[str, Any] = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    thought = lambda text: {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}  # noqa: E731
    given = [{"role": "user", "content": "a"}, thought("A"), call, thought("B"), call | {"call_id": "2"}]
    (_, answer) = responses.to_chat({"input": given})["messages"]
    assert answer["reasoning_content"] == "AB" and [call["id"] for call in answer["tool_calls"]] == ["1", "2"]
