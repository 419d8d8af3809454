"""Every field of every supported family's config class, changed alone: transformers' result, or a refusal."""

import copy
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints
import torch
from torch import Tensor

from fengine import models
from fengine.errors import ContextLengthError, FengineError
from fengine.models.kv_pages import init_kv, row_batch
from fengine.ops import linear
from fengine.worker.loader import load_params, spec_from_config
from fengine.worker.safetensors_file import read_config

PROMPT = [5, 99, 17, 3, 64, 64, 120, 8, 31, 77, 12, 6, 50, 101, 9, 42, 13, 88, 23, 7, 119, 2, 60, 71]
EXTRA: dict[str, Any] = {  # fields that change something at other values than a family's default; few experts
    "mistral": {"sliding_window": 10},
    "phi3": {"sliding_window": 10},
    "exaone4": {"sliding_window": 10, "sliding_window_pattern": 2},
    "smollm3": {"sliding_window": 10, "use_sliding_window": True},
    "qwen2": {"sliding_window": 10, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {"sliding_window": 10, "use_sliding_window": True, "max_window_layers": 1, "head_dim": 16},
    "glm4": {"head_dim": 16},
    "cohere2": {"sliding_window": 10},
    "starcoder2": {"sliding_window": 10},
    **dict.fromkeys(("glm", "ernie4_5", "seed_oss"), {"head_dim": 16}),
    "ministral": {"sliding_window": 10, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 16},
    "olmo3": {"sliding_window": 10},
    "hunyuan_v1_dense": {"head_dim": 16},
    "granitemoe": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                  "shared_expert_intermediate_size": 48},
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "moe_intermediate_size": 32},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 10},
    "gemma2": {"sliding_window": 10, "head_dim": 16},
    "gemma3": {"sliding_window": 10, "head_dim": 16},
    "gemma": {"head_dim": 16},
}  # fmt: skip
ALSO = {
    "is_causal": False, "partial_rotary_factor": 0.5, "attention_bias": True, "mlp_bias": True, "sliding_window": 6,
    "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 32,
    "rope_theta": 777.0, "rope_scaling": {"type": "linear", "factor": 4.0}, "use_qk_norm": True, "logit_scale": 0.5,
    "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 2.0, "attention_multiplier": 0.3,
    "final_logit_softcapping": 3.0, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 3,
    "use_bidirectional_attention": True, "hidden_activation": "relu", "use_bias": False, "norm_epsilon": 0.3,
    "layer_norm_eps": 0.3, "rms_norm_eps": 0.3, "no_rope_layers": [0, 1], "use_parallel_residual": True,
    "clip_qkv": 0.1, "num_experts": 4, "add_cross_attention": True, "is_encoder_decoder": True,
    "original_max_position_embeddings": 8, "rope_local_base_freq": 100.0,
}  # fmt: skip


def others(value: Any) -> list[Any]:
    """Values of a field that are not `value`, of its type and of none."""
    if isinstance(value, bool):
        return [not value, None]
    if isinstance(value, int):
        return [value + 1, 2 * value, 1, None]
    if isinstance(value, float):
        return [value * 1.5 + 0.25, 0.0, None]
    if isinstance(value, str):
        return ["gelu" if value in ("silu", "gelu_pytorch_tanh") else value + "x", None]
    if isinstance(value, list):
        return [value[::-1], value[:1], None]
    return [None] if value is not None else [True, 3, 0.5]


ROPES = [
    {"rope_type": "linear", "factor": 3.0}, {"rope_type": "dynamic", "factor": 3.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.3},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": None},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 64},
    {"rope_type": "default", "partial_rotary_factor": 0.5}, {"rope_type": "proportional"},
    {"rope_type": "default", "mrope_section": [2, 3, 3]}, {"rope_type": "default", "rope_theta": 50.0},
]  # fmt: skip


def mutations(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if key not in ("architectures", "rope_parameters", "dtype", "transformers_version"):
            yield from ((key, other) for other in others(value))
    yield from ALSO.items()
    for rope in ROPES:
        yield "rope_parameters", {"rope_theta": 1e4, **rope}


def ours(directory: Path) -> Tensor:
    spec = spec_from_config(read_config(directory))
    if spec.max_position < len(PROMPT):
        raise ContextLengthError("the prompt is longer than the context")
    params, model = (
        load_params(directory, spec, context_length=min(64, spec.max_position)),
        models.lookup(spec.architecture),
    )
    kv = init_kv(spec, 4, 16, torch.float32, "cpu")
    _, hidden_TD = model.forward(params, spec, kv, row_batch(PROMPT, 0, [1, 2], 16))
    return model.unembed(params, spec, hidden_TD).log_softmax(-1)


@torch.no_grad()
def theirs(family: str, config: dict[str, Any], state: dict[str, Tensor]) -> Tensor | None:
    """None where transformers does not take the config, or not with these weights."""
    family = "ministral" if family == "mistral" and "layer_types" in config else family  # as AutoConfig does
    config_class, model_class = tiny_checkpoints.CLASSES[family]
    try:
        made = config_class.from_dict(copy.deepcopy(config))
        made._attn_implementation = "eager"
        model = model_class(made).eval()
        result = model.load_state_dict(state, strict=False)
        if result.unexpected_keys or set(result.missing_keys) - {"lm_head.weight"}:
            return None
        model.tie_weights()
        return model(torch.tensor([PROMPT])).logits[0].float().log_softmax(-1)
    except Exception:
        return None


@pytest.mark.parametrize("family", tiny_checkpoints.CLASSES)
def test_a_value_of_another_type_is_never_a_bare_error(family: str) -> None:
    config = tiny_checkpoints.config_of(family)
    for key in config.keys() - {"architectures"}:
        for value in ("no", [1.5], {"a": 1}, -1, 1.5, True, 2**70):
            with suppress(FengineError):
                spec_from_config(config | {key: value})


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("olmo3", {"rope_parameters": None, "rope_theta": 333.0}, "rope_theta = 333.0"),
        ("gemma3", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "call it rope_type"),
        ("gemma3", {"rope_parameters": {"full_attention": YARN | {"truncate": False}}}, "truncate = False"),
        ("gemma3", {"rope_parameters": {"full_attention": [1]}}, "per layer type"),
        ("llama", {"is_causal": None}, "is_causal must be true or false"),
        ("glm4_moe", {"n_group": None}, "n_group = None is not supported"),
        ("hunyuan_v1_dense", {"rope_parameters": YARN}, "attention_factor = 1.1386"),
        ("hunyuan_v1_dense", {"rope_parameters": [1]}, "rope_parameters and rope_scaling must be objects"),
        (
            "hunyuan_v1_dense",
            {"rope_scaling": {"type": "dynamic", "alpha": 9.0}, "rope_parameters": {"type": "dynamic", "alpha": 1e3}},
            "contradicts rope_parameters",
        ),
        *(
            (family, {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": False}, "layer_types has sliding")
            for family in ("qwen2", "qwen2_moe", "smollm3")
        ),
        *(
            (family, {"layer_types": [], "sliding_window": 9}, "layer_types has 0 ent")
            for family in ("exaone4", "ministral")
        ),
    ],
)
def test_what_transformers_reads_in_its_own_way_is_refused(family: str, changes: Any, message: str) -> None:
    with pytest.raises(FengineError, match=message):
        spec_from_config(tiny_checkpoints.config_of(family) | changes)


@pytest.mark.parametrize(
    ("family", "changes", "name"),
    [
        ("granite", {"logits_scaling": 1e-30}, "logits_scaling"),
        ("granitemoe", {"embedding_multiplier": 1e-300}, "embedding_multiplier"),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e-300}}, "rope_theta"),
        ("qwen3", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 1e-38}}, "factor"),
        ("mistral", {"rope_parameters": YARN | {"rope_theta": 1e4, "factor": 1e-42}}, "factor"),
        ("gemma2", {"attn_logit_softcapping": 1e9}, "attn_logit_softcapping"),
        ("gemma2", {"query_pre_attn_scalar": 1e-300}, "query_pre_attn_scalar"),
        ("gpt_oss", {"swiglu_limit": 1e-300}, "swiglu_limit"),
    ],
)
def test_factors_by_which_float32_overflows_are_refused(family: str, changes: Any, name: str) -> None:
    with pytest.raises(FengineError, match=f"{name} must be above 1e-06 and at most"):
        spec_from_config(tiny_checkpoints.config_of(family) | {"rope_scaling": None} | changes)


@pytest.mark.parametrize(
    ("family", "field", "beside"),
    [("gemma3", "rope_parameters", {"rope_theta": None, "rope_type": "default"}), ("cohere2", None, None)],
)
def test_what_transformers_5_0_wrote_beside_changes_nothing(family: str, field: str | None, beside: Any) -> None:
    config = tiny_checkpoints.config_of(family)
    more = {"_sliding_window_pattern": 3} if field is None else {field: config[field] | beside}
    assert spec_from_config(config | more) == spec_from_config(config)


def test_experts_of_granite_have_no_biases() -> None:
    """What its relative without experts reads, transformers does not look at here."""
    config = tiny_checkpoints.config_of("granitemoe")
    assert "mlp_bias" not in config
    assert spec_from_config(config | {"mlp_bias": True}) == spec_from_config(config)


def test_as_many_layers_are_dense_as_transformers_assumes() -> None:
    config = tiny_checkpoints.config_of("glm4_moe")
    dense = config.pop("first_k_dense_replace")
    experts = spec_from_config(config).experts
    assert experts is not None and len(experts.dense_layers) == dense == 1


def test_fast_numerics_reach_every_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(spec_from_config(read_config(directory := tiny_checkpoints.write(tmp_path, "qwen3"))), exact=False)
    found, real, gated = [], linear.linear, linear.gated_linear
    monkeypatch.setattr(
        linear, "linear", lambda *given, exact=True, **more: found.append(exact) or real(*given, exact=exact, **more)
    )
    monkeypatch.setattr(linear, "gated_linear", lambda *given: found.append(given[4]) or gated(*given))
    params, model = load_params(directory, spec, context_length=64), models.lookup(spec.architecture)
    kv = init_kv(spec, 4, 16, torch.float32, "cpu")
    model.unembed(params, spec, model.forward(params, spec, kv, row_batch(PROMPT, 0, [1, 2], 16))[1])
    assert found == [False] * (4 * spec.num_layers + 1)


def test_a_window_as_long_as_the_context_is_none() -> None:
    config = tiny_checkpoints.config_of("mistral")
    longest = config["max_position_embeddings"]
    kinds = [spec_from_config(config | {"sliding_window": longest - less}).kinds for less in (0, 1)]
    assert kinds[0] == () != kinds[1]


TOGETHER: list[tuple[str, dict[str, Any]]] = [
    ("gpt_oss", {"rope_parameters": None, "rope_theta": 300.0}),
    ("gpt_oss", {"rope_parameters": None, "rope_theta": 300.0, "rope_scaling": {}}),
    ("mistral", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
    ("qwen2_moe", {"layer_types": None, "max_window_layers": 3, "use_sliding_window": True, "sliding_window": 6}),
]


@pytest.mark.parametrize(("family", "changes"), TOGETHER)
def test_fields_that_change_together(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    directory = tiny_checkpoints.write(tmp_path, family, num_hidden_layers=4, **EXTRA[family])
    state = tiny_checkpoints.CLASSES[family][1].from_pretrained(directory, dtype=torch.float32).state_dict()
    base = json.loads((directory / "config.json").read_text())
    config = base | changes
    (directory / "config.json").write_text(json.dumps(config))
    want, before = theirs(family, config, state), theirs(family, base, state)
    assert want is not None and before is not None and not torch.allclose(want, before, atol=0.1)
    assert (ours(directory) - want).abs().max() < 1e-4


@pytest.mark.parametrize("family", tiny_checkpoints.CLASSES)
def test_a_changed_field_is_honoured_or_refused(family: str, tmp_path: Path) -> None:
    directory = tiny_checkpoints.write(tmp_path, family, pad_token_id=0, **EXTRA.get(family, {}))
    path = directory / "config.json"
    base = json.loads(path.read_text())
    state = tiny_checkpoints.CLASSES[family][1].from_pretrained(directory, dtype=torch.float32).state_dict()
    if base.get("tie_word_embeddings"):
        state.pop("lm_head.weight", None)
    want = theirs(family, base, state)
    assert want is not None and (ours(directory) - want).abs().max() < 1e-4
    silent, agreed, changed = [], 0, 0
    for key, value in mutations(base):
        config = base | {key: value}
        path.write_text(json.dumps(config))
        try:
            got = ours(directory)
        except FengineError:
            continue
        found = theirs(family, config, state)
        if found is None:
            continue
        agreed += 1
        changed += not torch.equal(found, want)
        if not (got - found).abs().max() < 1e-4:
            silent.append((key, value, float((got - found).abs().max())))
    assert not silent, "\n".join(map(str, silent))
    assert agreed > 20 and changed >= 4, (agreed, changed)  # it compares, and some fields change the result
