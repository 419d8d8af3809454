"""Tool calls and reasoning in outputs: each family's format, broken ones, and that pieces add up to the whole."""

import json
import random
from typing import Any

import pytest

from fengine.server.output_parser import THINKING, Delta, OutputParser, parse_output
from fengine.server.tool_calls import FORMATS, forced_schema, format_of, new_call_id, strict_tag

BY_NAME = {form.name: form for form in FORMATS}
PARIS, ROME = ("weather", {"city": "Paris"}), ("weather", {"city": "Rome", "days": 3})
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜>\n"
DEEPSEEK += "<｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"

CASES: list[tuple[str, str, str, list[Any]]] = [  # (format, text, content, calls)
    ("hermes", 'Let me see.\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
     '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>', "Let me see.",
     [PARIS, ROME]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}', "", [PARIS]),
    ("hermes", ' a <tool_call without a call\n\n', " a <tool_call without a call\n\n", []),
    ("hermes", '\n<tool_call>{"name": "now"}</tool_call> and more \n', "and more", [("now", {})]),
    ("hermes", 'a <tool_call>{"name": "now"}</tool_call> b', "a  b", [("now", {})]),
    ("qwen_xml", "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n"
     "</parameter>\n</function>\n</tool_call>", "", [ROME]),
    ("glm", "Yes.<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n"
     "<arg_value>3</arg_value>\n</tool_call>", "Yes.", [ROME]),
    ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}}, '
     '{"name": "weather", "arguments": {"city": "Rome", "days": 3}}]', "", [PARIS, ROME]),
    ("mistral", 'So:[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]weather[CALL_ID]a1[ARGS]'
     '{"city": "Rome", "days": 3}', "So:", [PARIS, ROME]),
    ("granite", 'So.<|tool_call|>[{"name": "weather", "arguments": {"city": "Paris"}}]<tool_call>[{"name": "weather", '
     '"arguments": {"city": "Rome", "days": 3}}]', "So.", [PARIS, ROME]),
    ("deepseek", "I look." + DEEPSEEK.format(
        'function<｜tool▁sep｜>weather\n```json\n{"city": "Paris"}\n```',
        'function<｜tool▁sep｜>weather\n```json\n{"city": "Rome", "days": 3}\n```'), "I look.", [PARIS, ROME]),
    ("deepseek", DEEPSEEK.format('weather<｜tool▁sep｜>{"city": "Paris"}',
                                 'weather<｜tool▁sep｜>{"city": "Rome", "days": 3}'), "", [PARIS, ROME]),
    ("deepseek", DEEPSEEK.format('now<｜tool▁sep｜>{"x": "```json\\n{}\\n```"}',
                                 'function<｜tool▁sep｜>now\n```json\n{"x": "```"}\n```'), "",
     [("now", {"x": "```json\n{}\n```"}), ("now", {"x": "```"})]),
    ("kimi", 'I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>'
     '{"city": "Paris"}<|tool_call_end|><|tool_call_begin|>weather:1<|tool_call_argument_begin|>'
     '{"city": "Rome", "days": 3}<|tool_call_end|><|tool_calls_section_end|>', "I look.", [PARIS, ROME]),
    ("qwen_xml", "<tool_call><function=now></function>\n", "", [("now", {})]),
    ("qwen_xml", "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n"
     "<function=weather>\n<parameter=city>\nRome\n<parameter=days>\n3\n</function>\n</tool_call>", "", [PARIS, ROME]),
    ("qwen_xml", "So:\n<function=weather>\n<parameter=city>\nRome\n<parameter=days>3</parameter></function>\n"
     "</tool_call>\n<function=now></function>", "So:", [ROME, ("now", {})]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}\n{"name": "now"}</tool_call>', "",
     [PARIS, ("now", {})]),
    ("minimax", '<minimax:tool_call><invoke name="now"></invoke>', "", [("now", {})]),
    ("minimax", '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
     '<invoke name="weather">\n<parameter name="city">Rome</parameter>\n<parameter name="days">3</parameter>\n'
     '</invoke>\n</minimax:tool_call>', "", [PARIS, ROME]),
    ("llama", '{"name": "weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
    ("llama", '<|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}; {"name": "weather", "parameters": '
     '{"city": "Rome", "days": 3}}', "", [PARIS, ROME]),
    ("llama", '{"name": "weather", "parameters": {"city": "Paris"}}<|python_tag|>{"name": "weather", "parameters": '
     '{"city": "Rome", "days": 3}}', "", [PARIS, ROME]),
    ("llama", '\n{"answer": 4}', '\n{"answer": 4}', []),
    ("llama", '{"name": "Ann", "age": 4}', '{"name": "Ann", "age": 4}', []),
    ("llama", "The name is {x}.", "The name is {x}.", []),
    ("pythonic", '[weather(city="Paris"), weather(city=\'Rome\', days=3)]', "", [PARIS, ROME]),
    ("pythonic", '\n<|python_tag|>[a.b(x=[1, -2.5, (3,)], y={"k": None, "l": {}}, z=true, w=False, v="[b()]")]', "",
     [("a.b", {"x": [1, -2.5, [3]], "y": {"k": None, "l": {}}, "z": True, "w": False, "v": "[b()]"})]),
    ("pythonic", """[f( from = "a", class='in=1, (is=2)', x=["(as=3", True], None=None), f(in="\\", or=")]""", "",
     [("f", {"from": "a", "class": "in=1, (is=2)", "x": ["(as=3", True], "None": None}), ("f", {"in": '", or='})]),
    ("pythonic", '<|python_start|>[weather(city="Paris")]<|python_end|>', "", [PARIS]),
    ("pythonic", "[1, 2] is a list", "[1, 2] is a list", []),
    ("pythonic", " [now()] ", "", [("now", {})]),
    ("pythonic", "now() is a call", "now() is a call", []),
    ("cohere", '<|START_RESPONSE|>So.<|END_RESPONSE|><|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": '
     '"weather", "parameters": {"city": "Paris"}},\n    {"tool_call_id": "1", "tool_name": "weather", "parameters": '
     '{"city": "Rome", "days": 3}}\n]<|END_ACTION|>', "So.", [PARIS, ROME]),
    ("cohere", "<|START_TEXT|>It <|END is <b>warm</b>.<|END_TEXT|>", "It <|END is <b>warm</b>.", []),
    ("phi", '<|tool_call|>[{"type": "function", "name": "weather", "arguments": {"city": "Rome", "days": 3}}]'
     "<|/tool_call|>", "", [ROME]),
    ("phi", 'So: functools[{"name": "weather", "arguments": {"city": "Rome", "days": 3}}, {"name": "weather", '
     '"arguments": {"city": "Paris"}}]', "So:", [ROME, PARIS]),
    ("lfm2", 'Yes.<|tool_call_start|>[weather(city="Rome", days=3)]<|tool_call_end|>', "Yes.", [ROME]),
    ("harmony", "<|channel|>analysis<|message|>Where is it?<|end|><|start|>assistant<|channel|>commentary to=functions."
     'weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>', "", [PARIS]),
    ("harmony", "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.weather<|channel|>"
     'commentary json<|message|>{"city": "Rome", "days": 3}', "I look.", [ROME]),
    ("harmony", "<|channel|>commentary to=weather<|message|>" '{"city": "Paris"}<|call|><|channel|>commentary to=python'
     "<|message|>1<|call|>", "1", [PARIS]),
    ("harmony", ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>', "", [PARIS]),
    ("harmony", "to be", "to be", []),
    ("harmony", "<|channel|>final<|message|>It is warm.<|return|>", "It is warm.", []),
    ("harmony", "It is warm.", "It is warm.", []),
]  # fmt: skip


def pieces_of(text: str, draw: random.Random) -> list[str]:
    cuts = sorted(draw.randrange(len(text) + 1) for _ in range(draw.randrange(1, 12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def streamed(parser: OutputParser, pieces: list[str]) -> Delta:
    """All parts of the pieces; the last piece is told to be so, as a stream's last chunk is."""
    found = [parser.feed(piece, last=i == len(pieces) - 1) for i, piece in enumerate(pieces)]
    calls = tuple(call for one in found for call in one.calls)
    return Delta(*("".join(getattr(d, name) for d in found) for name in ("reasoning", "content")), calls)


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES, ids=range(len(CASES)))
@pytest.mark.parametrize("thought", [None, "Hm,\nwell", ""])
def test_calls_and_thoughts_of_each_format(name: str, text: str, content: str, calls: Any, thought: Any) -> None:
    form, draw = BY_NAME[name], random.Random(name + text)
    words: Any = THINKING[{"cohere": "cohere_command4", "mistral": "mistral"}.get(name, "qwen3")]
    if name == "harmony":  # which has thoughts of its own
        thought = None
    if thought is not None:
        text = f"{words.think_start_token}\n{thought}\n{words.think_end_token}\n\n{text.lstrip()}"
        content = content.lstrip()
    how: Any = {"thinks": thought is not None, "thought": words}
    whole = parse_output(text, form, **how)
    assert whole.content == content
    assert [(call.name, call.arguments, call.problem) for call in whole.calls] == [(*call, None) for call in calls]
    assert whole.reasoning == (thought or ("Where is it?" if "Where is it?" in text else ""))
    for pieces in (list(text), *(pieces_of(text, draw) for _ in range(30))):
        assert streamed(OutputParser(form, **how), pieces) == whole, pieces


WRITTEN: dict[str, tuple[str, str]] = {  # a call of write, and each of its arguments, as a template writes them
    "qwen_xml": ("<tool_call>\n<function=write>\n{}</function>\n</tool_call>",
                 "<parameter={}>\n{}\n</parameter>\n"),
    "glm": ("<tool_call>write\n{}</tool_call>", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"),
    "minimax": ('<minimax:tool_call>\n<invoke name="write">\n{}</invoke>\n</minimax:tool_call>',
                '<parameter name="{}">{}</parameter>\n'),
}  # fmt: skip
PLAIN, OR_NULL = {"type": "string"}, {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (PLAIN, "12345", "12345"),
        (PLAIN, '{"a": 1}\n', '{"a": 1}\n'),
        (PLAIN, "\n\tx\n\n", "\n\tx\n\n"),
        (PLAIN, "null", "null"),
        (PLAIN, "", ""),
        (OR_NULL, "null", None),
        (OR_NULL, "12345", "12345"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"type": ["string", "number"]}, "3", 3),
        ({"anyOf": [{"$ref": "#/$defs/code"}, {"type": "null"}]}, "12345", "12345"),
        ({"allOf": [{"$ref": "#/$defs/code"}]}, "12345", "12345"),
        ({"$ref": "#/$defs/pair/prefixItems/1"}, "12345", "12345"),
        ({"$ref": f"#/$defs/pair/prefixItems/{'0' * 5000}"}, "12345", 12345),
        ({"oneOf": [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/none"}, {"$ref": "other.json"}]}, "3", 3),
        ({"anyOf": 5}, "12345", 12345),
        ({"type": "boolean"}, "True", True),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": "object"}, "{'a': [1, None]}", {"a": [1, None]}),
        ({"type": "array"}, '["a"]', ["a"]),
        ({"type": "integer"}, "three", "three"),
        ({}, "12345", 12345),
        ({}, "True", "True"),
        (None, '{"a": 1}', {"a": 1}),
        (None, "text", "text"),
    ],
)
def test_a_written_argument_has_the_type_that_the_schema_tells(name: str, schema: Any, text: str, value: Any) -> None:
    call, argument = WRITTEN[name]
    written = call.format(argument.format("n", "7") + argument.format("x", text))
    properties = {"n": {"type": "integer"}} | ({} if schema is None else {"x": schema})
    definitions = {"code": {"enum": ["12345", "6"]}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}]},
                   "pair": {"prefixItems": [{}, {"type": "string"}]}}  # fmt: skip
    parameters = {"type": "object", "properties": properties, "$defs": definitions}
    functions = [{"name": "other"}, {"name": "write", "parameters": parameters}]
    for pieces in ([written], list(written)):
        (found,) = streamed(OutputParser(BY_NAME[name], functions=functions), pieces).calls
        assert (found.name, found.arguments, found.problem) == ("write", {"n": 7, "x": value}, None)
        assert type(found.arguments["x"]) is type(value)


BROKEN = [
    ("hermes", '<tool_call>{"name": "weather", "argu'),
    ("hermes", "<tool_call>{} </tool_call>"),
    ("hermes", '<tool_call>{"name": "a b", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"x": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"x": 1e999}}</tool_call>'),
    ("hermes", "<tool_call>" + "[" * 5000 + "</tool_call>"),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"x": ' + "9" * 5000 + "}}</tool_call>"),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS]" + " " * 20_000),
    ("deepseek", "<｜tool▁calls▁begin｜>nothing<｜tool▁calls▁end｜>"),
    ("kimi", "<|tool_calls_section_begin|>nothing<|tool_calls_section_end|>"),
    ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"),
    ("minimax", '<minimax:tool_call><invoke name="weather"></minimax:tool_call>'),
    ("llama", '{"name": "weather", "parameters": {"city": '),
    ("pythonic", "[weather(city="),
    ("pythonic", '[weather("Paris")]'),
    ("pythonic", "[weather(city=here)]"),
    ("pythonic", "[weather(city=b'x')]"),
    ("pythonic", "[weather(city=1e999)]"),
    ("pythonic", "[weather(city={1: 2})]"),
    ("pythonic", '[weather(**{"city": 1})]'),
    ("pythonic", "[weather(city=__import__('os').getcwd())]"),
    ("pythonic", "[weather(x=" + "[" * 5000),
    ("pythonic", "[weather(x=" + "-" * 20_000 + "1)]"),
    ("pythonic", "[weather(x=" + "9" * 5000 + ")]"),
    ("pythonic", '[weather(x="' + '\\"' * 100_000),
    ("pythonic", "[weather(), (lambda: 1)()]"),
    ("pythonic", "[weather(), 3]"),
    ("lfm2", "<|tool_call_start|>nothing<|tool_call_end|>"),
    ("glm", "<tool_call></tool_call>"),
    ("glm", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"),
    ("glm", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Ro</tool_call>"),
    ("glm", "<tool_call>weat"),
    ("qwen_xml", "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n"),
    ("qwen_xml", "<tool_call>\n<function=weather>\n<parameter=city>\nRome</tool_call>"),
    ("qwen_xml", "<function=weather>\n<parameter=city>\nRome"),
    ("minimax", '<minimax:tool_call><invoke name="a"></invoke><invoke name="b"><parameter name="x">1</parameter>'),
    ("minimax", '<minimax:tool_call><invoke name="a"></invoke><invoke name="b"></minimax:tool_call>'),
    ("qwen_xml", "<tool_call><function=</tool_call>"),
    ("qwen_xml", "<tool_call><function=f>" + "<parameter=a" * 20_000 + "</function></tool_call>"),
    ("harmony", "<|channel|>commentary to=functions.weather<|message|>no JSON<|call|>"),
]


@pytest.mark.parametrize(("name", "text"), BROKEN, ids=range(len(BROKEN)))
def test_a_broken_call_keeps_its_text_and_tells_what_is_wrong(name: str, text: str) -> None:
    (call,) = parse_output(text, BY_NAME[name]).calls
    assert call.problem and call.arguments == {}
    assert call.text == text or name == "harmony" and call.text == "no JSON"


def test_calls_that_cannot_be_read_stay_in_their_places() -> None:
    bad, good = "<tool_call>{</tool_call>", '<tool_call>{"name": "now"}</tool_call>'
    for text, content in (
        (f"a {bad} b {good} c {bad}", f"a {bad} b  c {bad}"),
        (f"\n{bad}\n{bad} c\n", f"\n{bad}\n{bad} c\n"),
        (f"<think>x</think>\n{good}\n{bad}\n", f"{bad}\n"),
        (f"\n{good}\na {good}\n", "a"),
    ):
        whole, parser = parse_output(text, BY_NAME["hermes"], thinks=True), OutputParser(BY_NAME["hermes"], thinks=True)
        assert whole.content == content and streamed(parser, list(text)) == whole
        assert whole.beside_calls == content.replace(bad, "").strip()
    for name, text in (("llama", '{"name": "now", "parameters": {}}'), ("mistral", '[TOOL_CALLS][{"name": "now"}]')):
        whole = parse_output(text + '; {"name": "a b"} so', BY_NAME[name])  # formats that write no end
        assert whole.content == '; {"name": "a b"} so' and whole.calls[0].name == "now"
    both = parse_output(text := '[TOOL_CALLS][{"name": "now"}, {"name": "a b"}]', BY_NAME["mistral"])
    assert both.calls[0].problem is None and both.content == text.removeprefix("[TOOL_CALLS]")
    text = "<|channel|>final<|message|>a<|end|>to=functions.f<|message|>{<|call|><|channel|>final<|message|>b"
    whole = parse_output(text, BY_NAME["harmony"])
    assert whole.content == "a{b" and streamed(OutputParser(BY_NAME["harmony"]), list(text)) == whole


def test_a_thought_without_an_end_and_one_that_the_prompt_began() -> None:
    assert parse_output("<think>and so on ", None, thinks=True) == Delta(reasoning="and so on")
    assert parse_output("so.\n</think>\n\nYes", None, opened=True) == Delta("so.", "Yes")
    assert parse_output("<thinner> Yes ", None, thinks=True) == Delta("", "<thinner> Yes ")
    assert parse_output("<think>x</think>", None) == Delta("", "<think>x</think>")


@pytest.mark.parametrize("name", [one.name for one in FORMATS if one.begin and one.name != "harmony"])
def test_a_call_ends_a_thought_that_has_no_other_end(name: str) -> None:
    form, calls = next((text, calls) for kind, text, _, calls in CASES if kind == name and calls[-1] == ROME)
    call = form[form.index(BY_NAME[name].begin) :]
    for text, wanted in (
        (f"<think>\nHm.\n{call}", ("Hm.", "", calls)),
        (f"<think>{call}", ("", "", calls)),
        (f"<think>I could {call}, or not.\n</think>\nNo.", (f"I could {call}, or not.", "No.", [])),
        (f"<think>It begins with {BY_NAME[name].begin} and", (f"It begins with {BY_NAME[name].begin} and", "", [])),
    ):
        for pieces in ([text], list(text)):
            found = streamed(OutputParser(BY_NAME[name], thinks=True), pieces)
            told = [(call.name, call.arguments) for call in found.calls]
            assert (found.reasoning, found.content, told) == wanted


def test_templates_tell_their_format() -> None:
    for source, name in (
        ("{% if tools %}<tool_call>", "hermes"),
        ("{% if tools %}<tool_call><function=", "qwen_xml"),
        ("{% if tools %}<tool_call><arg_key>", "glm"),
        ('{% if tools %}{"name", "parameters"}', "llama"),
        ("{% if tools %}[func_name1(params_name1=params_value1...)]", "pythonic"),
        ("<|tool_list_start|>", "lfm2"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|start_of_role|> <|tool_call|>", "granite"),
        ("{% if 'tools' in message %}<|tool|><|end|><|assistant|>", "phi"),
        ("{% if tools %}<|tool_call|><|/tool_call|><|end|><|assistant|>", "phi"),
        ("<|START_ACTION|>", "cohere"),
        ("<｜tool▁calls▁begin｜>", "deepseek"),
        ("<|tool_calls_section_begin|>", "kimi"),
        ("<minimax:tool_call>", "minimax"),
        ("<|channel|> functions", "harmony"),
    ):
        found = format_of(source)
        assert found is not None and found.name == name
    assert format_of("") is format_of("{{ messages }}") is None


def test_ids_of_calls_are_those_that_templates_take_back() -> None:
    ids = {name: new_call_id(BY_NAME.get(name), "get.time", 3, "0123456789ab") for name in ("none", *BY_NAME)}
    assert ids.pop("mistral") == "012345678" and ids.pop("kimi") == "functions.get.time:3"
    assert new_call_id(BY_NAME["mistral"], "f", 3, "3") == "000000003"
    assert set(ids.values()) == {"call_0123456789ab"}


def test_a_forced_call_is_read_or_is_content() -> None:
    text = json.dumps([{"name": "weather", "arguments": {"city": "Paris"}}])
    (call,) = streamed(OutputParser(None, forced=True), list(text)).calls
    assert (call.name, call.arguments) == PARIS
    assert OutputParser(None, forced=True).feed(text[:-5], last=True) == Delta(content=text[:-5])


def test_the_forced_schema_keeps_each_functions_references() -> None:
    point = {"$defs": {"P": {"type": "integer"}}, "type": "object", "properties": {"x": {"$ref": "#/$defs/P"}}}
    tree = {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}}}
    schema = forced_schema(
        [{"name": "f", "parameters": point}, {"name": "g"}, {"name": "t", "parameters": tree}], False
    )
    for i, (item, name) in enumerate(zip(schema["items"]["anyOf"], "fgt", strict=True)):
        assert item["properties"] == {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{i}"}}
    assert schema["$defs"]["0"]["properties"]["x"] == {"$ref": "#/$defs/0/$defs/P"}
    assert schema["$defs"]["2"]["properties"]["kids"]["items"] == {"$ref": "#/$defs/2"}
    assert schema["$defs"]["1"] == {"type": "object"} and schema["maxItems"] == schema["minItems"] == 1
    assert point["$defs"] and forced_schema([{"name": "g"}], parallel=True)["maxItems"] == 16


def test_only_the_functions_that_are_strict_hold_their_schema() -> None:
    hermes = BY_NAME["hermes"]
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    some = [{"name": name, "parameters": schema, "strict": strict}
            for name, strict in (("a", True), ("b", False), ("c", None))]  # fmt: skip
    tag = strict_tag(hermes, some)
    assert tag is not None and [one["schema"] for one in tag["structures"]] == [schema, *[{"type": "object"}] * 2]
    assert strict_tag(hermes, some[1:]) is None
