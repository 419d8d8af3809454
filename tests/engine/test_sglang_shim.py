"""Programs written for SGLang, with nothing changed but the module behind `import sglang`: the snippets of its offline
engine's documentation, the calls that lm-eval's backend makes, and the tokenizer through which it reaches.
"""

import argparse
import asyncio
import contextlib
import inspect
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tiny_checkpoints
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import fengine
import fengine.api.server_args
import fengine.utils
from fengine.api import io_struct
from fengine.api.engine import Engine
from fengine.errors import EngineClosedError
from fengine.tokenizer.hf_tokenizer import get_tokenizer, hf_tokenizer
from fengine.tokenizer.tokenizer import Tokenizer
from fengine.worker.hub import BOX


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module `sglang` that is fengine, with the box in place of the hub's models and the CPU in place of a GPU."""
    shim = ModuleType("sglang")
    started: list[Engine] = []

    def start(**settings: Any) -> Engine:
        if not Path(settings["model_path"]).is_dir():
            settings["model_path"] = "box"
        started.append(Engine(**settings | {"device": "cpu", "enable_torch_compile": False}))
        return started[-1]

    for name in vars(fengine)["__all__"]:
        setattr(shim, name, getattr(fengine, name))
    shim.Engine = start  # type: ignore[attr-defined]
    shim.test = fengine.utils  # type: ignore[attr-defined]
    modules = {
        "sglang": shim,
        "sglang.utils": fengine.utils,
        "sglang.srt": ModuleType("sglang.srt"),
        "sglang.srt.server_args": fengine.api.server_args,
        "sglang.test": fengine.utils,
        "sglang.test.doc_patch": fengine.utils,
        "sglang.test.test_utils": fengine.utils,
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield shim
    for engine in started:
        engine.shutdown()


# -- the documentation's snippets --------------------------------------------------------------------------------------

START_NEW = """
import asyncio

import sglang as sgl
import sglang.test.doc_patch
from sglang.utils import async_stream_and_merge, stream_and_merge

llm = sgl.Engine(model_path="qwen/qwen2.5-0.5b-instruct")
"""
START_OLD = """
import asyncio
import io
import os

import requests
import sglang as sgl

from sglang.utils import stream_and_merge, async_stream_and_merge
from sglang.test.test_utils import is_in_ci

if is_in_ci():
    import patch

llm = sgl.Engine(model_path="meta-llama/Meta-Llama-3.1-8B-Instruct")
"""
BATCH = """
prompts = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]

sampling_params = {"temperature": 0.8, "top_p": 0.95}

outputs = llm.generate(prompts, sampling_params)
for prompt, output in zip(prompts, outputs):
    print("===============================")
    print(f"Prompt: {prompt}\\nGenerated text: {output['text']}")
"""
STREAM = """
sampling_params = {
    "temperature": 0.2,
    "top_p": 0.9,
}

for prompt in prompts:
    print(f"Prompt: {prompt}")
    merged_output = stream_and_merge(llm, prompt, sampling_params)
    print("Generated text:", merged_output)
    print()
"""
ASYNC_BATCH = """
async def main():
    outputs = await llm.async_generate(prompts, sampling_params)

    for prompt, output in zip(prompts, outputs):
        print(f"\\nPrompt: {prompt}")
        print(f"Generated text: {output['text']}")


asyncio.run(main())
"""
ASYNC_STREAM = """
async def main():
    for prompt in prompts:
        print(f"\\nPrompt: {prompt}")
        print("Generated text: ", end="", flush=True)

        async for cleaned_chunk in async_stream_and_merge(llm, prompt, sampling_params):
            print(cleaned_chunk, end="", flush=True)

        print()


asyncio.run(main())
"""
SHUTDOWN = """
llm.shutdown()
"""


def run(*cells: str) -> tuple[str, dict[str, Any]]:
    """Runs the cells one after the other in one namespace, as a notebook does. What they printed, and their names."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for cell in cells:
            exec(compile(cell, "<cell>", "exec"), names)
    return printed.getvalue(), names


@pytest.mark.parametrize(
    ("start", "cells"),
    [(START_NEW, (BATCH, STREAM, ASYNC_BATCH, ASYNC_STREAM)), (START_OLD, (BATCH,))],
    ids=["new", "old"],
)
def test_the_offline_engine_notebook(
    sglang: ModuleType, start: str, cells: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old page starts otherwise; what follows is the same."""
    monkeypatch.setitem(sys.modules, "requests", ModuleType("requests"))  # imported by the old page, and not used
    monkeypatch.delenv("SGLANG_IS_IN_CI", raising=False)
    text, names = run(start, *cells)
    llm, prompts, params = names["llm"], names["prompts"], names["sampling_params"]
    assert text.count("Prompt: ") == len(cells) * len(prompts) == text.count("Generated text:")
    for prompt in prompts:
        assert text.count(prompt) >= len(cells)
        greedy = {"temperature": 0, "max_new_tokens": 24}
        whole = llm.generate(prompt, greedy)["text"]
        assert fengine.utils.stream_and_merge(llm, prompt, greedy) == whole and whole
    assert len(llm.generate(prompts[0], params)["output_ids"]) <= 128
    run_again, _ = run("from sglang.test.test_utils import is_in_ci\nprint(is_in_ci())")
    assert run_again == "False\n"
    exec(SHUTDOWN, names)
    exec(SHUTDOWN, names)  # idempotent
    with pytest.raises(EngineClosedError):
        llm.generate(prompts[0])


# -- what else published programs do -----------------------------------------------------------------------------------


def test_engine_attributes(sglang: ModuleType) -> None:
    llm = sglang.Engine(model_path="some/model", log_level="error", trust_remote_code=True)
    manager = llm.tokenizer_manager
    assert manager.context_len == llm._parts.context_length and manager.server_args is llm.server_args
    assert manager.tokenizer.encode("Hello") == llm.tokenizer.encode("Hello")
    manager.abort_request(rid="nobody")
    manager.abort_request(rid="")
    stream = llm.generate("Once", {"max_new_tokens": 500, "ignore_eos": True, "temperature": 0}, stream=True, rid="a_1")
    next(stream)
    manager.abort_request(rid="a_")  # SGLang would take this for the beginning of a_1
    next(stream)
    manager.abort_request(rid="a_1")
    last = list(stream)[-1]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    long: dict[str, Any] = {"max_new_tokens": 500, "ignore_eos": True}
    for prompts, params, rid in (["Once", long | {"n": 2}, "a"], [["Once", "One"], long, "a"],
                                 [["Once", "One"], long | {"n": 2}, ["b", "a"]]):  # fmt: skip
        stream, ends = llm.generate(prompts, params, stream=True, rid=rid), dict[int, Any]()
        first = next(stream)
        manager.abort_request(rid="a")  # all of a call that was given it, or of one of its prompts
        if "b" in rid:
            manager.abort_request(rid="b")
        for chunk in (first, *stream):
            ends[chunk["index"]] = chunk["meta_info"]["finish_reason"]
        assert len(ends) >= 2 and all(end["type"] == "abort" for end in ends.values())

    async def paused() -> list[int]:
        await manager.pause_generation()
        task = asyncio.ensure_future(llm.async_generate("Once", {"max_new_tokens": 4, "temperature": 0}))
        await manager.continue_generation()
        return (await task)["output_ids"]

    assert asyncio.run(paused()) == llm.generate("Once", {"max_new_tokens": 4, "temperature": 0})["output_ids"]


def test_settings_from_a_command_line(sglang: ModuleType) -> None:
    """As SGLang's examples start: add_cli_args, from_cli_args, then Engine(**asdict(server_args))."""
    program = """
import argparse
import dataclasses

import sglang as sgl
from sglang.srt.server_args import ServerArgs

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=2)
ServerArgs.add_cli_args(parser)
args = parser.parse_args(line)
server_args = ServerArgs.from_cli_args(args)
"""
    start = """
llm = sgl.Engine(**dataclasses.asdict(server_args))
output = llm.generate(["Hello"] * args.batch_size, {"max_new_tokens": 3})
"""
    names: dict[str, Any] = {"line": "--model-path some/model --tp 1 --disable-radix-cache --context-length 64".split()}
    exec(program, names)
    server_args = names["server_args"]
    assert (server_args.model_path, server_args.tp_size, server_args.context_length) == ("some/model", 1, 64)
    assert server_args.disable_radix_cache and not server_args.disable_cuda_graph
    exec(start, names)
    assert len(names["output"]) == 2 and names["llm"]._parts.context_length == 64
    defaults = argparse.ArgumentParser()
    fengine.ServerArgs.add_cli_args(defaults)
    parsed = defaults.parse_args(["--model", "m", "--no-enable-torch-compile", "--mem-fraction-static", "0.5"])
    found = fengine.ServerArgs.from_cli_args(parsed)
    assert found == fengine.ServerArgs(model_path="m", enable_torch_compile=False, mem_fraction_static=0.5)


# -- lm-eval's backend -------------------------------------------------------------------------------------------------


class Backend:
    """The calls that lm-eval's SGLang backend makes, and its arithmetic on what comes back."""

    def __init__(self, start: Callable[..., Engine], pretrained: Path, **more: Any) -> None:
        self.model = start(
            model_path=str(pretrained),
            tokenizer_path=None,
            tokenizer_mode="auto",
            load_format="auto",
            trust_remote_code=True,
            dtype="auto",
            kv_cache_dtype="auto",
            device="cuda",
            mem_fraction_static=None,
            tp_size=1,
            dp_size=1,
            chunked_prefill_size=-1,
            **more,
        )
        self.tokenizer = self.model.tokenizer_manager.tokenizer
        self.max_length = self.model.tokenizer_manager.context_len

    def encode(self, text: Any) -> Any:
        return self.tokenizer(text, add_special_tokens=False, truncation=False, return_attention_mask=False).input_ids

    def loglikelihood(self, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """(log-probability of the continuation, whether greedy decoding would give it) of (context, continuation)."""
        rows = [(context + rest)[-self.max_length :] for context, rest in pairs]
        outputs: Any = self.model.generate(
            input_ids=rows,
            sampling_params=[{"temperature": 0, "max_new_tokens": 1}] * len(rows),
            return_logprob=True,
            top_logprobs_num=2,
            logprob_start_len=0,
        )
        results = []
        for (context, rest), ids, output in zip(pairs, rows, outputs, strict=True):
            start = len(ids) - len(rest)
            entries = output["meta_info"]["input_token_logprobs"][start:]
            total = sum(logprob for logprob, _, _ in entries)
            tops = output["meta_info"]["input_top_logprobs"][start:]
            best = [max(top, key=lambda entry: entry[0])[1] for top in tops if top]
            assert len(entries) == len(tops) == len(rest) and context
            results.append((total, best == ids[start:]))
        return results

    def generate_until(self, prompts: list[str], until: list[str], max_gen_toks: int) -> list[str]:
        ids = self.encode(prompts)
        kwargs = {"temperature": 0.0, "skip_special_tokens": False, "spaces_between_special_tokens": False}
        params = [kwargs | {"max_new_tokens": max_gen_toks, "stop": until} for _ in ids]
        outputs: Any = self.model.generate(
            input_ids=ids, sampling_params=params, return_logprob=False, top_logprobs_num=1, logprob_start_len=-1
        )
        return [output.get("text", "") for output in outputs]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny_checkpoints.write(tmp_path_factory.mktemp("lm"), "llama", vocab_size=4096)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (directory / name).write_bytes((BOX / name).read_bytes())
    return directory


def test_loglikelihoods_equal_transformers(sglang: ModuleType, checkpoint: Path) -> None:
    backend = Backend(sglang.Engine, checkpoint, max_running_requests=3)
    reference: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    texts = [
        ("The capital of France", " is Paris."),
        ("Two and two", " are four"),
        ("A", " b c d e f g h"),
        ("Q:", " A"),
    ]
    pairs: list[tuple[list[int], list[int]]] = [(backend.encode(a), backend.encode(b)) for a, b in texts]
    context = backend.encode("Once upon a time")
    with torch.no_grad():  # a continuation that greedy decoding gives
        whole = reference.generate(torch.tensor([context]), max_new_tokens=5, do_sample=False)[0].tolist()
    pairs.append((context, whole[len(context) :]))
    pairs.append((list(range(3, backend.max_length)), [5, 6]))  # as long as may be: a window of a rolling evaluation
    results = backend.loglikelihood(pairs)
    for (before, after), (total, greedy) in zip(pairs, results, strict=True):
        with torch.no_grad():
            logprobs = reference(torch.tensor([before + after])).logits[0].log_softmax(-1)[-len(after) - 1 : -1]
        expected = logprobs.gather(1, torch.tensor(after)[:, None]).sum().item()
        assert total == pytest.approx(expected, abs=1e-3)
        assert greedy == (logprobs.argmax(-1).tolist() == after)
    assert [greedy for _, greedy in results][4] and not all(greedy for _, greedy in results)
    assert backend.loglikelihood(pairs[:1])[0] == results[0]  # the same bits alone


def test_generate_until(sglang: ModuleType) -> None:
    backend = Backend(sglang.Engine, BOX)
    eos = backend.tokenizer.decode(backend.tokenizer.eos_token_id)
    assert eos == backend.tokenizer.eos_token and backend.tokenizer.bos_token_id is not None
    prompts = ["The capital of France is", "one two three four", "Hello"]
    texts = backend.generate_until(prompts, [eos], 20)
    assert all(texts)
    stop = texts[0][3:6]
    cut = backend.generate_until(prompts, [stop, eos], 20)
    assert cut == [text.partition(stop)[0] for text in texts]


# -- the tokenizer behind tokenizer_manager ----------------------------------------------------------------------------

CHAT = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": " It is"}]


def test_the_tokenizer_is_transformers_own() -> None:
    tokenizer = Tokenizer.from_directory(BOX)
    ours, hf = hf_tokenizer(tokenizer.with_chat_template("{{ messages[0].content }}"), 512), get_tokenizer("box")
    assert type(ours) is type(hf) is type(AutoTokenizer.from_pretrained(BOX)) and ours.model_max_length == 512
    assert ours.apply_chat_template(CHAT, tokenize=False) == CHAT[0]["content"]
    assert hf.apply_chat_template(CHAT, tokenize=False) == tokenizer.apply_chat_template(
        CHAT, add_generation_prompt=False
    )
    ours("text " * 9, truncation=True, max_length=3, padding="max_length")
    assert len(tokenizer.encode("text " * 9)) > 9  # what programs set in theirs leaves the engine's as it is


# -- signatures --------------------------------------------------------------------------------------------------------

SIGNATURES = {
    "encode": "prompt image_data=None audio_data=None video_data=None dimensions=None lora_path=None "
    "embed_override_token_id=None embed_overrides=None external_trace_header=None rid=None",
    "rerank": "prompt",
    "score": "query=None items=None label_token_ids=None apply_softmax=False item_first=False "
    "embed_override_token_id=None query_embed_overrides=None item_embed_overrides=None "
    "return_pooled_hidden_states=False score_extraction_token_id=None temperature=1.0 return_token_logprobs=False "
    "stacked_query_item_embed_overrides=None",
    "open_session": "capacity_of_str_len session_id=None streaming=False timeout=None",
    "close_session": "session_id",
}
SIGNATURES |= {f"async_{name}": SIGNATURES[name] for name in ("encode", "score")}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_sglangs(name: str) -> None:
    """Behind theirs, by keyword only, ours may come."""
    parameters = list(inspect.signature(getattr(Engine, name)).parameters.values())[1:]
    parameters = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
    shown = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]
    assert " ".join(shown) == SIGNATURES[name] and all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    assert inspect.iscoroutinefunction(getattr(Engine, name)) == name.startswith("async_")


def test_the_manager_takes_sglangs_records(sglang: ModuleType) -> None:
    """As trainers call it: memory given back and taken again, a pause, weights from disk."""
    llm = sglang.Engine(model_path="some/model", enable_memory_saver=True)
    manager = llm.tokenizer_manager

    async def used() -> list[int]:
        await manager.release_memory_occupation(io_struct.ReleaseMemoryOccupationReqInput(tags=["kv_cache"]), None)
        await manager.resume_memory_occupation(io_struct.ResumeMemoryOccupationReqInput(), None)
        await manager.pause_generation(io_struct.PauseGenerationReqInput(mode="in_place"))
        await manager.continue_generation(io_struct.ContinueGenerationReqInput())
        assert (await manager.update_weights_from_disk(io_struct.UpdateWeightFromDiskReqInput(str(BOX)))).success
        req = io_struct.GenerateReqInput(input_ids=[5, 6], sampling_params={"temperature": 0, "max_new_tokens": 4})
        return (await anext(manager.generate_request(req, None)))["output_ids"]

    assert (
        asyncio.run(used())
        == llm.generate(input_ids=[5, 6], sampling_params={"temperature": 0, "max_new_tokens": 4})["output_ids"]
    )
