"""`python -m fengine.launch_server`: SGLang's command line, each word done, idle or refused by name."""

import contextlib
import json
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from forked import Fork  # noqa: E402

from fengine.api.server_args import ServerArgs, prepare_server_args  # noqa: E402
from fengine.errors import EngineClosedError  # noqa: E402
from fengine.server import launch_server  # noqa: E402
from fengine.server.config import ServerConfig  # noqa: E402
from fengine.server.runtime import Runtime, command_of  # noqa: E402


def test_a_server_by_sglangs_words_answers_and_ends() -> None:
    words = "--model-path box --port 0 --tp 1 --served-model-name mine --reasoning-parser qwen3 --tool-call-parser qwen"
    words += " --api-key sesame --mem-fraction-static 0.8 --log-level info"
    command = [sys.executable, "-m", "fengine.launch_server", *words.split()]
    with contextlib.ExitStack() as stack:
        process = Fork(command, stderr=subprocess.PIPE, text=True)
        stack.callback(stack.enter_context(process).kill)
        told = ""
        while not (found := re.search(r"http://[^ ]+/v1", told)):
            told += process.stderr.readline() if process.stderr else ""
        url = found[0]
        assert "sesame" not in told
        body = json.dumps({"model": "mine", "prompt": "Once", "max_tokens": 3}).encode()
        headers = {"Content-Type": "application/json", "Authorization": "Bearer sesame"}
        asked = urllib.request.Request(f"{url}/completions", body, headers)
        with urllib.request.urlopen(asked, timeout=60) as answer:
            assert json.loads(answer.read())["usage"]["completion_tokens"] == 3
        unknown = body.replace(b"mine", b"mine:sql")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(f"{url}/completions", unknown, headers), timeout=60)
        assert refused.value.code == 404 and b"LoRA is not enabled" in refused.value.read()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_it_serves_is_told(number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr("fengine.api.server_args.prepare_server_args", lambda _: signal.raise_signal(number))
    before = [(each, signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(SystemExit) as end:
        runpy.run_path(launch_server.__file__, run_name="__main__")
    for each, handler in before:
        signal.signal(each, handler)
    assert end.value.code == 128 + number and capfd.readouterr().err == f"fengine: ended by {number.name}\n"


def test_a_runtime_is_a_server_of_its_own() -> None:
    runtime = Runtime(model_path="box", api_key="k", max_total_tokens=4096, disable_radix_cache=True, lora_paths=None)
    try:
        sampling = {"temperature": 0, "max_new_tokens": 3}
        one = json.loads(runtime.generate("Once upon", sampling, return_logprob=True, top_logprobs_num=1))
        assert one["meta_info"]["completion_tokens"] == 3 and len(one["meta_info"]["output_top_logprobs"][0]) == 1
        many = json.loads(runtime.generate(["Once upon", "a"], sampling))
        assert many[0]["text"] == one["text"] and len(many) == 2
        assert "is_embedding" in json.loads(runtime.encode("a"))["error"]["message"]
    finally:
        runtime.shutdown()
        runtime.shutdown()
    with pytest.raises(EngineClosedError):
        runtime.generate("a")


def test_a_runtimes_settings_are_words() -> None:
    args = ServerArgs("a b", tp_size=2, lora_paths=["x=y", "z"], disable_radix_cache=True)
    words = command_of(args).partition("fengine.launch_server ")[2]
    assert words == "--model-path 'a b' --tp-size 2 --disable-radix-cache --lora-paths x=y z"
    assert prepare_server_args(shlex.split(words)) == args


def test_what_is_the_servers_of_the_settings() -> None:
    given: dict[str, Any] = {"host": "::1", "port": 5, "api_key": "k", "skip_server_warmup": True, "warmups": "x"}
    assert launch_server.config_of(ServerArgs("box", **given)) == ServerConfig("::1", 5, "k", any_model_name=True)
    given = {"admin_api_key": "a", "fastapi_root_path": "/llm", "tool_call_parser": "llama3"}
    told = launch_server.config_of(ServerArgs("box", **given))
    assert told == ServerConfig(
        port=30000, admin_key="a", root_path="/llm", any_model_name=True, tool_call_parser="llama3"
    )
    chosen = ServerArgs("box", served_model_name="m", sampling_defaults="openai")
    assert launch_server.config_of(chosen) == ServerConfig(
        port=30000, model_name="m", any_model_name=True, sampling_defaults="openai"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ssl-keyfile", "k"], "not built in this server: ssl_keyfile='k'"),
        (["--port", "70000"], "serve.port must be in"),
        (["--tool-call-parser", "nobody"], "serve.tool_call_parser must be one of gpt-oss, "),
        (["--reasoning-parser", "nobody"], "not built in this server: reasoning_parser='nobody'"),
        (["--quantization", "gguf"], "quantization='gguf' (quantized weights"),
        (["--host", "no.such.host.invalid"], "no.such.host.invalid"),
    ],
)
def test_what_is_not_built_is_refused_before_anything_is_loaded(words: list[str], said: str, capsys: Any) -> None:
    assert launch_server.main(["--model-path", "nothing", "--port", "0", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_port_in_use_is_told_before_the_model_is_loaded(capsys: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert launch_server.main(["--model", "nothing", "--port", str(taken.getsockname()[1])]) == 2
    assert "choose another port" in capsys.readouterr().err


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '{"a": NaN}', "[" * 100_000, "[1]", "{"])
def test_an_object_on_the_command_line_that_is_none(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        prepare_server_args(["--model", "m", "--default-chat-template-kwargs", text])
    assert "--default-chat-template-kwargs: the value must be a JSON object, got" in capsys.readouterr().err


def test_lists_and_objects_on_the_command_line() -> None:
    line = '--model m --lora-paths a=b c --cuda-graph-bs 1 2 8 --default-chat-template-kwargs {"a":1}'
    args = prepare_server_args(line.split())
    assert args.lora_paths == ["a=b", "c"] and args.default_chat_template_kwargs == {"a": 1}
    config = args.to_config()
    short = prepare_server_args("--model m --tp 2 --dp 3 --speculative-draft-model d --ep 1".split())
    assert (short.tp_size, short.dp_size, short.speculative_draft_model_path) == (2, 3, "d")
    assert prepare_server_args("--model m --tensor-parallel-size 2 --data-parallel-size 3".split()).dp_size == 3
    assert config.compile.graph_rows == 8 and config.lora.paths == ("a=b", "c=c")
