"""What type checkers tell users: one pyright run over a user's script and the code that the READMEs show."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from fengine.api import generate_input, types

ROOT = Path(__file__).resolve().parents[2]
USER = """
import asyncio
from collections.abc import AsyncIterator, Iterator

import fengine
from fengine import Engine, SamplingParams, ServerArgs

llm = Engine(model_path="box", page_size=16, log_level="info")
again = Engine(server_args=ServerArgs("box", stream_interval=2))
one = llm.generate("Hello", {"temperature": 0, "max_new_tokens": 8}, return_logprob=True)
reveal_type(one)  # GenerateOutput
reveal_type(one["meta_info"]["output_token_logprobs"][0][0])  # float | None
several = llm.generate(["Hello", "Bye"], [{"top_p": 0.9}, {"top_k": 3}])
reveal_type(several)  # list[GenerateOutput]
reveal_type(llm.generate(input_ids=[1, 2]))  # GenerateOutput
reveal_type(llm.generate(input_ids=[[1], [2]], sampling_params={"n": 1}))  # list[GenerateOutput]
for chunk in llm.generate("Hello", stream=True):
    reveal_type(chunk["text"])  # str


async def main() -> None:
    reveal_type(await llm.async_generate("Hello", SamplingParams()))  # GenerateOutput
    reveal_type(await llm.async_generate(["Hello"]))  # list[GenerateOutput]
    async for chunk in await llm.async_generate("Hello", stream=True):
        reveal_type(chunk)  # GenerateOutput
    reveal_type(await llm.async_score("q", ["a"], [1]))  # ScoreResult


asyncio.run(main())
reveal_type(llm.encode("text"))  # EncodeOutput
reveal_type(llm.encode(["text"]))  # list[EncodeOutput]
reveal_type(llm.score("q", ["a"], label_token_ids=[1]))  # ScoreResult
reveal_type(llm.flush_cache().success)  # bool
reveal_type(llm.update_weights_from_disk("other").message)  # str
reveal_type(llm.open_session(1000))  # str | None
reveal_type(llm.apply_chat_template([{"role": "user"}], tokenize=True))  # list[int]
reveal_type(llm.server_args.page_size)  # int | None
reveal_type(fengine.__version__)  # str
llm.generate("Hello", retrun_logprob=True)  # error
llm.generate(5)  # error
llm.open_session()  # error
Engine(model_path="box", page_sise=4)  # error
Engine(model_path=5)  # error
one["txt"]  # error
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("user")
    (folder / "user.py").write_text(USER)
    for path in [ROOT / "README.md", *sorted((ROOT / "fengine").rglob("README.md"))]:
        for i, block in enumerate(re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)):
            (folder / f"{path.parent.name}_{i}.py").write_text(block)
    (folder / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)], "pythonVersion": "3.11"}))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=500)
    return json.loads(result.stdout)["generalDiagnostics"]


def test_a_users_script_has_the_types_that_are_promised(told: list[dict[str, Any]]) -> None:
    found = {}
    for item in told:
        if item["file"].endswith("user.py"):
            line = item["range"]["start"]["line"]
            kind = re.search(r' is "(.*)"$', item["message"].splitlines()[0])
            found[line] = kind[1] if item["severity"] == "information" and kind else item["severity"]
    wanted = {i: line.rpartition("# ")[2] for i, line in enumerate(USER.splitlines()) if "# " in line}
    assert found == wanted


def test_the_code_of_the_readmes_has_no_type_error(told: list[dict[str, Any]]) -> None:
    wrong = [
        f"{Path(item['file']).name}:{item['range']['start']['line'] + 1}: {item['message']}"
        for item in told
        if not item["file"].endswith("user.py") and item["severity"] == "error"
    ]
    assert not wrong, "\n".join(wrong)


def test_options_of_a_call_are_those_that_it_has() -> None:
    """`CallOptions` is for type checkers what GenerateReqInput is at run time."""
    own = {name for name in get_type_hints(generate_input.GenerateReqInput)}
    assert get_type_hints(types.CallOptions).keys() == own - {
        "text", "sampling_params", "input_ids", "stream", *generate_input.NOT_BUILT,
    }  # fmt: skip
