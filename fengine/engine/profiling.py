"""`Profile`: torch's profiler over the loop's thread, and its trace as a file that Perfetto opens (ui.perfetto.dev).
The profiler watches the thread that starts it, so it is started and stopped in the loop's thread, between two steps.
While it is on, a watcher gives every step its name and sizes in the trace, and counts steps."""

import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerActivity, profile, record_function

from fengine.core.scalars import flag
from fengine.core.scheduler_output import SchedulerOutput, Watcher
from fengine.engine.engine_core import EngineCore
from fengine.errors import FengineError, InvalidRequestError, ProfileError, UnsupportedFeatureError

FOLDERS = ("FENGINE_TORCH_PROFILER_DIR", "SGLANG_TORCH_PROFILER_DIR")  # environment variables, the first that is set
ACTIVITIES = {"CPU": ProfilerActivity.CPU, "GPU": ProfilerActivity.CUDA}
NOT_BUILT = {"profile_by_stage": False, "merge_profiles": False, "profile_stages": None}


class ProfileRequest(NamedTuple):
    """Record steps [start, start + count) from now on to the file `path`; a count of None means until stopped."""

    path: str
    start: int
    count: int | None
    activities: tuple[str, ...]  # of ACTIVITIES
    with_stack: bool
    record_shapes: bool


def checked_start(
    output_dir: Any = None, start_step: Any = None, num_steps: Any = None, activities: Any = None,
    with_stack: Any = None, record_shapes: Any = None, profile_id: Any = None, profile_prefix: Any = None,
    **others: Any,
) -> ProfileRequest:  # fmt: skip
    """SGLang's arguments of start_profile. Errors: InvalidRequestError, UnsupportedFeatureError, ProfileError."""
    for name, value in others.items():
        if name not in NOT_BUILT:
            raise InvalidRequestError(f"start_profile has no argument {name!r}.")
        if value not in (None, NOT_BUILT[name]):
            raise UnsupportedFeatureError(f"start_profile: {name}={value!r} is not built; leave it out.")
    for name, value, least in (("start_step", start_step, 0), ("num_steps", num_steps, 1)):
        if value is not None and (type(value) is not int or value < least):
            raise InvalidRequestError(f"{name} must be a whole number of at least {least}, got {value!r:.80}.")
    stem = _stem(profile_prefix, profile_id)
    stacks = (flag("with_stack", with_stack or False), flag("record_shapes", record_shapes or False))
    path = _writable(output_dir) / f"{stem}.trace.json.gz"
    return ProfileRequest(str(path), start_step or 0, num_steps, _activities(activities), *stacks)


def _stem(prefix: Any, id: Any) -> str:
    """The name of a trace's file, without its ending."""
    for name, value in (("profile_id", id), ("profile_prefix", prefix)):
        if value is not None and (not isinstance(value, str) or not value or Path(value).name != value):
            raise InvalidRequestError(f"{name} must be usable as a file name, got {value!r:.80}.")
    return "-".join(part for part in (prefix, id or f"{time.time():.6f}") if part)


def _activities(asked: Any) -> tuple[str, ...]:
    if asked is None:
        return ("CPU", "GPU") if torch.cuda.is_available() else ("CPU",)
    if not isinstance(asked, (list, tuple)) or not asked:
        raise InvalidRequestError(f"activities must be a list of {', '.join(ACTIVITIES)}, got {asked!r:.80}.")
    bad = [name for name in asked if name not in tuple(ACTIVITIES)]
    if bad:
        raise UnsupportedFeatureError(f"activities={bad!r:.80} are not built; use {' and '.join(ACTIVITIES)}.")
    if "GPU" in asked and not torch.cuda.is_available():
        raise InvalidRequestError("activities has 'GPU', but torch sees no CUDA device; use ['CPU'].")
    return tuple(asked)


def _writable(folder: Any) -> Path:
    """The folder of the trace, made if it is not there. Errors: InvalidRequestError, ProfileError."""
    if folder is None:
        folder = next((os.environ[name] for name in FOLDERS if os.environ.get(name)), tempfile.gettempdir())
    if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder):
        raise InvalidRequestError(f"output_dir must be a folder, got {folder!r:.80}.")
    try:
        path = Path(os.fsdecode(folder)).expanduser()
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except (OSError, ValueError, RuntimeError) as error:  # also a name that no file can have, or "~" of nobody
        reason = getattr(error, "strerror", None) or error
        raise ProfileError(f"output_dir {str(folder)!r:.200} cannot be written: {reason}; choose another") from None


class Profile(Watcher):
    """One engine's profiling. Modifies, in the loop's thread: itself; it watches the loop's steps while it is on."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._asked: ProfileRequest | None = None
        self._profiler: profile | None = None
        self._span: record_function | None = None  # of the step that is being launched
        self._steps = 0  # seen since the start
        self._fault: str | None = None  # what befell the last profile, when nobody was there to be told
        core.handlers |= {"start_profile": self._start, "stop_profile": self._stop}

    def start(self, **asked: Any) -> Path:
        """Starts; returns the file that the trace will be in. Errors: as `checked_start`; ProfileError if it is on."""
        request = checked_start(**asked)
        self.core.call("start_profile", **request._asdict())
        return Path(request.path)

    def stop(self) -> Path:
        """Writes the trace. Errors: ProfileError if nothing is profiled, or the trace cannot be written."""
        return Path(self.core.call("stop_profile"))

    def close(self) -> None:
        """The engine ends: what is being recorded is written."""
        if self._asked is not None:
            with suppress(FengineError):
                self.stop()

    # -- in the loop's thread ------------------------------------------------------------------------------------------

    def _start(self, **asked: Any) -> None:
        if self._asked is not None:
            raise ProfileError(f"profiling is on already (for {self._asked.path}): call stop_profile first")
        self._asked, self._steps, self._fault = ProfileRequest(**asked), 0, None
        try:
            if self._asked.start == 0:
                self._begin(self._asked)
        except RuntimeError as error:
            self._asked = None
            raise ProfileError(f"profiling cannot start: {error}") from error
        self.core.stepper.watch(self)

    def _begin(self, asked: ProfileRequest) -> None:
        """Errors: RuntimeError."""
        if autograd_profiler._is_profiler_enabled:  # two at a time crash the process
            raise RuntimeError("a profiler is on in this process, perhaps another engine's")
        activities = tuple(ACTIVITIES[name] for name in asked.activities)
        profiler = profile(activities=activities, with_stack=asked.with_stack, record_shapes=asked.record_shapes)
        profiler.start()
        self._profiler = profiler

    def scheduled(self, output: SchedulerOutput) -> None:
        """The profiler starts at the first step that is asked for."""
        asked = self._asked
        if asked is not None and self._profiler is None and self._steps == asked.start:
            try:
                self._begin(asked)
            except RuntimeError as error:
                self._fault = f"the profiler could not start at step {asked.start}: {error}"
        self._span = record_function(f"step: {len(output.token_ids)} tokens, {output.num_draws} rows")
        self._span.__enter__()

    def launched(self, output: SchedulerOutput) -> None:
        """It ends with the last one, and its trace is written."""
        if self._span is not None:
            self._span.__exit__(None, None, None)
        self._span = None
        self._steps += 1
        asked = self._asked
        if asked is not None and asked.count is not None and self._steps == asked.start + asked.count:
            try:
                self._stop()
            except ProfileError as error:
                self._fault = str(error)

    def _stop(self) -> str:
        asked, profiler = self._asked, self._profiler
        if asked is None:
            raise ProfileError(self._fault or "nothing is being profiled: call start_profile first")
        self._asked = self._profiler = None
        self.core.stepper.unwatch(self)
        if profiler is None:
            raise ProfileError(self._fault or f"step {asked.start}, the first to profile, was never reached: no trace")
        if "GPU" in asked.activities:
            torch.cuda.synchronize()
        try:
            profiler.stop()
            profiler.export_chrome_trace(asked.path)
        except (OSError, RuntimeError, ValueError) as error:
            raise ProfileError(f"the trace {asked.path!r} cannot be written: {error}") from error
        return asked.path
