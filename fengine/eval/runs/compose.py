"""A `CommandLine` -> checked `Point`s. No torch.

Hydra composes values and nothing else: no config ever names a class, `instantiate` is never called, logging is fixed,
and every point of a sweep is composed and checked before the first one runs. Besides this file, `hydra_state.py`,
`explain.py` and `launch.py` touch Hydra and OmegaConf.
"""

import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from fengine.errors import ConfigError
from fengine.eval.runs.config import RUN, BadPoint, Point, RunConfig, Schema
from fengine.eval.runs.explain import explain
from fengine.eval.runs.hydra_state import compose, conf_dir, hydra_state, job_id, job_of, store_schema, version_base
from fengine.eval.runs.vet import vet_override
from fengine.eval.runs.words import CommandLine

MAX_POINTS = 1000


def load_config(overrides: Sequence[str] = (), config_dir: str | None = None) -> RunConfig:
    """Composes one config as `fengine` would, for notebooks and tests. Errors: ConfigError."""
    return points(CommandLine(tuple(overrides), config_dir=config_dir))[0].config


def points(command: CommandLine, schema: Schema = RUN) -> list[Point]:
    """Every job of this call, composed and checked; nothing is written. Errors: ConfigError."""
    found = jobs(command, schema)
    for job in found:
        if isinstance(job, BadPoint):
            raise ConfigError(job.message)
    return [job for job in found if isinstance(job, Point)]


def jobs(command: CommandLine, schema: Schema = RUN) -> list[Point | BadPoint]:
    """As `points`; of a sweep whose schema has `each_alone`, the points that are refused are among them."""
    with hydra_state(command, schema):
        given = _parse(command.overrides, schema)
        plain = [o.input_line or "" for o in given if not o.is_sweep_override()]
        master = compose(command, plain, schema)
        if command.multirun or str(master.hydra.mode).endswith("MULTIRUN"):
            return _sweep(command, master, given, schema)
        _refuse_several_values(given)
        if master.hydra.runtime.choices["hydra/launcher"] != "basic":
            raise ConfigError("hydra/launcher is for sweeps: add -m and list values, seed=1,2,3")
        return [point_of(job_of(master), master.hydra, _select(master, "hydra.run.dir"), plain, (), schema)]


def inspect(command: CommandLine, schema: Schema = RUN) -> None:
    """Lets Hydra print help, a config or completions. Vetted first, since Hydra configures logging on the way."""
    if not command.completion:
        with hydra_state(command, schema):
            compose(command, [o.input_line or "" for o in _parse(command.overrides, schema)], schema)
    store_schema(schema)
    words = command.overrides if command.completion else (*command.overrides, job_id())
    before, sys.argv = sys.argv, ["fengine", *command.flags, *words]  # Hydra reads sys.argv
    try:
        ask = hydra.main(config_path=str(conf_dir()), config_name=schema.primary, **version_base())
        ask(lambda _: None)()  # the function is never called
    except SystemExit as end:  # --help ends the process with code 0
        if end.code:
            raise
    finally:
        sys.argv = before


# -- composing ---------------------------------------------------------------------------------------------------------


def point_of(
    job: DictConfig, node: DictConfig, directory: str, overrides: Sequence[str], swept: tuple[str, ...], schema: Schema
) -> Point:
    """A composed config and its `hydra` node as a checked value. Errors: ConfigError with every problem."""
    subdir = node.output_subdir
    try:
        run = OmegaConf.to_object(job)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error, schema)) from error
    if not isinstance(run, schema.kind):
        raise ConfigError(
            f"the config has no schema: begin the defaults of your own primary config with `- {schema.primary}`"
        )
    if problems := schema.check(run):
        raise ConfigError("\n".join(problems))
    given = tuple(o for o in overrides if o)
    kept = {"config.yaml": job, "overrides.yaml": OmegaConf.create(list(given))}
    files = tuple((f"{subdir}/{name}", OmegaConf.to_yaml(value)) for name, value in kept.items() if subdir is not None)
    chosen = tuple((str(k), str(v)) for k, v in node.runtime.choices.items() if "hydra/" not in str(k))
    search = [Path(s.path.removeprefix("file://")) for s in node.runtime.config_sources if s.schema == "file"]
    launcher = str(node.runtime.choices["hydra/launcher"])
    return Point(run, Path(directory).absolute(), swept, files, given, chosen, tuple(search), launcher)


def _sweep(
    command: CommandLine, master: DictConfig, given: Sequence[Override], schema: Schema
) -> list[Point | BadPoint]:
    """The product of all choices, in the order of the basic sweeper: the first key is the outermost loop."""
    axes = _axes(master, given, schema)
    number = 1
    for choices in axes.values():
        number *= len(choices)
    if number > MAX_POINTS:
        raise ConfigError(f"the sweep has {number:,} points, at most {MAX_POINTS:,} are allowed; split it")
    directory, quick = _select(master, "hydra.sweep.dir"), _Quick(command, master, axes, schema)
    found: list[Point | BadPoint] = []
    for index, choice in enumerate(itertools.product(*axes.values())):
        swept = tuple(o for o, choices in zip(choice, axes.values(), strict=True) if len(choices) > 1)
        try:
            job, config = quick.compose(choice)
            with read_write(config.hydra), open_dict(config.hydra):  # what `_select` has made read-only
                config.hydra.job.num = index
            own = os.path.join(directory, _select(config, "hydra.sweep.subdir"))
            found.append(point_of(job, config.hydra, own, choice, swept, schema))
        except ConfigError as error:
            if not schema.each_alone:
                raise
            found.append(BadPoint(swept, str(error)))
    good = [p for p in found if isinstance(p, Point)]
    if not good and isinstance(found[0], BadPoint):
        raise ConfigError(found[0].message)
    names = [p.config.out for p in good if p.config.out is not None]
    if schema.one_file and len(names) != len(set(names)):
        raise ConfigError(
            f"out={names[0]} would be written by several points of the sweep; leave it out, since every point has its "
            "own directory, or put the swept key in: out='seed-${seed}.jsonl'"
        )
    return found


class _Quick:
    """Composes the points of a sweep. Those that differ only in plain values are one composition, into which each
    point's values are put as Hydra does it last of all: composing anew takes Hydra a tenth of a second."""

    def __init__(self, command: CommandLine, master: DictConfig, axes: dict[str, list[str]], schema: Schema) -> None:
        self.command, self.schema = command, schema
        loader = GlobalHydra.instance().config_loader()
        apart = "override_dirname" in OmegaConf.to_yaml(master.hydra.sweep)
        self.plain = [  # of each axis, whether it is a key of the config, and neither a group nor Hydra's own
            len(choices) > 1
            and not apart
            and all(part.isidentifier() for part in key.split("."))
            and not key.startswith("hydra.")
            and not loader.get_group_options(key.replace(".", "/"))
            and not any("{" in choice for choice in choices)
            for key, choices in axes.items()
        ]
        words = tuple(choices[0] for choices in axes.values() if len(choices) == 1)
        self.made = {words: (job_of(master), master)}

    def compose(self, choice: Sequence[str]) -> tuple[DictConfig, DictConfig]:
        """The job's config, and the same with its `hydra` node; good until the next call. Errors: ConfigError."""
        rest = tuple(word for word, plain in zip(choice, self.plain, strict=True) if not plain)
        if rest not in self.made:
            config = compose(self.command, rest, self.schema)
            self.made[rest] = (job_of(config), config)
        made = self.made[rest]
        try:
            values = [word for word, plain in zip(choice, self.plain, strict=True) if plain]
            for override in _parse(values, self.schema):
                for config in made:
                    OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
        except OmegaConfBaseException as error:
            raise ConfigError(explain(error, self.schema)) from error
        return made


def _axes(master: DictConfig, given: Sequence[Override], schema: Schema) -> dict[str, list[str]]:
    """Key -> the overrides to try, as written; those of `hydra.sweeper.params` first."""
    axes: dict[str, list[str]] = {}
    params = master.hydra.sweeper.get("params") or {}
    for override in [*_parse([f"{k}={v}" for k, v in params.items()], schema), *given]:
        key = override.get_key_element()
        if not override.is_sweep_override():
            axes[key] = [override.input_line or ""]
        elif override.is_discrete_sweep():
            axes[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        else:
            raise ConfigError(f"{override.input_line}: an interval has no grid; list its values: {key}=1,2,3")
    return axes


def _parse(words: Sequence[str], schema: Schema) -> list[Override]:
    """`key=value` words, vetted before Hydra acts on them. Errors: ConfigError."""
    try:
        parsed = OverridesParser.create(GlobalHydra.instance().config_loader()).parse_overrides(list(words))
    except HydraException as error:
        raise ConfigError(explain(error, schema)) from error
    seen: set[str] = set()
    for override in parsed:
        key = override.get_key_element().lstrip("+~")
        if key in seen:
            raise ConfigError(f"{override.input_line}: {key} is given twice")
        seen.add(key)
        vet_override(override.input_line or key, key, override.value(), schema)
    return parsed


def _refuse_several_values(given: Sequence[Override]) -> None:
    for override in (o for o in given if o.is_sweep_override()):
        key = override.get_key_element()
        raise ConfigError(
            f"{override.input_line}: several values. Add -m to sweep over them,\n"
            f"""or quote what is one text or one list: {key}='"a, b"'  {key}='["a", "b"]'"""
        )


def _select(config: DictConfig, key: str) -> str:
    """A text of the `hydra` node, with `${hydra:...}` resolved."""
    HydraConfig.instance().set_config(config)
    try:
        return str(OmegaConf.select(config, key, throw_on_missing=True))
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error
