"""One composition by Hydra: its search path, its globals set up and put back, its result vetted. No torch."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

import fengine
from fengine.errors import ConfigError
from fengine.eval.runs.config import Schema
from fengine.eval.runs.explain import explain
from fengine.eval.runs.vet import vet_config
from fengine.eval.runs.words import CommandLine


def conf_dir() -> Path:
    """Our YAML files: inside the package when installed, beside it in a checkout."""
    package = Path(fengine.__file__).resolve().parent
    for path in (package / "conf", package.parent / "conf"):
        if (path / "config.yaml").is_file():
            return path
    raise ConfigError(f"the configuration files are missing: no conf/config.yaml in {package} or beside it; reinstall")


def compose(command: CommandLine, overrides: Sequence[str], schema: Schema) -> DictConfig:
    """One composed and vetted config with its `hydra` node. Errors: ConfigError."""
    words = [*(o for o in overrides if o), job_id(), *search_words(command, schema)]
    try:
        config = hydra.compose(command.config_name or schema.primary, words, return_hydra_config=True)
    except Exception as error:  # whatever Hydra, OmegaConf or YAML found, it is about the user's words or files
        raise ConfigError(explain(error, schema)) from error
    return vetted(config, schema)


def vetted(config: DictConfig, schema: Schema) -> DictConfig:
    job, hydra_node = (OmegaConf.to_container(c, resolve=False) for c in (job_of(config), config.hydra))
    assert isinstance(job, dict) and isinstance(hydra_node, dict)
    vet_config({str(k): v for k, v in job.items()}, {str(k): v for k, v in hydra_node.items()}, schema)
    return config


def search_words(command: CommandLine, schema: Schema) -> list[str]:
    """The override that adds directories to the search path, if there are any."""
    others = _search_path(command, schema)[1]
    return [f"hydra.searchpath=[{','.join(others)}]"] if others else []


def job_id() -> str:
    """The process id, by which the directories of runs that start in the same microsecond differ."""
    return f"hydra.job.id={os.getpid()}"


def _search_path(command: CommandLine, schema: Schema) -> tuple[Path, list[str]]:
    """The directory of the primary config, and the others. Ours comes first, unless the primary config is the user's.

    Only a primary config could tell Hydra to import a package, by `hydra.searchpath`, so that is looked for here.
    """
    if command.config_dir is None:
        return conf_dir(), []
    path = Path(command.config_dir).absolute()
    if not path.is_dir():
        raise ConfigError(f"--config-dir {command.config_dir}: no such directory")
    primary = path / f"{command.config_name}.yaml"
    if command.config_name in (None, schema.primary) or not primary.is_file():
        return conf_dir(), [f"'file://{path}'"]
    try:
        searchpath = OmegaConf.select(OmegaConf.load(primary), "hydra.searchpath")
    except Exception as error:  # YAML's and OmegaConf's
        raise ConfigError(f"{primary}: {explain(error)}") from error
    if searchpath is not None:
        raise ConfigError(f"{primary}: hydra.searchpath is refused; use --config-dir")
    return path, [f"'file://{conf_dir()}'"]


def job_of(config: DictConfig) -> DictConfig:
    """The config without Hydra's own node. Pure."""
    job = config.copy()
    with open_dict(job):
        del job["hydra"]
    return job


@contextmanager
def hydra_state(command: CommandLine, schema: Schema) -> Iterator[None]:
    """Inside, Hydra knows the search path; afterwards its globals are as before."""
    store_schema(schema)
    before = HydraConfig.instance().cfg
    try:
        with hydra.initialize_config_dir(str(_search_path(command, schema)[0]), job_name="fengine", **version_base()):
            yield
    finally:
        HydraConfig.instance().cfg = before


def version_base() -> dict[str, Any]:
    """Hydra 1.3 wants to be told, 1.4 warns when it is."""
    major, minor = hydra.__version__.split(".")[:2]
    return {"version_base": "1.3"} if (int(major), int(minor)) < (1, 4) else {}


def store_schema(schema: Schema) -> None:
    """The dataclasses as the config `run_schema`, or another command's. Idempotent."""
    store = ConfigStore.instance()
    if f"{schema.store}.yaml" not in store.repo:
        store.store(schema.store, writable(OmegaConf.structured(schema.kind)))


def writable(node: Any) -> Any:
    """OmegaConf makes the nodes of frozen dataclasses read-only, so that no override could be merged in."""
    OmegaConf.set_readonly(node, None)
    for key in node if isinstance(node, DictConfig) else ():
        child = node._get_node(key)
        if OmegaConf.is_config(child):
            writable(child)
    return node
