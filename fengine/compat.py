"""Names under which modules can be imported besides their own: where they lay before, and where SGLang has them. A
module found under another name is the very module, not a copy. `import fengine` makes fengine's former paths and
`fengine.srt.…` known; `install_as_sglang()` makes `sglang` mean fengine in this process, and nothing else does."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any

MOVED = {  # the longest name that fits counts; what lies below it is looked for below its new name
    "fengine.serve": "fengine.server",
    "fengine.launch_server": "fengine.server.launch_server",
    "fengine.server_args": "fengine.api.server_args",
    "fengine.request": "fengine.core.request",
    "fengine.sampling_params": "fengine.core.sampling_params",
    "fengine.evaluate": "fengine.eval.commands.evaluate",
    "fengine.harness": "fengine.eval.harness",
    "fengine.srt": "fengine.api",
    "fengine.srt.entrypoints": "fengine.api",
    "fengine.srt.entrypoints.http_server": "fengine.server.launch_server",
    "fengine.srt.managers": "fengine.api",
    "fengine.srt.function_call": "fengine.server",
    "fengine.srt.function_call.function_call_parser": "fengine.server.parsers",
    "fengine.srt.function_call_parser": "fengine.server.parsers",
    "fengine.srt.parser": "fengine.server",
    "fengine.srt.parser.reasoning_parser": "fengine.server.parsers",
    "fengine.srt.reasoning_parser": "fengine.server.parsers",
    "fengine.srt.constants": "fengine.engine.memory",
    "fengine.srt.sampling": "fengine.core",
    "fengine.srt.sampling.custom_logit_processor": "fengine.api.call_options",
    "fengine.srt.utils": "fengine.utils",
    "fengine.test": "fengine.utils",  # what SGLang's documentation imports before it starts engines
    "fengine.test.doc_patch": "fengine.utils",
    "fengine.test.test_utils": "fengine.utils",
    "fengine.srt.utils.hf_transformers_utils": "fengine.tokenizer.hf_tokenizer",
    "fengine.srt.hf_transformers_utils": "fengine.tokenizer.hf_tokenizer",
}


def real_name(name: str) -> str | None:
    """The module that `name` is another name of; None for its own name. Pure."""
    own = "fengine" + name.removeprefix("sglang") if name.partition(".")[0] == "sglang" else name
    parts = own.split(".")
    for count in range(len(parts), 1, -1):
        if (target := MOVED.get(".".join(parts[:count]))) is not None:
            own = ".".join([target, *parts[count:]])
            break
    return None if own == name else own


class _Alias(Loader):
    """Loads a module under another name, by handing out the module itself."""

    def __init__(self, real: str) -> None:
        self.real = real
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self.real)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """The module has been executed under its own name; the import system has just replaced its spec."""
        module.__spec__ = self._spec

    def get_code(self, fullname: str) -> CodeType | None:
        """For `python -m`. Errors: ImportError."""
        spec = find_spec(self.real)
        loader: Any = None if spec is None else spec.loader
        if loader is None:
            raise ImportError(f"{fullname} is now {self.real}, which cannot be run", name=fullname)
        return loader.get_code(self.real)


class MovedFinder(MetaPathFinder):
    """Finds modules under the names of MOVED, and, where `root` is "sglang", under SGLang's."""

    def __init__(self, root: str) -> None:
        self.root = root

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Errors: ModuleNotFoundError that tells the new name, where that does not exist."""
        if fullname.partition(".")[0] != self.root or (real := real_name(fullname)) is None:
            return None
        found = find_spec(real)
        if found is None:
            raise ModuleNotFoundError(
                f"no module {fullname!r}: it would be {real!r}, which fengine has not", name=fullname
            )
        is_package = found.submodule_search_locations is not None
        return ModuleSpec(fullname, _Alias(real), origin=found.origin, is_package=is_package)


def find_moved() -> None:
    """Makes fengine's former paths importable. Idempotent. Modifies: sys.meta_path."""
    _install("fengine")


def install_as_sglang() -> None:
    """Makes `import sglang` mean fengine in this process, so that programs written for SGLang run as they are.
    Idempotent. Modifies: sys.meta_path. Errors: RuntimeError if SGLang itself has been imported already."""
    loaded = sys.modules.get("sglang")
    if loaded is not None and loaded is not sys.modules["fengine"]:
        raise RuntimeError("SGLang itself is imported already; call install_as_sglang() before `import sglang`")
    _install("sglang")


def _install(root: str) -> None:
    """First in the list: a package under two names has one folder, whose files must not be loaded twice."""
    if not any(isinstance(finder, MovedFinder) and finder.root == root for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedFinder(root))


def moved_names(module: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__` for names that lie in other modules now."""

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return get
