"""A point composed once more: from a record, or in a process of its own by one of Hydra's launchers. No torch.

Recorded values are taken literally: no interpolation, no group, nothing of today's YAML files. Changes are written as
on the command line, one key each. Hydra's launchers (joblib, submitit, Ray) compose a point again where it runs, from
its overrides, so that a value crosses no process but words, a folder and an exit code. Of a launcher's own config only
values are taken; its class is the one in `LAUNCHERS`."""

import copy
import os
import re
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import OverrideType
from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from fengine.errors import ConfigError
from fengine.eval.cli.command import TERMINATED
from fengine.eval.cli.compose import compose, opened, parsed, point_of
from fengine.eval.cli.config_files import writable
from fengine.eval.cli.guard import LAUNCHERS, TEXT_KEYS, explained, unescaped, unknown
from fengine.eval.cli.mistakes import quoted, readable
from fengine.eval.cli.schema import Point, Schema, leaves

Work = Callable[[Point], int]  # a function of a module, or a partial of one, since it is pickled by name


def restore(recorded: Mapping[str, Any], changes: Sequence[str], schema: Schema) -> Any:
    """The config of `schema` that `flat` gave as `recorded` ("section.key" → JSON value), with `changes` (key=value).
    Keys that were not recorded have their defaults. Errors: ConfigError with every problem."""
    if schema.program == "fengine eval" and all(recorded.get(name) is None for name in ("task.data", "task.prompts")):
        raise ConfigError("the run's task is an object of Python: run it again with fengine.evaluate(task, engine)")
    if strange := sorted(set(recorded) - set(leaves(schema.keys))):
        raise ConfigError(f"the recorded config has keys that this version lacks: {', '.join(strange[:5])}")
    node = copy.deepcopy(_defaults(schema.keys))
    changed = [_change(word, schema) for word in changes]
    try:
        for key, value in recorded.items():
            OmegaConf.update(node, key, _literal(value))
    except (OmegaConfBaseException, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"the recorded config holds what is none: {error}") from error
    try:
        for key, value in changed:
            OmegaConf.update(node, key, value)
        return schema.assemble(vars(OmegaConf.to_object(node)))
    except OmegaConfBaseException as error:
        raise ConfigError(explained(error, schema)) from error


@cache
def _defaults(keys: type) -> DictConfig:
    return writable(OmegaConf.structured(keys))


def _literal(value: Any) -> Any:
    """A JSON value in which OmegaConf finds no interpolation. Pure."""
    if isinstance(value, str) and "${" in value:
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, dict):
        return {key: _literal(item) for key, item in value.items()}
    return [_literal(item) for item in value] if isinstance(value, list) else value


def _change(word: str, schema: Schema) -> tuple[str, Any]:
    """One key=value. Errors: ConfigError."""
    known = leaves(schema.keys)
    (given,) = parsed([readable(word, False, [name for name in known if known[name] in (str, str | None)])], schema)
    key = given.get_key_element()
    if given.type is not OverrideType.CHANGE or given.is_sweep_override():
        raise ConfigError(f"{word:.500}: a recorded config is changed by single values: key=value")
    if key not in known:
        if inside := [name for name in known if name.startswith(f"{key}.")]:
            remedy = f"change single keys, such as {inside[0]}=VALUE"
            raise ConfigError(f"{word:.500}: a recorded config has no groups; {remedy}")
        raise ConfigError(unknown(key, schema.keys))
    return key, unescaped(given.value()) if key in TEXT_KEYS else given.value()


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
        launcher: Any = kinds[LAUNCHERS[name][0]](**settings)
        context = HydraContext(main.config_loader, Callbacks())
        launcher.setup(hydra_context=context, task_function=partial(_one, work, schema, os.getpid()), config=master)
        own = ["hydra.output_subdir=null", f"hydra.sweep.dir={quoted(str(home))}"]
        subs = [f"hydra.sweep.subdir={quoted(str(point.directory.relative_to(home)))}" for point in points]
        words = [[*point.overrides, *own, sub] for point, sub in zip(points, subs, strict=True)]
        done = launcher.launch(words, initial_job_idx=0)
    return [one._return_value if one.status is JobStatus.COMPLETED else None for one in done]


def _one(work: Work, schema: Schema, launcher: int, job: DictConfig) -> int:
    """In the process of one point: what Hydra composed there, as a Point. `launcher`: the process of the sweep, with
    which its own children end; Slurm's jobs are none."""
    if os.getppid() == launcher:
        threading.Thread(target=end_with, args=(launcher,), daemon=True).start()
    node: Any = HydraConfig.get()
    words = [str(word) for word in [*node.overrides.hydra, *node.overrides.task]]
    given = [word for word in words if not word.startswith(("hydra.sweep.", "hydra.output_subdir"))]
    code = work(point_of(job, node, str(node.runtime.output_dir), given, (), schema))
    sys.stdout.flush()
    return code


def end_with(parent: int) -> None:
    """Ends this process at once when its parent has gone; the same command goes on, and would find the folder taken."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(TERMINATED)


def _refuse_crowd(name: str, master: DictConfig, points: Sequence[Point]) -> None:
    """As many engines as cores would share the GPUs of this machine."""
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    on_gpu: list[Any] = [point for point in points if point.config.engine.model.device != "cpu"]
    if name == "joblib" and gpus and on_gpu and OmegaConf.select(master, "hydra.launcher.n_jobs") < 1:
        raise ConfigError(
            f"hydra.launcher.n_jobs={master.hydra.launcher.n_jobs} would start as many engines as there are cores on "
            f"{gpus} GPU(s); say how many, for example hydra.launcher.n_jobs={gpus}"
        )
