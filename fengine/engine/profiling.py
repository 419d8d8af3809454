"""`Profile`: torch's profiler over the loop's thread, and its trace as a file that Perfetto opens (ui.perfetto.dev).

The profiler watches the thread that starts it, so it is started and stopped in the loop's thread, between two steps.
While it is on, the driver's runner is wrapped: every step has its name and sizes in the trace, and steps are counted.
"""

import os
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerActivity, profile, record_function

from fengine.engine.engine_core import Driver, Runner
from fengine.errors import FengineError, InvalidRequestError, ProfileError, UnsupportedFeatureError
from fengine.models.kv_state import KVState
from fengine.worker.input_batch import StepInput
from fengine.worker.step import Result

FOLDERS = ("FENGINE_TORCH_PROFILER_DIR", "SGLANG_TORCH_PROFILER_DIR")  # environment variables, the first that is set
ACTIVITIES = {"CPU": ProfilerActivity.CPU, "GPU": ProfilerActivity.CUDA}
NOT_BUILT = {"profile_by_stage": False, "merge_profiles": False, "profile_stages": None}


@dataclass(frozen=True)
class Wish:
    """What to record, checked: steps [start, start + count) from now on; a count of None means until stopped."""

    path: Path
    start: int
    count: int | None
    activities: tuple[ProfilerActivity, ...]
    with_stack: bool
    record_shapes: bool


def checked_wish(
    output_dir: Any = None,
    start_step: Any = None,
    num_steps: Any = None,
    activities: Any = None,
    with_stack: Any = None,
    record_shapes: Any = None,
    profile_id: Any = None,
    profile_prefix: Any = None,
    **others: Any,
) -> Wish:
    """SGLang's arguments of start_profile. Errors: InvalidRequestError, UnsupportedFeatureError, ProfileError."""
    unknown = sorted(others.keys() - NOT_BUILT.keys())
    if unknown:
        raise InvalidRequestError(f"start_profile has no argument {unknown[0]!r}.")
    for name, value in others.items():
        if value not in (None, NOT_BUILT[name]):
            raise UnsupportedFeatureError(f"start_profile: {name}={value!r} is not built; leave it out.")
    steps = {"start_step": (start_step, 0), "num_steps": (num_steps, 1)}
    for name, (value, least) in steps.items():
        if value is not None and (type(value) is not int or value < least):
            raise InvalidRequestError(f"{name} must be a whole number of at least {least}, got {value!r:.80}.")
    for name, value in {"profile_id": profile_id, "profile_prefix": profile_prefix}.items():
        if value is not None and (not isinstance(value, str) or not value or Path(value).name != value):
            raise InvalidRequestError(f"{name} must be usable as a file name, got {value!r:.80}.")
    stem = "-".join(part for part in (profile_prefix, profile_id or f"{time.time():.6f}") if part)
    return Wish(
        _writable(output_dir) / f"{stem}.trace.json.gz",
        start_step or 0,
        num_steps,
        _activities(activities),
        bool(with_stack),
        bool(record_shapes),
    )


def _activities(asked: Any) -> tuple[ProfilerActivity, ...]:
    if asked is None:
        return (ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else []))
    if not isinstance(asked, (list, tuple)) or not asked:
        raise InvalidRequestError(f"activities must be a list of {', '.join(ACTIVITIES)}, got {asked!r:.80}.")
    bad = [name for name in asked if name not in tuple(ACTIVITIES)]
    if bad:
        raise UnsupportedFeatureError(f"activities={bad!r:.80} are not built; use {' and '.join(ACTIVITIES)}.")
    if "GPU" in asked and not torch.cuda.is_available():
        raise InvalidRequestError("activities has 'GPU', but torch sees no CUDA device; use ['CPU'].")
    return tuple(ACTIVITIES[name] for name in asked)


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


class Watched:
    """A runner whose steps are named in the trace."""

    def __init__(self, runner: Runner, profile: "Profile") -> None:
        self.runner, self._profile, self.params = runner, profile, runner.params

    def launch(self, kv: KVState, step: StepInput) -> tuple[KVState, Result]:
        self._profile.before_step()
        with record_function(f"step: {step.tokens} tokens, {step.rows} rows"):
            result = self.runner.launch(kv, step)
        self._profile.after_step()
        return result


def unwatched(runner: Runner) -> Runner:
    """The runner itself. Pure."""
    return runner.runner if isinstance(runner, Watched) else runner


class Profile:
    """One engine's profiling. Modifies, in the loop's thread: itself, and the driver's runner while it is on."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._wish: Wish | None = None
        self._profiler: profile | None = None
        self._steps = 0  # seen since the start
        self._fault: str | None = None  # what befell the last profile, when nobody was there to be told

    def start(self, **wish: Any) -> Path:
        """Starts; returns the file that the trace will be in. Errors: as `checked_wish`; ProfileError if it is on."""
        checked = checked_wish(**wish)
        self.driver.call(lambda: self._start(checked))
        return checked.path

    def stop(self) -> Path:
        """Writes the trace. Errors: ProfileError if nothing is profiled, or the trace cannot be written."""
        return self.driver.call(self._stop)

    def close(self) -> None:
        """The engine ends: what is being recorded is written."""
        if self._wish is not None:
            with suppress(FengineError):
                self.stop()

    # -- in the loop's thread ------------------------------------------------------------------------------------------

    def _start(self, wish: Wish) -> None:
        if self._wish is not None:
            raise ProfileError(f"profiling is on already (for {self._wish.path}): call stop_profile first")
        self._wish, self._steps, self._fault = wish, 0, None
        try:
            if wish.start == 0:
                self._begin(wish)
        except RuntimeError as error:
            self._wish = None
            raise ProfileError(f"profiling cannot start: {error}") from error
        self.driver.runner = Watched(self.driver.runner, self)

    def _begin(self, wish: Wish) -> None:
        """Errors: RuntimeError."""
        if autograd_profiler._is_profiler_enabled:  # two at a time crash the process
            raise RuntimeError("a profiler is on in this process, perhaps another engine's")
        profiler = profile(activities=wish.activities, with_stack=wish.with_stack, record_shapes=wish.record_shapes)
        profiler.start()
        self._profiler = profiler

    def before_step(self) -> None:
        """The profiler starts at the first step that is asked for."""
        wish = self._wish
        if wish is not None and self._profiler is None and self._steps == wish.start:
            try:
                self._begin(wish)
            except RuntimeError as error:
                self._fault = f"the profiler could not start at step {wish.start}: {error}"

    def after_step(self) -> None:
        """It ends with the last one, and its trace is written."""
        self._steps += 1
        wish = self._wish
        if wish is not None and wish.count is not None and self._steps == wish.start + wish.count:
            try:
                self._stop()
            except ProfileError as error:
                self._fault = str(error)

    def _stop(self) -> Path:
        wish, profiler = self._wish, self._profiler
        if wish is None:
            raise ProfileError(self._fault or "nothing is being profiled: call start_profile first")
        self._wish = self._profiler = None
        if isinstance(self.driver.runner, Watched):
            self.driver.runner = self.driver.runner.runner
        if profiler is None:
            raise ProfileError(self._fault or f"step {wish.start}, the first to profile, was never reached: no trace")
        if ProfilerActivity.CUDA in wish.activities:
            torch.cuda.synchronize()
        try:
            profiler.stop()
            profiler.export_chrome_trace(str(wish.path))
        except (OSError, RuntimeError, ValueError) as error:
            raise ProfileError(f"the trace {str(wish.path)!r} cannot be written: {error}") from error
        return wish.path
