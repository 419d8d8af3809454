"""Compiled code is kept where only this user can write."""

import os
import tempfile
from pathlib import Path

import pytest

from fengine import Engine
from fengine.engine.build import use_private_caches
from fengine.ops.proof import sources_digest


@pytest.mark.parametrize("given", [None, os.path.join(tempfile.gettempdir(), "torchinductor_somebody")])
def test_compiled_code_goes_to_the_private_directory(
    given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's own default, a predictable name in a shared directory, is not kept even where it was set."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", given or "")
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    if given is None:
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    use_private_caches()
    found = os.environ["TORCHINDUCTOR_CACHE_DIR"]  # one for each state of the ops, whose arguments the code knows
    assert found == str(tmp_path / "fengine" / f"inductor-{sources_digest()[:16]}")
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "fengine" / "triton")
    assert (tmp_path / "fengine").stat().st_mode & 0o777 == 0o700


def test_a_users_choice_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    use_private_caches()
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert os.environ[name] == str(tmp_path / name)


def test_an_engine_uses_the_private_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is loaded: a hook that stops `build` right there."""

    class Reached(Exception):
        pass

    def stop() -> None:
        raise Reached

    monkeypatch.setattr("fengine.engine.build.use_private_caches", stop)
    with pytest.raises(Reached):
        Engine(model_path="box")
