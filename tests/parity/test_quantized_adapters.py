"""LoRA over weights in few bits: of weight-only formats the bits of the dequantized model with the same adapters; of
products in FP8 their declared tree, and the adapters' own from x as it was."""

from pathlib import Path
from typing import Any

import pytest
import quantized_checkpoints as made
import tiny_adapters
import tiny_checkpoints
import torch
from test_quantized import CASES, W8A8_CASES, keep, mxfp4
from torch import Tensor

from fengine import Engine
from fengine.ops import linear, lora, w8a8
from fengine.ops.e4m3 import Rows
from fengine.ops.quantized import encoded

NAMES = ["a", "b", None, "a", "b", None]
PROMPTS = [[(7 * i + 13 * j) % 120 + 3 for j in range(n)] for i, n in enumerate((1, 5, 33, 17, 40, 9))]
PARAMS = [{"max_new_tokens": 6, "ignore_eos": True, "temperature": 0.9 * (i % 2), "sampling_seed": i} for i in range(6)]
Answers = list[tuple[list[int], Any, Any]]


def engine(model: Path, **options: Any) -> Engine:
    base = {"device": "cpu", "max_total_tokens": 1024, "enable_torch_compile": False, "skip_tokenizer_init": True}
    return Engine(model_path=str(model), **(base | options))


def answers(llm: Engine, names: list[str | None], rows: Any = range(6)) -> Answers:
    asked: Any = {"lora_path": [names[i] for i in rows]} if any(names) else {}
    outputs: Any = llm.generate(
        input_ids=[PROMPTS[i] for i in rows], sampling_params=[PARAMS[i] for i in rows], return_logprob=True,
        logprob_start_len=0, **asked,
    )  # fmt: skip
    metas = [o["meta_info"] for o in outputs]
    return [
        (o["output_ids"], m["input_token_logprobs"][1:], m["output_token_logprobs"])
        for o, m in zip(outputs, metas, strict=True)
    ]


def adapters(folder: Path, model: Path, **how: Any) -> dict[str, str]:
    found = {}
    for seed, name in enumerate("ab"):
        values = tiny_adapters.tensors(model, 4 + seed, seed=seed, gain=0.5, **how)
        found[name] = str(tiny_adapters.write(folder / name, values, 4 + seed, lora_alpha=4))
    return found


def bits_of(few: Path, paths: dict[str, str], **options: Any) -> Answers:
    """Of rows with adapters and without, after a look at each alone, and at those without in an engine without LoRA."""
    with engine(few, lora_paths=paths, **options) as llm:
        found = answers(llm, NAMES)
        llm.flush_cache()
        assert [answers(llm, NAMES, [i])[0] for i in range(6)] == found
        assert all(a != b for a, b in zip(found, answers(llm, ["b", "a", "a", None, None, "b"]), strict=True))
    with engine(few, **options) as llm:
        assert answers(llm, [None] * 6, (2, 5)) == [found[2], found[5]]
    return found


@pytest.mark.parametrize("case", CASES)
def test_adapters_over_each_format_are_those_over_its_dequantized_model(case: str, tmp_path: Path) -> None:
    config, make, options = CASES[case]
    few, dense = made.write(tmp_path, config, keep(make), **options)
    paths = adapters(tmp_path, dense)
    got = bits_of(few, paths)
    with engine(dense, lora_paths=paths) as llm:
        assert answers(llm, NAMES) == got


def test_adapters_of_attention_beside_experts_of_mxfp4(tmp_path: Path) -> None:
    few, dense = mxfp4(tmp_path)
    paths = adapters(tmp_path, dense, kinds=("q_proj", "v_proj", "o_proj"))
    got = bits_of(few, paths)
    with engine(dense, lora_paths=paths) as llm:
        assert answers(llm, NAMES) == got


@pytest.mark.parametrize("case", [*W8A8_CASES, "at load", "at load, down alone", "at load, shared expert"])
def test_rows_without_an_adapter_are_those_of_fp8_without_lora(case: str, tmp_path: Path) -> None:
    """Some leaves with adapters, and some without; norms and gated products go to FP8 by themselves beside adapters."""
    kinds = ("down_proj",) if "down" in case else tiny_adapters.ALL
    if "at load" in case:
        family: str = "llama"
        sizes: Any = {}
        if "expert" in case:
            family, sizes = "qwen2_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                                          "shared_expert_intermediate_size": 48}  # fmt: skip
        few = dense = tiny_checkpoints.write(tmp_path / "model", family, dtype=torch.bfloat16, **sizes)
    else:
        config, make, options = CASES[case]
        few, dense = made.write(tmp_path, config, keep(make), **options)
    bits_of(few, adapters(tmp_path, dense, kinds=kinds), quantization="w8a8_fp8")


@pytest.mark.parametrize("group", [0, 64])
def test_products_in_fp8_and_adapters_have_the_trees_of_both(group: int) -> None:
    """The adapter's part is what it adds to zero, so from x itself; a row in FP8 is no x."""
    draw = torch.Generator().manual_seed(group)
    n, k, rank, tokens = 96, 192, 16, 9

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    codes = encoded(normal(n, k).bfloat16() * 0.1, "w8a8", group)
    a_SPRK, b_SNR = normal(3, 2, k, rank).transpose(2, 3) * k**-0.5, normal(3, rank, n).transpose(1, 2)
    stack = lora.Stack(a_SPRK, b_SNR, torch.rand(3, 2, generator=draw), torch.tensor([[16, 3]] * 3).int(), (32, 64))
    some = torch.tensor([7, 0, 4, 1, 8]).int(), torch.tensor([0, 2, 2, 5]).int()
    x_TK, bias_N, base = normal(tokens, k), normal(n), w8a8.pack(codes)
    zero = lora.Adapted(linear.pack(torch.zeros(n, k)), stack)
    want = w8a8.reference(x_TK, codes, bias_N) + linear.linear(x_TK, zero, None, some)
    leaf = lora.Adapted(base, stack)
    got = linear.linear(x_TK, leaf, bias_N, some)
    assert torch.equal(got, want) and not torch.equal(got, linear.linear(x_TK, base, bias_N))
    assert torch.equal(linear.linear(x_TK, leaf, bias_N), linear.linear(x_TK, base, bias_N))
    halves = linear.gated_linear(x_TK, leaf, bias_N, some), linear.gated_linear(x_TK, leaf, bias_N, some, group=32)
    gate, up = want.chunk(2, 1)
    torch.testing.assert_close(halves[0], torch.nn.functional.silu(gate) * up)
    assert isinstance(halves[1], Rows)
