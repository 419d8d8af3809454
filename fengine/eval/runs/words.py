"""The words of one call: `parse` turns argv into a `CommandLine`. No Hydra, no torch."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from fengine import __version__
from fengine.errors import ConfigError


@dataclass(frozen=True)
class CommandLine:
    """`inspect` is True when Hydra answers (--help, --cfg, completion ...) and nothing runs."""

    overrides: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()  # as given, for Hydra
    multirun: bool = False
    inspect: bool = False
    completion: bool = False
    config_name: str | None = None  # None: the command's own
    config_dir: str | None = None


def parse(argv: Sequence[str], program: str = "fengine") -> CommandLine:
    """Hydra's flags, anywhere among the overrides. Exits with code 2 on an unknown flag. Errors: ConfigError."""
    given = _parser(program).parse_intermixed_args(list(argv))
    if given.config_path or given.experimental_rerun:
        raise ConfigError("--config-path and --experimental-rerun are refused; use --config-dir DIR to add your files")
    flags = []
    for name, value in vars(given).items():
        if name != "overrides" and value not in (None, False):
            flags += [f"--{name.replace('_', '-')}"] + ([] if value is True else [value])
    return CommandLine(
        overrides=tuple(given.overrides),
        flags=tuple(flags),
        multirun=given.multirun,
        inspect=given.help or given.hydra_help or given.shell_completion or bool(given.cfg or given.info),
        completion=given.shell_completion,
        config_name=given.config_name,
        config_dir=given.config_dir,
    )


def _parser(program: str) -> argparse.ArgumentParser:
    usage = f"{program} [group=option] [key=value] ...        ({program} --help shows them)"
    parser = argparse.ArgumentParser(program, usage, add_help=False, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"fengine {__version__}")
    switches = [("-h", "--help"), ("--hydra-help",), ("--resolve",), ("-sc", "--shell-completion"), ("-r", "--run")]
    for names in [*switches, ("-m", "--multirun")]:
        parser.add_argument(*names, action="store_true")
    for names in [("-p", "--package"), ("-cn", "--config-name"), ("-cd", "--config-dir"), ("-cp", "--config-path")]:
        parser.add_argument(*names)
    parser.add_argument("--experimental-rerun")
    parser.add_argument("-c", "--cfg", choices=["job", "hydra", "all"])
    infos = ["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"]
    parser.add_argument("-i", "--info", nargs="?", const="all", choices=infos)
    parser.add_argument("overrides", nargs="*")
    return parser
