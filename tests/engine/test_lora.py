"""LoRA in a running engine: what an adapter computes, whose bits it changes, how adapters come and go.

Oracles: a checkpoint with the adapter merged into its weights; the same request alone; and PEFT where it is installed.
"""

import asyncio
import gc
import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import tiny_adapters
import tiny_checkpoints
import torch
from books import check_scheduler
from loops import in_loop
from safetensors.torch import load_file, save_file

from fengine import Engine
from fengine.errors import AdapterError, ConfigError, InvalidRequestError, UnsupportedFeatureError
from fengine.ops.lora import Adapted

Result = list[tuple[list[int], list[float]]]
RANKS = (1, 4, 8, 16, 24, 32, 2, 3)
NAMES = [f"a{i}" for i in range(len(RANKS))]
GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


def engine(model: Path | str, **options: Any) -> Engine:
    base: dict[str, Any] = {
        "page_size": 4,
        "max_total_tokens": 4096,
        "chunked_prefill_size": 64,
        "max_running_requests": 16,
    }
    eager: dict[str, Any] = {"enable_torch_compile": False, "disable_cuda_graph": False}
    return Engine(model_path=str(model), skip_tokenizer_init=True, **(base | eager | options))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoints.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def paths(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Eight adapters; a3 changes q and v only, a4 only the MLP of one layer."""
    folder, some = tmp_path_factory.mktemp("adapters"), {3: ("q_proj", "v_proj"), 4: ("gate_proj", "down_proj")}
    for i, rank in enumerate(RANKS):
        values = tiny_adapters.tensors(model, rank, some.get(i, tiny_adapters.ALL), seed=i, gain=0.5)
        layers = {"layers_to_transform": [1]} if i == 4 else {}
        values = {name: value for name, value in values.items() if not layers or ".layers.1." in name}
        tiny_adapters.write(folder / NAMES[i], values, rank, lora_alpha=rank, **layers)
    return {name: str(folder / name) for name in NAMES}


@pytest.fixture(scope="module")
def llm(model: Path, paths: dict[str, str]) -> Iterator[Engine]:
    with engine(model, lora_paths=paths) as made:
        yield made


def work(seed: int = 0, count: int = 16) -> list[tuple[list[int], dict[str, Any], str | None]]:
    """Ragged prompts, half of them with a common head; greedy and seeded; nine in ten with an adapter."""
    draw = random.Random(seed)
    head = [draw.randrange(3, 131) for _ in range(21)]
    found = []
    for i in range(count):
        prompt = [draw.randrange(3, 131) for _ in range(draw.choice([1, 3, 4, 5, 16, 33, 70]))]
        params = {"max_new_tokens": draw.randint(4, 24), "ignore_eos": True, "sampling_seed": i}
        params |= {"temperature": 0} if i % 2 else {"temperature": 0.9, "top_p": 0.95}
        found.append((head + prompt if i % 3 else prompt, params, ([*NAMES, None])[i % 9]))
    return found


def results(outputs: Any) -> Result:
    return [(o["output_ids"], [entry[0] for entry in o["meta_info"]["output_token_logprobs"]]) for o in outputs]


def batch(llm: Engine, requests: Any) -> Result:
    prompts, params, names = map(list, zip(*requests, strict=True))
    return results(llm.generate(input_ids=prompts, sampling_params=params, lora_path=names, return_logprob=True))


@pytest.fixture(scope="module")
def reference(llm: Engine) -> Result:
    """Every request alone, on an empty cache."""
    found = []
    for request in work():
        llm.flush_cache()
        found += batch(llm, [request])
    return found


def check_idle(llm: Engine) -> None:
    scheduler = llm._parts.core.stepper.scheduler
    in_loop(llm._parts.core, lambda: check_scheduler(scheduler))
    assert scheduler.counters()["used_pages"] == 0


# -- what an adapter computes ------------------------------------------------------------------------------------------


def merge(model: Path, adapter: Path, folder: Path, alpha: float) -> Path:
    """The checkpoint with alpha / rank * B A added to its weights."""
    weights, tensors = load_file(model / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, a in tensors.items():
        if ".lora_A." in name:
            b = tensors[name.replace("lora_A", "lora_B")]
            weight = name.removeprefix("base_model.model.").replace(".lora_A", "")
            weights[weight] = (weights[weight].double() + alpha / len(a) * b.double() @ a.double()).float()
    folder.mkdir()
    (folder / "config.json").write_text((model / "config.json").read_text())
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "glm4", "phi3", "olmo2"])
def test_an_adapter_is_what_its_merged_weights_are(family: str, tmp_path: Path) -> None:
    model = tiny_checkpoints.write(tmp_path / "model", family, pad_token_id=0, head_dim=16)
    adapter = tiny_adapters.random_adapter(tmp_path / "adapter", model, 8, lora_alpha=12)
    merged = merge(model, adapter, tmp_path / "merged", 12)
    requests = [(ids, params | {"temperature": 0}, "x") for ids, params, _ in work(3, 6)]
    with engine(model, lora_paths={"x": str(adapter)}) as llm:
        got, base = batch(llm, requests), batch(llm, [(*rest, None) for *rest, _ in requests])
    with engine(merged) as llm:
        want = batch(llm, [(*rest, None) for *rest, _ in requests])
    for (ids, logprobs), (want_ids, want_logprobs), (base_ids, _) in zip(got, want, base, strict=True):
        assert ids == want_ids != base_ids
        torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(want_logprobs), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("rank", "config"),
    [
        (4, {"use_rslora": True}),
        (4, {"target_modules": r"model\.layers\.\d+\.self_attn\.(q|v)_proj"}),
        (4, {"target_modules": "all-linear", "rank_pattern": {r"layers\.1\..*down_proj": 2}}),
        (6, {"alpha_pattern": {"q_proj": 3, "^model.layers.0.self_attn.v_proj": 5}, "exclude_modules": ["up_proj"]}),
        (3, {"layers_to_transform": [0], "layers_pattern": "layers"}),
    ],
)
def test_configs_mean_what_they_mean_to_peft(rank: int, config: dict[str, Any], model: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="compares with PEFT itself: pip install peft")
    transformers = pytest.importorskip("transformers")
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    values = {"r": rank, "lora_alpha": 8, "target_modules": list(tiny_adapters.ALL), "task_type": "CAUSAL_LM"}
    torch.manual_seed(rank)
    adapted = peft.get_peft_model(base, peft.LoraConfig(**(values | config | {"init_lora_weights": False})))
    adapted.save_pretrained(tmp_path / "adapter")
    ids = [5, 17, 99, 23, 64, 7]
    with torch.no_grad():
        want = torch.log_softmax(adapted.eval()(torch.tensor([ids])).logits[0, :-1], -1)
    want = want[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    with engine(model, lora_paths={"x": str(tmp_path / "adapter")}) as llm:
        meta = llm.generate(
            input_ids=ids, sampling_params={"max_new_tokens": 1}, lora_path="x", return_logprob=True,
            logprob_start_len=0,
        )["meta_info"]  # type: ignore[call-overload]  # fmt: skip
    got = torch.tensor([entry[0] for entry in meta["input_token_logprobs"][1:]])
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


# -- whose bits --------------------------------------------------------------------------------------------------------


def adapted_leaves(llm: Engine) -> list[str]:
    layer = llm._parts.weights.params["layers"][0]
    return [key for key, leaf in layer.items() if isinstance(leaf, Adapted)]


def test_adapters_differ_and_none_is_the_engine_without_lora(llm: Engine, model: Path) -> None:
    prompt = [7, 9, 11, 50]
    outputs = {str(batch(llm, [(prompt, GREEDY, name)])) for name in [*NAMES, None]}
    assert len(outputs) == len(NAMES) + 1
    with engine(model) as plain:
        assert batch(plain, [(prompt, GREEDY, None)]) == batch(llm, [(prompt, GREEDY, None)])
        assert not adapted_leaves(plain)


LAYOUTS: dict[str, dict[str, Any]] = {
    "chunks of 7, pages of 1": {"chunked_prefill_size": 7, "max_running_requests": 5, "page_size": 1},
    "overlapped steps, whole prompts": {"disable_overlap_schedule": False, "chunked_prefill_size": 2048},
    "preempted": {"max_total_tokens": 124},
    "two slots": {"max_loras_per_batch": 2, "disable_overlap_schedule": False},
    "larger padding, other slots": {"max_lora_rank": 100, "max_loras_per_batch": 11},
    "guessing ahead": {"speculative_algorithm": "NGRAM"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_do_not_depend_on_the_layout(model: Path, paths: dict[str, str], reference: Result, layout: str) -> None:
    requests = work()
    order = random.Random(len(layout)).sample(range(len(requests)), len(requests))
    with engine(model, lora_paths=paths, **LAYOUTS[layout]) as llm:
        for _ in range(2):  # the second time the prefix cache is warm
            assert batch(llm, [requests[i] for i in order]) == [reference[i] for i in order]
            check_idle(llm)
        if layout == "preempted":
            assert llm.stats()["preemptions"] > 0


@pytest.mark.parametrize("quantization", ["fp8", "w8a8_fp8"])
def test_bits_over_weights_in_few_bits(model: Path, paths: dict[str, str], quantization: str, tmp_path: Path) -> None:
    """Under each layout, with a draft, and with adapters that are loaded and unloaded meanwhile."""
    requests: Any = work(count=9)
    drafted: dict[str, Any] = {
        "speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(model),
        "speculative_adaptive": False, "page_size": 8,
    }  # fmt: skip
    few = {"quantization": quantization, "dtype": "bfloat16"}
    with engine(model, lora_paths=paths, **few) as llm:
        want = [batch(llm, [request])[0] for request in requests]
        llm.flush_cache()
        assert batch(llm, requests) == want
        for name in NAMES[:4]:
            assert llm.unload_lora_adapter(name).success and llm.load_lora_adapter(name, paths[name]).success
        assert batch(llm, requests[::-1]) == want[::-1]
    for name, layout in (LAYOUTS | {"draft": drafted}).items():
        with engine(model, lora_paths=paths, **few, **layout) as llm:
            assert batch(llm, requests) == want, name
            check_idle(llm)
            assert name != "draft" or llm.stats()["draft_tokens"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", [None, "fp8", "w8a8_fp8"])
def test_bits_on_a_gpu(model: Path, paths: dict[str, str], quantization: str | None) -> None:
    """In bfloat16: in a graph, where x A^T runs beside x W^T, and without; alone, among others, preempted."""
    requests, found = work(count=36), []
    few = {"device": "cuda", "dtype": "bfloat16", "quantization": quantization}
    for layout in ({}, {"disable_cuda_graph": True, "max_total_tokens": 124}, {"max_loras_per_batch": 2}):
        with engine(model, lora_paths=paths, **few, **layout) as llm:
            if not found:
                for request in requests:
                    llm.flush_cache()
                    found += batch(llm, [request])
            order = random.Random(len(layout)).sample(range(len(requests)), len(requests))
            assert batch(llm, [requests[i] for i in order]) == [found[i] for i in order]
            check_idle(llm)
    bare = [i for i, (*_, name) in enumerate(requests) if name is None]
    with engine(model, **few) as llm:
        assert batch(llm, [requests[i] for i in bare]) == [found[i] for i in bare]


def test_bits_of_random_arrivals(llm: Engine, reference: Result) -> None:
    assert arrivals(llm) == reference


def arrivals(llm: Engine) -> Result:
    requests, got = work(), {}

    async def arrive(i: int) -> None:
        await asyncio.sleep(random.Random(i).random() * 0.2)
        ids, params, name = requests[i]
        output = await llm.async_generate(input_ids=ids, sampling_params=params, lora_path=name, return_logprob=True)
        got[i] = results([output])[0]

    async def all_of_them() -> None:
        await asyncio.gather(*(arrive(i) for i in range(len(requests))))

    asyncio.run(all_of_them())
    return [got[i] for i in range(len(requests))]


def test_prefix_pages_belong_to_one_load_of_one_adapter(llm: Engine, paths: dict[str, str]) -> None:
    prompt = list(range(3, 60))
    llm.flush_cache()

    def cached(name: str | None) -> int:
        output: Any = llm.generate(input_ids=prompt, sampling_params=GREEDY, lora_path=name)
        return output["meta_info"]["cached_tokens"]

    assert [cached(name) for name in ("a0", "a1", None, "a0", "a1", None)] == [0, 0, 0, 56, 56, 56]
    assert llm.unload_lora_adapter("a0").success and llm.load_lora_adapter("a0", paths["a0"]).success
    assert cached("a0") == 0
    salted: Any = llm.generate(input_ids=prompt, sampling_params=GREEDY, lora_path="a1", cache_salt="s")
    assert salted["meta_info"]["cached_tokens"] == 0


def test_input_logprobs_embeddings_and_sessions_take_adapters(llm: Engine, model: Path, paths: dict[str, str]) -> None:
    ids = list(range(20, 40))
    asked = {"return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 1}}
    mixed: Any = llm.generate(input_ids=[ids] * 3, lora_path=["a1", None, "a2"], **asked)
    alone: Any = [llm.generate(input_ids=ids, lora_path=name, **asked) for name in ("a1", None, "a2")]
    got = [[o["meta_info"]["input_token_logprobs"] for o in outputs] for outputs in (mixed, alone)]
    assert got[0] == got[1] and got[0][0] != got[0][1] != got[0][2]
    session = {"id": llm.open_session(1000)}
    first: Any = llm.generate(input_ids=ids, sampling_params=GREEDY, lora_path="a1", session_params=session)
    turn: Any = llm.generate(input_ids=[9], sampling_params=GREEDY, lora_path="a2", session_params=session)
    whole: Any = llm.generate(input_ids=[*ids, *first["output_ids"], 9], sampling_params=GREEDY, lora_path="a2")
    assert turn["output_ids"] == whole["output_ids"]
    with engine(model, lora_paths=paths, is_embedding=True) as reader:
        vectors: Any = reader.encode([ids] * 3, lora_path=["a1", None, "a2"])
        assert [v["embedding"] for v in vectors] == [
            reader.encode(ids, lora_path=name)["embedding"]
            for name in ("a1", None, "a2")  # type: ignore[call-overload]
        ]
        assert len({str(v["embedding"]) for v in vectors}) == 3


def test_new_base_weights_leave_the_adapters(model: Path, paths: dict[str, str], tmp_path: Path) -> None:
    other = tiny_checkpoints.write(tmp_path / "other", seed=5)
    request = [([5, 6, 7], GREEDY, "a2")]
    with engine(other, lora_paths={"a2": paths["a2"]}) as llm:
        want = batch(llm, request)
    with engine(model, lora_paths={"a2": paths["a2"]}) as llm:
        before = batch(llm, request)
        assert llm.update_weights_from_disk(str(other)).success
        assert batch(llm, request) == want != before


# -- coming and going --------------------------------------------------------------------------------------------------


def test_load_and_unload_answer_as_sglang_does(model: Path, paths: dict[str, str]) -> None:
    with engine(model, enable_lora=True, max_loras_per_batch=2, max_loaded_loras=3, max_lora_rank=32) as llm:
        answer = llm.load_lora_adapter("a", paths["a0"], pinned=True)
        assert answer == (True, "", {"a": paths["a0"]})
        for bad, words in (
            (llm.load_lora_adapter("a", paths["a1"]), "already loaded"),
            (llm.load_lora_adapter("b", paths["a1"], pinned=True), "cannot be pinned: 1 of max_loras_per_batch=2"),
            (llm.load_lora_adapter("b", "no/such/place/at/all"), "does not exist"),
            (llm.unload_lora_adapter("b"), "'b' does not exist. Loaded adapters: ['a']"),
            (asyncio.run(llm.async_unload_lora_adapter("b")), "does not exist"),
        ):
            assert not bad.success and words in bad.error_message and bad.loaded_adapters == {"a": paths["a0"]}
        for call in (
            lambda: llm.load_lora_adapter("", paths["a0"]),
            lambda: llm.load_lora_adapter("b", 5),  # type: ignore[arg-type]
            lambda: llm.load_lora_adapter("b", paths["a1"], pinned="yes"),  # type: ignore[arg-type]
            lambda: llm.load_lora_adapter_from_tensors("b", [], {}),  # type: ignore[arg-type]
            lambda: llm.load_lora_adapter_from_tensors("b", {}, {}, load_format="pickle"),
        ):
            with pytest.raises(InvalidRequestError):
                call()
        tensors = load_file(Path(paths["a1"]) / "adapter_model.safetensors")
        config = json.loads((Path(paths["a1"]) / "adapter_config.json").read_text())
        assert llm.load_lora_adapter_from_tensors("b", tensors, config).success
        assert asyncio.run(llm.async_load_lora_adapter("c", paths["a1"])).loaded_adapters.keys() == {"a", "b", "c"}
        assert batch(llm, [([5], GREEDY, "b")]) == batch(llm, [([5], GREEDY, "c")])
        assert llm.unload_lora_adapter("c").success
        with pytest.raises(InvalidRequestError, match="never been loaded: 'c'. Loaded: 'a', 'b'"):
            llm.generate(input_ids=[5], lora_path="c")


def test_an_unknown_adapter_is_refused_before_anything_is_queued(llm: Engine) -> None:
    for names, words in (
        (["a0", "nobody"], "prompt 1: Got LoRA adapter that has never been loaded: 'nobody'"),
        (["a0"], "lora_path has 1 entries for 2"),
        ([5, None], "prompt 0: lora_path must be the name"),
        ("A0", "never been loaded"),
    ):
        finished = llm.stats()["finished"]
        with pytest.raises(InvalidRequestError, match=words):
            llm.generate(input_ids=[[5], [6]], lora_path=names)  # type: ignore[arg-type]
        assert llm.stats()["finished"] == finished and not llm.stats()["running"]


def test_what_was_evicted_is_read_again_unless_it_has_changed(
    model: Path, paths: dict[str, str], reference: Result, tmp_path: Path
) -> None:
    requests = work()
    copy = tiny_adapters.write(tmp_path / "copy", load_file(Path(paths["a2"]) / "adapter_model.safetensors"), 8)
    options = {"enable_lora": True, "max_lora_rank": 32, "max_loras_per_batch": 2, "max_loaded_loras": 2}
    with engine(model, **options) as llm:
        for name in NAMES:
            assert llm.load_lora_adapter(name, paths[name]).success
        adapters = llm._parts.adapters
        assert adapters is not None and sum(e.load is not None for e in adapters._entries.values()) == 2
        assert batch(llm, requests) == reference  # all at once: loads that were given up go on for their requests
        gone, read, threads = adapters.given_up([*NAMES, 7])[0], adapters._reload, []
        adapters._reload = lambda name: (threads.append(threading.current_thread()), read(name))[1]
        asyncio.run(llm.async_generate(input_ids=[5], sampling_params=GREEDY, lora_path=gone))  # type: ignore[arg-type]
        assert len(threads) == 1 and threads[0] is not threading.current_thread()  # the event loop went on
        assert llm.load_lora_adapter("copy", str(copy)).success
        for name in ("a0", "a1"):
            llm.generate(input_ids=[5], sampling_params=GREEDY, lora_path=name)
        told = (copy / "adapter_config.json").read_text()
        (copy / "adapter_config.json").write_text(told.replace("{", '{"lora_alpha": 3, ', 1))
        with pytest.raises(AdapterError, match="has changed since it was loaded"):
            llm.generate(input_ids=[5], lora_path="copy")
        (copy / "adapter_config.json").write_text(told)
        tiny_adapters.write(copy, tiny_adapters.tensors(model, 8, seed=99), 8)
        with pytest.raises(AdapterError, match="has changed since it was loaded"):
            llm.generate(input_ids=[5], lora_path="copy")
        with pytest.raises(AdapterError, match="has changed since it was loaded"):
            asyncio.run(llm.async_generate(input_ids=[5], lora_path="copy"))  # type: ignore[arg-type]


def test_a_pinned_adapter_keeps_its_slot(model: Path, paths: dict[str, str]) -> None:
    written: list[str] = []
    lora_paths = [{"lora_name": n, "lora_path": paths[n], "pinned": n == "a0"} for n in ("a0", "a1")]
    with engine(model, lora_paths=lora_paths, max_loras_per_batch=2, max_loaded_loras=2, max_lora_rank=32) as llm:
        tables = llm._parts.core.stepper.input_batch
        write = tables.write_adapter
        assert write is not None
        adapters: Any = llm._parts.adapters
        tables.write_adapter = lambda slot, number: (written.append(adapters._loads[number].name), write(slot, number))[
            1
        ]
        assert llm.load_lora_adapter("a2", paths["a2"]).success
        for name in ("a0", "a1", "a2", "a1", "a0", "a2"):
            llm.generate(input_ids=[5], sampling_params=GREEDY, lora_path=name)
            assert len(adapters.given_up(["a0", "a1", "a2"])) == 1 and not adapters.given_up("a0")  # nor its image
        assert written == ["a0", "a1", "a2", "a1", "a2"]
        llm.unload_lora_adapter("a0")
        for name in ("a1", "a2", "a1", "a2"):
            llm.generate(input_ids=[5], sampling_params=GREEDY, lora_path=name)
        assert written[5:] == ["a1"]  # both slots are free for all now


def test_what_was_just_read_again_is_not_given_up_where_nothing_else_may_be(model: Path, paths: dict[str, str]) -> None:
    given = Path(paths["a0"])
    with engine(model, enable_lora=True, max_lora_rank=32, max_loras_per_batch=1, max_loaded_loras=1) as llm:
        assert llm.load_lora_adapter("a2", paths["a2"]).success
        request = [([5, 6, 7], GREEDY, "a2")]
        want, adapters = batch(llm, request), cast(Any, llm._parts.adapters)
        config = json.loads((given / "adapter_config.json").read_text())
        tensors = load_file(given / "adapter_model.safetensors")  # such an adapter keeps its image
        assert llm.load_lora_adapter_from_tensors("a0", tensors, config).success
        assert "all of them pinned or given as tensors" in llm.load_lora_adapter("a1", paths["a1"]).error_message
        assert adapters.given_up([*NAMES]) == ["a2"] and want != batch(llm, [([5, 6, 7], GREEDY, None)])
        assert batch(llm, request) == want and not adapters.given_up([*NAMES])


def test_requests_finish_with_an_adapter_that_is_unloaded_meanwhile(
    llm: Engine, paths: dict[str, str], reference: Result
) -> None:
    requests = work()
    got: Result = []
    thread = threading.Thread(target=lambda: got.extend(batch(llm, requests)))
    llm.pause_generation("in_place")
    thread.start()
    while llm.stats()["waiting"] < len(requests):
        pass
    assert all(llm.unload_lora_adapter(name).success for name in NAMES)
    llm.continue_generation()
    thread.join()
    assert got == reference
    assert all(llm.load_lora_adapter(name, paths[name]).success for name in NAMES)


def test_loads_and_unloads_under_traffic_change_no_bit(model: Path, paths: dict[str, str], reference: Result) -> None:
    """Fixed requests run while other adapters come and go, are used, and requests are aborted."""
    requests = work()
    stop, faults = threading.Event(), []

    def others(llm: Engine, seed: int) -> None:
        draw = random.Random(seed)
        while not stop.is_set():
            name, action = f"other{draw.randrange(4)}", draw.random()
            try:
                if action < 0.4:
                    llm.load_lora_adapter(name, paths[draw.choice(NAMES)])
                elif action < 0.6:
                    llm.unload_lora_adapter(name)
                elif action < 0.9:
                    llm.generate(input_ids=[3, 4, 5], sampling_params={"max_new_tokens": 3}, lora_path=name)
                else:
                    llm.abort("nobody's")
            except InvalidRequestError as error:
                if "never been loaded" not in str(error):
                    faults.append(error)
            except Exception as error:
                faults.append(error)

    options = {"max_loras_per_batch": 3, "max_loaded_loras": 10, "disable_overlap_schedule": False}
    with engine(model, lora_paths=paths, **options) as llm:
        threads = [threading.Thread(target=others, args=(llm, seed)) for seed in range(2)]
        for thread in threads:
            thread.start()
        try:
            for seed in range(3):
                order = random.Random(seed).sample(range(len(requests)), len(requests))
                assert batch(llm, [requests[i] for i in order]) == [reference[i] for i in order]
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not faults
        check_idle(llm)


def test_nothing_is_left_of_a_closed_engine(model: Path, paths: dict[str, str]) -> None:
    def images() -> int:
        gc.collect()
        return sum(type(o) is torch.Tensor and o.dtype == torch.uint8 and o.dim() == 2 for o in gc.get_objects())

    before = images()
    llm = engine(model, lora_paths=paths)
    llm.generate(input_ids=[5], sampling_params=GREEDY, lora_path="a0")
    llm.shutdown()
    del llm
    assert images() <= before


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_loras_per_batch": 0}, "max_loras_per_batch must be at least 1"),
        ({"max_lora_rank": 0}, "max_lora_rank must be at least 1"),
        ({"max_loaded_loras": 3}, "smaller than lora.max_loras_per_batch"),
        ({"lora_target_modules": ["q_proj", "conv1"]}, "conv1; linear layers of this model are q_proj, k_proj"),
        ({"lora_paths": {"a": "x"}, "enable_lora": False}, "leave one of them out"),
        ({"lora_paths": ["a=x", "a=y"]}, "two adapters of the name 'a'"),
        ({"lora_paths": [{"lora_name": "a"}]}, "lora_paths must hold"),
        ({"lora_paths": {"a": 5}}, "lora_paths must hold"),
        ({"lora_paths": "a=x"}, "lora_paths must be"),
        ({"lora_target_modules": [5]}, "must be names of modules"),
        ({"lora_eviction_policy": "fifo"}, "lora_eviction_policy"),
    ],
)
def test_bad_settings_are_told_before_weights_are_read(model: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, UnsupportedFeatureError), match=words):
        engine(model, **({"enable_lora": True} | options))


def test_bad_adapters_at_the_start_and_of_a_smaller_engine(model: Path, paths: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="adapter_config.json is missing"):
        engine(model, lora_paths={"a": str(tmp_path)})
    options = {"enable_lora": True, "max_lora_rank": 4, "lora_target_modules": ["q_proj", "v_proj"]}
    with engine(model, **options) as llm:
        assert "over this engine's max_lora_rank=4" in llm.load_lora_adapter("a", paths["a3"]).error_message
        assert "add 'o_proj' to its lora_target_modules" in llm.load_lora_adapter("a", paths["a1"]).error_message
        values = tiny_adapters.tensors(model, 4, ("v_proj",))
        assert llm.load_lora_adapter("a", str(tiny_adapters.write(tmp_path / "v", values, 4))).success
        assert adapted_leaves(llm) == ["wqkv"]
