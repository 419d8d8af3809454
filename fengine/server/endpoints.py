"""Every path of the server: its body's fields, the call of the engine behind it, and who may ask."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from os.path import exists
from typing import Any

from fengine import __version__
from fengine.api.engine import Engine
from fengine.api.io_struct import EncodeReqInput, GenerateReqInput
from fengine.api.outputs import Output
from fengine.server import chat, choices, fields, messages, native, openai_body, pairs, parsers, pooled, responses
from fengine.server.answers import Plan, Writer, usage_of
from fengine.server.errors import ApiError, invalid, unsupported
from fengine.server.fields import Field, Fields, flag, loose, take
from fengine.server.gate import Access
from fengine.server.service import Service

Body = Mapping[str, Any]
MAX_CHATS = 1024  # of one body


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`plan`: what a body asks of the model; or `call`: the value that answers it, computed in a thread. `words`: a
    field's name in the engine, or in a chat -> its name in this body. `query`: or in the path's query."""

    paths: tuple[str, ...]
    doc: str
    fields: Fields | None = None  # None: a GET
    plan: Callable[[Service, Body], Plan] | None = None
    call: Callable[[Service, Body], Any] | None = None
    access: Access = Access.KEY
    words: Mapping[str, str] = field(default_factory=dict)
    query: bool = False


# -- what the model computes -------------------------------------------------------------------------------------------


def _completions(service: Service, body: Body) -> Plan:
    request = openai_body.read_completion(body, service.config.max_samples)
    writer = choices.CompletionWriter(request, service.tokenizer, service.context, service.head(body))
    return _planned(service, body, writer)


def _chat(service: Service, body: Body) -> chat.ChatWriter:
    request = openai_body.read_chat(body, service.config.max_samples)
    facts = service.template_facts(request.chat_options.tools is not None)
    return chat.ChatWriter(request, service.engine, facts, service.head(body))


def _planned(service: Service, body: Body, writer: choices.ChoiceWriter, told: Writer | None = None) -> Plan:
    """`told`: what writes the answer, if it is none of choices."""
    request, told = writer.request, told or writer
    arguments = service.request_of(body, writer.arguments, writer)
    return Plan(arguments, request.prompts * request.given["n"], told.whole, told, request.words)


def _chat_completions(service: Service, body: Body) -> Plan:
    return _planned(service, body, _chat(service, body))


def _several_chats(service: Service, body: Body) -> Plan:
    """vLLM's: the chats of one body, a choice for each."""
    chats = body.get("messages")
    if not isinstance(chats, list) or not 0 < len(chats) <= MAX_CHATS:
        raise invalid("messages", f"messages must be a list of 1 to {MAX_CHATS} chats, got {chats!r:.80}.")
    writers = [_chat(service, {**body, "messages": one}) for one in chats]
    first, request = writers[0], writers[0].request
    if request.given["stream"] or request.given["n"] > 1:
        name = "stream" if request.given["stream"] else "n"
        raise unsupported(name, "several chats have one choice each, and no events.")
    if len({writer.limit for writer in writers}) > 1:
        raise unsupported("thinking_token_budget", "of these chats some begin within a thought, and some do not.")

    def whole(outputs: list[Output]) -> dict[str, Any]:
        found = [writer.choice(0, output) for writer, output in zip(writers, outputs, strict=True)]
        return first.around([choice | {"index": i} for i, choice in enumerate(found)], usage_of(outputs))

    images = [writer.arguments.get("image_data") for writer in writers]
    prompts = {"input_ids": [writer.ids for writer in writers], "image_data": images if any(images) else None}
    arguments = service.request_of(body, first.arguments | prompts, first)
    return Plan(arguments, len(writers), whole, words=request.words)


def _as_chat(
    to_chat: Callable[[Body], Body], kind: Callable[[chat.ChatWriter, Body, str], Writer]
) -> Callable[[Service, Body], Plan]:
    """Another's body, which asks the same as a chat."""

    def plan(service: Service, body: Body) -> Plan:
        writer = _chat(service, to_chat(body))
        return _planned(service, body, writer, kind(writer, body, service.name_of(body)))

    return plan


def _of_engine(read: Callable[[Body, Engine, str], Plan]) -> Callable[[Service, Body], Plan]:
    def plan(service: Service, body: Body) -> Plan:
        found = read(body, service.engine, service.name_of(body))
        found.request.lora_path = service.lora_path(body, found.request.lora_path)
        return found

    return plan


def _one_token(service: Service, body: Body) -> Plan:
    tokenizer = service.engine._parts.tokenizer
    ids = [0 if tokenizer is None else tokenizer.bos_id or 0]
    if service.engine._parts.spec.generates:
        return Plan(GenerateReqInput(None, {"max_new_tokens": 1, "temperature": 0.0}, ids), 1, lambda _: _OK)
    return Plan(EncodeReqInput(ids), 1, lambda _: _OK)


def _invocations(service: Service, body: Body) -> Plan:
    """By what the body has."""
    of_inputs = _EMBEDDINGS if service.engine._parts.spec.num_labels is None else _CLASSIFY
    if not service.engine._parts.spec.generates and body.get("messages") is not None:
        return of_inputs(service, body)
    for name, plan in (("messages", _chat_completions), ("prompt", _completions), ("input", of_inputs),
                       ("documents", _RERANK), ("text_1", _SCORE)):  # fmt: skip
        if body.get(name) is not None:
            return plan(service, body)
    raise ApiError(400, "the body must have messages, prompt, input, documents or text_1.", code="invalid_value")


_EMBEDDINGS, _SCORE, _CLASSIFY = _of_engine(pooled.embeddings), _of_engine(pairs.score), _of_engine(pooled.classify)
_RERANK = _of_engine(partial(pairs.rerank, jina=True))
_OK = {"status": "ok"}

# -- what the engine is asked or told ----------------------------------------------------------------------------------


def _method(name: str, arguments: Fields, as_vllm: bool = False, none: str = "") -> Callable[[Service, Body], Any]:
    """A method of the engine; the body's fields are its arguments. `as_vllm`: a change of adapters that fails is an
    error, and 404 if there is no such adapter. `none`: the field that is wrong where nothing comes back, and why."""

    def call(service: Service, body: Body) -> Any:
        given = {key: value for key, value in take(body, arguments).items() if value is not None}
        found = getattr(service.engine, name)(**given)
        if as_vllm and not found.success:
            there = service.engine._parts.adapters is None or "lora_path" in given and exists(given["lora_path"])
            raise ApiError(400 if there else 404, found.error_message)
        if found is None and none:
            field = none.partition(" ")[0]
            raise invalid(field, f"{none}, got {given[field]!r:.80}.")
        return {"success": True} if found is None else found

    return call


def _pickled(service: Service, body: Body) -> Any:
    raise unsupported("serialized_named_tensors", "serialized tensors are not built: they are pickles, which are code. "
                      "Use update_weights_from_disk or update_weights_from_distributed.")  # fmt: skip


def _sleep(service: Service, body: Body) -> Any:
    """Both of vLLM's levels: weights come back from the checkpoint, or are kept where the engine is told to."""
    if (level := take(body, _SLEEP)["level"]) not in (None, 1, 2, ["1"], ["2"]):
        raise invalid("level", f"level must be 1 or 2, got {level!r:.80}; /pause_generation stops and keeps memory.")
    return service.turn(service.engine.release_memory_occupation, [*_SLEEPS])


def _count_tokens(service: Service, body: Body) -> Any:
    asked = openai_body.read_chat(messages.to_chat(body, counted=True), 1).chat_options
    return {"input_tokens": len(chat.chat_prompt(service.engine, asked, False)[0])}


def _steering(
    name: str, doc: str, *arguments: str, access: Access = Access.STEER, root: str = "", none: str = ""
) -> Endpoint:  # fmt: skip
    known = {key: loose("As the argument of the engine's method.") for key in arguments}
    return Endpoint((f"{root}/{name}",), doc, known, call=_method(name, known, bool(root), none), access=access)


def _abort(service: Service, body: Body) -> Any:
    given = take(body, _ABORT)
    service.engine.abort(given["rid"] or None, given["abort_all"])
    return {"success": True}


_ABORT: Fields = {"rid": fields.text("The request's id."), "abort_all": flag("All requests."),
                  "abort_message": loose("Accepted.")}  # fmt: skip
_SESSION: Fields = {
    "capacity_of_str_len": Field({"type": "integer", "description": "Bounds nothing, as in SGLang."}, 0),
    "session_id": fields.text("The id; absent: a new one."), "streaming": flag("Each turn continues the last one."),
    "timeout": loose("Seconds without a request, after which it closes.", "number"),
}  # fmt: skip
_SLEEPS = frozenset({"weights", "kv_cache"})  # what a sleeping engine has given back
_TAGS: Fields = {"tags": loose("weights, kv_cache, or both.")}
_SLEEP: Fields = {"level": loose("1 or 2.")}
_UPDATE = ("weight_version", "abort_all_requests")
_admin = partial(_steering, access=Access.ADMIN)
_vllms = partial(_admin, root="/v1")

ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(("/v1/completions",), "Texts that go on from prompts.", openai_body.OF_COMPLETIONS, _completions),
    Endpoint(("/v1/chat/completions",), "Answers to chats.", openai_body.OF_CHATS, _chat_completions),
    Endpoint(("/v1/chat/completions/batch",), "vLLM's: a list of chats, a choice for each.", openai_body.OF_CHATS,
             _several_chats),
    Endpoint(("/v1/responses",), "OpenAI's responses; nothing is stored.", responses.FIELDS,
             _as_chat(responses.to_chat, responses.ResponseWriter), words=responses.WORDS),
    Endpoint(("/v1/messages",), "Anthropic's messages.", messages.FIELDS,
             _as_chat(messages.to_chat, messages.MessageWriter), words=messages.WORDS),
    Endpoint(("/v1/messages/count_tokens",), "How many tokens a chat has.", messages.COUNTED, call=_count_tokens,
             words=messages.WORDS),
    Endpoint(("/generate",), "SGLang's: Engine.generate.", native.GENERATE, _of_engine(native.generate)),
    Endpoint(("/encode",), "SGLang's: Engine.encode.", pooled.ENCODE, _of_engine(pooled.encode)),
    Endpoint(("/v1/embeddings",), "Vectors of texts.", pooled.EMBEDDINGS, _EMBEDDINGS),
    Endpoint(("/classify", "/v1/classify"), "vLLM's: the likeliest labels of texts.", pooled.CLASSIFY, _CLASSIFY),
    Endpoint(("/v1/score", "/score"), "Scores: of labels (SGLang's) or of pairs (vLLM's).", pairs.SCORE, _SCORE),
    Endpoint(("/v1/rerank",), "Documents, the best first; SGLang's answer.", pairs.RERANK,
             _of_engine(partial(pairs.rerank, jina=False))),
    Endpoint(("/rerank", "/v2/rerank"), "Documents, the best first; Jina's and vLLM's answer.", pairs.RERANK, _RERANK),
    Endpoint(("/pooling",), "vLLM's: vectors of texts, or numbers of their labels.", pooled.POOLING,
             _of_engine(pooled.pooling)),
    Endpoint(("/invocations",), "One of those above, by what the body has.", {}, _invocations),
    Endpoint(("/tokenize", "/v1/tokenize"), "Ids of a text, several or a chat.", native.TOKENIZE,
             call=lambda service, body: native.tokenize(body, service.engine, service.tokenizer)),
    Endpoint(("/detokenize", "/v1/detokenize"), "The text of ids.", native.DETOKENIZE,
             call=lambda service, body: native.detokenize(body, service.tokenizer)),
    Endpoint(("/parse_function_call",), "SGLang's: the calls in a text.", parsers.CALLS,
             call=lambda _, body: parsers.parse_function_call(body)),
    Endpoint(("/separate_reasoning",), "SGLang's: the thoughts in a text.", parsers.THOUGHTS,
             call=lambda _, body: parsers.separate_reasoning(body)),
    Endpoint(("/tokenizer_info",), "Special tokens and chat template.",
             call=lambda service, _: native.tokenizer_info(service.tokenizer, service.context)),
    Endpoint(("/health_generate",), "One token through the whole engine.", plan=_one_token),
    Endpoint(("/get_model_info", "/model_info"), "What kind of model runs.", call=_method("get_model_info", {})),
    Endpoint(("/server_info", "/get_server_info"), "Every setting as resolved, and counters.",
             call=lambda service, _: service.server_info()),
    Endpoint(("/v1/models",), "The model and its adapters.",
             call=lambda service, _: {"object": "list", "data": list(service.cards().values())}),
    Endpoint(("/get_load",), "SGLang's load of each rank.", call=_method("get_load", {})),
    Endpoint(("/v1/loads",), "The same, of SGLang's newer form.",
             call=lambda service, _: {"loads": service.engine.get_load()}),
    Endpoint(("/load",), "vLLM's: samples that run or wait.", call=lambda service, _: {"server_load": service.rows}),
    Endpoint(("/version",), "The version.", call=lambda *_: {"version": __version__}),
    Endpoint(("/abort_request",), "Ends a request, or all.", _ABORT, call=_abort, access=Access.STEER),
    _steering("flush_cache", "Empties the prefix cache, while nothing runs."),
    Endpoint(("/open_session",), "A session's id.", _SESSION, access=Access.STEER,
             call=_method("open_session", _SESSION, none="session_id must be one that is not in use")),
    _steering("close_session", "Forgets a session.", "session_id"),
    _steering("pause_generation", "Plans no steps.", "mode"),
    _steering("continue_generation", "Plans steps again."),
    _admin("update_weights_from_disk", "Weights of a checkpoint.", "model_path", "load_format", *_UPDATE),
    _admin("update_weights_from_distributed", "Weights that a group's rank 0 sends.", "names", "dtypes", "shapes",
           "group_name", "flush_cache", "load_format", *_UPDATE),
    Endpoint(("/update_weights_from_tensor", "/update_weights_from_ipc"), "Refused: pickles.", {}, call=_pickled,
             access=Access.ADMIN),
    _admin("init_weights_update_group", "Joins a trainer's group.", "master_address", "master_port", "rank_offset",
           "world_size", "group_name", "backend", "timeout"),
    _admin("destroy_weights_update_group", "Leaves it.", "group_name"),
    _admin("begin_weight_update", "Collects updates.", "selector"),
    _admin("end_weight_update", "They take effect together.", *_UPDATE),
    _admin("get_weights_by_name", "The first rows of a tensor.", "name", "truncate_size",
           none="name must be that of a weight, as in the checkpoint"),
    _admin("release_memory_occupation", "Gives memory back.", "tags"),
    _admin("resume_memory_occupation", "Takes it again.", "tags"),
    Endpoint(("/sleep",), "vLLM's: gives weights and KV pages back.", _SLEEP, call=_sleep, access=Access.ADMIN,
             query=True),
    Endpoint(("/wake_up",), "vLLM's: takes them again.", _TAGS, access=Access.ADMIN, query=True,
             call=lambda service, body: service.turn(service.engine.resume_memory_occupation, **take(body, _TAGS))),
    Endpoint(("/is_sleeping",), "vLLM's: whether any is given back.", call=lambda service, _: {
        "is_sleeping": not _SLEEPS.isdisjoint(service.engine._parts.core.call("get_stats")["refusals"])}),
    _admin("load_lora_adapter", "Loads an adapter.", "lora_name", "lora_path", "pinned"),
    _admin("unload_lora_adapter", "Forgets an adapter.", "lora_name"),
    _vllms("load_lora_adapter", "The same; 404 where there is none.", "lora_name", "lora_path", "pinned"),
    _vllms("unload_lora_adapter", "The same; 404 where there is none.", "lora_name"),
    _admin("start_profile", "Records a trace.", "output_dir", "start_step", "num_steps", "activities", "with_stack",
           "record_shapes", "profile_id", "profile_prefix"),
    _admin("stop_profile", "Writes it."),
)  # fmt: skip


@cache
def open_api(title: str, root: str = "") -> dict[str, Any]:
    """What /openapi.json tells, from the same fields that bodies are read by. Pure."""
    paths: dict[str, Any] = {}
    for endpoint in ENDPOINTS:
        told: dict[str, Any] = {"summary": endpoint.doc, "responses": {"200": {"description": "The answer."}}}
        if endpoint.fields is not None:
            schema = {"type": "object", "properties": {name: one.schema for name, one in endpoint.fields.items()},
                      "additionalProperties": not endpoint.fields}  # fmt: skip
            told["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        for path in endpoint.paths:
            paths[path] = {"get" if endpoint.fields is None else "post": told | {"operationId": path.strip("/")}}
    key = {"key": {"type": "http", "scheme": "bearer"}}
    return {"openapi": "3.1.0", "info": {"title": title, "version": __version__}, "paths": paths,
            "servers": [{"url": root or "/"}],
            "components": {"securitySchemes": key}, "security": [{"key": []}]}  # fmt: skip
