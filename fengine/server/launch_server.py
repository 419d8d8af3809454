"""`python -m fengine.launch_server`: a server by SGLang's command line; `fengine serve` is fengine's own. Exit codes:
those of `fengine serve`."""

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

from fengine.api.engine import Engine
from fengine.api.server_args import ServerArgs, prepare_server_args
from fengine.api.sglang_args import FOREIGN, HARMLESS, SERVERS
from fengine.errors import ConfigError, FengineError, MissingExtraError, UnsupportedFeatureError
from fengine.server.config import ServerConfig, check, log_to_stderr
from fengine.server.parsers import THINKS

try:
    from fengine.server.server import SIGNALS, listen, serve
except ModuleNotFoundError as error:
    raise MissingExtraError.of("fengine.launch_server", str(error.name), "serve") from error

# Of what is for servers alone, all is refused but what the server does, and what changes nothing about it.
DONE = {"host", "port", "api_key", "admin_api_key", "tool_call_parser", "enable_cache_report", "fastapi_root_path"}
IDLE = {"skip_server_warmup", "warmups", "log_level_http", "uvicorn_access_log_exclude_prefixes", "file_storage_path",
        "file_storage_pth", "asr_max_buffer_seconds", "asr_max_concurrent_sessions"}  # fmt: skip


def config_of(args: ServerArgs) -> ServerConfig:
    """What of them is the server's. Errors: ConfigError; UnsupportedFeatureError with all that is not built."""
    values: dict[str, Any] = vars(args)
    bad = [name for name in HARMLESS[SERVERS] if name not in DONE | IDLE and values[name] not in (None, FOREIGN[name])]
    bad += ["reasoning_parser"] if values["reasoning_parser"] not in (None, *THINKS) else []
    if bad:
        shown = ", ".join(f"{name}={values[name]!r:.80}" for name in bad)
        raise UnsupportedFeatureError(f"not built in this server: {shown}. Leave these arguments out.")
    config = ServerConfig(
        host=values["host"], port=values["port"], api_key=values["api_key"], admin_key=values["admin_api_key"],
        model_name=args.served_model_name, any_model_name=True, sampling_defaults=args.sampling_defaults or "model",
        root_path=values["fastapi_root_path"] or "", tool_call_parser=values["tool_call_parser"],
    )  # fmt: skip
    if problems := check(config):
        raise ConfigError("\n".join(problems))
    return config


def launch_server(server_args: ServerArgs) -> int:
    """Serves until a signal ends it; returns the exit code. The address is taken before the model is loaded. Thoughts
    are told by the model's template, whichever `reasoning_parser` is given. Errors: ConfigError,
    UnsupportedFeatureError, ModelLoadError and kinds."""
    config = config_of(server_args)
    log_to_stderr(config.log)
    done = {name: HARMLESS[SERVERS][name] for name in DONE}  # a key, or a port, is no word to an engine, nor to a log
    with listen(config) as bound, Engine(server_args=replace(server_args, sampling_defaults=None, **done)) as engine:
        stopped_by = serve(engine, config, bound)
    return 0 if stopped_by is None else 128 + stopped_by


def main(argv: Sequence[str] | None = None) -> int:
    """Runs these arguments (default: those of this process) and returns the exit code."""
    try:
        return launch_server(prepare_server_args(sys.argv[1:] if argv is None else argv))
    except FengineError as error:
        print(f"fengine: {error}", file=sys.stderr)
        return 2 if isinstance(error, (ConfigError, UnsupportedFeatureError)) else 1


def _end(number: int, _: Any) -> NoReturn:
    os.write(2, f"fengine: ended by {signal.Signals(number).name}\n".encode())
    sys.exit(128 + number)


if __name__ == "__main__":
    for number in SIGNALS:  # while it loads, and behind the server, which has handlers of its own
        signal.signal(number, _end)
    sys.exit(main())
