"""A command line → checked `Point`s, by Hydra. No torch. Hydra reads flags, files and overrides and multiplies a sweep
out. Its jobs are not run by it: no config names a class, `instantiate` is never called, logging is fixed, and every
point is composed and checked before the first one runs. What a config may hold is decided in `guard.py`."""

import io
import os
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

import fengine
from fengine.errors import ConfigError
from fengine.eval.cli import guard, mistakes
from fengine.eval.cli.config_files import ConfigFiles, writable
from fengine.eval.cli.lines import say
from fengine.eval.cli.schema import BadPoint, Point, Schema, annotated, conf_dir, leaves

MAX_POINTS = 1000


def parse(argv: Sequence[str], schema: Schema | None = None) -> Namespace:
    """Hydra's flags and overrides, as their writer means them. `schema`: whose keys an unknown flag may mean. Errors:
    ConfigError."""
    program, keys = ("fengine", {}) if schema is None else (schema.program, leaves(schema.keys))
    parser = get_args_parser()
    parser.prog = program
    parser.usage = f"{program} [group=option] [key=value] ...        ({program} --help shows them)"
    next(a for a in parser._actions if a.dest == "version").version = f"fengine {fengine.__version__}"  # type: ignore[attr-defined]

    def refuse(message: str) -> NoReturn:
        for index, word in enumerate(argv):
            if word.startswith("-") and word.partition("=")[0] not in parser._option_string_actions:
                raise ConfigError(mistakes.flag(argv, index, list(keys)))
        raise ConfigError(message)

    parser.error = refuse
    given = parser.parse_intermixed_args(list(argv))
    for word in given.overrides:
        if not word.partition("=")[0].strip():
            raise ConfigError(f"{word!r:.80} names no key; settings are written key=value (an empty variable, perhaps)")
    texts = [key for key, kind in keys.items() if kind in (str, str | None)]
    given.parser = parser
    given.overrides = [mistakes.readable(word, given.multirun, texts) for word in given.overrides]
    if (given.package or given.resolve) and not given.cfg:
        raise ConfigError("-p (--package) and --resolve are of --cfg; settings are written key=value: serve.port=9000")
    if given.config_path or given.experimental_rerun:
        raise ConfigError("--config-path and --experimental-rerun are refused; use --config-dir DIR to add your files")
    return given


def is_inspection(command: Namespace) -> bool:
    """Whether Hydra answers (--help, --cfg, completion ...) and nothing runs. Pure."""
    return bool(command.help or command.hydra_help or command.shell_completion or command.cfg or command.info)


def points(command: Namespace, schema: Schema) -> list[Point]:
    """Every job of this call, composed and checked; nothing is written. Errors: ConfigError."""
    found = jobs(command, schema)
    if bad := [job.message for job in found if isinstance(job, BadPoint)]:
        raise ConfigError(bad[0])
    return [job for job in found if isinstance(job, Point)]


def jobs(command: Namespace, schema: Schema) -> list[Point | BadPoint]:
    """As `points`; of a sweep, the points that are refused are among them."""
    with opened(command, schema) as main:
        given = parsed(command.overrides, schema)
        plain = [o.input_line or "" for o in given if not o.is_sweep_override()]
        master = compose(main, command, plain, schema)
        if command.multirun or str(master.hydra.mode).endswith("MULTIRUN"):
            if not schema.sweeps:
                raise ConfigError("a server has one configuration: leave -m and hydra.mode out")
            return _sweep(main, command, master, given, schema)
        if several := next((o for o in given if o.is_sweep_override()), None):
            key, remedy = several.get_key_element(), "Add -m to sweep over them" if schema.sweeps else "Give one"
            raise ConfigError(
                f"{several.input_line}: several values. {remedy},\n"
                f"""or quote what is one text or one list: {key}='"a, b"'  {key}='["a", "b"]'"""
            )
        if master.hydra.sweeper.get("params"):
            raise ConfigError("hydra.sweeper.params, as an experiment may have it, is for sweeps: add -m")
        if master.hydra.runtime.choices["hydra/launcher"] != "basic":
            raise ConfigError("hydra/launcher is for sweeps: add -m and list values, seed=1,2,3")
        return [_point(master, _select(master, "hydra.run.dir"), plain, (), schema)]


def inspect(command: Namespace, schema: Schema) -> None:
    """Lets Hydra print help, a config or completions. Vetted first, since Hydra configures logging on the way."""
    name, overrides = command.config_name or schema.primary, [*command.overrides]
    with opened(command, schema) as main:
        if command.shell_completion:
            main.shell_completion(name, overrides)
            return
        compose(main, command, [o.input_line or "" for o in parsed(overrides, schema)], schema)
        command.overrides = overrides = [*overrides, _job_id()]
        if command.help:
            with redirect_stdout(io.StringIO()) as text:
                main.app_help(name, command.parser, command)
            say(annotated(text.getvalue(), schema), prose=True)
        elif command.hydra_help:
            main.hydra_help(None, command.parser, command)
        elif command.cfg:
            main.show_cfg(name, overrides, command.cfg, command.package, command.resolve)
        else:
            main.show_info(command.info, name, overrides, RunMode.RUN)


@contextmanager
def opened(command: Namespace, schema: Schema) -> Iterator[Hydra]:
    """Hydra over our files and the user's; ours come first. Afterwards its globals are as before."""
    store = ConfigStore.instance()
    if f"{schema.store}.yaml" not in store.repo:
        store.store(schema.store, writable(OmegaConf.structured(schema.keys)))
    # Hydra 1.3 wants to be told its version, 1.4 warns when it is
    base: dict[str, Any] = {"version_base": "1.3"} if hydra.__version__.startswith("1.3") else {}
    before = HydraConfig.instance().cfg
    try:
        with hydra.initialize_config_dir(str(conf_dir()), job_name="fengine", **base):
            main: Any = GlobalHydra.instance().hydra
            loader = main.config_loader
            if command.config_dir is not None:
                own = Path(command.config_dir).absolute()
                if not os.path.isdir(own):
                    raise ConfigError(f"--config-dir {command.config_dir:.500}: no such directory")
                entries = loader.config_search_path.get_path()
                loader.config_search_path.append("command-line", f"file://{own}")
                entries.insert(-2, entries.pop())  # Hydra's schema comes last
            loader.repository = ConfigFiles(loader.config_search_path)
            yield main
    except OmegaConfBaseException as error:  # of what Hydra shows
        raise ConfigError(guard.explained(error, schema)) from error
    finally:
        HydraConfig.instance().cfg = before


def compose(main: Hydra, command: Namespace, overrides: Sequence[str], schema: Schema) -> DictConfig:
    """One composed and vetted config with its `hydra` node. Errors: ConfigError."""
    name, words = command.config_name or schema.primary, [*filter(None, overrides), _job_id()]
    try:
        primary = main.config_loader.repository.load_config(name)  # type: ignore[attr-defined]
        if primary is not None and OmegaConf.select(primary.config, "hydra.searchpath") is not None:
            raise ConfigError(f"{name}: hydra.searchpath is refused; use --config-dir")
        config = main.compose_config(name, words, RunMode.RUN, from_shell=False)
    except (ConfigError, MemoryError):
        raise
    except Exception as error:  # whatever Hydra, OmegaConf or YAML found, it is about the user's words or files
        raise ConfigError(guard.explained(error, schema)) from error
    job: Any = OmegaConf.to_container(config, resolve=False)
    guard.check_config(job, job.pop("hydra"), schema)
    return config


def _job_id() -> str:
    """The process id, by which the directories of runs that start in the same microsecond differ."""
    return f"hydra.job.id={os.getpid()}"


def _point(
    config: DictConfig, directory: str, overrides: Sequence[str], swept: tuple[str, ...], schema: Schema
) -> Point:
    """A composed config, from which Hydra's own node is taken, as a checked value. Errors: as of `point_of`."""
    node = config.hydra
    with open_dict(config):
        del config["hydra"]
    return point_of(config, node, directory, overrides, swept, schema)


def parsed(words: Sequence[str], schema: Schema) -> list[Override]:
    """`key=value` words, vetted before Hydra acts on them. Errors: ConfigError."""
    found: list[Override] = []
    main = GlobalHydra.instance()
    parser = OverridesParser.create(main.config_loader() if main.is_initialized() else None)
    for word in words:
        try:
            found += parser.parse_overrides([word])
        except (HydraException, ValueError, RecursionError) as error:  # a number of 5,000 digits; nested too deeply
            raise ConfigError(guard.explained(error, schema, word)) from error
    seen: set[str] = set()
    for override in found:
        key = override.get_key_element().lstrip("+~")
        if key in seen:
            raise ConfigError(f"{override.input_line:.500}: {key:.500} is given twice")
        seen.add(key)
        if override.is_delete():
            raise ConfigError(f"{override.input_line:.500}: no key can be taken away; give it another value")
        guard.check_override(override.input_line or key, key, value := override.value(), schema)
        if (value is None or isinstance(value, (int, float, list, dict))) and os.path.isdir(conf_dir() / key):
            raise ConfigError(f"{override.input_line:.500}: it takes the name of one option; -m sweeps over several")
    return found


def point_of(
    job: DictConfig, node: DictConfig, directory: str, overrides: Sequence[str], swept: tuple[str, ...], schema: Schema
) -> Point:
    """A composed config and its `hydra` node as a checked value. Errors: ConfigError with every problem."""
    given = {word.partition("=")[0].lstrip("+") for word in overrides}
    try:
        for key in given.intersection(guard.TEXT_KEYS):
            value = OmegaConf.select(job, key)
            value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            if value is not None:
                OmegaConf.update(job, key, guard.unescaped(value))
        run = OmegaConf.to_object(job)
    except OmegaConfBaseException as error:
        raise ConfigError(guard.explained(error, schema)) from error
    if not isinstance(run, schema.keys):
        raise ConfigError(guard.bare(schema))
    checked = schema.assemble(vars(run))
    chosen = tuple((str(k), str(v)) for k, v in node.runtime.choices.items() if "hydra/" not in str(k))
    search = [Path(s.path.removeprefix("file://")) for s in node.runtime.config_sources if s.schema == "file"]
    launcher = str(node.runtime.choices["hydra/launcher"])
    return Point(checked, Path(directory).absolute(), swept, tuple(overrides), chosen, tuple(search), launcher)


def _sweep(
    main: Hydra, command: Namespace, master: DictConfig, given: Sequence[Override], schema: Schema
) -> list[Point | BadPoint]:
    """The product of all choices, in the order of the basic sweeper: the first key is the outermost loop."""
    axes = _axes(master, given, schema)
    plain = [str(o.input_line) for o in axes if not o.is_sweep_override()]
    several = [o for o in axes if o.is_sweep_override()]
    directory, jobs = _select(master, "hydra.sweep.dir"), []
    for index, swept in enumerate(map(tuple, BasicSweeper.split_arguments(several, None)[0])):
        try:
            config = compose(main, command, [*plain, *swept], schema)
            if config.hydra.sweeper.get("params") != master.hydra.sweeper.get("params"):
                raise ConfigError("its hydra.sweeper.params would not count: sweep over this experiment alone")
            with open_dict(config.hydra.job):
                config.hydra.job.num = index
            own = os.path.join(directory, _select(config, "hydra.sweep.subdir"))
            jobs.append(_point(config, own, [*plain, *swept], swept, schema))
        except ConfigError as error:
            jobs.append(BadPoint(swept, str(error)))
    if all(isinstance(job, BadPoint) for job in jobs):
        raise ConfigError(jobs[0].message)
    names = [job.config.out for job in jobs if isinstance(job, Point) and job.config.out is not None]
    if schema.one_file and len(names) != len(set(names)):
        raise ConfigError(
            f"out={names[0]} would be written by several points of the sweep; leave it out, since every point has its "
            "own directory, or put the swept key in: out='seed-${seed}.jsonl'"
        )
    return jobs


def _axes(master: DictConfig, given: Sequence[Override], schema: Schema) -> list[Override]:
    """The overrides of a sweep: those of `hydra.sweeper.params` that are not given again, then those given. Errors:
    ConfigError for what has no grid, or too many points."""
    known, number = {o.get_key_element().lstrip("+") for o in given}, 1
    words = [f"{key}={value}" for key, value in (master.hydra.sweeper.get("params") or {}).items()]
    axes = [*(o for o in parsed(words, schema) if o.get_key_element() not in known), *given]
    for axis in filter(Override.is_sweep_override, axes):
        if not axis.is_discrete_sweep():
            key = axis.get_key_element()
            raise ConfigError(f"{axis.input_line}: an interval has no grid; list its values: {key}=1,2,3")
        try:
            values = list(islice(axis.sweep_string_iterator(), 10**5))
            if not values or len({*values}) < len(values):
                nothing = "it chooses nothing; a glob is for the options of a group"
                raise ValueError("a value occurs twice" if values else nothing)
            number *= len(values)
        except ValueError as error:
            raise ConfigError(f"{axis.input_line}: {error}") from error
    if number > MAX_POINTS:
        raise ConfigError(f"the sweep has {number:,} points, at most {MAX_POINTS:,} are allowed; split it")
    return axes


def _select(config: DictConfig, key: str) -> str:
    """A text of the `hydra` node, with `${hydra:...}` resolved."""
    HydraConfig.instance().set_config(config)
    OmegaConf.set_readonly(config.hydra, None)  # as set_config has made it
    try:
        return str(OmegaConf.select(config, key, throw_on_missing=True))
    except OmegaConfBaseException as error:
        raise ConfigError(guard.explained(error)) from error
