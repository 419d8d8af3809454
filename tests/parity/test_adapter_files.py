"""Adapters that cannot be used: each is refused as a whole, with the tensor or setting that is wrong."""

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import tiny_adapters
import torch
from tiny_checkpoints import SIZES
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fengine.core.request import Adapter
from fengine.errors import AdapterError, UnsupportedFormatError
from fengine.lora.adapters import Adapters, adapter_directory
from fengine.lora.layout import ALONE, Layout, all_finite, all_sites, kinds_of
from fengine.lora.peft_config import parse_config
from fengine.lora.peft_files import Limits, from_tensors, read_adapter
from fengine.worker.loader import spec_from_config

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
SPEC = spec_from_config(SIZES | CONFIG)
LIMITS = Limits(all_sites(SPEC), kinds_of(SPEC), 16)
NAME = "base_model.model.model.layers.1.self_attn.q_proj.lora_{}.weight"
A, B = NAME.format("A"), NAME.format("B")
Tensors = dict[str, Tensor]
GIVEN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(LIMITS.kinds)}


def whole(rank: int = 4) -> Tensors:
    return tiny_adapters.tensors(SPEC, rank)


def test_a_good_adapter_is_read_whole(tmp_path: Path) -> None:
    values = whole()
    read = read_adapter(tiny_adapters.write(tmp_path, values, 4, lora_alpha=6), LIMITS)
    assert len(read.updates) == len(values) / 2 == 14 and len(read.sha256) == 64
    update = read.updates["model.layers.1.self_attn.q_proj"]
    assert torch.equal(update.a, values[A]) and torch.equal(update.b, values[B]) and update.scale == 1.5


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda values: {name.replace(old, new): value for name, value in values.items()}


def plus(**more: Tensor) -> Callable[[Tensors], Tensors]:
    return lambda values: values | {name.replace("__", "."): value for name, value in more.items()}


def changed(name: str, change: Callable[[Tensor], Any]) -> Callable[[Tensors], Tensors]:
    return lambda values: values | {name: change(values[name])}


def nan(value: Tensor) -> Tensor:
    value = value.clone()
    value[0, 0] = float("nan")
    return value


BAD_TENSORS: list[tuple[Callable[[Tensors], Tensors], str]] = [
    (changed(A, nan), f"{A}' holds NaN or infinite values"),
    (changed(B, lambda t: t / 0), f"{B}' holds NaN or infinite values"),
    (changed(A, lambda t: t[:3]), rf"{A}': expected shape \[4, 64\], got \[3, 64\]"),
    (changed(B, lambda t: t[:, :3]), rf"{B}': expected shape \[64, 4\], got \[64, 3\]"),
    (changed(A, lambda t: t[:, :48]), rf"{A}': expected shape \[4, 64\], got \[4, 48\]"),  # another base
    (changed(A, lambda t: t.double()), f"{A}' is F64"),
    (lambda values: {k: v for k, v in values.items() if k != A}, "self_attn.q_proj' is targeted, but its lora_A"),
    (lambda values: {k: v for k, v in values.items() if ".layers.0." in k}, "layers.1.* is targeted, but its lora_"),
    (renamed("base_model.model.", ""), "no tensor belongs to a linear layer"),
    (renamed("model.layers", "transformer.h"), "no tensor belongs to a linear layer"),
    (renamed("layers.1.", "layers.7."), "layers.7.*lora_A.weight' is not part of"),
    (plus(**{A.replace(".lora_A", ".lora_magnitude_vector").replace(".", "__"): torch.ones(64)}), "is DoRA"),
    (plus(base_model__model__lm_head__lora_A__weight=torch.ones(4, 64)), "is an adapted or replaced output head"),
    (plus(base_model__model__model__embed_tokens__lora_embedding_A=torch.ones(4, 131)), "is LoRA of an embedding"),
    (plus(base_model__model__model__layers__0__self_attn__q_proj__bias=torch.ones(64)), "is a bias"),
    (plus(base_model__model__score__weight=torch.ones(2, 64)), "is a replaced classification head"),
    (plus(something=torch.ones(1)), "'something' is not part of a LoRA adapter"),
    (plus(**{A.replace("lora_A", "lora_A.default").replace(".", "__"): torch.ones(4, 64)}), "are the same"),
    (lambda values: {}, "no tensor belongs"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), BAD_TENSORS)
def test_bad_tensors(change: Callable[[Tensors], Tensors], words: str, tmp_path: Path) -> None:
    kinds = list(tiny_adapters.ALL)
    directory = tiny_adapters.write(tmp_path, change(whole()), 4, target_modules=kinds)
    with pytest.raises(AdapterError, match=words):
        read_adapter(directory, LIMITS)
    values = change(whole())
    if not any(value.dtype == torch.float64 for value in values.values()):
        with pytest.raises(AdapterError, match=words):
            from_tensors(values, json.loads((directory / "adapter_config.json").read_text()), "x", LIMITS)


BAD_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"r": 0}, "r must be a whole number from 1"),
    ({"r": 4.0}, "r must be a whole number"),
    ({"r": True}, "r must be a whole number"),
    ({"r": None}, "r must be a whole number"),
    ({"r": 8}, r"expected shape \[8, 64\], got \[4, 64\]"),
    ({"r": 17}, "has rank 17, over this engine's max_lora_rank=16"),
    ({"lora_alpha": -1}, "lora_alpha must be a finite number above 0"),
    ({"lora_alpha": 0}, "lora_alpha must be"),
    ({"lora_alpha": None}, "lora_alpha must be"),
    ({"lora_alpha": "8"}, "lora_alpha must be"),
    ({"use_rslora": 1}, "use_rslora must be true or false"),
    ({"rank_pattern": {"q_proj": 0}}, "rank_pattern must be an object"),
    ({"rank_pattern": {"q_proj": 2}}, r"expected shape \[2, 64\], got \[4, 64\]"),
    ({"alpha_pattern": [1]}, "alpha_pattern must be an object"),
    ({"rank_pattern": {"(": 2}}, "a pattern of adapter_config.json cannot be used"),
    ({"target_modules": None}, "target_modules must be a list"),
    ({"target_modules": []}, "target_modules must be a list"),
    ({"target_modules": ["c_attn", "qkv_proj"]}, "match no linear layer of this model"),
    ({"target_modules": ["q_proj"]}, "adapter_config.json does not target its module"),
    ({"target_modules": r"transformer\.h\..*"}, "match no linear layer of this model"),
    ({"target_modules": "(a+)+$("}, "cannot be used"),
    ({"target_modules": r"(?<=x)q_proj"}, "look-around"),
    ({"target_modules": "((((.?){60}){60}){60}){60}z"}, "takes too long"),
    ({"layers_to_transform": [0]}, "does not target its module"),
    ({"layers_to_transform": [5]}, "match no linear layer"),
    ({"layers_to_transform": "0"}, "layers_to_transform must be"),
    ({"layers_to_transform": [0], "target_modules": "all-linear"}, "goes with a list of target_modules"),
    ({"layers_to_transform": [0], "layers_pattern": "h"}, "layers_pattern='h' is not supported"),
    ({"exclude_modules": 5}, "exclude_modules must be"),
    ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; only LORA is built"),
    ({"peft_type": None}, "peft_type is None"),
    ({"use_dora": True}, "use_dora=True is not supported"),
    ({"bias": "lora_only"}, "bias='lora_only' is not supported"),
    ({"lora_bias": True}, "lora_bias=True is not supported"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out=True is not supported"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save=.* is not supported"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4' is not supported"),
    ({"target_parameters": ["x"]}, "target_parameters=.* is not supported"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices=.* is not supported"),
    ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens=.* is not supported"),
    ({"layer_replication": [[0, 1]]}, "layer_replication=.* is not supported"),
    ({"next_years_idea": {"on": True}}, "next_years_idea=.* is not supported"),
]


@pytest.mark.parametrize(("config", "words"), BAD_CONFIGS)
def test_bad_configs(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=words):
        read_adapter(tiny_adapters.write(tmp_path, whole(), 4, **config), LIMITS)


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(AdapterError) as error:
        parse_config({"peft_type": "LORA", "r": 0, "lora_alpha": float("nan"), "use_dora": True}, "x")
    for words in ("use_dora=True", "r must be", "lora_alpha must be", "target_modules must be"):
        assert words in str(error.value)


def test_bad_files(tmp_path: Path) -> None:
    def fails(words: str, kind: type[Exception] = AdapterError) -> None:
        with pytest.raises(kind, match=words):
            read_adapter(tmp_path / "a", LIMITS)

    fails("does not exist, or is no directory")
    (tmp_path / "a").mkdir()
    fails("adapter_config.json is missing")
    tiny_adapters.write(tmp_path / "a", whole(), 4)
    weights, config = tmp_path / "a" / "adapter_model.safetensors", tmp_path / "a" / "adapter_config.json"
    data, text = weights.read_bytes(), config.read_text()
    weights.write_bytes(data[:-5])
    fails("is truncated or no safetensors file")
    weights.write_bytes(b"")
    fails("is truncated or no safetensors file")
    weights.unlink()
    fails("has no adapter_model.safetensors; it holds adapter_config.json")
    (tmp_path / "a" / "adapter_model.bin").write_bytes(b"\x80\x04")
    fails("only as adapter_model.bin, a pickle", UnsupportedFormatError)
    weights.write_bytes(data)
    for bad in ("", "[]", "{", '{"r": NaN}', '{"r": 1, "r": 2}', '{"lora_alpha": 1e999, "r": 4, "peft_type": "LORA"}'):
        config.write_text(bad)
        fails("adapter_config.json")
    config.write_text(text)
    assert read_adapter(tmp_path / "a", LIMITS).updates


def test_patterns_take_linear_time() -> None:
    config = parse_config(
        {"peft_type": "LORA", "r": 4, "lora_alpha": 1, "target_modules": "(([a-z._0-9]+)+)+!"}, "x"
    )  # in Python's re: for ever
    with pytest.raises(AdapterError, match="match no linear layer"):
        config.targeted([module.name for site in LIMITS.sites for module in site.modules])


BLOCKS = "self_attn|attention|attn|mlp|feed_forward|ffn|dense"
WORDS = "q_proj|k_proj|v_proj|o_proj|gate_proj"


@pytest.mark.parametrize(
    "pattern",
    [
        rf"(?:.*?(?:language|text).*?(?:{BLOCKS}).*?(?:{WORDS}).*?)|(?:\bmodel\.layers\.[\d]{{1,}}\.(?:{BLOCKS})\.(?:(?:{WORDS}|"
        "up_proj|down_proj|out_proj|fc1|fc2|proj|qkv|linear|dense_h_to_4h)))",
        rf"^(model(?=\.).*\.({WORDS}))$",
        rf"^(?!.*(?:visual|layers\.0)).*(?:{WORDS}).*",
        r"(?i:MODEL).layers.\d{1,2}\b.\w+\.(q|up)_proj\Z",
    ],
)
def test_patterns_that_trainers_write_mean_what_re_says(pattern: str) -> None:
    """Of Unsloth, ms-swift and LLaMA-Factory."""
    found = parse_config(GIVEN | {"target_modules": pattern}, "x").targeted(list(LIMITS.modules))
    assert found == [name for name in LIMITS.modules if re.fullmatch(pattern, name)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_that_are_not_finite_are_found_wherever_they_stand(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    values = torch.tensor([0.0, -0.0, largest, -largest, torch.finfo(dtype).tiny / 2], dtype=dtype)
    values = values.repeat(ALONE // 2).view(5, -1)
    assert all_finite(values) and all_finite(values.T) and all_finite(values[:0]) and all_finite(values[0, 0])
    for bad in (float("inf"), -float("inf"), float("nan")):
        for at in (0, ALONE - 1, ALONE, values.numel() - 1):
            wrong = values.clone()
            wrong.view(-1)[at] = bad
            assert not all_finite(wrong) and not all_finite(wrong.T)


class Work(TorchDispatchMode):
    """Notes the elements that torch computed at once."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and not str(func).startswith(("aten.empty", "aten.detach", "aten.split")):
            self.most = max([self.most, *(value.numel() for value in (result, *args) if isinstance(value, Tensor))])
        return result


@pytest.mark.parametrize("device", ["cpu", "meta"])  # meta: laid out as on CUDA
def test_a_load_never_calls_for_the_threads_that_steps_need(device: str) -> None:
    sizes = {"hidden_size": 512, "num_hidden_layers": 1, "intermediate_size": 5000}
    spec = spec_from_config(SIZES | CONFIG | sizes)
    limits, kinds = Limits(all_sites(spec), kinds_of(spec), 40), kinds_of(spec)
    values = tiny_adapters.tensors(spec, 40)
    layout = Layout.of(spec, 40, kinds, torch.bfloat16, torch.device(device))
    adapters = Adapters(layout, limits, layout.memory(2), None, "")
    config = {"peft_type": "LORA", "r": 40, "lora_alpha": 8, "target_modules": list(kinds)}
    with Work() as work:
        adapters.load_tensors("a", values, config)
    assert max(value.numel() for value in values.values()) > 3 * ALONE and 0 < work.most <= ALONE
    image = torch.cat(adapters.resolve("a").image)[None]
    for site, stack in adapters.layout.stacks(image):
        first = 0
        for part, module in enumerate(site.modules):
            a, b = (values[f"base_model.model.{module.name}.lora_{side}.weight"].bfloat16() for side in "AB")
            assert torch.equal(stack.a_SPRK[0, part, :40], a) and not stack.a_SPRK[0, part, 40:].any()
            assert torch.equal(stack.b_SNR[0, first : first + module.outputs, :40], b)
            first += module.outputs


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a.to("meta"), "must be dense, and have values"),
        (lambda a: a.to_sparse(), "must be dense"),
        (lambda a: a.to_sparse_csr(), "must be dense"),
        (lambda a: a.double(), "must be a float32, bfloat16 or float16 tensor"),
        (lambda a: a.numpy(), "must be a float32"),
    ],
)
def test_tensors_without_plain_values_are_refused(change: Callable[[Tensor], Any], words: str) -> None:
    with pytest.raises(AdapterError, match=f"{A}.*{words}"):
        from_tensors(changed(A, change)(whole()), GIVEN, "a", LIMITS)


def test_views_are_read_as_what_they_show() -> None:
    values = whole()
    for view in (torch._neg_view(-values[A]), values[A].T.contiguous().T, torch.nn.Parameter(values[A])):
        read = from_tensors(values | {A: view}, GIVEN, "a", LIMITS)
        assert torch.equal(read.updates["model.layers.1.self_attn.q_proj"].a, values[A])


@pytest.mark.parametrize("values", [
    {"lora_alpha": 10**400}, {"alpha_pattern": {"q_proj": 10**400}}, {"lora_alpha": 10**400, "use_rslora": True},
    {"rank_pattern": {3: 4}}, {"alpha_pattern": {None: 4.0}},
])  # fmt: skip
def test_numbers_beyond_floats_and_keys_that_are_none_are_told(values: dict[str, Any]) -> None:
    with pytest.raises(AdapterError, match=next(iter(values))):
        parse_config(GIVEN | values, "config")
    parse_config(GIVEN | {"lora_alpha": 10**38}, "config")


def test_what_another_thread_has_read_meanwhile_is_not_read_again() -> None:
    adapters, load = cast(Any, Adapters.__new__(Adapters)), Adapter("a", 1, None)
    found = iter([None, load])
    adapters._loading, adapters._used = threading.Lock(), lambda name: next(found)
    adapters._reload = lambda name: pytest.fail("it is there")
    assert adapters.resolve("a") is load


def test_a_module_named_whole_is_meant_beside_layers_to_transform() -> None:
    """As in PEFT, where layers choose among those that end in a target, and of targets some may be no module's."""
    named = {"target_modules": {"k_proj", "model.layers.0.self_attn.q_proj", "c_attn"}, "layers_to_transform": [1]}
    found = parse_config(GIVEN | named, "config").targeted(list(LIMITS.modules))
    assert found == ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.k_proj"]


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model.", ""])
def test_patterns_are_of_the_names_that_peft_has(prefix: str) -> None:
    """Of a decoder with images, with them as before, or alone."""
    limits = LIMITS._replace(
        rename=lambda name: re.sub(r"^(model\.language_model|language_model\.model)", "model", name)
    )
    values = {name.replace("model.model.layers", f"model.{prefix}layers"): value for name, value in whole().items()}
    q = re.escape(f"{prefix}layers.1.self_attn.q_proj")
    patterns = {"alpha_pattern": {f"^{q}": 3}, "target_modules": rf"{re.escape(prefix)}layers\.\d+\..*_proj"}
    read = from_tensors(values, GIVEN | patterns, "x", limits)
    assert {name for name, update in read.updates.items() if update.scale == 3 / 4} == {
        "model.layers.1.self_attn.q_proj"
    }
    whole_names = sorted(name.partition(".lora_")[0].removeprefix("base_model.model.") for name in values)
    assert len(from_tensors(values, GIVEN | {"target_modules": whole_names}, "x", limits).updates) == 14


def test_patterns_say_rank_and_alpha_each_by_themselves() -> None:
    patterns = {"rank_pattern": {"q_proj": 2, "v_proj": 16}, "alpha_pattern": {r"layers\.1\..*": 3, "k_proj": 5}}
    names = [f"model.layers.{i}.self_attn.{name}_proj" for i in (0, 1) for name in "qkvo"]
    config = parse_config(GIVEN | patterns, "config")
    ranks, alphas = [2, 4, 16, 4] * 2, [8, 5, 8, 8, 3, 3, 3, 3]
    assert [config.rank_of(name) for name in names] == ranks
    assert [config.scale_of(name) for name in names] == [a / r for a, r in zip(alphas, ranks, strict=True)]
    config = parse_config(GIVEN | patterns | {"use_rslora": True}, "config")
    assert [config.scale_of(name) for name in names] == [a / r**0.5 for a, r in zip(alphas, ranks, strict=True)]


@pytest.mark.parametrize("path", ["x" * 5000, "a\0b", "\ud800"])
def test_paths_that_no_file_can_have_are_refused(path: str) -> None:
    with pytest.raises(AdapterError):
        adapter_directory(path)
