"""A process without file descriptors: what needs one fails alone, by name; later requests are answered."""

from forked import run

PROGRAM = """
import os, resource, sys
from fengine import Engine
from fengine.errors import FengineError

PLAIN = {"max_new_tokens": 8, "temperature": 0}
ASKS = {
    "regex": PLAIN | {"regex": "[a-z]+"}, "json": PLAIN | {"json_schema": '{"type": "object"}'},
    "penalty": PLAIN | {"frequency_penalty": 0.5, "stop": "x", "stop_regex": "yz+"},
}
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))


def none_left():
    held = []
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        return held


with Engine(model_path="box", device="cpu") as engine:
    wanted = engine.generate("Hello", PLAIN)
    calls = {name: lambda ask=ask: engine.generate("Hello", ask) for name, ask in ASKS.items()}
    calls["plain"] = lambda: engine.generate("Hello", PLAIN)
    calls["stream"] = lambda: list(engine.generate("Hello", PLAIN, stream=True))[-1]
    calls["chat"] = lambda: engine.chat([{"role": "user", "content": "hi"}], PLAIN)
    first = {}
    for name, call in calls.items():
        held = none_left()
        try:
            first[name] = call()["output_ids"]
        except FengineError as error:
            first[name] = type(error).__name__
            print(name, type(error).__name__, error, flush=True)
        for descriptor in held:
            os.close(descriptor)
        assert engine.generate("Hello", PLAIN)["output_ids"] == wanted["output_ids"], name
    for name, call in calls.items():
        ids = call()["output_ids"]
        assert first[name] in (ids, "FengineError"), (name, first[name])
    assert first["plain"] == first["stream"] == wanted["output_ids"]
"""


def test_without_descriptors_requests_fail_by_name_and_later_ones_are_answered() -> None:
    done = run(PROGRAM)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "llguidance" in done.stdout and "regex FengineError" in done.stdout
