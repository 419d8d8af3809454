"""Configs of public checkpoints as they are published: each gives its facts, or is refused for what is not built.

public_configs.jsonl has their essential fields, one checkpoint a line, where it can as the difference to another one.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from fengine.config.schema import PACKAGED
from fengine.errors import UnsupportedArchitectureError
from fengine.worker.loader import spec_from_config

OmegaConf = pytest.importorskip("omegaconf").OmegaConf

LINES = (Path(__file__).parent / "public_configs.jsonl").read_text().splitlines()
ROWS: dict[str, dict[str, Any]] = {row["name"]: row for row in map(json.loads, LINES)}
PRESETS = Path(__file__).parents[2] / "conf" / "model"


def config_of(row: dict[str, Any]) -> dict[str, Any]:
    base = config_of(ROWS[row["like"]]) if "like" in row else {}
    return {key: value for key, value in base.items() if key not in row.get("without", ())} | row["config"]


@pytest.mark.parametrize("name", ROWS)
def test_a_public_config(name: str) -> None:
    row = ROWS[name]
    if "refused" in row:
        with pytest.raises(UnsupportedArchitectureError, match=row["refused"]):
            spec_from_config(config_of(row))
        return
    spec = spec_from_config(config_of(row))
    facts = [spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.window, len(spec.window_layers)]
    assert [*facts, spec.rope.kind] == row["spec"]
    experts = spec.experts
    found = None if experts is None else [experts.count, experts.top_k, experts.size, experts.shared_size]
    assert found == row.get("experts")


def test_every_preset_has_its_config_here() -> None:
    paths = {str(OmegaConf.load(file).path) for file in PRESETS.glob("*.yaml")}
    assert paths - PACKAGED.keys() <= ROWS.keys()
