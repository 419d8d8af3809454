"""Helpers that SGLang's documents and examples import from `sglang.utils` and `sglang.srt.utils`."""

import os
import shlex
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from fengine.errors import ConfigError, EngineDeadError

__all__ = [
    "async_stream_and_merge",
    "execute_shell_command",
    "is_in_ci",
    "kill_process_tree",
    "launch_server_cmd",
    "print_highlight",
    "stream_and_merge",
    "terminate_process",
    "trim_overlap",
    "wait_for_server",
]
__path__: list[str] = []  # SGLang's is a package: compat.py finds the modules below it
POLL_SECONDS = 0.2
GRACE_SECONDS = 10


def is_in_ci() -> bool:
    """Whether FENGINE_IS_IN_CI or SGLANG_IS_IN_CI is "true" or "1"."""
    return any(os.environ.get(name, "").lower() in ("true", "1") for name in ("FENGINE_IS_IN_CI", "SGLANG_IS_IN_CI"))


def trim_overlap(existing: str, new: str) -> str:
    """`new` without its longest beginning that is an end of `existing`. Pure."""
    for size in range(min(len(existing), len(new)), 0, -1):
        if existing.endswith(new[:size]):
            return new[size:]
    return new


def _delta(existing: str, chunk: dict[str, Any]) -> str:
    """What `chunk` adds to the text so far. Pure. A chunk whose output_ids are all completion tokens carries all text
    so far; with fewer it carries only what is new, so that a genuine repetition ("ha" + "ha") survives. Without these
    figures overlap is trimmed, as SGLang does."""
    text, ids = chunk["text"], chunk.get("output_ids")
    total = chunk.get("meta_info", {}).get("completion_tokens")
    if ids is not None and total is not None:
        if len(ids) != total:
            return text
        if text.startswith(existing):
            return text[len(existing) :]
    return trim_overlap(existing, text)


def stream_and_merge(llm: Any, prompt: str, sampling_params: dict[str, Any] | None) -> str:
    """Streams one prompt and returns its whole text, whether the engine streams cumulative text or increments."""
    text = ""
    for chunk in llm.generate(prompt, sampling_params, stream=True):
        text += _delta(text, chunk)
    return text


async def async_stream_and_merge(llm: Any, prompt: str, sampling_params: dict[str, Any] | None) -> AsyncIterator[str]:
    """Streams one prompt and yields what each chunk adds (perhaps ""); the pieces concatenate to the whole text."""
    text = ""
    async for chunk in await llm.async_generate(prompt, sampling_params, stream=True):
        delta = _delta(text, chunk)
        text += delta
        yield delta


def print_highlight(html_content: str) -> None:
    print(html_content)


def execute_shell_command(command: str) -> subprocess.Popen[bytes]:
    """Starts a command in a process group of its own, without a shell. A backslash at a line's end goes on with it."""
    try:
        words = shlex.split(command.replace("\\\n", " "))
    except ValueError as error:
        raise ConfigError(f"the command {command!r:.200} cannot be read: {error}") from None
    if not words:
        raise ConfigError("the command is empty")
    return subprocess.Popen(words, start_new_session=True)


def launch_server_cmd(
    command: str, host: str = "127.0.0.1", port: int | None = None
) -> tuple[subprocess.Popen[bytes], int]:
    """Starts a server's command with `--port`. Returns the process and the port; None takes a free one."""
    return execute_shell_command(f"{command} --port {(chosen := port or _free_port(host))}"), chosen


def _free_port(host: str) -> int:
    with socket.socket() as free:
        free.bind((host, 0))
        return free.getsockname()[1]


def wait_for_server(
    base_url: str, timeout: float | None = None, process: subprocess.Popen[bytes] | None = None
) -> None:
    """Returns once GET `base_url`/health answers. `timeout`: the most seconds to wait; None: for ever. Errors:
    TimeoutError; EngineDeadError if `process` has ended."""
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        with suppress(OSError, ValueError):  # not there yet
            with urllib.request.urlopen(f"{base_url.rstrip('/')}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        if process is not None and process.poll() is not None:
            raise EngineDeadError(f"the server ended with status {process.returncode} before it answered")
        if end is not None and time.monotonic() > end:
            raise TimeoutError(f"the server at {base_url} did not answer within {timeout:g} seconds")
        time.sleep(POLL_SECONDS)


def terminate_process(process: subprocess.Popen[bytes]) -> None:
    """Ends a process of `execute_shell_command` and its group: asks first, and kills what is left after ten seconds."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_SECONDS)
    kill_process_tree(process.pid)
    process.wait()


def kill_process_tree(parent_pid: int | None, include_parent: bool = True) -> None:
    """Kills the group of a process that leads one; no other process is touched. SGLang's name. `include_parent=False`,
    for the children of an engine, has no effect: there are none."""
    with suppress(ProcessLookupError):
        if parent_pid and include_parent and os.getpgid(parent_pid) == parent_pid != os.getpgid(0):
            os.killpg(parent_pid, signal.SIGKILL)
