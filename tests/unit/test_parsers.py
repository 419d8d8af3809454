"""SGLang's parsers, as its documents use them: whole answers, and pieces that add up to the same."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from fengine.api.io_struct import Function, Tool
from fengine.errors import UnsupportedFeatureError
from fengine.server import output_parser
from fengine.server.output_parser import OutputParser
from fengine.server.parsers import FORMS, FunctionCallParser, ReasoningParser, ToolCallItem
from fengine.server.template_facts import ThoughtLimit, ThoughtTokens, template_facts
from fengine.server.tool_calls import FORMATS

TOOLS = [Tool(Function("time")), Tool(Function("weather", "of a city", {"type": "object"}))]
CALL = '{"name": "weather", "arguments": {"city": "Köln"}}'
ITEM = ToolCallItem(1, "weather", '{"city": "Köln"}')
WRITTEN = {  # by the name of a format: a call of `weather`
    "qwen25": f"<tool_call>\n{CALL}\n</tool_call>",
    "qwen3_coder": "<tool_call><function=weather><parameter=city>Köln</parameter></function></tool_call>",
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key><arg_value>Köln</arg_value></tool_call>",
    "mistral": f"[TOOL_CALLS][{CALL}]",
    "deepseekv31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    '{"city": "Köln"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "llama3": CALL.replace("arguments", "parameters"),
    "pythonic": '[weather(city="Köln")]',
    "lfm2": "<|tool_call_start|>[weather(city='Köln')]<|tool_call_end|>",
}

GPT_OSS = '<|channel|>commentary to=functions.weather<|message|>{"city": "Köln"}<|call|>'


@pytest.mark.parametrize(
    ("kind", "text", "wanted"),
    [
        ("deepseek-r1", "One and three.</think>\n\nFour", ("One and three.", "Four")),
        ("deepseek-r1", "<think>One and three.</think>Four", ("One and three.", "Four")),
        ("qwen3", "<think>\nso\n</think>\n4", ("so", "4")),
        ("qwen3", "4", ("", "4")),
        ("qwen3-thinking", "still at it", ("still at it", "")),
        ("mistral", "[THINK]so[/THINK]4 [THIN", ("so", "4 [THIN")),
        ("mistral", "<think>so", ("", "<think>so")),
        ("cohere_command4", "so<|END_THINKING|><|START_TEXT|>4<|END_TEXT|>", ("so", "4")),
        ("cohere_command4", "<|START_TEXT|>4<|END_TEXT|>", ("", "4")),
    ],
)
def test_thoughts_are_told_from_the_answer(kind: str, text: str, wanted: tuple[str, str]) -> None:
    assert ReasoningParser(kind).parse_non_stream(text) == wanted
    assert ReasoningParser(model_type=kind.upper()).parse_non_stream(text) == wanted


def test_thoughts_may_be_forced() -> None:
    assert ReasoningParser("qwen3", force_reasoning=True).parse_non_stream("a</think>b") == ("a", "b")
    for kind in ("nobody", None):
        with pytest.raises(UnsupportedFeatureError, match="is not built; there are"):
            ReasoningParser(kind)


@pytest.mark.parametrize(
    ("template", "words", "shown"),
    [
        ("{{ content.split('</think>')[-1] }}", ("<think>", "</think>"), False),  # DeepSeek-R1's, which begins none
        ("[TOOL_CALLS]{{ '[THINK]' + text + '[/THINK]' }}", ("[THINK]", "[/THINK]"), True),
        ("[TOOL_CALLS]", (), False),
    ],
)
def test_templates_tell_the_words_of_thoughts(template: str, words: tuple[str, ...], shown: bool) -> None:
    """And whether they are special tokens, which are shown then; those of calls are where there are tools."""
    added = {i: AddedToken(word, special=True) for i, word in enumerate(("[THINK]", "[/THINK]", "[TOOL_CALLS]"))}
    backend = SimpleNamespace(get_added_tokens_decoder=lambda: added)
    tokenizer: Any = SimpleNamespace(template_of=lambda tools: (template, ()), backend=backend)
    facts = template_facts(tokenizer, False)
    assert ((facts.thinks or ())[:2], facts.hidden) == (words, shown)
    assert template_facts(tokenizer, True).hidden == ("[TOOL_CALLS]" in template)
    tokenizer.decode = lambda ids, skip: f"a {''.join(words[:1])}\n"
    assert facts.opened(tokenizer, [1]) == bool(words)


def test_thoughts_may_be_held_until_they_end() -> None:
    parser = ReasoningParser("qwen3", stream_reasoning=False, tokenizer=None)
    found = [parser.parse_stream_chunk(piece) for piece in ("<think>a", "b", "</think>", "c", "d")]
    assert found == [("", ""), ("", ""), ("", ""), ("ab", "c"), ("", "d")]
    assert parser.detector is not None and parser.detector.think_end_token == "</think>"


def test_tokens_of_thoughts_are_counted_to_their_end() -> None:
    words = {"<think>": 7, "</think>": 8}
    tokenizer = SimpleNamespace(backend=SimpleNamespace(token_to_id=words.get))
    for opened, pieces, count in (
        (False, [[7, 1, 2, 8, 3]], 4), (False, [[7], [1, 2], [8], [3, 8]], 4), (False, [[1, 8]], 0),
        (True, [[1], [2, 8, 3]], 3), (True, [[1, 2]], 2), (False, [[], [7, 1]], 2),
    ):  # fmt: skip
        thought = ThoughtTokens(tokenizer, opened)
        for piece in pieces:
            thought.feed(piece)
        assert thought.count == count, pieces
    words.clear()
    thought = ThoughtTokens(tokenizer, True)
    thought.feed([1])
    assert thought.count is None  # </think> is several tokens


@pytest.mark.parametrize("opened", [True, False])
def test_a_limit_of_a_thought_is_reached_once(opened: bool) -> None:
    drawn = [1, 2, 3, 4] if opened else [7, 1, 2, 3, 4]
    for most in range(4):
        limit = ThoughtLimit(most, 7, 8, opened)
        at = len(drawn) - 4 + most
        assert [limit.reached(drawn[:n]) for n in range(len(drawn) + 1)] == [n == at for n in range(len(drawn) + 1)]
        assert not limit.reached([*drawn[: at - 1], 8]) and not ThoughtLimit(most, 7, 8, False).reached(
            [1, 2, 3][:most]
        )


@given(cuts=st.lists(st.integers(0, 40), max_size=6), opened=st.booleans())
def test_pieces_add_up_to_the_whole(cuts: list[int], opened: bool) -> None:
    text = ("<think>" if opened else "") + "One and three, so.</think>\nIt is four"
    parser, edges = ReasoningParser("deepseek-r1"), [0, *sorted(cuts), len(text)]
    found = [parser.parse_stream_chunk(text[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    assert ("".join(r for r, _ in found), "".join(c for _, c in found)) == ("One and three, so.", "It is four")


@pytest.mark.parametrize("alias", [None, "qwen25", "llama3"])
def test_what_is_told_is_kept_no_longer(alias: str | None) -> None:
    """Thoughts and content of any length: a piece costs what it has, not what was before it."""
    parser = OutputParser(None if alias is None else FORMS[alias], thinks=True, opened=True)
    pieces = ["a thought "] * 300 + ["</think>"] + ["some text "] * 300
    found = []
    for piece in pieces:
        found.append(parser.feed(piece))
        assert len(parser._held) + len(parser._text) < 20
    assert "".join(one.reasoning for one in found) == ("a thought " * 300).strip()
    assert "".join(one.content for one in found).strip() == ("some text " * 300).strip()


@pytest.mark.parametrize(("alias", "said"), [("qwen25", WRITTEN["qwen25"]), ("gpt-oss", GPT_OSS)])
def test_calls_that_are_complete_are_read_once(alias: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cuts, cut = [], output_parser._cut
    monkeypatch.setattr(output_parser, "_cut", lambda *how: cuts.append(how) or cut(*how))
    parser = OutputParser(FORMS[alias])
    assert sum(len(parser.feed(said).calls) for _ in range(100)) == 100
    assert len(cuts) < 5 * 100


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_are_told_from_the_text(name: str) -> None:
    parser = FunctionCallParser(tools=TOOLS, tool_call_parser=name)
    text, calls = parser.parse_non_stream(WRITTEN[name])
    assert (text.strip(), calls) == ("", [ITEM]) and json.loads(calls[0].parameters) == {"city": "Köln"}
    assert parser.has_tool_call(WRITTEN[name]) and not parser.has_tool_call("It rains.")


def test_calls_in_pieces_and_of_unknown_tools() -> None:
    text = f"Wait. {WRITTEN['qwen25']}"
    for name, said in (WRITTEN | {"qwen25": text, "gpt-oss": GPT_OSS}).items():
        parser, times = FunctionCallParser(TOOLS, name), 2 if name == "llama3" else 1
        found = [parser.parse_stream_chunk(char) for char in ";".join([said] * times)]
        assert sum((calls for _, calls in found), []) == [ITEM] * times
        assert "".join(part for part, _ in found).strip() == ("Wait." if name == "qwen25" else "")
    chunks = ("<|python_", "start|>[weather(city=", "'Köln')]<|python_end|>")  # Llama 4's
    parser = FunctionCallParser(TOOLS, "pythonic")
    assert sum((parser.parse_stream_chunk(chunk)[1] for chunk in chunks), []) == [ITEM]
    assert FunctionCallParser([], "qwen25").parse_non_stream(WRITTEN["qwen25"])[1] == []
    cut = text[:-20]  # what cannot be read stays text, whole and in pieces
    assert FunctionCallParser(TOOLS, "qwen25").parse_non_stream(cut) == (cut, [])
    broken, parser = "<tool_call>{</tool_call>", FunctionCallParser(TOOLS, "qwen25")
    assert "".join(parser.parse_stream_chunk(char)[0] for char in broken) == broken
    for name in ("nobody", "deepseekv32"):
        with pytest.raises(UnsupportedFeatureError, match=f"tool_call_parser='{name}' is not built"):
            FunctionCallParser(TOOLS, name)
    assert set(FORMS.values()) == set(FORMATS)
