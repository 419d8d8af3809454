"""Engines over several processes: the bits of one, whatever a request asks for; and one clear end, whoever dies."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import eagle_heads
import pytest
import tiny_adapters
import tiny_checkpoints
import tiny_vision
import torch
from forked import Fork
from safetensors.torch import load_file

from fengine import Engine
from fengine.engine import load
from fengine.engine.parallel import child, ranks
from fengine.engine.weights.incoming import Origin
from fengine.errors import ConfigError, EngineDeadError, MemoryReleasedError
from fengine.worker import process_group
from fengine.worker.hub import BOX

SAMPLED = {"temperature": 0.9, "max_new_tokens": 12}
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_new_tokens": 16},
    SAMPLED | {"top_p": 0.9, "top_k": 40},
    SAMPLED | {"frequency_penalty": 0.5, "repetition_penalty": 1.3},
    SAMPLED | {"json_schema": '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'},
    SAMPLED | {"logit_bias": {"9": 4.0}, "stop": ["7"]},
]
PROMPTS = ["What is 2+3?", "Sort: 3 1 2", "capital of France", "Spell cat", "One two three four " * 30]


def results(engine: Engine, hidden: bool = True) -> list[Any]:
    """Of a batch of everything, twice (the second time over a cached prefix), and of one request alone."""
    found: list[Any] = []
    for _ in range(2):
        asked = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, "token_ids_logprob": [5, 6]}
        found += engine.generate(PROMPTS, PARAMS, return_hidden_states=hidden, **asked)
    found.append(engine.generate(PROMPTS[0], PARAMS[2], return_logprob=True))
    keys = ("output_token_logprobs", "input_token_logprobs", "output_top_logprobs", "hidden_states", "finish_reason")
    return [(out["text"], *(out["meta_info"].get(key) for key in keys)) for out in found]


SETTINGS: dict[str, Any] = {
    "model_path": "box", "random_seed": 3, "enable_return_hidden_states": True, "max_running_requests": 4,
    "chunked_prefill_size": 48, "max_total_tokens": 600,
}  # fmt: skip


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine(**SETTINGS, tp_size=2)
    yield engine
    engine.shutdown()


def processes(engine: Engine) -> list[subprocess.Popen[bytes]]:
    found: Any = engine._parts.ranks
    return [child.process for child in found._ranks.values()]


def test_two_ranks_give_the_bits_of_one() -> None:
    """And at their end no process is left, nor a weight of the first rank."""
    with Engine(**SETTINGS) as one, Engine(**SETTINGS, tp_size=2) as two:
        assert results(one) == results(two)
        others, kept = processes(two), [weakref.ref(tensor) for tensor in two._parts.weights.tensors()]
    assert all(process.poll() is not None for process in others)
    assert len(kept) > 10 and not [tensor for tensor in kept if tensor() is not None]


SELF = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "box", "speculative_adaptive": False}


WINDOWED = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64}  # in every layer


@pytest.mark.parametrize(
    ("algorithm", "changes"), [("NGRAM", {}), ("STANDALONE", {}), ("EAGLE3", {}), ("STANDALONE", WINDOWED)]
)
def test_drafts_over_two_ranks_change_no_bit(algorithm: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Rank 0 guesses, by the whole draft; the others compute their part of what it guessed."""
    settings = SETTINGS | {"json_model_override_args": changes}
    more: dict[str, Any] = SELF | {"speculative_algorithm": algorithm}
    if algorithm == "NGRAM":
        more = {"speculative_algorithm": "NGRAM"}
    elif algorithm == "EAGLE3":
        more["speculative_draft_model_path"] = eagle_heads.write(
            tmp_path, json.loads((BOX / "config.json").read_text())
        )
    with Engine(**settings) as one:
        want = results(one, hidden=False)
    with Engine(**settings, **more, tp_size=2) as two:
        assert results(two, hidden=False) == want
        stats = two.stats()
    least = {"NGRAM": 0, "EAGLE3": 0, "STANDALONE": 20}[algorithm]  # how many of them are right
    assert stats["correct_draft_tokens"] >= least and (stats["draft_tokens"] > 20 or algorithm == "NGRAM")


def dead(engine: Engine, kill: Callable[[], None]) -> str:
    """The error of a call that waits while `kill` is called, and of the next one."""
    stream = engine.generate("One two three", {"max_new_tokens": 400, "ignore_eos": True}, stream=True)
    next(iter(stream))
    kill()
    began = time.monotonic()
    with pytest.raises(EngineDeadError) as found:
        for _ in stream:
            pass
    with pytest.raises(EngineDeadError):
        engine.generate("again")
    assert all(process.wait(10) is not None for process in processes(engine))
    assert time.monotonic() - began < 60
    return str(found.value)


def test_a_rank_that_is_killed_ends_the_engine_by_name(engine: Engine) -> None:
    assert "rank 1 of 2 was ended by SIGKILL" in dead(engine, processes(engine)[0].kill)
    loop = engine._parts.core.threads[0]
    loop.join(30)
    assert not loop.is_alive()  # it waits for nobody


def test_a_rank_that_hangs_is_found(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "SILENCE", 3.0)
    heard = threading.Event()  # the limit counts from the next sign of life on
    found: Any = engine._parts.ranks
    monkeypatch.setattr(found._ranks[1], "_hear", lambda told: heard.set())
    heard.wait(20)
    message = dead(engine, lambda: processes(engine)[0].send_signal(signal.SIGSTOP))
    assert "rank 1 of 2 gave no sign of life for 3 s" in message


def test_steps_that_differ_are_told(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ranks.checksum
    assert "was not the same on all ranks" in dead(
        engine, lambda: monkeypatch.setattr(ranks, "checksum", lambda step: own(step) ^ 1)
    )


def test_ranks_end_with_the_process_of_rank_0(tmp_path: Path) -> None:
    code = (
        "import fengine, time\n"
        "engine = fengine.Engine(model_path='box', tp_size=2)\n"
        "print(*engine.get_all_child_pids(), engine._parts.ranks.folder.name, flush=True)\n"
        "time.sleep(600)"
    )
    process = Fork([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid, folder = process.stdout.readline().split()
    assert Path(folder).exists()
    process.kill()
    process.wait()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            break
        if state == "Z":  # ended, and nobody has asked yet
            break
        threading.Event().wait(0.05)
    else:
        assert not Path(f"/proc/{pid}").exists()
    process.stdout.close()
    assert not Path(folder).exists()


def test_ranks_that_read_other_files_do_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, own = tiny_checkpoints.write(tmp_path), load.load_params

    def slow(*args: Any, **how: Any) -> Any:
        """Another process has written the files meanwhile."""
        params = own(*args, **how)
        (rank,) = running
        with rank._news:
            rank._news.wait_for(lambda: rank._loaded, 60)
            rank._loaded = {1: ranks.told_of(Origin.of(model)._replace(stamp=()))}
        return params

    running, made = list[Any](), ranks.Ranks.__init__
    monkeypatch.setattr(ranks.Ranks, "__init__", lambda self, config: (running.append(self), made(self, config))[1])
    monkeypatch.setattr(load, "load_params", slow)
    with pytest.raises(EngineDeadError, match="files changed while the ranks read them"):
        Engine(model_path=str(model), skip_tokenizer_init=True, tp_size=2)


def test_what_cannot_be_cut_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tp_size is 64.*num_key_value_heads.*\[1, 2"):
        Engine(model_path="box", tp_size=64)
    with pytest.raises(ConfigError, match=r"tp_size must be at least 1"):
        Engine(model_path="box", tp_size=0)
    experts = tiny_checkpoints.write(tmp_path / "experts", "qwen3_moe", moe_intermediate_size=21)
    with pytest.raises(ConfigError, match="moe_intermediate_size 21"):
        Engine(model_path=str(experts), tp_size=2, skip_tokenizer_init=True)


MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "mlp_only_layers": [1]},
    "gpt_oss": {
        "num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 9,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_are_those_of_one(family: str, tmp_path: Path) -> None:
    """Also when they are read, updated from memory and from disk, released, and saved."""
    old, new = (tiny_checkpoints.write(tmp_path / str(i), family, seed=i, **MIXTURES[family]) for i in range(2))
    names = [name for name in load_file(new / "model.safetensors") if "experts" in name]
    found: list[Any] = []
    for size in (1, 2):
        with Engine(model_path=str(old), skip_tokenizer_init=True, max_total_tokens=600, tp_size=size) as engine:

            def outputs(engine: Engine = engine) -> Any:
                outs = engine.generate(input_ids=[[3, 4, 5], [9] * 40], sampling_params=PARAMS[0], return_logprob=True)
                return [(out["output_ids"], out["meta_info"]["output_token_logprobs"]) for out in outs]

            told: list[Any] = [outputs(), [engine.get_weights_by_name(name, 7) for name in names]]
            tensors = {name: load_file(new / "model.safetensors")[name] for name in names[1:4]}
            assert engine.update_weights_from_tensor(tensors).success
            told += [outputs(), [engine.get_weights_by_name(name, 7) for name in names]]
            assert engine.update_weights_from_disk(str(new)).success
            told.append(outputs())
            engine.release_memory_occupation()
            engine.resume_memory_occupation()
            engine.save_sharded_model(path=str(tmp_path / f"saved{size}"))
            found.append((*told, outputs()))
    assert found[0] == found[1] and len({str(found[0][i]) for i in (0, 2, 4)}) == 3
    saved = [load_file(next((tmp_path / f"saved{size}").glob("*.safetensors"))) for size in (1, 2)]
    assert saved[0].keys() == saved[1].keys() and all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])


def changed(engine: Engine) -> list[Any]:
    """What weights that are read, updated, released and read again from disk make of outputs."""
    names = ["model.norm.weight", "model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.down_proj.weight"]
    told = [engine.get_weights_by_name(name, 4096) for name in (*names, "lm_head.weight", "nothing")]
    found = [told]
    running: Any = engine.generate(PROMPTS[0], PARAMS[0] | {"max_new_tokens": 64, "ignore_eos": True}, stream=True)
    next(iter(running))
    tensors = [(name, torch.tensor(values).flip(0)) for name, values in zip(names, told, strict=False)]
    tensors.append(("model.layers.0.input_layernorm.weight", tensors[0][1]))  # as tied ones share their memory
    assert engine.update_weights_from_tensor(tensors, weight_version="flipped").success
    for _ in running:
        pass
    found.append(engine.generate(PROMPTS, PARAMS[0]))
    found.append([engine.get_weights_by_name(name, 4096) for name in names])
    assert not engine.update_weights_from_tensor([(names[0], torch.zeros(3))]).success
    assert engine.update_weights_from_disk("box", weight_version="again").success
    for tags in (["kv_cache"], ["weights"], None):
        engine.release_memory_occupation(tags)
        with pytest.raises(MemoryReleasedError):
            engine.generate("a")
        engine.resume_memory_occupation()
        found.append(engine.generate(PROMPTS, PARAMS[0]))
    return [[(out["text"], out["meta_info"]["weight_version"]) for out in each] if isinstance(each[0], dict) else each
            for each in found]  # fmt: skip


def test_weights_and_memory_are_those_of_one() -> None:
    with Engine(**SETTINGS) as one, Engine(**SETTINGS, tp_size=2) as two:
        assert changed(one) == changed(two)


FEW = [params | {"max_new_tokens": 8} for params in PARAMS]


def adapted(engine: Engine, folder: Path) -> list[Any]:
    """Texts under adapters that share one slot fewer than they are, of a file and of tensors, one unloaded."""
    assert engine.load_lora_adapter("second", str(folder / "second")).success
    tensors = tiny_adapters.tensors(BOX, 4, seed=7)
    kinds = sorted({name.split(".")[-3] for name in tensors})
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": kinds}
    assert engine.load_lora_adapter_from_tensors("third", tensors, values).success
    names = ["first", None, "second", "third", "first"]
    found = [engine.generate(PROMPTS, FEW, lora_path=names, return_logprob=True)]
    assert engine.unload_lora_adapter("first").success
    found.append(engine.generate(PROMPTS, {"max_new_tokens": 8}, lora_path=[None, "second", "third", None, "second"]))
    return [[(out["text"], out["meta_info"].get("output_token_logprobs")) for out in each] for each in found]


@pytest.mark.parametrize("few", [{}, {"quantization": "fp8"}, {"quantization": "w8a8_fp8"}, SELF], ids=str)
def test_adapters_are_those_of_one(few: dict[str, Any], tmp_path: Path) -> None:
    for seed, name in enumerate(("first", "second")):
        tiny_adapters.random_adapter(tmp_path / name, BOX, 8, seed=seed)
    lora: Any = {"lora_paths": {"first": str(tmp_path / "first")}, "max_loras_per_batch": 2, "enable_lora": True} | few
    with Engine(**SETTINGS, **lora) as one, Engine(**SETTINGS, **lora, tp_size=2) as two:
        want, got = adapted(one, tmp_path), adapted(two, tmp_path)
        plain = one.generate(PROMPTS, FEW)
    assert got == want
    assert [text for text, _ in want[0]] != [out["text"] for out in plain]


def test_embeddings_are_those_of_one() -> None:
    found = []
    for size in (1, 2):
        with Engine(**SETTINGS, is_embedding=True, tp_size=size) as engine:
            found.append([out["embedding"] for out in engine.encode(PROMPTS)])
    assert found[0] == found[1]


# Towers run on rank 0 alone. What the others are told: positions in three axes, last keys, several parts of an image.
@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "idefics3"])
def test_images_are_those_of_one(family: str, tmp_path: Path) -> None:
    """In chunks, with a table that has no room for all of them."""
    directory, found = tiny_vision.write(tmp_path, family), []
    spot = [tiny_vision.TOKEN] * (4 if family == "gemma3" else 1)  # whose chunks must not cut an image
    pictures: list[Any] = [[tiny_vision.picture(1)], [tiny_vision.picture(2, 33, 64), tiny_vision.picture(3)], None]
    for size in (1, 2):
        with Engine(model_path=str(directory), skip_tokenizer_init=True, max_total_tokens=2048, tp_size=size,
                    chunked_prefill_size=40) as engine:  # fmt: skip
            prompts = [[5, *spot, 7, 8], [9, *spot, 10, *spot, 11], [3, 4, 5]]
            if family == "idefics3":  # text stands around their parts
                given = zip(prompts, pictures, strict=True)
                prompts = [tiny_vision.in_place(engine, ids, images or []) for ids, images in given]
            for _ in range(2):
                params: Any = PARAMS[0] | {"max_new_tokens": 5, "ignore_eos": True}
                outs = engine.generate(None, params, prompts, image_data=pictures, return_logprob=True)
                found.append([(out["output_ids"], out["meta_info"]["output_token_logprobs"]) for out in outs])
    assert found[:2] == found[2:]


def test_a_run_over_two_ranks_is_verified_by_one_process(tmp_path: Path) -> None:
    pytest.importorskip("hydra")
    from fengine import run

    folder = tmp_path / "run"
    words = ["view=quiet", "compile=none", "task=addition", "task.limit=4", "sampling.temperature=0.8"]
    assert run.main(["eval", *words, "parallel.tp_size=2", f"out={folder}"]) == run.OK
    more = ["parallel.tp_size=1", "verify.layouts=[permuted,alone]"]
    assert run.main(["verify", str(folder), *more]) == run.OK
    told = json.loads((folder / "verify.json").read_text())
    assert told["identical"] and [one["verdict"] for one in told["layouts"]] == ["identical"] * 2


def test_settings_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="GPU"):
        monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
        process_group.device_of_rank("cuda", 1, 2)
    assert os.environ.get("LOCAL_RANK") is None
