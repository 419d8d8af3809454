"""Puts the C kernels into a wheel, built for the kinds of CPU of `fengine.ops.compiler`; without a compiler none."""

import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Prebuilt(BuildHookInterface):
    """On Linux, for wheels that are not editable; FENGINE_PREBUILT=0 leaves the kernels to the first start."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable" or platform.system() != "Linux" or os.environ.get("FENGINE_PREBUILT") == "0":
            return
        sys.path.insert(0, self.root)
        from fengine.errors import ConfigError
        from fengine.ops import compiler

        folder = Path(self.root, "build", "prebuilt")
        shutil.rmtree(folder, ignore_errors=True)
        try:
            paths = compiler.prebuild("cpu", compiler.SOURCES, compiler.HEADERS, folder)
        except ConfigError as error:
            self.app.display_warning(f"the wheel has no built kernels: {error}")
            return
        build_data["force_include"] |= {str(path): f"fengine/ops/prebuilt/{path.name}" for path in paths}
        build_data["tag"] = f"py3-none-linux_{platform.machine()}"
        build_data["pure_python"] = False
