"""Ranks of a group compute one device's bits: every family, cut in 2 and 4, over real exchanges between threads."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import tiny_checkpoints
import torch
from torch import Tensor

from fengine import models
from fengine.config import EngineConfig
from fengine.config.schema import ParallelConfig
from fengine.engine.memory import DeviceMemory
from fengine.engine.weights.incoming import Origin
from fengine.engine.weights.live import LiveWeights
from fengine.errors import ConfigError
from fengine.models.kv_pages import init_kv, row_batch
from fengine.models.sources import Source
from fengine.models.spec import ModelSpec
from fengine.models.weights import Weight, head_weight
from fengine.ops import columns, peers
from fengine.ops.columns import Group
from fengine.worker import safetensors_file
from fengine.worker.loader import load_params, spec_from_config
from fengine.worker.process_group import check_parts, group_of
from fengine.worker.safetensors_file import read_config

pytestmark = pytest.mark.usefixtures("one_thread")
FOUR = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
CASES: dict[str, dict[str, Any]] = {
    "llama": FOUR | {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "qwen3": FOUR,
    "mistral": FOUR | {"sliding_window": 9},
    "phi3": {"num_attention_heads": 8, "num_key_value_heads": 4, "pad_token_id": 0},
    "granite": FOUR | {"tie_word_embeddings": False},
    "smollm3": {"num_attention_heads": 8, "num_key_value_heads": 4, "pad_token_id": 0},
    "glm4": FOUR | {"pad_token_id": 0},
    "gemma2": FOUR,
    "gemma3": FOUR,
    "olmo2": FOUR,
    "cohere": {"num_attention_heads": 8, "num_key_value_heads": 4, "use_qk_norm": True, "tie_word_embeddings": True},
    "starcoder2": {"num_attention_heads": 8, "num_key_value_heads": 4},
    "hunyuan_v1_dense": FOUR,
    "qwen2_moe": FOUR
    | {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 36},
    "qwen3_moe": FOUR | EXPERTS | {"norm_topk_prob": True, "mlp_only_layers": [1]},
    "mixtral": FOUR | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 36},
    "olmoe": {"num_attention_heads": 8, "num_key_value_heads": 4}
    | {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 20, "pad_token_id": 0},
    "granitemoe": FOUR | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 20},
    "gpt_oss": FOUR
    | {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 20,
        "sliding_window": 9,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "glm4_moe": FOUR | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
    "cohere2": {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True},
}


def logits_of(directory: Path, spec: ModelSpec, group: Group | None, part: ModelSpec, **how: Any) -> Tensor:
    """Of a prompt in two chunks and two more tokens."""
    model, params = models.lookup(spec.architecture), load_params(directory, spec, group=group, **how)
    rng, kv, at, found = random.Random(1), init_kv(part, 6, 8, torch.float32, "cpu"), 0, []
    tokens = [rng.randrange(3, spec.vocab_size) for _ in range(24)]
    for count in (13, 9, 1, 1):
        batch = row_batch(tokens[at : at + count], at, [3, 1, 4], 8)
        kv, hidden_TD = model.forward(params, part, kv, batch)
        found.append(model.unembed(params, part, hidden_TD))
        at += count
    return torch.cat(found)


def on_ranks(size: int, folder: Path, body: Any) -> list[Any]:
    """What `body` returns for each rank's group, in threads of their own."""

    sockets = peers.mesh(size)

    def run(rank: int) -> Any:
        try:
            return body(group_of("", rank, str(folder), sockets[rank], "cpu"))
        finally:
            peers.close(sockets[rank])

    with ThreadPoolExecutor(size) as pool:
        return [future.result(60) for future in [pool.submit(run, rank) for rank in range(size)]]


@pytest.mark.parametrize("family", CASES)
def test_every_family_has_the_bits_of_one_device(family: str, tmp_path: Path) -> None:
    directory = tiny_checkpoints.write(tmp_path / "model", family, **CASES[family])
    spec = spec_from_config(read_config(directory))
    want = logits_of(directory, spec, None, spec)
    for size in (2, 4):
        for logits in on_ranks(size, tmp_path, lambda group: logits_of(directory, spec, group, spec.part(group.size))):
            assert logits.shape == want.shape and torch.equal(logits, want)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "granitemoe", "gpt_oss"])
def test_a_rank_reads_no_more_than_its_rows(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But of norms, routers and embeddings, which all of them hold."""
    directory = tiny_checkpoints.write(tmp_path / "model", family, **CASES[family])
    spec, own, counts = spec_from_config(read_config(directory)), safetensors_file.read_tensor, dict[str, list[int]]()

    def counted(file: Any, entry: Any, *rows: Any) -> Tensor:
        tensor = own(file, entry, *rows)
        counts.setdefault(entry.name, []).append(tensor.numel())
        return tensor

    monkeypatch.setattr(safetensors_file, "read_tensor", counted)
    load_params(directory, spec)
    whole = {name: sum(read) for name, read in counts.items()}
    counts.clear()
    load_params(directory, spec, group=Group("", 1, 4))
    every = (
        "norm.weight",
        "embed_tokens.weight",
        "mlp.gate.weight",
        "router.weight",
        "router.bias",
        "router.layer.weight",
    )
    read = {name for name, found in counts.items() if sum(found) == whole[name]}
    assert read and all(name.endswith(every) for name in read), read
    assert all(4 * sum(counts[name]) == whole[name] for name in counts.keys() - read if "lm_head" not in name)


def test_negative_control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product cut along K, whose parts the ranks would add, has another tree."""
    directory = tiny_checkpoints.write(tmp_path / "model", "llama", **CASES["llama"])
    spec = spec_from_config(read_config(directory))
    want = logits_of(directory, spec, None, spec)
    own = columns.Columns.linear

    def added(self: Any, x_TK: Tensor, *rest: Any) -> Tensor:
        y_TN = own(self, x_TK, *rest)
        if x_TK.shape[1] == self.k or not self.whole:
            return y_TN
        x_TK = columns.gather(x_TK, self.k, self.group)
        half = torch.arange(self.k) < self.k // 2
        return own(self, x_TK * half, *rest) + own(self, x_TK * ~half, None, *rest[1:])

    monkeypatch.setattr(columns.Columns, "linear", added)
    found = on_ranks(2, tmp_path, lambda group: logits_of(directory, spec, group, spec.part(2)))
    assert not torch.equal(found[0], want) and torch.allclose(found[0], want, atol=1e-3)


def test_rows_of_ranks_are_those_of_the_leaf_once() -> None:
    """Fused sources are cut as the leaf's blocks; a vocabulary at its blocks, the last rank with what is left."""
    apart = Weight((), (Source("q", (16, 4)), Source("k", (8, 4)), Source("v", (8, 4))), "CD", "C")
    fused = Weight((), (Source("qkv", (32, 4)),), "CD", "C", blocks=(16, 8, 8))
    for weight, sizes in ((apart, (2, 4)), (fused, (2, 4)), (head_weight(131, 4), (2, 3, 4))):
        for size in sizes:
            for index, source in enumerate(weight.sources):
                own = [list(range(source.shape[0]))[rows] for r in range(size) for rows in weight.rows(r, size)[index]]
                assert sorted(sum(own, [])) == list(range(source.shape[0]))
    assert apart.rows(1, 2) == [[slice(8, 16)], [slice(4, 8)], [slice(4, 8)]]
    assert fused.rows(1, 2) == [[slice(8, 16), slice(20, 24), slice(28, 32)]]
    assert head_weight(131, 4).rows(2, 3) == [[slice(128, 131)]]


def test_numbers_that_are_told_to_work_do(tmp_path: Path) -> None:
    """The vocabulary's blocks count, too."""
    odd: dict[str, Any] = {"num_attention_heads": 12, "num_key_value_heads": 12, "hidden_size": 48, "vocab_size": 131}
    spec = spec_from_config(read_config(tiny_checkpoints.write(tmp_path, **odd)))

    def refusal(size: int) -> str | None:
        try:
            return check_parts(EngineConfig(parallel=ParallelConfig(tp_size=size)), spec)
        except ConfigError as error:
            return str(error)

    refused = {size: refusal(size) for size in range(1, 14)}
    works = [size for size, said in refused.items() if said is None]
    assert works == [1, 2, 3, 4] and "vocab_size 131 (blocks of 32) cannot" in str(refused[6])
    for size, said in refused.items():
        assert said is None or json.loads(said.split("; ")[1].removesuffix(" work")) == [n for n in works if n < size]


def test_released_weights_come_back_on_all_ranks_or_on_none(tmp_path: Path) -> None:
    directory = tiny_checkpoints.write(tmp_path / "model")
    spec, origin = spec_from_config(read_config(directory)), Origin.of(directory)

    def resumed(group: Group, origin: Origin | None) -> bool:
        weights = LiveWeights(load_params(directory, spec, group=group), spec, directory, origin, group)
        memory = DeviceMemory(cast(Any, None), weights, cast(Any, None), 8, cast(Any, None))
        memory.release(["weights"], keep=False)
        return memory.resume("weights")

    changed = origin._replace(stamp=())
    assert on_ranks(2, tmp_path, lambda group: resumed(group, origin)) == [True, True]
    assert on_ranks(2, tmp_path, lambda group: resumed(group, changed if group.rank else origin)) == [False, False]
