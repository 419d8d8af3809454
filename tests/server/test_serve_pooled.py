"""Vectors, labels, scores and ranks over HTTP: each is the engine's, in the words of SGLang, vLLM and Jina."""

import base64
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from serving import BOX, CHAT, PROMPT, Live, live, post, until
from transformers import AutoTokenizer

from fengine.api.engine import Engine
from fengine.errors import ModelLoadError
from fengine.server import heads
from fengine.server.errors import ApiError
from fengine.worker.pooling import read_pooling


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
        every = {"query": PROMPT, "documents": ["a", PROMPT], "top_n": 0, "activation": False}
        assert post(server, "/rerank", every)["results"] == ranked["results"]
        answer = server.ask("POST", "/rerank", every | {"use_activation": True})
        assert (answer.status, answer.error["param"]) == (400, "use_activation")
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
        for name, dtype in heads.DTYPES.items():
            asked: Any = {"input": PROMPT, "encoding_format": "base64", "embed_dtype": name}
            meant = torch.tensor(expected[0]["embedding"]).to(dtype)
            for order in ("native", "little", "big"):
                (found,) = post(server, "/v1/embeddings", asked | {"endianness": order})["data"]
                data = base64.b64decode(found["embedding"])
                data = data if order != "big" else np.frombuffer(data, f"u{meant.itemsize}").byteswap().tobytes()
                assert torch.frombuffer(bytearray(data), dtype=dtype).equal(meant)
        for more in ({}, {"task": "embed"}):
            told = post(server, "/pooling", {"input": [PROMPT, "a"], "padding": "do_not_pad", **more})
            assert [one["data"] for one in told["data"]] == [one["embedding"] for one in engine.encode([PROMPT, "a"])]
            assert [(one["index"], one["object"]) for one in told["data"]] == [(0, "pooling"), (1, "pooling")]
            assert told["id"].startswith("pool-") and told["usage"]["prompt_tokens"] > 2
        (half,) = post(server, "/pooling", {**asked, "embed_dtype": "float16"})["data"]
        assert base64.b64decode(half["data"]) == np.array(expected[0]["embedding"], np.float16).tobytes()
        for more, name in (({"task": "token_embed"}, "task"), ({"padding": "max_length"}, "padding"),
                           ({"activation": False}, "activation")):  # fmt: skip
            answer = server.ask("POST", "/pooling", {"input": "a", **more})
            assert (answer.status, answer.error["param"]) == (400, name)
        for path in ("/v1/embeddings", "/pooling"):  # lists of numbers have neither
            plain = {"input": "a", "embed_dtype": "float16", "endianness": "big"}
            assert post(server, path, plain)["data"] == post(server, path, {"input": "a"})["data"]
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
        for more, numbers in (({}, [one["probs"] for one in told["data"]]), ({"activation": False}, raw)):
            pooled = post(server, "/pooling", {"input": texts, "task": "classify", **more})["data"]
            assert [one["data"] for one in pooled] == numbers
        for more, name in (({"task": "embed"}, "task"), ({"dimensions": 2}, "dimensions")):
            answer = server.ask("POST", "/pooling", {"input": "a", **more})
            assert (answer.status, answer.error["param"]) == (400, name)
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


def test_a_cross_encoders_own_file_comes_first() -> None:
    config = {"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}, "sbert_ce_default_activation_function": "Y"}
    assert heads.of_scores(config, "torch.nn.modules.linear.Identity", True) is heads.bare
    with pytest.raises(ApiError, match="Tanh"):
        heads.of_scores(config, None, True)


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
            assert len(post(server, "/rerank", asked | {"documents": ["Paris " * 9999]})["results"]) == 1  # it is cut
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
            classifier = {"architectures": ["LlamaForSequenceClassification"]}
            for name, said, none in (
                ("config.json", {"sbert_ce_default_activation_function": identity}, {}),
                ("config.json", {"sentence_transformers": {"activation_fn": identity, "version": "4"}}, {}),
                (file, {"activation_fn": identity}, {"activation_fn": None}),
            ):
                rewrite(tmp_path / "m" / name, said)
                engine._parts.pooling = read_pooling(tmp_path / "m", classifier)
                assert [one["score"] for one in post(server, "/score", pairs)["data"]] == raw
                results = post(server, "/rerank", asked)["results"]
                assert [one["relevance_score"] for one in results] == sorted(raw, reverse=True)
                rewrite(tmp_path / "m" / name, dict.fromkeys(said) | none)
            rewrite(tmp_path / "m" / file, {"activation_fn": "torch.nn.modules.activation.Tanh"})
            engine._parts.pooling = read_pooling(tmp_path / "m", classifier)
            answer = server.ask("POST", "/score", pairs)
            assert (answer.status, answer.error["param"]) == (400, "activation") and "Tanh" in answer.error["message"]
            (tmp_path / "m" / file).write_text("{")  # broken: told when a model is loaded, not at each request
            assert server.ask("POST", "/score", pairs).status == 400
            for config in (classifier, {"architectures": ["LlamaForRewardModel"]}):
                with pytest.raises(ModelLoadError, match=file):
                    read_pooling(tmp_path / "m", config)
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
            for most in (1, 2, 0):
                rows = [theirs(one, add_special_tokens=False)["input_ids"][: most or None] for one in documents]
                meant = engine.rerank([[query, theirs.decode(row)] for row in rows])
                told = post(server, "/rerank", asked | {"max_tokens_per_doc": most, "activation": False})["results"]
                by_place = sorted((one["index"], one["relevance_score"]) for one in told)
                assert [score for _, score in by_place] == [one["embedding"] for one in meant]
                assert {one["document"]["text"] for one in told} == set(documents)
            answer = server.ask("POST", "/score", pairs | {"truncate_prompt_tokens": 9999})
            assert (answer.status, answer.error["param"]) == (400, "truncate_prompt_tokens")
            until(server.quiet)
