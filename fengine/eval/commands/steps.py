"""`fengine replay FILE`: the recorded steps of an engine, scheduled again and executed on a simulated device. No torch.

scheduler.record=FILE records them: what the scheduler was asked and what it answered, ids as hashes, no texts. A replay
tells the first step that is scheduled otherwise now, or that would read the KV of others.
"""

from collections.abc import Sequence
from pathlib import Path

from fengine.core.recording import replay
from fengine.errors import ConfigError
from fengine.eval.cli.command import OK, run

USAGE = """
fengine replay FILE: schedules the recorded steps of an engine again, and executes them on a simulated device.

    fengine prompts=a.jsonl scheduler.record=steps.jsonl     records them: ids as hashes, no texts
    fengine replay steps.jsonl                               every step must be the same, and read its own KV

Exit codes: 0 all are, 1 one is not, 2 usage.
"""


def main(argv: Sequence[str]) -> int:
    """The exit code."""
    return run(USAGE, argv, _replay)


def _replay(argv: Sequence[str]) -> int:
    """Errors: ConfigError, InputFileError, InvariantError."""
    if len(argv) != 1:
        raise ConfigError(f"fengine replay takes one file, got {len(argv)} arguments; see fengine replay --help")
    requests, steps = replay(Path(argv[0]))
    print(f"{requests:,} requests, {steps:,} steps: each is scheduled as it was, and reads its own KV")
    return OK
