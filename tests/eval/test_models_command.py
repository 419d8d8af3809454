"""`fengine models`: what the registry and conf/model hold, and nothing else."""

import pytest

pytest.importorskip("hydra")

from fengine import models
from fengine.eval.cli.schema import conf_dir
from fengine.eval.commands.inform import presets_of
from fengine.run import main


def test_every_family_and_preset_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    for title, family in models.FAMILIES.items():
        assert lines[lines.index(title) + 1].split() == ", ".join(family.models()).split()
    assert len(presets_of()) == len(list((conf_dir() / "model").iterdir()))
    for name, path in presets_of().items():
        assert f"{name} {path}" in [" ".join(line.split()) for line in lines]


def test_a_word_chooses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "MIXTRAL"]) == 0
    assert capsys.readouterr().out.splitlines()[::3] == [
        "Mixtral",
        "    mixtral-8x7b            mistralai/Mixtral-8x7B-Instruct-v0.1",
    ]
    assert main(["models", "no-such-model"]) == 2 == main(["models", "two", "words"])
    assert "no family or preset has 'no-such-model'" in capsys.readouterr().err
    assert main(["models", "--help"]) == 0 and "Usage:  fengine models" in capsys.readouterr().out
