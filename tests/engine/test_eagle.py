"""EAGLE-3 against a draft written by the paper's formulas over transformers' hidden states; and no bit changes."""

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, silu
from transformers import AutoModelForCausalLM

from fengine import Engine
from fengine.errors import ConfigError, CorruptCheckpointError, FengineError, UnsupportedFeatureError
from fengine.models.eagle3 import LAYER_IDS
from fengine.speculative import proposers
from fengine.speculative.draft import DraftModel
from fengine.speculative.pace import Cost

EAGLE: dict[str, Any] = {"speculative_algorithm": "EAGLE3", "speculative_adaptive": False}
V, D, F, H, G, K, HEAD = 131, 64, 96, 4, 2, 16, 40
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": V, "draft_vocab_size": HEAD,
    "hidden_size": D, "intermediate_size": F, "num_hidden_layers": 1, "num_attention_heads": H, "head_dim": K,
    "num_key_value_heads": G, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 500.0,
    "tie_word_embeddings": False,
}  # fmt: skip
SHAPES = {
    "fc.weight": (D, 3 * D), "midlayer.input_layernorm.weight": (D,), "midlayer.hidden_norm.weight": (D,),
    "midlayer.post_attention_layernorm.weight": (D,), "midlayer.self_attn.q_proj.weight": (H * K, 2 * D),
    "midlayer.self_attn.k_proj.weight": (G * K, 2 * D), "midlayer.self_attn.v_proj.weight": (G * K, 2 * D),
    "midlayer.self_attn.o_proj.weight": (D, H * K), "midlayer.mlp.gate_proj.weight": (F, D),
    "midlayer.mlp.up_proj.weight": (F, D), "midlayer.mlp.down_proj.weight": (D, F), "norm.weight": (D,),
    "lm_head.weight": (HEAD, D),
}  # fmt: skip


def draft_tensors(seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for name, shape in SHAPES.items()}
    tensors |= {name: 1 + 0.3 * tensors[name] * D**0.5 for name in SHAPES if "norm" in name}
    ids = torch.randperm(V, generator=generator)[:HEAD].sort().values
    return tensors | {"d2t": ids - torch.arange(HEAD), "t2d": torch.zeros(V, dtype=torch.bool)}


def write_draft(folder: Path, tensors: dict[str, Tensor] | None = None, **changes: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(draft_tensors() if tensors is None else tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return str(folder)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(
        tiny_checkpoints.write(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=8, rms_norm_eps=1e-5)
    )


@pytest.fixture(scope="module")
def want(target: str) -> list[Any]:
    return answers(target, None)[0]


@cache
def read(target: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()


class Reference:
    """The draft over whole sequences, without a cache."""

    def __init__(self, target: str, tensors: dict[str, Tensor], layers: tuple[int, ...], normed: bool) -> None:
        self.model = read(target)
        self.w = {name.removeprefix("midlayer."): x for name, x in tensors.items()}
        self.seen: tuple[list[int], tuple[Tensor, ...]] = [], ()  # the last sequence and the target's streams of it
        self.layers, self.normed = layers, normed

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * self.w[f"{name}.weight"]

    def rope(self, x_THK: Tensor) -> Tensor:
        angle = torch.arange(len(x_THK))[:, None] * 500.0 ** (-torch.arange(0, K, 2) / K)
        cos, sin = (f(angle).repeat(1, 2)[:, None] for f in (torch.cos, torch.sin))
        first, second = x_THK.chunk(2, -1)
        return x_THK * cos + torch.cat((-second, first), -1) * sin

    def layer(self, tokens: list[int], stream: Tensor) -> Tensor:
        hidden = self.norm(stream, "hidden_norm")
        x = torch.cat((self.norm(self.model.get_input_embeddings().weight[tokens], "input_layernorm"), hidden), 1)
        q, k, v = (linear(x, self.w[f"self_attn.{n}_proj.weight"]).view(len(x), -1, K) for n in "qkv")
        k, v = (part.repeat_interleave(H // G, 1) for part in (self.rope(k), v))
        scores = torch.einsum("ahk,bhk->hab", self.rope(q), k) * K**-0.5
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
        heads = torch.einsum("hab,bhk->ahk", scores.softmax(-1), v).flatten(1)
        stream = (hidden if self.normed else stream) + linear(heads, self.w["self_attn.o_proj.weight"])
        y = self.norm(stream, "post_attention_layernorm")
        gate, up = (linear(y, self.w[f"mlp.{n}_proj.weight"]) for n in ("gate", "up"))
        return stream + linear(silu(gate) * up, self.w["mlp.down_proj.weight"])

    @torch.no_grad()
    def guesses(self, ids: list[int], count: int) -> list[int]:
        """Greedy, from the target's streams of all but the last token."""
        if self.seen[0][: len(ids)] != ids:
            self.seen = ids, self.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        streams = [self.seen[1][layer][0, : len(ids) - 1] for layer in self.layers]
        stream = linear(torch.cat(streams, 1), self.w["fc.weight"])
        tokens, found = ids[1:], []
        for _ in range(count):
            out = self.layer(tokens, stream)
            logits = linear(self.norm(out[-1:], "norm"), self.w["lm_head.weight"])
            best = int(logits.argmax())
            found.append(best + int(self.w["d2t"][best]))
            tokens, stream = [*tokens, found[-1]], torch.cat((stream, out[-1:]))
        return found


QWEN3 = {  # what heads for Qwen3 have besides
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "initializer_range": 0.02,
    "max_window_layers": 36, "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": True,
    "rope_scaling": None, "use_cache": True, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
}  # fmt: skip
MODELOPT = {
    "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
    "use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": None, "eagle_aux_hidden_state_layer_ids": [],
}  # fmt: skip


def write_speculator(folder: Path, **changes: Any) -> str:
    """In vLLM's form of speculators, with the embedding that it writes."""
    tensors = {name.replace("midlayer.", "layers.0."): x for name, x in draft_tensors().items()}
    path = write_draft(folder, tensors | {"embed_tokens.weight": torch.zeros(V, D)})
    layer = {name: value for name, value in CONFIG.items() if name not in ("architectures", "draft_vocab_size")}
    config = {
        "architectures": ["Eagle3Speculator"], "draft_vocab_size": HEAD, "has_no_defaults_at_init": False,
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": [{"speculative_tokens": 3}]},
        "speculators_model_type": "eagle3", "speculators_version": "0.1.0", "target_hidden_size": None,
        "torch_dtype": "float32", "transformer_layer_config": layer,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | changes))
    return path


IDS = [[5, 9, 7, 60, 3], [100, 3, 90] * 9, [8] * 19, [44]]


def answers(
    target: str, draft: str | None, rounds: int = 2, count: int = 4, **settings: Any
) -> tuple[list[Any], dict[str, Any]]:
    """Cold, and with two rounds over a cache. Of `count` prompts, the greedy ones first."""
    eagle: dict[str, Any] = {} if draft is None else EAGLE | {"speculative_draft_model_path": draft} | settings
    params: Any = [{"temperature": 0.9 * (i > 1), "max_new_tokens": 24, "ignore_eos": True} for i in range(count)]
    with Engine(model_path=target, skip_tokenizer_init=True, page_size=8, **(eagle or settings)) as engine:
        outputs: Any = [engine.generate(input_ids=IDS[:count], sampling_params=params, return_logprob=True)
                        for _ in range(rounds)]  # fmt: skip
        stats = engine.stats()
    return [o["meta_info"]["output_token_logprobs"] for out in outputs for o in out], stats


def guessed(target: str, draft: str, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> list[tuple[list[int], Any]]:
    """(known tokens, guesses behind them) of greedy requests."""
    told, own = [], DraftModel.__call__

    def listen(self: DraftModel, asks: Any) -> list[list[int]]:
        found = own(self, asks)
        told.extend((list(a.request.token_ids), guess, a.request.params.top_k)
                    for a, guess in zip(asks, found, strict=True))  # fmt: skip
        return found

    monkeypatch.setattr(DraftModel, "__call__", listen)
    answers(target, draft, speculative_num_steps=4, **settings)
    return [(ids, guess) for ids, guess, top_k in told if guess and top_k == 1]


@pytest.mark.parametrize(
    ("form", "layers", "normed"),
    [
        ({}, (2, 4, 5), False),
        ({"norm_before_residual": True, "eagle_config": {LAYER_IDS: [0, 2, 6]}}, (1, 3, 7), True),
        (QWEN3, (2, 4, 5), False),
        ({"eagle_config": MODELOPT, "architectures": ["LlamaForCausalLM"]}, (2, 4, 5), False),
        (write_speculator, (2, 4, 5), True),
        (partial(write_speculator, norm_before_residual=False, **{LAYER_IDS: [1, 3, 7]}), (1, 3, 7), False),
    ],
    ids=["plain", "normed, other layers", "Qwen3", "ModelOpt, unnamed", "speculators", "speculators, other layers"],
)
def test_guesses_are_those_of_the_formulas(
    form: Any, layers: tuple[int, ...], normed: bool, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = write_draft(tmp_path, **form) if isinstance(form, dict) else form(tmp_path)
    greedy = guessed(target, head, monkeypatch, rounds=1, count=2, max_running_requests=1)
    reference = Reference(target, draft_tensors(), layers, normed)
    assert len(greedy) >= 12 and max(len(guess) for _, guess in greedy) == 4
    for ids, guess in sorted({(tuple(ids), tuple(guess)) for ids, guess in greedy}, reverse=True):
        assert list(guess) == reference.guesses(list(ids), len(guess))


@pytest.mark.parametrize("settings", [{}, {"max_total_tokens": 72}], ids=["cached", "preempted"])
def test_what_was_drawn_in_a_rest_is_caught_up_with(
    settings: dict[str, Any], target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also over a cached prefix, and where a request is preempted while it rests."""
    monkeypatch.setattr(proposers, "_cost", lambda *_: Cost(0.1, 0.1, 0.25, 0.005))
    for module in ("pace", "memo"):
        monkeypatch.setattr(f"fengine.speculative.{module}.REST", 3)
    draft = write_draft(tmp_path)
    greedy = guessed(target, draft, monkeypatch, speculative_adaptive=True, max_running_requests=3, **settings)
    reference, last, rests = Reference(target, draft_tensors(), (2, 4, 5), False), dict[int, int](), 0
    for ids, guess in greedy:
        assert guess == reference.guesses(ids, len(guess))
        rests += len(ids) > last.get(ids[0], len(ids)) + 3
        last[ids[0]] = len(ids)
    assert rests > 3


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_total_tokens": 72, "max_running_requests": 3}, {"chunked_prefill_size": 8, "max_running_requests": 4},
     {"disable_overlap_schedule": False}],
    ids=["plain", "preempted", "chunked", "overlap"],
)  # fmt: skip
def test_no_bit_changes(settings: dict[str, Any], target: str, want: list[Any], tmp_path: Path) -> None:
    found, stats = answers(target, write_draft(tmp_path), speculative_num_steps=3, **settings)
    assert found == want and stats["draft_tokens"] > 0


def test_memory_and_weights_that_come_back_change_no_bit(target: str, tmp_path: Path) -> None:
    """The pages of streams and of the draft's KV are new, or hold what other weights gave."""
    eagle: dict[str, Any] = {
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": write_draft(tmp_path),
        "speculative_adaptive": False,
    }
    params: Any = {"temperature": 0.7, "max_new_tokens": 24, "ignore_eos": True, "sampling_seed": 5}

    def tokens(engine: Engine) -> list[Any]:
        outputs: Any = engine.generate(input_ids=IDS, sampling_params=params, return_logprob=True)
        return [out["meta_info"]["output_token_logprobs"] for out in outputs]

    with Engine(model_path=target, skip_tokenizer_init=True) as engine:
        want = tokens(engine)
    with Engine(model_path=target, skip_tokenizer_init=True, **eagle) as engine:
        assert tokens(engine) == want
        engine.release_memory_occupation()
        engine.resume_memory_occupation()
        assert tokens(engine) == want
        assert engine.update_weights_from_disk(target)[0]
        before = engine.stats()["draft_tokens"]
        assert tokens(engine) == want and engine.stats()["draft_tokens"] > before > 0


def test_a_draft_that_gives_no_number_stops_guessing(target: str, want: list[Any], tmp_path: Path) -> None:
    tensors = draft_tensors()
    tensors["norm.weight"][:] = torch.nan
    found, stats = answers(target, write_draft(tmp_path, tensors))
    assert found == want and stats["draft_tokens"] == 0


def test_bad_drafts_are_refused_by_name(target: str, tmp_path: Path) -> None:
    def refused(kind: type[FengineError], match: str, draft: str, algorithm: str = "EAGLE3") -> None:
        with pytest.raises(kind, match=match):
            Engine(
                model_path=target, skip_tokenizer_init=True, speculative_algorithm=algorithm,
                speculative_draft_model_path=draft,
            )  # fmt: skip

    tensors = draft_tensors()
    refused(ConfigError, "vocab_size 99, not 131", write_draft(tmp_path / "a", vocab_size=99))
    refused(ConfigError, "layers.*40", write_draft(tmp_path / "b", eagle_config={
        "eagle_aux_hidden_state_layer_ids": [1, 2, 39]}))  # fmt: skip
    refused(UnsupportedFeatureError, "num_hidden_layers=2", write_draft(tmp_path / "c", num_hidden_layers=2))
    mtp = MODELOPT | {"use_mtp_layernorm": True}
    refused(UnsupportedFeatureError, "use_mtp_layernorm': True", write_draft(tmp_path / "i", eagle_config=mtp))
    peagle = write_speculator(tmp_path / "j", speculators_model_type="peagle")
    refused(UnsupportedFeatureError, "speculators_model_type='peagle'", peagle)
    refused(UnsupportedFeatureError, "are no layers", write_speculator(tmp_path / "k", **{LAYER_IDS: "1, 2, 3"}))
    refused(UnsupportedFeatureError, "quantization_config=.*fp8.* is not built", write_draft(
        tmp_path / "l", quantization_config={"quant_method": "fp8"}))  # fmt: skip
    for i, (name, value) in enumerate({"draft_vocab_size": [1], "target_hidden_size": "64", "eagle_config": "[1]",
                                       "norm_before_residual": "no", "layer_types": 1.5}.items()):  # fmt: skip
        refused(
            FengineError, f"{name} .*{value!r}".replace("[", r"\["), write_draft(tmp_path / f"m{i}", **{name: value})
        )
    twice = tensors | {"model.norm.weight": torch.zeros(D)}
    refused(CorruptCheckpointError, "'model.norm.weight' and 'norm.weight' are", write_draft(tmp_path / "n", twice))
    missing = {name: x for name, x in tensors.items() if name != "d2t"}
    refused(CorruptCheckpointError, "tensor 'd2t' is missing", write_draft(tmp_path / "d", missing))
    twice = tensors | {"d2t": -torch.arange(HEAD)}
    refused(CorruptCheckpointError, "different ids", write_draft(tmp_path / "e", twice))
    refused(
        CorruptCheckpointError, "'extra' is not part", write_draft(tmp_path / "f", tensors | {"extra": torch.ones(1)})
    )
    refused(ConfigError, "algorithm=standalone", target)
    refused(ConfigError, "algorithm=eagle3", write_draft(tmp_path / "g"), "STANDALONE")
    with pytest.raises(FengineError, match="LlamaForCausalLMEagle3"):
        Engine(model_path=write_draft(tmp_path / "h"))
    assert load_file(tmp_path / "h" / "model.safetensors")
