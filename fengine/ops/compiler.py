"""Builds the C kernels at first use and keeps them in a directory that only the user can write.

A wheel brings them built for some kinds of CPU (`prebuild`), for machines without a compiler; the bits are the same,
whatever instructions they are made of. With $CC set they are compiled for this very CPU all the same.

A built library is a file `<name>-<key>-<digest>.so`: `key` covers sources, flags, compiler version and CPU; `digest` is
the SHA-256 of the file itself, so a truncated or altered file is found before it is loaded, and is built again. Files
appear by one atomic rename: any number of processes may build at once."""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fengine.errors import CacheSecurityError, ConfigError

# No -ffast-math: every sum has a fixed order. No contraction: the sources ask for FMA by name.
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-fvisibility=hidden", "-w")
COMPILE_SECONDS = 120
SOURCES = sorted(Path(__file__).parent.glob("cpu_*.c"))
HEADERS = sorted(Path(__file__).parent.glob("cpu_*.h"))
PREBUILT = Path(__file__).parent / "prebuilt"
# Kinds of CPU that wheels have kernels for, the best first: the flags of /proc/cpuinfo that it needs, the compiler's.
LEVELS = {
    "x86-64-v4-bf16": (
        "avx512_bf16 avx512f avx512bw avx512cd avx512dq avx512vl avx2 fma bmi1 bmi2 f16c movbe",
        "-march=x86-64-v4 -mavx512bf16",
    ),
    "x86-64-v4": ("avx512f avx512bw avx512cd avx512dq avx512vl avx2 fma bmi1 bmi2 f16c movbe", "-march=x86-64-v4"),
    "x86-64-v3": ("avx2 fma bmi1 bmi2 f16c movbe", "-march=x86-64-v3"),
    "arm64": ("asimd", "-march=armv8-a"),
}


def private_cache_dir() -> Path:
    """The directory `fengine` under XDG_CACHE_HOME (default ~/.cache), created with mode 0700 if missing. Errors:
    CacheSecurityError if it is another user's or others can write to it; ConfigError if it cannot be made."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        path = (base if base.is_absolute() else Path.home() / ".cache") / "fengine"
    except RuntimeError as error:
        raise ConfigError(f"cannot tell where to cache compiled code: {error}; set XDG_CACHE_HOME") from error
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.stat()
    except OSError as error:
        raise ConfigError(f"cannot create the cache directory {path}: {error}; set XDG_CACHE_HOME") from error
    if info.st_uid != os.getuid():
        raise CacheSecurityError(f"cache directory {path} belongs to uid {info.st_uid}, not to you; set XDG_CACHE_HOME")
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        remedy = f"chmod 700 {shlex.quote(str(path))}"
        raise CacheSecurityError(f"cache directory {path} is writable by others; run: {remedy}")
    return path


def find_compiler() -> list[str]:
    """The C compiler as a command: $CC, else cc, gcc or clang. Errors: ConfigError if there is none."""
    try:
        wanted = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise ConfigError(f"CC={os.environ['CC']!r} is not a command: {error}") from error
    if wanted and shutil.which(wanted[0]):
        return wanted
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    remedy = "xcode-select --install" if platform.system() == "Darwin" else "apt install g++"
    raise ConfigError(f"running on the CPU needs a C compiler, and none of $CC, cc, gcc, clang was found; {remedy}")


def build(name: str, sources: list[Path], headers: list[Path]) -> Path:
    """The shared library made from `sources`, from the cache or newly compiled for this very CPU. Errors: ConfigError
    without a working compiler or room, CacheSecurityError for an unsafe cache directory."""
    compiler = find_compiler()
    cache = private_cache_dir()
    key = _key(compiler, [*sources, *headers])
    for candidate in sorted(cache.glob(f"{name}-{key}-*.so")):
        if candidate.name == f"{name}-{key}-{_digest(candidate)}.so":
            return candidate
        candidate.unlink(missing_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=cache, prefix="build-") as folder:
            output = Path(folder) / "library.so"
            _compile(compiler, sources, output)
            path = cache / f"{name}-{key}-{_digest(output)}.so"
            output.replace(path)
    except OSError as error:
        raise ConfigError(
            f"compiled code cannot be kept in {cache}: {error}; make room, or set XDG_CACHE_HOME"
        ) from error
    return path


def load(name: str, sources: list[Path], headers: list[Path], loader: type[ctypes.CDLL] = ctypes.CDLL) -> ctypes.CDLL:
    """What the wheel brought, or what is built, loaded. Errors: those of `build`; ConfigError if the system refuses to
    load the library."""
    for path in () if os.environ.get("CC") else prebuilt(name, sources, headers):
        try:
            return loader(str(path))
        except OSError:  # of another C library, say: then it is compiled here
            continue
    path = build(name, sources, headers)
    try:
        return loader(str(path))
    except OSError as error:
        path.unlink(missing_ok=True)
        raise ConfigError(
            f"cannot load the compiled kernels: {error}; if {path.parent} is mounted noexec, set XDG_CACHE_HOME"
        ) from error


def prebuilt(name: str, sources: list[Path], headers: list[Path]) -> list[Path]:
    """The libraries of these very sources that a wheel brought for this kind of CPU, the best first."""
    digest, flags = _sources_digest([*sources, *headers]), set(_cpu().split())
    paths = [
        PREBUILT / f"{name}-{level}-{digest}.so" for level, (need, _) in LEVELS.items() if flags >= {*need.split()}
    ]
    return [path for path in paths if path.is_file()]


def prebuild(name: str, sources: list[Path], headers: list[Path], folder: Path) -> list[Path]:
    """Builds for every kind of CPU of this machine's architecture, into `folder`. Errors: as `build`."""
    compiler, arm, found = find_compiler(), platform.machine() in ("arm64", "aarch64"), []
    folder.mkdir(parents=True, exist_ok=True)
    for level, (_, march) in LEVELS.items():
        if level.startswith("arm") == arm:
            path = folder / f"{name}-{level}-{_sources_digest([*sources, *headers])}.so"
            with tempfile.TemporaryDirectory(dir=folder) as work:
                _compile(compiler, sources, Path(work) / "library.so", march)
                (Path(work) / "library.so").replace(path)
            found.append(path)
    return found


def _sources_digest(files: list[Path]) -> str:
    whole = "\0".join(FLAGS).encode() + b"".join(file.read_bytes() for file in files)
    return hashlib.sha256(whole).hexdigest()[:16]


def _compile(compiler: list[str], sources: list[Path], output: Path, march: str | None = None) -> None:
    """Compiles the sources side by side, then links them. `march` None: for this very CPU."""
    arm = platform.machine() in ("arm64", "aarch64")
    undefined = ("-Wl,-undefined,dynamic_lookup",) if platform.system() == "Darwin" else ()
    objects = [output.with_name(source.stem + ".o") for source in sources]
    native = (march or ("-mcpu=native" if arm else "-march=native")).split()
    commands = [
        [*compiler, *FLAGS, *native, "-c", str(source), "-o", str(target)]
        for source, target in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(len(commands)) as pool:
        list(pool.map(_run, commands))
    _run([*compiler, "-shared", *undefined, *map(str, objects), "-lm", "-o", str(output)])


def _run(command: list[str]) -> str:
    """What the command prints. Errors: ConfigError with the compiler's message."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"the C compiler {command[0]} does not run: {error}; set CC to one that does") from error
    if done.returncode:
        shown = f"{shlex.join(command)}\n{done.stderr[-2000:]}"
        raise ConfigError(f"the C compiler failed; set CC to another one\n  {shown}")
    return done.stdout


def _key(compiler: list[str], files: list[Path]) -> str:
    parts = [*compiler, _run([*compiler, "--version"]), *FLAGS, platform.machine(), _cpu()]
    whole = "\0".join(parts).encode() + b"".join(file.read_bytes() for file in files)
    return hashlib.sha256(whole).hexdigest()[:16]


def _cpu() -> str:
    """Model and features of the first CPU: a home directory may be shared by unlike machines."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return platform.processor()
    facts = ("model", "flags", "Features", "CPU")
    return "\n".join(line for line in text.splitlines() if line.startswith(facts))


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:32]
    except OSError:
        return "unreadable"
