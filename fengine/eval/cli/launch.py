"""The points of a sweep in processes of their own, by one of Hydra's launchers: joblib, submitit, Ray. No torch.

Hydra's launchers compose a point again where it runs, from its overrides, so that a value crosses no process but words,
a folder and an exit code. Of a launcher's own config only values are taken; its class is the one in `LAUNCHERS`.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict

from fengine.errors import ConfigError
from fengine.eval.cli.compose import compose, opened, point_of
from fengine.eval.cli.guard import LAUNCHERS
from fengine.eval.cli.mistakes import quoted
from fengine.eval.cli.schema import Point, Schema

Work = Callable[[Point], int]  # a function of a module, or a partial of one, since it is pickled by name


def launch(command: Namespace, schema: Schema, home: Path, points: Sequence[Point], work: Work) -> list[int | None]:
    """`work(point)` for every point, each with the folder that it has here, all of them in `home`. None stands for a
    process that died. Errors: ConfigError; whatever the launcher raises."""
    name = points[0].launcher
    with opened(command, schema) as main:
        master = compose(main, command, points[0].overrides, schema)
        _refuse_crowd(name, master, points)
        with open_dict(master):
            master.hydra.sweep.dir = str(home)
        kinds = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in Plugins.instance().discover(Launcher)}
        settings = {str(key): value for key, value in master.hydra.launcher.items() if key != "_target_"}
        launcher: Any = kinds[LAUNCHERS[name].target](**settings)
        context = HydraContext(main.config_loader, Callbacks())
        launcher.setup(hydra_context=context, task_function=partial(_one, work, schema), config=master)
        own = ["hydra.output_subdir=null", f"hydra.sweep.dir={quoted(str(home))}"]
        subs = [f"hydra.sweep.subdir={quoted(str(point.directory.relative_to(home)))}" for point in points]
        words = [[*point.overrides, *own, sub] for point, sub in zip(points, subs, strict=True)]
        done = launcher.launch(words, initial_job_idx=0)
    return [one._return_value if one.status is JobStatus.COMPLETED else None for one in done]


def _one(work: Work, schema: Schema, job: DictConfig) -> int:
    """In the process of one point: what Hydra composed there, as a Point."""
    node: Any = HydraConfig.get()
    words = [str(word) for word in [*node.overrides.hydra, *node.overrides.task]]
    given = [word for word in words if not word.startswith(("hydra.sweep.", "hydra.output_subdir"))]
    code = work(point_of(job, node, str(node.runtime.output_dir), given, (), schema))
    sys.stdout.flush()
    return code


def _refuse_crowd(name: str, master: DictConfig, points: Sequence[Point]) -> None:
    """As many engines as cores would share the GPUs of this machine."""
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    on_gpu: list[Any] = [point for point in points if point.config.engine.model.device != "cpu"]
    if name == "joblib" and gpus and on_gpu and OmegaConf.select(master, "hydra.launcher.n_jobs") < 1:
        raise ConfigError(
            f"hydra.launcher.n_jobs={master.hydra.launcher.n_jobs} would start as many engines as there are cores on "
            f"{gpus} GPU(s); say how many, for example hydra.launcher.n_jobs={gpus}"
        )
