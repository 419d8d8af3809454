"""What all paths share: keys, refusals by name, the schema, logs; and what the engine is told over HTTP."""

import json
import logging
import random
import re
import threading
from typing import Any

import pytest
from serving import BOX, CHAT, KEY, PROMPT, Live, live, paused, post, request, until
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.websockets import WebSocketDisconnect

from fengine.api.engine import Engine
from fengine.server.app import make_app
from fengine.server.config import ServerConfig, check, log_to_stderr
from fengine.server.endpoints import ENDPOINTS, open_api
from fengine.server.errors import ApiError
from fengine.server.gate import Access
from fengine.server.metrics import status_line


def test_what_the_engine_tells_and_is_told(engine: Engine, server: Live) -> None:
    for path in ("/server_info", "/get_server_info"):
        info = server.ask("GET", path).json
        assert info["max_total_num_tokens"] == engine._parts.pool_tokens and "launch_command" not in info
    assert server.ask("GET", "/get_model_info").json == server.ask("GET", "/model_info").json
    assert server.ask("GET", "/load").json == {"server_load": 0}
    assert server.ask("GET", "/health_generate").json == {"status": "ok"}
    assert server.ask("GET", "/tokenizer_info").json["bos_token"] == engine.tokenizer.special_tokens["bos_token"]
    assert server.ask("POST", "/flush_cache", None, Content_Type="", **KEY).json["success"] is True
    assert server.ask("GET", "/flush_cache", None, **KEY).json["success"] is True
    for method in ("GET", "POST"):  # a web page may not
        assert server.ask(method, "/flush_cache", None, Content_Type="", Origin="http://x", **KEY).status == 415
    body = {"text": PROMPT, "sampling_params": {"max_new_tokens": 1}, "rid": "mine"}
    engine.pause_generation("in_place")
    try:
        told: list[Any] = []
        thread = threading.Thread(target=lambda: told.append(post(server, "/generate", body)))
        thread.start()
        server.wait_for_requests(1)
        assert server.ask("GET", "/load").json == {"server_load": 1}
        post(server, "/abort_request", {"rid": "mine"}, **KEY)
        post(server, "/continue_generation", {}, **KEY)
        thread.join(30)
    finally:
        engine.continue_generation()
    assert told[0]["meta_info"]["finish_reason"]["type"] == "abort"


def test_weights_and_adapters_need_the_admin_key(engine: Engine, server: Live) -> None:
    path = str(engine._parts.model_dir)
    for one in ENDPOINTS:
        if one.access is Access.ADMIN:
            for name in one.paths:
                for key in ({}, {"Authorization": "Bearer x"}):
                    assert server.ask("POST", name, {}, **key).status == 401
    told = post(server, "/update_weights_from_disk", {"model_path": path, "weight_version": "2"}, **KEY)
    assert told["success"] and post(server, "/generate", {"text": "a"})["meta_info"]["weight_version"] == "2"
    assert server.ask("POST", "/update_weights_from_disk", {"model_path": "/nowhere"}, **KEY).json["success"] is False
    for name, param in (("update_weights_from_disk", "model_path"), ("load_lora_adapter", "lora_name")):
        answer = server.ask("POST", f"/{name}", {"no": 1}, **KEY)
        assert answer.status == 400 and answer.error["param"] == "no"
        assert param in server.ask("POST", f"/{name}", {}, **KEY).error["message"]
    assert server.ask("POST", "/get_weights_by_name", {"name": "no"}, **KEY).error["param"] == "name"
    assert server.ask("POST", "/update_weights_from_tensor", {"a": 1}, **KEY).error["code"] == "unsupported_feature"
    adapter = engine.lora_adapters()["sql"]
    told = post(server, "/v1/load_lora_adapter", {"lora_name": "more", "lora_path": adapter}, **KEY)
    assert told["success"] and "more" in [card["id"] for card in server.ask("GET", "/v1/models").json["data"]]
    texts = [post(server, "/v1/completions", {"model": name, "prompt": PROMPT, "temperature": 0})["choices"][0]["text"]
             for name in ("sql", "more", "box:more", "box", "default")]  # fmt: skip
    assert texts[0] == texts[1] == texts[2] != texts[3] == texts[4]
    for lora_path, name, status in ((adapter, "more", 400), (str(BOX), "other", 400), ("/nowhere", "other", 404),
                                    ("n" * 5000, "other", 404)):  # fmt: skip
        answer = server.ask("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": lora_path}, **KEY)
        assert answer.status == status and answer.json["error"]["message"]
    answer = server.ask("POST", "/load_lora_adapter", {"lora_name": "other", "lora_path": "/nowhere"}, **KEY)
    assert (answer.status, answer.json["success"]) == (400, False)  # SGLang's
    assert post(server, "/unload_lora_adapter", {"lora_name": "more"}, **KEY)["success"]
    assert server.ask("POST", "/v1/unload_lora_adapter", {"lora_name": "more"}, **KEY).status == 404
    with live(engine) as other:
        answer = other.ask("POST", "/update_weights_from_disk", {"model_path": path}, **KEY)
        assert (answer.status, answer.error["code"]) == (403, "no_admin_key")
        assert other.ask("POST", "/flush_cache", {}).status == 200  # no admin key: as any other path


def test_below_another_app_paths_need_the_same_keys(engine: Engine) -> None:
    testclient = pytest.importorskip("starlette.testclient", reason="it needs httpx")
    with testclient.TestClient(Starlette(routes=[Mount("/llm", make_app(engine))]), "http://localhost") as client:
        assert client.get("/llm/v1/models/box").json()["id"] == "box"
        refused = client.post("/llm/update_weights_from_disk", json={"model_path": "/nowhere"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "no_admin_key")
        assert client.post("/llm/v1/completions", json={"prompt": PROMPT}).json()["usage"]["completion_tokens"] == 16
        allowed = client.get("/llm/v1/completions")
        assert (allowed.status_code, allowed.headers["allow"]) == (405, "POST") and client.head("/llm/docs").text == ""
        assert client.get("/llm/nothing").status_code == client.get("/v1/models").status_code == 404
        with pytest.raises(WebSocketDisconnect), client.websocket_connect("/llm/v1/models"):
            pass


def test_keys_of_both_kinds(engine: Engine) -> None:
    with live(engine, api_key="user", admin_key="admin", any_model_name=True) as server:
        body = {"model": "claude", "messages": CHAT, "max_tokens": 1}
        for name, status in (("box", 200), ("claude", 404)):
            assert server.ask("GET", f"/v1/models/{name}", **KEY).status == status
        for name, status in (("box:", 200), ("box:sql", 200), ("qwen:7b", 200), ("box:nobody", 404)):
            assert server.ask("POST", "/v1/messages", body | {"model": name}, **KEY).status == status, name
        for headers, status in (({"x_api_key": "user"}, 200), ({"x_api_key": "no"}, 401), (KEY, 200), ({}, 401)):
            assert server.ask("POST", "/v1/messages", body, **headers).status == status, headers
        told = server.ask("POST", "/v1/messages", body).json
        assert (told["type"], told["error"]["type"]) == ("error", "authentication_error")
        for method, path, kind in (("GET", "/v1/x", "NotFound"), ("GET", "/generate", "MethodNotAllowed")):
            answer = server.ask(method, path, **KEY)
            assert (answer.json["type"], answer.json["code"]) == (f"{kind}Error", answer.status)
        assert server.ask("POST", "/flush_cache", {}, Authorization="Bearer user").status == 401
        assert server.ask("POST", "/flush_cache", {}, **KEY).status == 200
        assert server.ask("GET", "/docs").status == server.ask("GET", "/openapi.json").status == 200


def test_an_engine_sleeps_for_who_has_the_admin_key(engine: Engine, server: Live) -> None:
    asked, asleep = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}, {"is_sleeping": True}
    before = post(server, "/v1/completions", asked)["choices"]
    assert server.ask("POST", "/sleep").status == 401 and server.ask("GET", "/is_sleeping").json != asleep
    answer = server.ask("POST", "/sleep?level=0", **KEY)
    assert (answer.status, answer.error["param"]) == (400, "level")
    with paused(engine), server.connect() as link:
        link.sendall(request("POST", "/v1/completions", asked))
        server.wait_for_requests(1, link)
        answer = server.ask("POST", "/sleep", **KEY)
        assert answer.status == 503 and "while requests run or wait" in answer.error["message"]
    until(server.quiet)
    parts = ("/wake_up?tags=weights", "/wake_up?tags=kv_cache")
    bodies = ("/sleep", {"level": 2}, parts), ("/sleep?level=2", None, ("/wake_up",))
    for sleep, body, wakes in (("/sleep?level=1", None, ("/wake_up",)), *bodies):
        for _ in range(2):  # the second one finds it asleep
            assert server.ask("POST", sleep, body, **KEY).json == {"success": True}
        assert server.ask("POST", "/v1/completions", asked).status == 503
        for wake in wakes:
            assert server.ask("GET", "/is_sleeping").json == asleep
            assert server.ask("POST", wake, **KEY).status == server.ask("POST", wake, **KEY).status == 200
        assert server.ask("GET", "/is_sleeping").json == {"is_sleeping": False}
        assert post(server, "/v1/completions", asked)["choices"] == before


def test_anthropics_words_for_an_error_are_those_of_its_clients() -> None:
    kinds = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error",
             413: "request_too_large", 429: "rate_limit_error", 500: "api_error", 503: "overloaded_error"}  # fmt: skip
    for status, kind in kinds.items():
        want = {"type": "error", "error": {"type": kind, "message": "no"}}
        assert ApiError(status, "no").body_at("/v1/messages") == want


def test_the_path_of_a_proxy_may_stand_before_every_path(engine: Engine) -> None:
    with live(engine, root_path="/llm", api_key="user") as server:
        key = {"Authorization": "Bearer user"}
        for path in ("/v1/models", "/llm/v1/models", "/llm/v1/models/box"):
            assert (server.ask("GET", path).status, server.ask("GET", path, **key).status) == (401, 200)
        for path in ("/llmv1/models", "/other/v1/models", "/llm/llm/v1/models"):
            assert server.ask("GET", path, **key).status == 404
        assert server.ask("GET", "/llm/openapi.json").json["servers"] == [{"url": "/llm"}]
        until(server.quiet)
    assert check(ServerConfig(root_path="/a/b")) == []
    for bad in ("llm", "/llm/", "/"):
        assert "serve.root_path" in check(ServerConfig(root_path=bad))[0]


def test_a_profile_in_a_folder_that_cannot_be_written(server: Live) -> None:
    told = server.ask("POST", "/start_profile", {"output_dir": "/proc/profile"}, **KEY)
    assert (told.status, told.error["param"]) == (400, "output_dir") and "choose another" in told.error["message"]
    assert server.ask("POST", "/stop_profile", {}, **KEY).status == 400


ITEMS: dict[str, Any] = {"query": "a", "items": ["b"], "label_token_ids": [1]}
REFUSED = [
    ("/v1/completions", {"extra_key": "x" * 5000}, "extra_key"),
    ("/v1/completions", {"allowed_token_ids": []}, "allowed_token_ids"),
    ("/v1/completions", {"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ("/v1/completions", {"allowed_token_ids": [1 << 30]}, "allowed_token_ids"),
    ("/v1/completions", {"allowed_token_ids": [1], "custom_logit_processor": "a"}, "allowed_token_ids"),
    ("/v1/completions", {"use_beam_search": True}, "use_beam_search"),
    ("/v1/completions", {"prompt_logprobs": -1}, "prompt_logprobs"),
    ("/v1/completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ("/v1/completions", {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ("/v1/score", ITEMS | {"truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
    ("/v1/completions", {"truncation_side": "middle"}, "truncation_side"),
    ("/v1/completions", {"bad_words": [3]}, "bad_words"),
    ("/v1/completions", {"bad_words": ["a"] * 1025}, "bad_words"),
    ("/v1/completions", {"bad_words": ["a"], "logit_bias": [1]}, "logit_bias"),
    ("/v1/completions", {"guided_choice": []}, "guided_choice"),
    ("/v1/completions", {"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ("/v1/completions", {"structured_outputs": {"grammar": ""}}, "structured_outputs"),
    ("/v1/completions", {"guided_regex": "a", "regex": "b"}, "guided_regex"),
    ("/v1/completions", {"rid": 3}, "rid"),
    ("/v1/completions", {"return_hidden_states": "all"}, "return_hidden_states"),
    ("/v1/responses", {"previous_response_id": "resp_1"}, "previous_response_id"),
    ("/v1/responses", {"background": True}, "background"),
    ("/v1/responses", {"tools": [{"type": "web_search"}]}, "tools"),
    ("/v1/responses", {"input": None}, "input"),
    ("/v1/responses", {"input": [{"type": "image"}]}, "input"),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
    ("/v1/responses", {"input": [{"role": "", "content": "a"}]}, "input"),
    ("/v1/responses", {"input": [{"type": "reasoning", "content": 3}]}, "input"),
    ("/v1/responses", {"input": [{"type": "reasoning", "content": [{"type": "input_image"}]}]}, "input"),
    ("/v1/responses", {"input": [{"role": "user", "content": {"type": "input_text", "text": "a"}}]}, "input"),
    ("/v1/responses", {"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input"),
    ("/v1/responses", {"input": [{"role": "user", "content": "a", "phase": "x"}]}, "input"),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]}, "input"),
    ("/v1/responses", {"input": [{"type": "function_call", "name": 3}]}, "input"),
    ("/v1/responses", {"reasoning": {"effort": "huge"}}, "reasoning"),
    ("/v1/responses", {"max_output_tokens": 0}, "max_output_tokens"),
    ("/v1/responses", {"text": {"format": {"type": "xml"}}}, "text"),
    ("/v1/responses", {"temprature": 1}, "temprature"),
    ("/generate", {"texts": "a"}, "texts"),
    ("/generate", {"extra_key": 3}, "extra_key"),
    ("/generate", {"sampling_params": {"temprature": 1}}, None),
    ("/generate", {"image_data": "x"}, "image_data"),
    ("/v1/completions", {"logprob_token_ids": [1]}, "logprob_token_ids"),
    ("/v1/completions", {"logprobs": 1, "logprob_token_ids": [-1]}, "logprob_token_ids"),
    ("/tokenize", {"prompt": "a", "messages": CHAT}, "messages"),
    ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
    ("/tokenize", {"messages": CHAT, "reasoning_effort": "low"}, "reasoning_effort"),
    ("/v1/embeddings", {"input": "a", "messages": CHAT}, "messages"),
    ("/v1/embeddings", {"input": "a", "continue_final_message": True}, "continue_final_message"),
    (
        "/v1/responses",
        {"structured_outputs": {"regex": "a"}, "text": {"format": {"type": "json_object"}}},
        "structured_outputs",
    ),
    ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}}, "text"),
    (
        "/v1/responses",
        {
            "text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}},
            "tools": [{"type": "function", "name": "f"}],
            "tool_choice": "none",
        },
        "text",
    ),
    (
        "/v1/responses",
        {
            "text": {"format": {"type": "text"}},
            "tool_choice": "required",
            "tools": [{"type": "function", "name": "f", "strict": True, "parameters": {"type": "nope"}}],
        },
        "tools",
    ),
    ("/v1/score", ITEMS | {"text_1": "a"}, "text_1"),
    ("/v1/score", {"data_1": "a", "text_2": "b"}, "text_2"),
    ("/v1/score", {"text_1": "a", "text_2": []}, "text_2"),
    ("/v1/score", {"text_1": "a", "text_2": "b", "return_pooled_hidden_states": True}, "return_pooled_hidden_states"),
    ("/v1/score", {"text_1": "a", "text_2": "b", "items": ["c"]}, "items"),
    ("/v1/score", ITEMS | {"activation": False}, "activation"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages"),
    ("/tokenize", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages"),
    ("/v1/score", ITEMS | {"items": []}, "items"),
    ("/v1/rerank", {"query": "a"}, "documents"),
    ("/rerank", {"query": ["a"], "documents": ["a"]}, "query"),
    ("/rerank", {"query": "a", "documents": ["a", 3]}, "documents"),
    ("/detokenize", {"tokens": [[1], "a"]}, "tokens"),
    ("/abort_request", {}, None),
    ("/invocations", {"a": 1}, None),
]
GOOD: dict[str, Any] = {"/v1/completions": {"prompt": "a"}, "/v1/responses": {"input": "a"}, "/generate": {"text": "a"}}


@pytest.mark.parametrize(("path", "change", "param"), REFUSED, ids=[f"{p} {c}"[:60] for p, c, _ in REFUSED])
def test_what_is_refused_is_named(path: str, change: Any, param: str | None, server: Live) -> None:
    answer = server.ask("POST", path, GOOD.get(path, {}) | change, **KEY)
    assert answer.status == 400 and answer.json["error"]["param"] == param, answer.body


TOOL = {"type": "function", "function": {"name": "f"}}
CALLED: dict[str, Any] = {"messages": CHAT, "tools": [TOOL], "tool_choice": "required"}


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/chat/completions", {"prompt": "x"}, "Did you mean 'messages'?"),
        ("/v1/chat/completions", {"extra_body": {"top_k": 1}}, "Its fields stand in the body itself."),
        ("/v1/completions", {"messages": CHAT}, "unknown field 'messages'. Did you mean 'prompt'?"),
        ("/v1/responses", {"messages": CHAT}, "unknown field 'messages'. Did you mean 'input'?"),
        ("/generate", {"prompt": "x"}, "Did you mean 'text'?"),
        ("/v1/responses", {"input": "x", "max_tokens": 3}, "Did you mean 'max_output_tokens'?"),
        ("/v1/chat/completions", {"messages": CHAT, "enable_thinking": False}, "It stands in chat_template_kwargs."),
        ("/generate", {"text": "x", "max_tokens": 5}, "It stands in sampling_params"),
        ("/v1/completions", {"prompt": "x", "stop": "a", "regex": "a"}, "with regex: they would cut the text where"),
        ("/v1/chat/completions", CALLED | {"stop": "a"}, "stop and stop_regex cannot be combined with tool_choice"),
        ("/chat/completions", {}, "did you mean /v1/chat/completions?"),
        ("/v1/v1/chat/completions", {}, "did you mean /v1/chat/completions?"),
        ("/v1/fine_tuning/jobs", {}, "GET /openapi.json tells all paths"),
    ],
)
def test_words_of_other_paths_are_told_ours(path: str, body: Any, said: str, server: Live) -> None:
    assert said in server.ask("POST", path, body).json["error"]["message"]


ODD: list[Any] = [True, 0, -1, 1.5, 10**30, "", "x", [], [1], [[]], ["a", 1], {}, {"a": 1}, [{}], [None], [[1], ["a"]],
                  {"type": "x"}, [{"type": "message"}], [{"type": "reasoning", "content": "x"}],
                  [{"role": "user", "content": [{}]}], [{"type": "function", "function": {}}]]  # fmt: skip
SHORT: dict[str, Any] = GOOD | {
    "/v1/completions": {"prompt": "a", "max_tokens": 1}, "/v1/chat/completions": {"messages": CHAT, "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1}, "/v1/messages": {"messages": CHAT, "max_tokens": 1},
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 1}}, "/tokenize": {"prompt": "a"},
}  # fmt: skip


def test_odd_values_of_any_field_are_no_fault_of_the_server(server: Live) -> None:
    """What a body holds may be refused, and ends in no internal error. A sample, always the same."""
    cases = [(one.paths[0], name, value) for one in ENDPOINTS for name in one.fields or () for value in ODD
             if one.access is Access.KEY]  # fmt: skip
    for path, name, value in random.Random(1).sample(cases, 400):
        answer = server.ask("POST", path, {**SHORT.get(path, {}), name: value})
        assert answer.status in (200, 400, 404), (path, name, value, answer.body)
    assert post(server, "/generate", {"text": []}) == []


def test_the_schema_is_that_of_the_readers(server: Live) -> None:
    told = server.ask("GET", "/openapi.json").json
    assert told == json.loads(json.dumps(open_api("fengine")))
    docs = server.ask("GET", "/docs").body.decode()
    assert "openapi.json" in docs and all(f"<code>{path}</code>" in docs for path in told["paths"])
    assert "<script" not in docs and "//" not in docs, "the page needs nothing but this server"
    schema = told["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    fields = dict.fromkeys(schema["properties"])
    known = server.ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1, **fields})
    assert known.status == 400 and known.error["param"] == "prompt"  # every name is known, and null is absent
    for path, methods in told["paths"].items():
        (method,) = methods
        assert server.ask(method.upper(), path, {} if method == "post" else None).status != 404, path


def test_ids_of_requests_and_pages_of_other_origins(server: Live, caplog: Any) -> None:
    assert server.ask("GET", "/version", X_Request_Id="abc-1").headers["x-request-id"] == "abc-1"
    for odd in ("a b", "x" * 200, ""):
        assert re.fullmatch("[0-9a-f]{32}", server.ask("GET", "/version", X_Request_Id=odd).headers["x-request-id"])
    asked = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "content-type"}
    allowed = server.ask("OPTIONS", "/v1/completions", None, Origin="http://page", **asked)
    assert allowed.status == 200 and allowed.headers["access-control-allow-origin"] == "http://page"
    assert server.ask("OPTIONS", "/v1/completions", None, Origin="http://other", **asked).status == 400


def test_the_access_log_and_the_line_of_the_state(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fengine.server")
    with live(engine, access_log=True, status_seconds=0.01) as server:
        post(server, "/v1/completions", {"prompt": PROMPT, "max_tokens": 8}, X_Request_Id="id-7")
        until(lambda: "tokens/s drawn" in caplog.text)
        server.server.handle_exit(15, None)
        until(lambda: "drained" in caplog.text)
    assert re.search(r"POST /v1/completions 200 \d+ ms id-7", caplog.text)
    stats = {"running": 2, "waiting": 1, "pages_used": 5, "pages_total": 10, "pages_cached": 3, "computed_tokens": 30,
             "output_tokens": 20}  # fmt: skip
    told = status_line(stats, {"computed_tokens": 10, "output_tokens": 10}, 2.0)
    assert told == "2 running, 1 waiting; 10 tokens/s computed, 5 tokens/s drawn; 50 % of 10 pages held, 3 cached"


def test_what_is_logged_is_text_json_or_nothing(capsys: Any) -> None:
    package = logging.getLogger("fengine")
    package.propagate = False
    for form, pattern in (("text", r"\d\d:\d\d:\d\d say \"a\"\n"), ("json", r"\{.*\}\n"), ("none", "")):
        package.handlers.clear()
        log_to_stderr(form)
        log_to_stderr(form)  # once is enough
        logging.getLogger("fengine.server").info('say "%s"', "a")
        told = capsys.readouterr().err
        assert re.fullmatch(pattern, told), told
        assert form != "json" or json.loads(told)["message"] == 'say "a"'


def test_the_log_has_levels(capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("fengine").handlers.clear()
    log_to_stderr("json", "warning")
    logging.getLogger("fengine.server").info("not seen")
    logging.getLogger("fengine.server").warning("seen")
    assert json.loads(capsys.readouterr().err)["message"] == "seen"
