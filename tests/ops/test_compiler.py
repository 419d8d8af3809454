"""Building C sources: a private cache, damaged files, several processes, compilers that fail."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fengine.errors import CacheSecurityError, ConfigError
from fengine.ops import compiler


@pytest.fixture
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def small_source(tmp_path: Path) -> Path:
    path = tmp_path / "small.c"
    path.write_text('__attribute__((visibility("default"))) int answer(void) { return 42; }\n')
    return path


def test_cache_directory_is_private(cache_home: Path, small_source: Path) -> None:
    path = compiler.build("small", [small_source], [])
    assert path.parent == cache_home / "fengine"
    assert path.parent.stat().st_mode & 0o777 == 0o700
    before = path.stat().st_mtime_ns
    assert compiler.build("small", [small_source], []) == path and path.stat().st_mtime_ns == before


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_cache_directory_that_others_can_write_is_refused(cache_home: Path, small_source: Path, mode: int) -> None:
    (cache_home / "fengine").mkdir()
    (cache_home / "fengine").chmod(mode)
    with pytest.raises(CacheSecurityError, match="chmod 700"):
        compiler.build("small", [small_source], [])


def test_cache_directory_of_another_user_is_refused(cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.private_cache_dir()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(CacheSecurityError, match="belongs to uid"):
        compiler.private_cache_dir()


@pytest.mark.parametrize(
    "damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: bytes(len(b)), lambda b: b[:-1] + b"?"]
)
def test_damaged_library_is_built_again(cache_home: Path, small_source: Path, damage: Callable[[bytes], bytes]) -> None:
    path = compiler.build("small", [small_source], [])
    path.write_bytes(damage(path.read_bytes()))
    assert compiler.load("small", [small_source], []).answer() == 42
    assert len(list(path.parent.iterdir())) == 1


def test_changed_source_or_compiler_is_another_library(
    cache_home: Path, small_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compiler.build("small", [small_source], [])
    small_source.write_text(small_source.read_text().replace("42", "43"))
    second = compiler.build("small", [small_source], [])
    assert first != second and compiler.load("small", [small_source], []).answer() == 43
    monkeypatch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "-DX"))
    assert compiler.build("small", [small_source], []).name.split("-")[1] != second.name.split("-")[1]


def test_two_processes_may_build_at_once(cache_home: Path, small_source: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from fengine.ops import compiler;"
        "print(compiler.load('small', [Path(sys.argv[1])], []).answer())"
    )
    command = [sys.executable, "-c", code, str(small_source)]
    environment = os.environ | {"PYTHONPATH": str(Path(compiler.__file__).parents[2])}
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) for _ in range(2)]
    assert [process.communicate()[0].strip() for process in both] == [b"42", b"42"]
    assert len(list((cache_home / "fengine").iterdir())) == 1


def test_compilers_that_are_missing_or_fail(
    cache_home: Path, small_source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CC", "false")
    with pytest.raises(ConfigError, match="set CC"):
        compiler.build("small", [small_source], [])
    monkeypatch.delenv("CC")
    small_source.write_text("this is not C\n")
    with pytest.raises(ConfigError, match="error"):
        compiler.build("small", [small_source], [])
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="install"):
        compiler.build("small", [small_source], [])


def test_no_home_directory_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    with pytest.raises(ConfigError, match="set XDG_CACHE_HOME"):
        compiler.private_cache_dir()


def test_a_cache_without_room_is_a_configuration_error(
    cache_home: Path, small_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(**_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(compiler.tempfile, "TemporaryDirectory", full)
    with pytest.raises(ConfigError, match=f"{cache_home}.*No space left.*set XDG_CACHE_HOME"):
        compiler.build("small", [small_source], [])


def test_a_cc_that_is_no_command_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "'gcc")
    with pytest.raises(ConfigError, match="CC=.*is not a command"):
        compiler.find_compiler()


@pytest.fixture
def wheel(tmp_path: Path, small_source: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The libraries of a wheel, on a machine that has no compiler and, at first, a CPU of every kind."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(compiler, "PREBUILT", tmp_path / "wheel")
    paths = compiler.prebuild("small", [small_source], [], tmp_path / "wheel")
    monkeypatch.setattr(compiler, "_cpu", lambda: " ".join(flags for flags, _ in compiler.LEVELS.values()))
    monkeypatch.setenv("PATH", str(tmp_path))
    return paths


def test_a_wheel_needs_no_compiler(wheel: list[Path], small_source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wheel and compiler.prebuilt("small", [small_source], []) == wheel
    assert compiler.load("small", [small_source], []).answer() == 42
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="compiler"):
        patch.setenv("CC", "no-such-compiler")  # it is asked for
        compiler.load("small", [small_source], [])
    monkeypatch.setattr(compiler, "_cpu", lambda: "fpu sse2")  # too old a CPU
    with pytest.raises(ConfigError, match="needs a C compiler"):
        compiler.load("small", [small_source], [])


def test_what_a_wheel_brought_is_of_its_very_sources(wheel: list[Path], small_source: Path) -> None:
    small_source.write_text(small_source.read_text().replace("42", "43"))
    with pytest.raises(ConfigError, match="needs a C compiler"):
        compiler.load("small", [small_source], [])


def test_a_library_that_cannot_be_loaded_is_compiled_instead(
    wheel: list[Path], small_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in wheel:
        path.write_bytes(b"\x7fELF of another system")
    monkeypatch.undo()
    monkeypatch.setattr(compiler, "PREBUILT", wheel[0].parent)
    monkeypatch.setenv("XDG_CACHE_HOME", str(small_source.parent))
    assert compiler.load("small", [small_source], []).answer() == 42
    assert wheel[0].read_bytes().startswith(b"\x7fELF of"), "what was installed is left alone"


def test_the_sources_are_those_of_the_package() -> None:
    assert [path.name for path in compiler.SOURCES] and all(path.parent.name == "ops" for path in compiler.SOURCES)
    assert {path.suffix for path in compiler.HEADERS} == {".h"}
