"""SGLang's own paths: each answer is that of the engine's call behind it."""

import json
from typing import Any

from serving import CHAT, KEY, PROMPT, Live, events, live, post, until

from fengine.api.engine import Engine


def test_generate_is_the_engines(engine: Engine, server: Live) -> None:
    params = {"temperature": 0, "max_new_tokens": 5}
    asked: Any = {"sampling_params": params, "return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}
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
    assert len(post(server, "/generate", {"text": PROMPT, "sampling_params": params})) == 2
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
                           ("/v1/score", {"text_1": "a", "text_2": "b"}),
                           ("/detokenize", {"tokens": [5]}),
                           ("/generate", {"input_ids": [5], "return_text_in_logprobs": True})):  # fmt: skip
            answer = server.ask("POST", path, body)
            assert answer.status == 400 and "tokenizer" in answer.json["message"], (path, answer.body)
        until(server.quiet)
    with (
        Engine(model_path="box", skip_tokenizer_init=True, enable_torch_compile=False, is_embedding=True) as engine,
        live(engine) as server,
    ):
        assert post(server, "/v1/embeddings", {"input": [5, 6]})["usage"]["prompt_tokens"] == 2
        cut = {"truncate_prompt_tokens": 1}
        ranked = {"query": "a", "documents": ["b"]}
        for path, body in (("/v1/embeddings", {"input": "a", **cut}), ("/v1/score", {"text_1": "a", "text_2": "b"}),
                           ("/rerank", ranked), ("/rerank", {**ranked, "max_tokens_per_doc": 1})):  # fmt: skip
            answer = server.ask("POST", path, body)
            assert answer.status == 400 and "tokenizer" in answer.json["message"], (path, answer.body)
        until(server.quiet)


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
