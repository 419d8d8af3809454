"""The proof script proves what it says: equal bits are found equal, one wrong bit or a careless sum is found."""

# pyright: reportMissingImports=false

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import layouts
import prove_exact
import tiny_checkpoints
from proof import Answer, difference, float_bits, requests

from fengine.errors import UnsupportedFeatureError

TINY = tiny_checkpoints.LLAMA | {"max_position_embeddings": 512}
PROMISED = {"alone (reference)", "batch of all, cold cache", "random batches 1", "warm prefix", "partly warm prefix",
            "page edges -1, 0, +1", "chunks of 256", "chunks of 512", "chunks of 2048", "preempted", "overlap on",
            "compiled", "fresh process, alone", "decoded, then prefilled", "re-scored as a prompt"}  # fmt: skip
GOOD = {"reference", "equal", "differs, as it must"}


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> layouts.Case:
    """A tiny random model."""
    monkeypatch.setattr(prove_exact, "shape", lambda model: TINY)
    case = prove_exact.make_case("tiny", "cpu", 14, 130, tmp_path)
    case.options |= {"max_total_tokens": 4096}
    return case


VISION = TINY | {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "image_token_id": 200,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "vision_config": {"depth": 2, "hidden_size": 48, "intermediate_size": 70, "num_heads": 2, "patch_size": 14,
                      "window_size": 56, "out_hidden_size": 64, "fullatt_block_indexes": [1]},
}  # fmt: skip


def test_pictures_change_nothing_of_what_is_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {key: value for key, value in VISION.items() if key != "head_dim"}
    monkeypatch.setattr(prove_exact, "shape", lambda model: config | {"max_position_embeddings": 2048})
    case = prove_exact.make_case("pictures", "cpu", 7, 40, tmp_path)
    case.options |= {"max_total_tokens": 8192}
    assert sum(len(ask.images) for ask in case.asks) > 5
    work = prove_exact.Proof(case, None, None)
    work.run()
    found = verdicts(work)
    assert set(found.values()) == GOOD, work.rows
    assert PROMISED - {"compiled"} <= found.keys()


GEMMA = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "mm_tokens_per_image": 4,
    "boi_token_index": 201, "eoi_token_index": 202, "image_token_index": 200,
    "text_config": {"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
                    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 203,
                    "max_position_embeddings": 2048, "sliding_window": 8, "query_pre_attn_scalar": 16,
                    "layer_types": ["sliding_attention", "full_attention"]},
    "vision_config": {"hidden_size": 48, "image_size": 28, "intermediate_size": 70, "num_attention_heads": 2,
                      "model_type": "siglip_vision_model", "num_hidden_layers": 2, "patch_size": 7,
                      "vision_use_head": False},
}  # fmt: skip


def test_pictures_whose_tokens_see_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove_exact, "shape", lambda model: GEMMA)
    monkeypatch.setitem(prove_exact.PROCESSORS, "gemma3", prove_exact.GEMMA | {"size": {"height": 28, "width": 28}})
    monkeypatch.setitem(prove_exact.IN_PLACE, "gemma3", 4)
    case = prove_exact.make_case("pictures", "cpu", 12, 60, tmp_path)
    case.options |= {"max_total_tokens": 8192}
    assert sum(len(ask.images) for ask in case.asks) > 5
    work = prove_exact.Proof(case, ["batch of all", "partly", "chunks of 256", "control", "preempted"], None)
    work.run()
    assert set(verdicts(work).values()) == GOOD, work.rows


def verdicts(work: prove_exact.Proof) -> dict[str, str]:
    return {row["layout"]: row["verdict"] for row in work.rows}


def test_every_layout_of_a_sound_engine_is_equal_and_the_control_is_found(case: layouts.Case) -> None:
    work = prove_exact.Proof(case, None, None)
    facts = work.run()
    found = verdicts(work)
    assert set(found.values()) == GOOD, work.rows
    assert found["control: split sums"] == "differs, as it must"
    assert PROMISED <= found.keys()
    assert prove_exact.status(work.rows) == 0
    assert facts["distinct_first_logprobs"] == 1 and facts["distinct_logprobs"] > 0.9
    for row in work.rows:
        if row["verdict"] == "equal":
            assert row["compared"] > 0 and row["tokens"] == row["logprobs"] == row["bits"] == 0


def test_an_engine_that_sums_by_company_fails(case: layouts.Case) -> None:
    work = prove_exact.Proof(case, ["batch of all", "random batches 1"], None)
    with layouts.careless_linear():
        work.run()
    assert verdicts(work)["batch of all, cold cache"] == verdicts(work)["random batches 1"] == "DIFFERS"
    assert all(row["bits"] > 0 for row in work.rows if row["verdict"] == "DIFFERS")
    assert prove_exact.status(work.rows) == 1


def test_a_control_that_is_not_found_and_a_layout_that_does_not_happen_fail(
    case: layouts.Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prove_exact, "careless_linear", prove_exact.nullcontext)
    case.options |= {"disable_radix_cache": True}
    work = prove_exact.Proof(case, ["control", "warm prefix"], None)
    work.run()
    assert verdicts(work)["control: split sums"] == "CONTROL FOUND NOTHING"
    assert verdicts(work)["warm prefix"] == "NOT EXERCISED"
    assert prove_exact.status(work.rows) == 1


def test_a_budget_leaves_nothing_out_silently(case: layouts.Case) -> None:
    work = prove_exact.Proof(case, None, 0.0)
    work.run()
    found = verdicts(work)
    names = {layout.name for layout in layouts.layouts(case)} | {prove_exact.REFERENCE, prove_exact.RESTART}
    assert found.keys() == names
    assert sum(verdict.startswith("left out: budget") for verdict in found.values()) == len(names) - 1
    assert prove_exact.status(work.rows) == 3


def test_what_is_not_built_is_told_and_is_no_success(case: layouts.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def unbuilt(llm: Any, case: Any) -> Any:
        raise UnsupportedFeatureError("not built: logprob_start_len")

    monkeypatch.setattr(layouts, "rescored", unbuilt)
    work = prove_exact.Proof(case, ["re-scored", "control"], None)
    work.run()
    assert verdicts(work)["re-scored as a prompt"] == "not available"
    assert prove_exact.status(work.rows) == 3


def test_errors_of_a_layout_are_rows_and_fail(case: layouts.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(llm: Any, case: Any) -> Any:
        raise ValueError("no such thing")

    monkeypatch.setattr(layouts, "warm", broken)
    work = prove_exact.Proof(case, ["warm prefix", "batch of all"], None)
    work.run()
    assert verdicts(work)["warm prefix"] == "FAILED ValueError"
    assert verdicts(work)["batch of all, cold cache"] == "equal"
    assert prove_exact.status(work.rows) == 1


def test_differences_are_counted_in_tokens_logprobs_and_bits() -> None:
    want = [Answer([1, 2, 3], [-0.5, -1.5, 0.0]), Answer([7], [-2.0])]
    next_up = math.frexp(1.0)[0] + 2**-24  # 0.5 and one unit in the last place of a float32
    assert difference(want, want) == (4, 0, 0, 0)
    assert difference(want, [Answer([1, 2, 3], [-next_up, -1.5, 0.0]), want[1]]) == (4, 0, 1, 1)
    assert difference(want, [Answer([1, 2, 3], [-0.5, -1.5, -0.0]), want[1]]) == (4, 0, 1, 1)
    assert difference(want, [Answer([1, 9, 3], [-0.5, -1.5, 0.0]), want[1]]) == (4, 1, 0, 0)
    assert difference(want, [Answer([1, 2], [-0.5, -1.5]), want[1]]) == (4, 1, 1, 32)
    assert difference([], []) == (0, 0, 0, 0)
    assert float_bits(1.0) == 0x3F800000
    with pytest.raises(ValueError):
        difference(want, want[:1])


def test_requests_are_ragged_seeded_and_of_every_kind() -> None:
    asks = requests(50000, 256, 4096)
    lengths = [len(ask.ids) for ask in asks]
    assert min(lengths) == 1 and max(lengths) == 4096
    assert len(set(lengths)) > 100 and sum(n > 1024 for n in lengths) > 20
    assert {ask.params["temperature"] for ask in asks} == {0, 0.8}
    assert {"top_p", "top_k", "min_p"} <= {key for ask in asks for key in ask.params}
    assert max(ask.params["max_new_tokens"] for ask in asks) > 64
    heads = [tuple(ask.ids[:200]) for ask in asks if len(ask.ids) > 200]
    assert len(set(heads)) < len(heads)
    assert requests(50000, 256, 4096) == asks != requests(50000, 256, 4096, seed=1)
    json.dumps(asks)
