"""Tool calls in a model's text: the formats that chat templates teach, and a schema that forces a call. No torch.

hermes    <tool_call>{"name": …, "arguments": {…}}</tool_call> (Hermes, Qwen2.5, Qwen3)
qwen_xml  <tool_call><function=name><parameter=key>value</parameter></function></tool_call> (Qwen3-Coder)
glm       <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call> (GLM-4.5)
mistral   [TOOL_CALLS][{"name": …, "arguments": {…}}, …] or [TOOL_CALLS]name[ARGS]{…}
phi       <|tool_call|>[{"name": …, "arguments": {…}}, …]<|/tool_call|> or functools[…] (Phi-4-mini)
cohere    <|START_ACTION|>[{"tool_name": …, "parameters": {…}}, …]<|END_ACTION|> (Command R7B and A)
granite   <|tool_call|>[{"name": …, "arguments": {…}}, …]; <tool_call> as well (Granite 3)
deepseek  <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>[function<｜tool▁sep｜>]name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>…
kimi      <|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>…, in a section
minimax   <minimax:tool_call><invoke name="…"><parameter name="key">value</parameter></invoke></minimax:tool_call>
llama     {"name": …, "parameters": {…}}, several with ; between them, before any text (Llama 3.1 and 3.2)
pythonic  [name(key="value", n=3), …] and nothing else (Llama 3.2, Llama 4, Gemma 3); LFM2's stand in markers
harmony   <|channel|>commentary to=functions.name<|message|>{…}<|call|> (gpt-oss); read by `output_parser`"""

import ast
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from keyword import kwlist
from typing import Any

from fengine.server.tool_values import decode, python_value, written_value

PYTHON_TAGS = ("<|python_tag|>", "<|python_start|>")  # which Llama may write in front of calls
CALL_ID = "call_{unique}"
MAX_CALLS = 16  # that a request may force at once
COMPACT = {"whitespace_flexible": False}  # so that a model does not go on with blanks
_NAME = re.compile(r"[\w.:-]{1,128}")
_PYTHONIC = re.compile(r"\[?\s*[A-Za-z_][\w.]*\(")
_BARE = re.compile(r'(?=.*"name")(?=.*"(?:arguments|parameters)")\s*(?:<\|python_tag\|>\s*)?\{', re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>]*)>(.*?)(?:</parameter>|(?=\n<parameter=)|\Z)", re.DOTALL)
_KEYWORD = re.compile(  # of Python, where it names an argument; a string, which may hold anything, is passed over
    rf"""("(?:\\.?|[^"\\])*(?:"|\Z)|'(?:\\.?|[^'\\])*(?:'|\Z))|([(,]\s*(?:{"|".join(kwlist)}))(?=\s*=)""", re.DOTALL
)
_NO_KEYWORD = "_no_keyword"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`problem` tells what is wrong with a call that cannot be read; it may have no name then. `text`: as written.
    `untyped`: its arguments are texts, whose types the function's schema tells. `at`: how much content is before it."""

    name: str
    arguments: dict[str, Any]
    text: str = ""
    problem: str | None = None
    untyped: bool = False
    at: int = field(default=0, compare=False)

    def typed(self, functions: Sequence[dict[str, Any]]) -> "ToolCall":
        """With arguments as the one of these `functions` that it calls takes them. Pure."""
        if not self.untyped:
            return self
        schema: Any = next((one.get("parameters") for one in functions if one["name"] == self.name), None)
        schemas = schema.get("properties") if isinstance(schema, dict) else None
        schemas = schemas if isinstance(schemas, dict) else {}
        values = {name: written_value(text, schemas.get(name), schema) for name, text in self.arguments.items()}
        return replace(self, arguments=values, untyped=False)


@dataclass(frozen=True, slots=True)
class Format:
    """Calls stand between `begin` and `end`; without an end, up to the next begin or the end of the text. `marks`:
    substrings of the templates that teach it. `read`: what stands between, to calls; None: `output_parser` has a
    function for it. `aliases`: SGLang's and vLLM's names. `call_id`: what a call's id is like, so that templates take
    it back. `closes`: what calls end with at the end of the text, or they are cut off; "": those are no JSON, or no
    Python. `bare`: what a call begins with where the model leaves `begin` out."""

    name: str
    marks: tuple[str, ...]
    aliases: tuple[str, ...]
    begin: str = ""
    end: str = ""
    read: Callable[[str], list[ToolCall]] | None = None
    call_id: str = CALL_ID
    closes: str = ""
    bare: str = ""

    @property
    def begins(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.begin, self.bare)))

    @property
    def ends(self) -> tuple[str, ...]:
        return (self.end,) if self.end else self.begins


def call_of(value: Any, text: str) -> ToolCall:
    """A call from {"name" or "tool_name", "arguments" or "parameters"}; arguments may be their JSON text. Pure."""
    name = value.get("name", value.get("tool_name")) if isinstance(value, dict) else None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return ToolCall("", {}, text, f'the tool call is no object with a "name": {text.strip()!r:.200}')
    arguments = value.get("arguments", value.get("parameters"))
    try:
        arguments = decode(arguments)[0] if isinstance(arguments, str) else {} if arguments is None else arguments
    except ValueError as error:
        return ToolCall(name, {}, text, f"the arguments of {name} are no JSON ({error})")
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, text, f"the arguments of {name} are no object: {arguments!r:.200}")
    return ToolCall(name, arguments, text)


def read_json(body: str) -> list[ToolCall]:
    """The calls of values one behind another, which are calls or lists of them. Pure. What is no JSON is the last one,
    with a problem."""
    rest, calls = body, list[ToolCall]()
    while text := rest.lstrip(" \t\r\n;,").removeprefix(PYTHON_TAGS[0]).lstrip():
        try:
            value, behind = decode(text, whole=False)
        except ValueError as error:
            return [*calls, ToolCall("", {}, rest, f"the tool call is no JSON ({error}): {text.strip()!r:.200}")]
        said, rest = rest[: len(rest) - len(behind)], behind
        calls += [call_of(one, said) for one in (value if isinstance(value, list) else [value])]
    return calls


def read_forced(body: str) -> list[ToolCall]:
    """The calls of a list of `forced_schema` that are whole; the list may be cut off. Pure."""
    return [call for call in read_json(body.strip().removeprefix("[")) if call.problem is None]


def read_bare(body: str) -> list[ToolCall]:
    """The calls that a text begins with; none if it is no call at all. Pure."""
    return read_json(body) if _BARE.match(body) else []


def read_pythonic(body: str) -> list[ToolCall]:
    """The calls of a text that is nothing else, written as Python does; none if it is no call at all. Pure."""
    text = body.strip().removesuffix("<|python_end|>").strip()
    for tag in PYTHON_TAGS:
        text = text.removeprefix(tag).lstrip()
    if not _PYTHONIC.match(text):
        return []
    try:
        named = _KEYWORD.sub(lambda found: found[1] or found[2] + _NO_KEYWORD, text)
        tree = ast.parse(named, mode="eval").body
        found = [_python_call(one) for one in (tree.elts if isinstance(tree, ast.List) else [tree])]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return [ToolCall("", {}, body, f"the tool call is not written as in Python ({error}): {text!r:.200}")]
    return [call_of(one, "" if i else body) for i, one in enumerate(found)]


def _python_call(node: ast.expr) -> dict[str, Any]:
    """Errors: ValueError."""
    if isinstance(node, ast.Call) and not node.args and _NAME.fullmatch(name := ast.unparse(node.func)):
        if all(one.arg for one in node.keywords):
            values = {str(one.arg).removesuffix(_NO_KEYWORD): python_value(one.value) for one in node.keywords}
            return {"name": name, "arguments": values}
    raise ValueError("it is no call with named arguments")


def _read_named(body: str) -> list[ToolCall]:
    """name[ARGS]{…}, or JSON. Pure."""
    head, brace, rest = body.partition("{")
    if not head.strip() or head.lstrip().startswith("[") or not brace:
        return read_json(body)
    name = re.split(r"\[CALL_ID\]|\[ARGS\]", head)[0].strip()
    return [call_of({"name": name, "arguments": brace + rest}, body)]


def _read_marked(body: str, begin: str, gap: str, end: str) -> list[ToolCall]:
    """Calls between `begin` and `end`: a name, `gap` and the arguments; Kimi numbers its names. Pure."""
    calls = []
    for part in (piece.partition(end)[0] for piece in body.split(begin)[1:]):
        head, brace, arguments = part.removeprefix("function<｜tool▁sep｜>").partition("{")
        name, arguments = re.split(f"{re.escape(gap)}|```json", head)[0], brace + arguments
        if "```json" in head:  # DeepSeek V3 and R1
            arguments = arguments.rpartition("```")[0] or arguments
        name = re.sub(r"^(?:functions\.)?(.*):\d+$", r"\1", name.strip())
        calls.append(call_of({"name": name, "arguments": arguments}, part))
    return calls


def _read_pairs(body: str, head: str, behind: str, key: str, value: str, gap: str, end: str) -> list[ToolCall]:
    """A name between `head` and `behind`, then pairs: `key` … `value` `gap` … `end`; what stands between the last two
    is the value. Pure."""
    found, (*pieces, rest) = {}, body.split(end)
    for piece in pieces:
        name, _, said = piece.partition(key)[2].partition(value)
        found[name.strip()] = said.partition(gap)[2] if gap else said
    name = body.strip().removeprefix(head).partition(behind)[0].strip()
    if key in rest:
        return [ToolCall(name, {}, body, f"an argument of {name:.80} has no end: {rest.strip()!r:.200}")]
    return [replace(call_of({"name": name, "arguments": found}, body), untyped=True)]


_GLM = partial(_read_pairs, head="", behind="<arg_key>", key="<arg_key>", value="</arg_key>", gap="<arg_value>",
               end="</arg_value>")  # fmt: skip
_INVOKE = partial(_read_pairs, head='<invoke name="', behind='">', key='<parameter name="', value='">', gap="",
                  end="</parameter>")  # fmt: skip


def _read_invokes(body: str) -> list[ToolCall]:
    """Calls of pairs, each up to </invoke>. Pure."""
    *parts, rest = body.split("</invoke>")
    calls = [call for part in parts for call in _INVOKE(part)]
    if rest.strip():
        calls.append(ToolCall("", {}, rest, f"the tool call has no end: {rest.strip()!r:.200}"))
    return calls


def _read_functions(body: str) -> list[ToolCall]:
    """Calls of parameters, each up to </function>. Pure. Models leave ends out: a parameter goes up to the line of the
    next one, or to the end of its function, and a block may have several of these."""
    *whole, rest = re.split(r"</function>\s*(?=<function=|\Z)", body.strip())
    calls, left = [], [rest.rpartition("</parameter>")[2]]
    for part in filter(None, (*whole, rest)):
        name, _, said = part.removeprefix("<function=").partition(">")
        found = {key.strip(): value.removeprefix("\n").removesuffix("\n") for key, value in _PARAMETER.findall(said)}
        calls.append(replace(call_of({"name": name.strip(), "arguments": found}, part), untyped=True))
        left.append(_PARAMETER.sub("", said))
    if cut := next((text for text in left if "<parameter=" in text), None):
        return [ToolCall("", {}, body, f"an argument of the tool call has no end: {cut.strip()!r:.200}")]
    return calls


_DEEPSEEK = partial(_read_marked, begin="<｜tool▁call▁begin｜>", gap="<｜tool▁sep｜>", end="<｜tool▁call▁end｜>")
_KIMI = partial(_read_marked, begin="<|tool_call_begin|>", gap="<|tool_call_argument_begin|>", end="<|tool_call_end|>")
FORMATS = (  # the first whose marks all stand in a template is the one that it teaches
    Format("harmony", ("<|channel|>", "functions"), ("gpt-oss",), "<|channel|>"),
    Format("deepseek", ("<｜tool▁calls▁begin｜>",), ("deepseekv3", "deepseekv31"),
           "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _DEEPSEEK),
    Format("kimi", ("<|tool_calls_section_begin|>",), ("kimi_k2",),
           "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", _KIMI, "functions.{name}:{index}"),
    Format("minimax", ("<minimax:tool_call>",), ("minimax-m2",), "<minimax:tool_call>", "</minimax:tool_call>",
           _read_invokes, closes="</invoke>"),
    Format("mistral", ("[TOOL_CALLS]",), ("mistral",), "[TOOL_CALLS]", "", _read_named, "{unique:0>9.9}"),
    Format("cohere", ("<|START_ACTION|>",), ("cohere_command4",), "<|START_ACTION|>", "<|END_ACTION|>", read_json),
    Format("granite", ("<|tool_call|>", "<|start_of_role|>"), ("granite",), "<|tool_call|>", "",
           lambda body: read_json(body.removeprefix("<tool_call>")), bare="<tool_call>"),
    Format("glm", ("<tool_call>", "<arg_key>"), ("glm", "glm45", "glm47"), "<tool_call>", "</tool_call>", _GLM,
           closes="</tool_call>"),
    Format("qwen_xml", ("<tool_call>", "<function="), ("qwen3_coder",), "<tool_call>", "</tool_call>",
           _read_functions, closes="</function>", bare="<function="),
    Format("hermes", ("tools", "<tool_call>"), ("qwen", "qwen25", "qwen3", "hermes"), "<tool_call>", "</tool_call>",
           read_json),
    Format("lfm2", ("<|tool_list_start|>",), ("lfm2",), "<|tool_call_start|>", "<|tool_call_end|>", read_pythonic),
    Format("phi", ("tools", "<|end|>", "<|assistant|>"), ("phi4_mini_json",), "<|tool_call|>", "<|/tool_call|>",
           lambda body: read_json(body.removeprefix("functools")), bare="functools["),
    Format("pythonic", ("tools", "[func_name1("), ("pythonic",), closes=")]"),
    Format("llama", ("tools", '"parameters"'), ("llama3",)),
)  # fmt: skip

FORMS = {alias: form for form in FORMATS for alias in form.aliases}  # by SGLang's names


def new_call_id(form: Format | None, name: str, index: int, unique: str) -> str:
    """The id of call number `index` of a chat, from 0: of Mistral's templates nine letters or digits, of Kimi's by the
    function's name. `unique`: other letters or digits for each call. Pure."""
    return (CALL_ID if form is None else form.call_id).format(name=name, index=index, unique=unique)


def format_of(template: str) -> Format | None:
    """The format that a chat template teaches; None: none that is read here. Pure."""
    return next((one for one in FORMATS if all(mark in template for mark in one.marks)), None)


def forced_schema(functions: Sequence[dict[str, Any]], parallel: bool) -> dict[str, Any]:
    """The JSON schema of a list of calls, at least one: [{"name": …, "arguments": …}]. Pure."""
    definitions, items = dict[str, Any](), list[dict[str, Any]]()
    for i, function in enumerate(functions):
        definitions[str(i)] = _moved(function.get("parameters") or {"type": "object"}, root := f"#/$defs/{i}")
        properties = {"name": {"const": function["name"]}, "arguments": {"$ref": root}}
        items.append({"type": "object", "properties": properties, "required": ["name", "arguments"],
                      "additionalProperties": False})  # fmt: skip
    schema: dict[str, Any] = {"type": "array", "items": items[0] if len(items) == 1 else {"anyOf": items}}
    most = MAX_CALLS if parallel else 1
    return schema | {"minItems": 1, "maxItems": most, "$defs": definitions, "x-guidance": COMPACT}


def strict_tag(form: Format, functions: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The structural tag of calls whose functions are `strict`; None: there is none, or the format has no tag. Pure."""
    if form.name != "hermes" or not any(function.get("strict") is True for function in functions):
        return None
    structures = [
        {
            "begin": f'{form.begin}\n{{"name": {json.dumps(function["name"])}, "arguments": ',
            "schema": (function.get("parameters") if function.get("strict") else None) or {"type": "object"},
            "end": f"}}\n{form.end}",
        }
        for function in functions
    ]
    return {"structures": structures, "triggers": [form.begin]}


def _moved(schema: Any, root: str) -> Any:
    """A copy whose references point below `root`, where it stands now. Pure."""
    if isinstance(schema, list):
        return [_moved(one, root) for one in schema]
    if not isinstance(schema, dict):
        return schema
    reference = {"$ref": re.sub("^#", root, to)} if isinstance(to := schema.get("$ref"), str) else {}
    return {key: _moved(value, root) for key, value in schema.items()} | reference
