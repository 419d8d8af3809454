"""Endpoints beside OpenAI's completions: each answer is that of the engine's call behind it, or the same chat's."""

import asyncio
import json
import logging
import math
import random
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_adapters
import torch
from safetensors.torch import load_file, save_file
from serving import Live, live, until
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.websockets import WebSocketDisconnect
from transformers import AutoTokenizer

from fengine.api.engine import Engine
from fengine.api.streams import IndexQueue
from fengine.errors import NumericsError
from fengine.server import answers
from fengine.server.answers import usage_of
from fengine.server.app import make_app
from fengine.server.chat import chat_writer
from fengine.server.choices import completion_writer
from fengine.server.config import ServerConfig, check, log_to_stderr
from fengine.server.endpoints import ENDPOINTS, open_api
from fengine.server.errors import ApiError
from fengine.server.gate import Access
from fengine.server.messages import to_chat
from fengine.server.metrics import status_line
from fengine.server.openai_body import read_chat, read_completion
from fengine.server.output_parser import TemplateFacts

BOX = Path(__file__).resolve().parents[2] / "fengine" / "models" / "box"
PROMPT = "Once upon a time"
CHAT: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
KEY = {"Authorization": "Bearer admin"}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    adapter = tiny_adapters.random_adapter(tmp_path_factory.mktemp("sql"), BOX, 2)
    with Engine(
        model_path="box", enable_torch_compile=False, enable_return_hidden_states=True,
        enable_custom_logit_processor=True, lora_paths={"sql": str(adapter)},
    ) as engine:  # fmt: skip
        yield engine


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Live]:
    with live(engine, admin_key="admin", allow_origins=["http://page"]) as server:
        yield server
        until(server.quiet)


def post(server: Live, path: str, body: Any, **headers: str) -> Any:
    answer = server.ask("POST", path, body, **headers)
    assert answer.status == 200, answer.body
    return answer.json


def events(server: Live, path: str, body: Any) -> list[tuple[str, Any]]:
    """(name, data) of each event; data that is no JSON stays text."""
    raw = server.ask("POST", path, {**body, "stream": True}).body.decode()
    found = []
    for one in re.sub(r"\r\n[0-9a-f]*\r\n", "", re.sub(r"^[0-9a-f]+\r\n", "", raw)).split("\n\n"):
        lines = dict(line.split(": ", 1) for line in one.split("\n") if ": " in line)
        if "data" in lines:
            data = lines["data"]
            found.append((lines.get("event", ""), json.loads(data) if data.startswith("{") else data))
    return found


# -- SGLang's own ------------------------------------------------------------------------------------------------------


def test_generate_is_the_engines(engine: Engine, server: Live) -> None:
    params = {"temperature": 0, "max_new_tokens": 5}
    asked: dict[str, Any] = {
        "sampling_params": params,
        "return_logprob": True,
        "top_logprobs_num": 2,
        "logprob_start_len": 0,
    }
    expected: Any = engine.generate(PROMPT, params, return_logprob=True, top_logprobs_num=2, logprob_start_len=0)
    for given in ({"text": PROMPT}, {"input_ids": engine.tokenizer.encode(PROMPT)}):
        told = post(server, "/generate", {**given, **asked})
        assert (told["text"], told["output_ids"]) == (expected["text"], expected["output_ids"])
        for name in ("input_token_logprobs", "output_token_logprobs", "output_top_logprobs"):
            meant = json.loads(json.dumps(expected["meta_info"][name]))
            assert told["meta_info"][name] == meant, name
    texts = post(server, "/generate", {"text": PROMPT, **asked, "return_text_in_logprobs": True})["meta_info"]
    assert "".join(text for _, _, text in texts["output_token_logprobs"]) == expected["text"]
    assert "".join(text for _, _, text in texts["input_token_logprobs"][1:]) == PROMPT


def test_generate_of_several_and_as_events(engine: Engine, server: Live) -> None:
    params = {"temperature": 0.8, "sampling_seed": 3, "max_new_tokens": 6, "n": 2}
    expected: Any = engine.generate([PROMPT, "2 + 3 ="], params)
    told = post(server, "/generate", {"text": [PROMPT, "2 + 3 ="], "sampling_params": params})
    assert [one["text"] for one in told] == [one["text"] for one in expected]
    assert isinstance(post(server, "/generate", {"text": [PROMPT], "sampling_params": {"max_new_tokens": 1}}), list)
    found = events(server, "/generate", {"text": [PROMPT, "2 + 3 ="], "sampling_params": params})
    assert found.pop() == ("", "[DONE]")
    last = {data["index"]: data["text"] for _, data in found}
    assert [last[i] for i in range(4)] == [one["text"] for one in expected]
    hidden = post(
        server, "/generate", {"text": PROMPT, "sampling_params": {"max_new_tokens": 1}, "return_hidden_states": True}
    )
    assert len(hidden["meta_info"]["hidden_states"][0]) == hidden["meta_info"]["prompt_tokens"]


def test_sessions_over_http(server: Live) -> None:
    name = post(server, "/open_session", {"capacity_of_str_len": 100, "session_id": "s"}, **KEY)
    assert name == "s" and server.ask("POST", "/open_session", {"session_id": "s"}, **KEY).status == 400
    params = {"temperature": 0, "max_new_tokens": 4}
    first = post(server, "/generate", {"text": PROMPT, "sampling_params": params, "session_params": {"id": name}})
    turn = {"id": name, "rid": first["meta_info"]["id"]}
    second = post(server, "/generate", {"text": " and", "sampling_params": params, "session_params": turn})
    assert second["meta_info"]["prompt_tokens"] > first["meta_info"]["prompt_tokens"] + 4
    assert post(server, "/close_session", {"session_id": name}, **KEY) == {"success": True}
    assert server.ask("POST", "/close_session", {"session_id": name}, **KEY).status == 400


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
        server.wait_for_rows(1)
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
                assert (
                    server.ask("POST", name, {}).status
                    == server.ask("POST", name, {}, Authorization="Bearer x").status
                    == 401
                )
    told = post(server, "/update_weights_from_disk", {"model_path": path, "weight_version": "2"}, **KEY)
    assert told["success"] and post(server, "/generate", {"text": "a"})["meta_info"]["weight_version"] == "2"
    assert server.ask("POST", "/update_weights_from_disk", {"model_path": "/nowhere"}, **KEY).json["success"] is False
    for name, param in (("update_weights_from_disk", "model_path"), ("load_lora_adapter", "lora_name")):
        answer = server.ask("POST", f"/{name}", {"no": 1}, **KEY)
        assert answer.status == 400 and answer.error["param"] == "no"
        assert param in server.ask("POST", f"/{name}", {}, **KEY).error["message"]
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
        assert server.ask("POST", "/flush_cache", {}, Authorization="Bearer user").status == 401
        assert server.ask("POST", "/flush_cache", {}, **KEY).status == 200
        assert server.ask("GET", "/docs").status == server.ask("GET", "/openapi.json").status == 200


# -- hidden states as answers ------------------------------------------------------------------------------------------


def test_scores_are_the_engines(engine: Engine, server: Live) -> None:
    asked = {"query": "2 + 3 =", "items": [" 5", " 6"], "label_token_ids": [300, 301], "apply_softmax": True}
    expected = engine.score(**asked)
    told = post(server, "/v1/score", asked)
    assert told["scores"] == expected.scores and told["object"] == "scoring"
    assert told["usage"] == {"prompt_tokens": expected.prompt_tokens, "completion_tokens": 0,
                             "total_tokens": expected.prompt_tokens}  # fmt: skip
    answer = server.ask("POST", "/v1/score", {**asked, "label_token_ids": [999999]}).json
    assert "Token ID 999999 is out of vocabulary" in answer["message"] and answer["type"] == "BadRequestError"
    for told in (answer, server.ask("POST", "/generate", {"text": "a", "sampling_params": {"n": 0}}).json):
        assert told["error"]["message"] == told["message"]
        assert (told["object"], told["code"], told["type"]) == ("error", 400, "BadRequestError")


def test_without_a_tokenizer_there_are_ids() -> None:
    sampling = {"temperature": 0, "max_new_tokens": 4}
    with (
        Engine(model_path="box", skip_tokenizer_init=True, enable_torch_compile=False) as engine,
        live(engine) as server,
    ):
        expected = engine.generate(input_ids=[5, 6, 7], sampling_params=sampling)
        told = post(server, "/generate", {"input_ids": [5, 6, 7], "sampling_params": sampling})
        assert told["output_ids"] == expected["output_ids"] and "text" not in told
        assert [data["output_ids"] for _, data in events(server, "/generate", {
            "input_ids": [5, 6, 7], "sampling_params": sampling})[:-1]][-1] == told["output_ids"]  # fmt: skip
        assert server.ask("GET", "/health_generate").status == server.ask("GET", "/v1/models").status == 200
        for path, body in (("/v1/completions", {"prompt": [5]}), ("/v1/chat/completions", {"messages": CHAT}),
                           ("/generate", {"text": "a"}), ("/tokenize", {"prompt": "a"}),
                           ("/detokenize", {"tokens": [5]}),
                           ("/generate", {"input_ids": [5], "return_text_in_logprobs": True})):  # fmt: skip
            answer = server.ask("POST", path, body)
            assert answer.status == 400 and "tokenizer" in answer.json["message"], (path, answer.body)
        until(server.quiet)


def test_an_embedding_model_answers_encode_and_pairs() -> None:
    with Engine(model_path="box", is_embedding=True, enable_torch_compile=False) as engine, live(engine) as server:
        expected: Any = engine.encode([PROMPT, "a"])
        assert post(server, "/encode", {"text": PROMPT})["embedding"] == expected[0]["embedding"]
        told = post(server, "/encode", {"text": [PROMPT, "a"]})
        assert [one["embedding"] for one in told] == [one["embedding"] for one in expected]
        same, other = post(server, "/score", {"text_1": PROMPT, "text_2": [PROMPT, "a"]})["data"]
        assert same["score"] == pytest.approx(1) and other["score"] < 0.999
        ranked = post(server, "/rerank", {"query": PROMPT, "documents": ["a", PROMPT], "truncate_prompt_tokens": 9})
        assert [(one["index"], one["relevance_score"]) for one in ranked["results"]] == [
            (1, same["score"]), (0, other["score"])
        ]  # fmt: skip
        for path, documents in (("/v1/rerank", ["b"]), ("/rerank", [{"text": "b"}])):
            assert server.ask("POST", path, {"query": "a", "documents": documents}).status == 400
        assert server.ask("GET", "/health_generate").status == 200
        ids, chat = engine.tokenizer.encode(PROMPT), engine.chat_ids(CHAT)
        for given, meant in (
            ({"input": [PROMPT, "a"], "truncate_prompt_tokens": 3}, [ids[:3], engine.tokenizer.encode("a")]),
            ({"input": PROMPT, "truncate_prompt_tokens": 3, "truncation_side": "left"}, [[ids[0], *ids[-2:]]]),
            ({"input": [ids], "truncate_prompt_tokens": 3, "truncation_side": "left"}, [ids[-3:]]),
            ({"input": PROMPT, "add_special_tokens": False}, [ids[1:]]),
            ({"input": "a " * 900, "truncate_prompt_tokens": -1}, [engine.tokenizer.encode("a " * 900)[:1024]]),
            ({"messages": CHAT}, [chat]),
            ({"messages": CHAT, "truncate_prompt_tokens": 4, "truncation_side": "right"}, [chat[:4]]),
        ):
            told = post(server, "/v1/embeddings", given)
            assert [one["embedding"] for one in told["data"]] == [one["embedding"] for one in engine.encode(meant)]
            assert told["usage"]["prompt_tokens"] == sum(map(len, meant)) and told["usage"]["completion_tokens"] == 0
        raw = post(server, "/v1/embeddings", {"input": PROMPT, "normalize": False})["data"][0]["embedding"]
        assert raw == engine.encode(PROMPT, normalize=False)["embedding"] != expected[0]["embedding"]
        assert raw == post(server, "/v1/embeddings", {"input": PROMPT, "use_activation": False})["data"][0]["embedding"]
        for empty in ("", ["a", ""]):
            answer = server.ask("POST", "/v1/embeddings", {"input": empty})
            assert (answer.status, answer.error["param"]) == (400, "input")
        answer = server.ask("POST", "/classify", {"input": "a"})
        assert (answer.status, answer.error["param"]) == (400, "model")
        answer = server.ask("POST", "/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 9999})
        assert (answer.status, answer.error["param"]) == (400, "truncate_prompt_tokens")
        cut = post(server, "/score", {"text_1": PROMPT, "text_2": PROMPT[:9] + " else", "truncate_prompt_tokens": 3})
        assert cut["data"][0]["score"] == pytest.approx(1) and cut["usage"]["prompt_tokens"] == 6
        answer = server.ask("POST", "/pooling", {"input": "a"})
        assert answer.status == 400 and "/v1/embeddings" in answer.error["message"]
        assert post(server, "/invocations", {"messages": CHAT})["object"] == "list"
        found = post(server, "/invocations", {"input": PROMPT})
        assert found["data"][0]["embedding"] == expected[0]["embedding"]
        until(server.quiet)


def cross_encoder(directory: Path, labels: tuple[str, ...] = ("x",)) -> Path:
    """The box with a head of so many labels."""
    model = shutil.copytree(BOX, directory)
    (file,) = model.glob("*.safetensors")
    tensors = load_file(file)
    width = tensors["model.norm.weight"].shape[0]
    head = torch.linspace(-0.5, 0.5, width, dtype=tensors["model.norm.weight"].dtype)
    tensors["score.weight"] = torch.stack([head.roll(7 * i) for i in range(len(labels))])
    save_file({name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}, file)
    config = json.loads((model / "config.json").read_text())
    named = {"id2label": {str(i): x for i, x in enumerate(labels)}, "label2id": {x: i for i, x in enumerate(labels)}}
    config |= {"architectures": ["LlamaForSequenceClassification"], **named}
    (model / "config.json").write_text(json.dumps(config))
    return model


def rewrite(path: Path, changes: dict[str, Any]) -> None:
    """A JSON object's keys."""
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changes))


def test_a_classifier_tells_labels(tmp_path: Path) -> None:
    path, labels = str(cross_encoder(tmp_path / "m", ("a", "b", "c"))), ("bad", "good", "odd")
    over: Any = {"json_model_override_args": {"id2label": {str(i): label for i, label in enumerate(labels)}}}
    with (
        Engine(model_path=path, is_embedding=True, enable_torch_compile=False, **over) as engine,
        live(engine) as server,
    ):
        texts = [PROMPT, "a b c"]
        raw: Any = [one["embedding"] for one in engine.encode(texts)]
        told = post(server, "/classify", {"input": texts})
        assert [one["index"] for one in told["data"]] == [0, 1] and told["object"] == "list"
        for one, found in zip(told["data"], raw, strict=True):
            assert one["probs"] == pytest.approx(torch.tensor(found).softmax(-1).tolist(), abs=1e-6)
            assert one["label"] == labels[found.index(max(found))] and one["num_classes"] == 3
        assert [one["probs"] for one in post(server, "/classify", {"input": texts, "activation": False})["data"]] == raw
        said: Any = {
            "multi_label_classification": torch.sigmoid,
            "regression": lambda x: x,
            None: lambda x: x.softmax(-1),
        }
        for problem, meant in said.items():  # as transformers' pipeline has it
            rewrite(tmp_path / "m/config.json", {"problem_type": problem})
            probs = [one["probs"] for one in post(server, "/classify", {"input": texts})["data"]]
            assert probs == [pytest.approx(meant(torch.tensor(found)).tolist(), abs=1e-6) for found in raw]
        short = post(server, "/classify", {"input": "a b c d e f", "truncate_prompt_tokens": 3})
        assert short["usage"]["prompt_tokens"] == 3 and post(server, "/classify", {"input": []})["data"] == []
        for body, param in (
            ({"input": [], "messages": CHAT}, "messages"),
            ({"input": "a", "activation": False, "use_activation": True}, "use_activation"),
        ):
            answer = server.ask("POST", "/classify", body)
            assert (answer.status, answer.error["param"]) == (400, param)
        assert post(server, "/invocations", {"input": texts})["data"] == told["data"]
        for path in ("/classify", "/v1/classify", "/invocations"):
            (one,) = post(server, path, {"messages": CHAT, "use_activation": False})["data"]
            assert one["probs"] == engine.encode([engine.chat_ids(CHAT)])[0]["embedding"]
        asked = {"query": PROMPT, "items": texts, "return_pooled_hidden_states": True}
        expected, found = engine.score(**asked), post(server, "/v1/score", asked)
        assert found["scores"] == expected and found["usage"]["prompt_tokens"] == expected.prompt_tokens
        assert found["pooled_hidden_states"] == [one.tolist() for one in expected.pooled_hidden_states or ()]
        assert len(found["pooled_hidden_states"][0]) == engine._parts.spec.hidden_size
        answer = server.ask("POST", "/classify", {"input": "a " * 2000})
        assert answer.status == 400 and "reduce the length of the input" in answer.error["message"]
        until(server.quiet)


def test_a_cross_encoder_answers_in_three_forms(tmp_path: Path) -> None:
    query, documents = "What is the capital of France?", ["Rome is big.", "Paris is the capital of France.", "2 + 3"]
    with Engine(model_path=str(cross_encoder(tmp_path / "m")), is_embedding=True, enable_torch_compile=False) as engine:
        raw: Any = [one["embedding"] for one in engine.rerank([[query, document] for document in documents])]
        order = sorted(range(3), key=lambda i: -raw[i])
        with live(engine) as server:
            asked = {"query": query, "documents": documents}
            told = post(server, "/v1/rerank", asked)
            assert [(one["index"], one["score"], one["document"]) for one in told] == [
                (i, raw[i], documents[i]) for i in order
            ]
            best = post(server, "/rerank", {**asked, "top_n": 2, "return_documents": False})["results"]
            assert [one["index"] for one in best] == order[:2] and "document" not in best[0]
            sigmoids = [1 / (1 + math.exp(-value)) for value in raw]
            assert [one["relevance_score"] for one in best] == pytest.approx([sigmoids[i] for i in order[:2]])
            pairs = {"text_1": query, "text_2": documents}
            assert [one["score"] for one in post(server, "/score", pairs)["data"]] == pytest.approx(sigmoids)
            bare = post(server, "/score", {**pairs, "activation": False})["data"]
            assert [one["score"] for one in bare] == raw
            for one, other in (("data_1", "data_2"), ("queries", "documents"), ("queries", "items")):
                found = post(server, "/score", {one: query, other: documents, "use_activation": False})["data"]
                assert [one["score"] for one in found] == raw
            shares = post(server, "/v1/rerank", {**asked, "use_activation": True})
            assert [one["score"] for one in shares] == pytest.approx([sigmoids[i] for i in order])
            identity, file = "torch.nn.modules.linear.Identity", "config_sentence_transformers.json"
            for name, said, none in (
                ("config.json", {"sbert_ce_default_activation_function": identity}, {}),
                ("config.json", {"sentence_transformers": {"activation_fn": identity, "version": "4"}}, {}),
                (file, {"activation_fn": identity}, {"activation_fn": None}),
            ):
                rewrite(tmp_path / "m" / name, said)
                assert [one["score"] for one in post(server, "/score", pairs)["data"]] == raw
                assert [one["relevance_score"] for one in post(server, "/rerank", asked)["results"]] == sorted(raw)[
                    ::-1
                ]
                rewrite(tmp_path / "m" / name, dict.fromkeys(said) | none)
            rewrite(tmp_path / "m" / file, {"activation_fn": "torch.nn.modules.activation.Tanh"})
            answer = server.ask("POST", "/score", pairs)
            assert (answer.status, answer.error["param"]) == (400, "activation") and "Tanh" in answer.error["message"]
            theirs = AutoTokenizer.from_pretrained(BOX)
            for most, side in ((7, "right"), (9, "left"), (14, "right"), (40, "left")):
                theirs.truncation_side = side
                cut = theirs([query] * 3, documents, truncation=True, max_length=most)["input_ids"]
                given = pairs | {"truncate_prompt_tokens": most, "truncation_side": side, "activation": False}
                found = [one["score"] for one in post(server, "/score", given)["data"]]
                assert found == [one["embedding"][0] for one in engine.encode(cut)]
                given = asked | {"truncate_prompt_tokens": most, "truncation_side": side}
                told = sorted((one["index"], one["score"]) for one in post(server, "/v1/rerank", given))
                assert [score for _, score in told] == found
            answer = server.ask("POST", "/score", pairs | {"truncate_prompt_tokens": 9999})
            assert (answer.status, answer.error["param"]) == (400, "truncate_prompt_tokens")
            until(server.quiet)


def test_an_engine_sleeps_for_who_has_the_admin_key(engine: Engine, server: Live) -> None:
    asked, asleep = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}, {"is_sleeping": True}
    before = post(server, "/v1/completions", asked)["choices"]
    assert server.ask("POST", "/sleep").status == 401 and server.ask("GET", "/is_sleeping").json != asleep
    answer = server.ask("POST", "/sleep?level=0", **KEY)
    assert (answer.status, answer.error["param"]) == (400, "level")
    parts = ("/wake_up?tags=weights", "/wake_up?tags=kv_cache")
    for sleep, body, wakes in (("/sleep?level=1", None, ("/wake_up",)), ("/sleep", {"level": 2}, parts)):
        assert server.ask("POST", sleep, body, **KEY).json == {"success": True}
        assert server.ask("POST", "/v1/completions", asked).status == 503
        for wake in wakes:
            assert server.ask("GET", "/is_sleeping").json == asleep
            assert server.ask("POST", wake, **KEY).status == 200
        assert server.ask("GET", "/is_sleeping").json == {"is_sleeping": False}
        assert post(server, "/v1/completions", asked)["choices"] == before


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


# -- tokens ------------------------------------------------------------------------------------------------------------


def test_tokens_of_several_texts_in_sglangs_words(engine: Engine, server: Live) -> None:
    rows = [engine.tokenizer.encode(text) for text in ("a", PROMPT)]
    told = post(server, "/v1/tokenize", {"prompt": ["a", PROMPT], "return_token_strs": True})
    assert (told["tokens"], told["count"]) == (rows, [len(row) for row in rows])
    assert told["token_strs"] == [[engine.tokenizer.backend.id_to_token(id) for id in row] for row in rows]
    assert post(server, "/detokenize", {"tokens": rows, "skip_special_tokens": True}) == {"text": ["a", PROMPT]}
    chat = post(server, "/tokenize", {"messages": CHAT})["tokens"]
    assert post(server, "/tokenize", {"messages": CHAT, "add_special_tokens": True})["tokens"] == [chat[0], *chat]
    assert post(server, "/v1/messages/count_tokens", {"messages": CHAT})["input_tokens"] == len(chat)
    counted = {"messages": CHAT, "output_config": {"effort": "most"}}
    told = server.ask("POST", "/v1/messages/count_tokens", counted).json["error"]["message"]
    assert told == server.ask("POST", "/v1/messages", counted | {"max_tokens": 1}).json["error"]["message"]


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


# -- vLLM's and SGLang's words in OpenAI's bodies ----------------------------------------------------------------------


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
    (choice,) = post(server, "/v1/chat/completions", {**chat, "allowed_token_ids": [9, 11], "ignore_eos": True})[
        "choices"
    ]
    for one in choice["logprobs"]["content"]:
        told = [other["token_id"] for other in one["top_logprobs"]]
        assert sorted(told) == sorted({7, 9, one["token_id"]}) and len(told) == len(set(told))
    (few,) = post(server, "/v1/completions", {**asked, "logprobs": 3, "prompt_logprobs": 1})["choices"]
    assert all(len(told) <= 2 for told in few["prompt_logprobs"][1:])  # the token, and the likeliest
    plain = post(server, "/v1/completions", {"prompt": PROMPT, "max_tokens": 1})["choices"][0]
    assert plain["prompt_logprobs"] is plain["token_ids"] is None and "hidden_states" not in plain
    chat = post(
        server,
        "/v1/chat/completions",
        {"messages": CHAT, "max_tokens": 1, "return_token_ids": True, "prompt_logprobs": 0},
    )
    assert chat["prompt_token_ids"] == engine.chat_ids(CHAT) and len(chat["prompt_logprobs"]) == len(
        chat["prompt_token_ids"]
    )


def test_usage_is_that_of_each_choice_and_of_each_prompt_once(engine: Engine, server: Live) -> None:
    texts = [PROMPT, f"{PROMPT} and more of it"]
    counts = [len(engine.tokenizer.encode(text)) for text in texts]
    body = {"prompt": texts, "n": 2, "max_tokens": 3, "stream_options": {"include_usage": True}}
    body["stream_options"]["continuous_usage_stats"] = True
    *chunks, last, _ = [data for _, data in events(server, "/v1/completions", body)]
    told = {(chunk["choices"][0]["index"], chunk["usage"]["prompt_tokens"]) for chunk in chunks}
    assert told == {(i, counts[i // 2]) for i in range(4)} and last["usage"]["prompt_tokens"] == sum(counts)
    metas = [{"prompt_tokens": n, "completion_tokens": 1, "cached_tokens": n - 1} for n in (5, 5, 9, 9)]
    usage = usage_of([{"meta_info": meta} for meta in metas], 2)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 12} and usage["total_tokens"] == 18


def test_what_a_tool_or_an_output_has_in_messages() -> None:
    tool: dict[str, Any] = {"name": "f", "input_schema": {"type": "object"}, "strict": True, "defer_loading": False}
    body: dict[str, Any] = {"messages": CHAT, "max_tokens": 1, "tools": [tool], "cache_salt": "a",
                            "cache_control": {"type": "ephemeral"}}  # fmt: skip
    form = {"type": "json_schema", "schema": {"type": "array"}}
    told = to_chat(body | {"output_config": {"format": form, "effort": "max"}})
    assert told["tools"][0]["function"]["strict"] is True and told["cache_salt"] == "a"
    assert told["response_format"] == {"type": "json_schema", "json_schema": {"schema": {"type": "array"}}}
    assert read_chat(told, 1).chat_options.reasoning_effort == "max"
    for change in (
        {"tools": [tool | {"defer_loading": True}]},
        {"tools": [tool | {"input_examples": [{}]}]},
        {"tool_choice": {"type": "auto", "names": ["f"]}},
        {"thinking": {"type": "enabled", "budget": 3}},
        {"output_config": {"format": {"type": "xml"}}},
        {"output_config": {"length": 3}},
    ):
        with pytest.raises(ApiError):
            to_chat(body | change)


def test_calls_and_thoughts_of_a_text_in_sglangs_words(server: Live) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    said = 'Hm.<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    asked: Any = {"text": said, "tools": [tool], "tool_call_parser": "qwen25"}
    told = post(server, "/parse_function_call", asked)
    assert told == {"normal_text": "Hm.", "calls": [{"tool_index": 0, "name": "f", "parameters": '{"a": 1}'}]}
    thought = {"text": "It is July.</think>Yes.", "reasoning_parser": "deepseek-r1"}
    assert post(server, "/separate_reasoning", thought) == {"reasoning_text": "It is July.", "text": "Yes."}
    for path, body, param in (
        ("/parse_function_call", asked | {"tool_call_parser": "none"}, "tool_call_parser"),
        ("/parse_function_call", asked | {"tools": [{}]}, "tools"),
        ("/parse_function_call", asked | {"tools": None}, "tools"),
        ("/separate_reasoning", thought | {"return_blocks": True}, "return_blocks"),
    ):
        answer = server.ask("POST", path, body)
        assert (answer.status, answer.error["param"]) == (400, param)


def test_a_templates_own_switch_goes_before_thinking() -> None:
    body = {"messages": [], "max_tokens": 1, "thinking": {"type": "enabled"}}
    switches = {"enable_thinking": False, "other": 1}
    assert to_chat(body)["chat_template_kwargs"] == {"enable_thinking": True, "thinking": True}
    asked = to_chat(body | {"chat_template_kwargs": switches})
    assert asked["chat_template_kwargs"] == switches | {"thinking": True} and asked["separate_reasoning"] is True


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": 1, "a": 2}', '{"a": ', "[1]"])
def test_arguments_that_are_no_object_stay_the_text_that_they_are(text: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": text}}
    chat = read_chat({"messages": [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "a"}]}, 4)
    assert chat.chat_options.messages[0]["tool_calls"][0]["function"]["arguments"] == text


@pytest.mark.parametrize("content", [False, 0, {}])
def test_a_result_of_a_tool_that_is_no_text(server: Live, content: object) -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": content}
    told = server.ask("POST", "/v1/messages", {"messages": [{"role": "user", "content": [result]}], "max_tokens": 1})
    assert told.status == 400 and "content" in told.json["error"]["message"]


def test_a_profile_in_a_folder_that_cannot_be_written(server: Live) -> None:
    told = server.ask("POST", "/start_profile", {"output_dir": "/proc/profile"}, **KEY)
    assert (told.status, told.error["param"]) == (400, "output_dir") and "choose another" in told.error["message"]
    assert server.ask("POST", "/stop_profile", {}, **KEY).status == 400


@pytest.mark.parametrize("most", [-1, 0, True, "9", 1.5])
def test_a_budget_of_thoughts_that_is_none(most: object) -> None:
    with pytest.raises(ApiError, match="thinking.budget_tokens must be a whole number of at least 1") as caught:
        to_chat({"messages": [], "max_tokens": 1, "thinking": {"type": "enabled", "budget_tokens": most}})
    assert (caught.value.status, caught.value.param) == (400, "thinking")


@pytest.mark.parametrize("alone", [True, False])
def test_one_call_where_one_is_asked_for(alone: bool) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    choice = {"type": "auto", "disable_parallel_tool_use": alone}
    assert to_chat({"messages": [], "max_tokens": 1, "tool_choice": choice})["parallel_tool_calls"] is not alone
    chosen = {"type": "function", "function": {"name": "f"}} if alone else "required"
    chat = read_chat({"messages": [{"role": "user", "content": "a"}], "tools": [tool], "tool_choice": chosen}, 4)
    assert chat.chat_options.parallel is not alone


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


@pytest.mark.parametrize("usage", [True, False])
def test_events_of_text_alone_are_written_as_any_other(usage: bool, engine: Engine) -> None:
    asked = {"stream": True, "stream_options": {"include_usage": usage}}
    body, head, text = asked | {"prompt": PROMPT}, {"model": "box"}, 'a"\\\n\0é\u2028😀 "text": "\\u0000"'
    writer = completion_writer(read_completion(body, 4), engine.tokenizer, 512, head)
    output: Any = {"text": text, "output_ids": [5], "meta_info": {"finish_reason": None}}
    assert writer.piece(0, output) == writer.piece(0, output) == writer.piece(0, output)  # the first is as all were
    assert writer.piece(0, output | {"text": ""}) == b""
    chat = chat_writer(read_chat(asked | {"messages": CHAT}, 4), engine, TemplateFacts(), head)
    for _ in range(2):
        told = json.loads((piece := chat.piece(0, output)).removeprefix(b"data: "))
        assert answers.event(told) == piece and ("usage" in told) is usage
        assert told["choices"] == [{"index": 0, "delta": {"reasoning_content": None, "content": text}, "logprobs": None,
                                    "finish_reason": None}]  # fmt: skip


def test_a_prompt_that_spells_what_the_tokenizer_puts_in_front_has_its_width(engine: Engine, server: Live) -> None:
    begin = engine.tokenizer.decoding.data(engine.tokenizer.bos_id or 0).decode()
    body = {"prompt": f"{begin}a", "echo": True, "logprobs": 0, "max_tokens": 1, "add_special_tokens": False}
    (choice,) = post(server, "/v1/completions", body)["choices"]
    assert choice["logprobs"]["tokens"][:2] == [begin, "a"] and choice["logprobs"]["text_offset"][:2] == [0, len(begin)]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_streams_tell_ids_states_and_usage(path: str, engine: Engine, server: Live) -> None:
    body: dict[str, Any] = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": CHAT}
    body |= {
        "max_tokens": 5,
        "temperature": 0,
        "return_token_ids": True,
        "return_hidden_states": True,
        "ignore_eos": True,
    }
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last, done = [data for _, data in events(server, path, body)]
    assert done == "[DONE]" and last["choices"] == []
    first = chunks[0] if path != "/v1/completions" else chunks[0]["choices"][0]
    ids = engine.tokenizer.encode(PROMPT) if path == "/v1/completions" else engine.chat_ids(CHAT)
    assert first["prompt_token_ids"] == ids and all("prompt_token_ids" not in one for one in chunks[1:])
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert (
        counts == sorted(counts)
        and counts[-1] == 5
        and {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {len(ids)}
    )
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
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
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


def test_custom_roles_where_the_template_writes_them(server: Live) -> None:
    chats = [[{"role": "judge", "content": content}] for content in ("Hi", [{"type": "text", "text": "Hi"}])]
    told = [post(server, "/v1/chat/completions", {"messages": chat, "temperature": 0}) for chat in chats]
    assert told[0]["choices"] == told[1]["choices"]
    template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    with Engine(model_path="box", enable_torch_compile=False, chat_template=template) as engine:
        with pytest.raises(ValueError, match="unknown role 'judge'"):
            engine.chat_ids([*CHAT, {"role": "judge", "content": "Hm"}])


REFUSED = [
    ("/v1/completions", {"allowed_token_ids": []}, "allowed_token_ids"),
    ("/v1/completions", {"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ("/v1/completions", {"allowed_token_ids": [1 << 30]}, "allowed_token_ids"),
    ("/v1/completions", {"allowed_token_ids": [1], "custom_logit_processor": "a"}, "allowed_token_ids"),
    ("/v1/completions", {"use_beam_search": True}, "use_beam_search"),
    ("/v1/completions", {"prompt_logprobs": -1}, "prompt_logprobs"),
    ("/v1/completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ("/v1/completions", {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ("/v1/completions", {"prompt_logprobs": -1}, "prompt_logprobs"),
    (
        "/v1/score",
        {"query": "a", "items": ["b"], "label_token_ids": [1], "truncate_prompt_tokens": 2},
        "truncate_prompt_tokens",
    ),
    ("/v1/completions", {"truncation_side": "middle"}, "truncation_side"),
    ("/v1/completions", {"bad_words": [3]}, "bad_words"),
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
    ("/v1/responses", {"input": [{"type": "function_call", "name": 3}]}, "input"),
    ("/v1/responses", {"reasoning": {"effort": "huge"}}, "reasoning"),
    ("/v1/responses", {"max_output_tokens": 0}, "max_output_tokens"),
    ("/v1/responses", {"text": {"format": {"type": "xml"}}}, "text"),
    ("/v1/responses", {"temprature": 1}, "temprature"),
    ("/generate", {"texts": "a"}, "texts"),
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
    ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [1], "text_1": "a"}, "text_1"),
    ("/v1/score", {"data_1": "a", "text_2": "b"}, "text_2"),
    ("/v1/score", {"text_1": "a", "text_2": []}, "text_2"),
    ("/v1/score", {"text_1": "a", "text_2": "b", "return_pooled_hidden_states": True}, "return_pooled_hidden_states"),
    ("/v1/score", {"text_1": "a", "text_2": "b", "items": ["c"]}, "items"),
    ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [1], "activation": False}, "activation"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages"),
    ("/tokenize", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages"),
    ("/v1/score", {"query": "a", "items": [], "label_token_ids": [1]}, "items"),
    ("/v1/rerank", {"query": "a"}, "documents"),
    ("/detokenize", {"tokens": [[1], "a"]}, "tokens"),
    ("/abort_request", {}, None),
    ("/invocations", {"a": 1}, None),
]
GOOD: dict[str, Any] = {"/v1/completions": {"prompt": "a"}, "/v1/responses": {"input": "a"}, "/generate": {"text": "a"}}


@pytest.mark.parametrize(("path", "change", "param"), REFUSED, ids=[f"{p} {c}"[:60] for p, c, _ in REFUSED])
def test_what_is_refused_is_named(path: str, change: Any, param: str | None, server: Live) -> None:
    answer = server.ask("POST", path, GOOD.get(path, {}) | change, **KEY)
    assert answer.status == 400 and answer.json["error"]["param"] == param, answer.body


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


# -- responses and messages --------------------------------------------------------------------------------------------


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
        assert (told["stop_reason"], block["name"], block["input"]["city"] in ("Paris", "Rome")) == (
            "tool_use",
            "weather",
            True,
        )
    streamed = events(
        server, "/v1/messages", {**body, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    )
    parts = "".join(data["delta"]["partial_json"] for name, data in streamed if name == "content_block_delta")
    assert json.loads(parts)["city"] in ("Paris", "Rome") and streamed[-2][1]["delta"]["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "21"}]}
    turns = [*body["messages"], {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm"}, block]},
             {"role": "user", "content": [result, {"type": "text", "text": "So?"}]}]  # fmt: skip
    assert post(server, "/v1/messages", {**body, "messages": turns, "max_tokens": 2})["content"]


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
    assert names[:2] == ["message_start", "content_block_start"] and all(
        name == data["type"] for name, data in streamed
    )
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert (
        "".join(data["delta"]["text"] for name, data in streamed if name == "content_block_delta") == expected["text"]
    )
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


# -- what stands around the answers ------------------------------------------------------------------------------------


def test_the_schema_is_that_of_the_readers(server: Live) -> None:
    told = server.ask("GET", "/openapi.json").json
    assert told == json.loads(json.dumps(open_api("fengine")))
    docs = server.ask("GET", "/docs").body.decode()
    assert "openapi.json" in docs and all(f"<code>{path}</code>" in docs for path in told["paths"])
    assert "<script" not in docs and "//" not in docs, "the page needs nothing but this server"
    fields = told["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"][
        "properties"
    ]
    known = server.ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1, **dict.fromkeys(fields)})
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
    stats = {
        "running": 2,
        "waiting": 1,
        "pages_used": 5,
        "pages_total": 10,
        "pages_cached": 3,
        "computed_tokens": 30,
        "output_tokens": 20,
    }
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
