"""The command line from words to files, against an engine that is a few lines long."""

import asyncio
import errno
import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hydra")

from rich.console import Console

from fengine import run
from fengine.config import EngineConfig, Hardware, resolve
from fengine.core.request import SamplingParams, derive_seed
from fengine.errors import ContextLengthError, EngineDeadError, ModelLoadError
from fengine.eval.cli import engines as engines_file
from fengine.eval.cli import view
from fengine.eval.cli.view import Progress, Shown, clean, clock, tail
from fengine.eval.runs import loop as meter
from fengine.eval.runs import manifest
from fengine.eval.runs.journal import Entry, scan

ROOT = Path(run.__file__).resolve().parent.parent


class FakeTokenizer:
    chat_templates = {"default": "x"}

    def template_of(self, tools: bool) -> tuple[str, frozenset[str]]:
        return "", frozenset()

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        return [len(m["content"]) for m in messages]


class FakeEngine:
    """Answers with a function of prompt and seed. Some prompts misbehave, unless it is calm."""

    calm = False

    def __init__(self, config: EngineConfig) -> None:
        self.config = resolve(config, Hardware("cpu"))
        self.tokenizer = FakeTokenizer()
        self.calls: list[dict[str, Any]] = []
        self.open = True
        self.in_flight = self.most_in_flight = 0

    def stats(self) -> dict[str, Any]:
        names = ("running", "waiting", "pages_used", "pages_total", "computed_tokens", "output_tokens", "preemptions")
        return dict.fromkeys([*names, "steps", "compiles", "compile_seconds", "start_seconds"], 0)

    def get_server_info(self) -> dict[str, Any]:
        return {"max_req_input_len": 100}

    def shutdown(self) -> None:
        self.open = False

    async def async_generate(self, **call: Any) -> Any:
        assert self.open
        self.calls.append(call)
        prompt = str(call.get("prompt", call.get("input_ids")))
        if "too long" in prompt:
            raise ContextLengthError("The input (900 tokens) is longer than the model's context length (512 tokens).")
        if "death" in prompt:
            for _ in range(20):
                await asyncio.sleep(0)
            raise EngineDeadError("the engine's loop failed: RuntimeError: boom")
        if self.calm:
            return self.output(prompt, call)
        if "interrupt" in prompt:  # Ctrl-C, once every other row has had its turn
            for _ in range(20):
                await asyncio.sleep(0)
            signal.raise_signal(signal.SIGINT)
        if "interrupt" in prompt or "hang" in prompt:
            await asyncio.Event().wait()
        if call.get("stream"):
            return self.stream(prompt, call)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        for _ in range(len(prompt) % 7):
            await asyncio.sleep(0)
        self.in_flight -= 1
        return self.output(prompt, call)

    async def stream(self, prompt: str, call: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        whole = self.output(prompt, call)
        yield whole | {"text": whole["text"][:3]}
        await asyncio.sleep(0)
        yield whole

    def output(self, prompt: str, call: dict[str, Any]) -> dict[str, Any]:
        text = f"{prompt[::-1]} {call['sampling_params']['sampling_seed'] % 1000}"
        meta = {
            "finish_reason": {"type": "length", "length": len(text)},
            "prompt_tokens": len(prompt),
            "completion_tokens": len(text),
            "cached_tokens": 0,
            "first_token_latency": 0.25,
            "output_token_logprobs": [(-0.5, 1, None), (-0.25, 2, None)],
        }
        return {"text": text, "output_ids": [1, 2], "meta_info": meta}


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[FakeEngine]:
    """Engines that the command line has opened; the working directory is a new one."""
    opened: list[FakeEngine] = []

    def open_engine(config: EngineConfig) -> FakeEngine:
        if config.model.path == "missing":
            raise ModelLoadError("model directory 'missing' does not exist")
        assert all(not engine.open for engine in opened), "two engines at once"
        opened.append(FakeEngine(config))
        return opened[-1]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(manifest.provenance, "checkout", lambda: None)
    monkeypatch.setattr(engines_file, "open_engine", open_engine)
    return opened


def journaled(folder: str) -> list[dict[str, Any]]:
    """The records of a run's folder, in the order of the input."""
    _, *lines = [line for line in scan(Path(folder, "journal.log")) if isinstance(line, Entry)]
    return [json.loads(line.record) for line in sorted(lines, key=lambda line: line.head[0])]


def records(path: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def only_output(directory: Path) -> Path:
    (path,) = directory.glob("runs/*/*/output.jsonl")
    return path


# -- one run -----------------------------------------------------------------------------------------------------------


def test_built_in_prompts(engines: list[FakeEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["model=llama", "sampling.temperature=0.8"]) == run.OK
    path = only_output(tmp_path)
    rows = records(path)
    assert [r.get("prompt") for r in rows][:2] == ["Hello, my name is", "The president of the United States is"]
    assert any("messages" in r for r in rows)
    assert rows[0]["text"] == f"si eman ym ,olleH {derive_seed(0, 0) % 1000}"
    assert engines[0].calls[0]["sampling_params"]["temperature"] == 0.8
    assert "max_new_tokens" not in engines[0].calls[0]["sampling_params"]
    assert not engines[0].open
    shown = capsys.readouterr()
    assert "prompt: Hello, my name is\noutput: si eman ym" in shown.out
    assert (
        f"{len(rows)} rows in" in shown.out
        and "median 250 ms" in shown.out
        and f"{path.relative_to(tmp_path)}\n" in shown.out
    )
    assert "\x1b" not in shown.out + shown.err
    assert "temperature: 0.8" in (path.parent / "config.yaml").read_text()
    assert (path.parent / "overrides.yaml").read_text() == "- model=llama\n- sampling.temperature=0.8\n"


def test_record_is_the_requests_alone(engines: list[FakeEngine]) -> None:
    """No times, no cache hits: two runs of one config give the same bytes, whatever the batch was."""
    (Path("in.txt")).write_text("".join(f"prompt number {i}\n" for i in range(40)))
    assert run.main(["prompts=in.txt", "out=a.jsonl", "return_logprob=true"]) == run.OK
    assert run.main(["prompts=in.txt", "out=b.jsonl", "return_logprob=true", "scheduler=one_by_one"]) == run.OK
    assert Path("a.jsonl").read_bytes() == Path("b.jsonl").read_bytes()
    row = records("a.jsonl")[3]
    assert list(row) == [
        *("prompt", "text", "output_ids", "finish_reason"),
        *("prompt_tokens", "sampling_seed", "output_token_logprobs"),
    ]
    assert row["sampling_seed"] == derive_seed(0, 3) and row["output_token_logprobs"] == [-0.5, -0.25]


def test_jsonl_keeps_columns_and_order_and_bad_rows(
    engines: list[FakeEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        '{"id": "a", "prompt": "one"}',
        "{not json",
        '{"id": "c", "messages": [{"role": "user", "content": "hey"}], "extra": [1, {"x": null}]}',
        '{"id": "d", "input_ids": [5, 6]}',
        '{"id": "e", "prompt": "much too long"}',
        '{"id": "f"}',
        "",
        '{"id": "g", "prompt": "last", "sampling_seed": 3}',
        '{"id": "h", "prompt": "done"}',
    ]
    Path("in.jsonl").write_text("\n".join(lines))
    assert run.main(["prompts=in.jsonl", "out=out.jsonl"]) == run.FAILED
    rows = records("out.jsonl")
    assert [r.get("id") for r in rows] == ["a", None, "c", "d", "e", "f", "g", "h"]
    assert [r["error"]["type"] if "error" in r else None for r in rows] == [
        *(None, "InputFileError", None, None, "ContextLengthError", "InputFileError", "InputFileError", None)
    ]
    assert "in.jsonl line 2" in rows[1]["error"]["message"]
    assert rows[2]["extra"] == [1, {"x": None}]
    assert [c.get("prompt", c.get("input_ids")) for c in engines[0].calls] == [
        "one",
        [3],
        [5, 6],
        "much too long",
        "done",
    ]
    # the seed belongs to the row, not to the number of good rows before it
    assert rows[7]["sampling_seed"] == derive_seed(0, 7)
    out = capsys.readouterr().out
    assert "8 rows, 4 failed" in out and "error: ContextLengthError: The input (900 tokens)" in out


def test_chat_wraps_plain_prompts(engines: list[FakeEngine]) -> None:
    assert run.main(["prompts=[hello]", "chat=true", "out=o.jsonl"]) == run.OK
    assert engines[0].calls[0]["input_ids"] == [5]
    assert records("o.jsonl")[0]["prompt"] == "hello"


def test_sampling_reaches_the_engine(engines: list[FakeEngine]) -> None:
    words = ["prompts=[a,b]", "sampling.max_new_tokens=7", "sampling.stop=['\\n']", "sampling.sampling_seed=11"]
    assert run.main([*words, "out=o.jsonl", "view=quiet"]) == run.OK
    params = engines[0].calls[1]["sampling_params"]
    assert (params["max_new_tokens"], params["sampling_seed"]) == (7, 11) and len(params["stop"]) == 1
    assert SamplingParams.of(params).max_new_tokens == 7


def test_window_is_bounded(engines: list[FakeEngine]) -> None:
    Path("in.txt").write_text("".join(f"row {i}\n" for i in range(500)))
    assert run.main(["prompts=in.txt", "out=o.jsonl", "scheduler.max_running_requests=2", "show=3"]) == run.OK
    assert 2 <= engines[0].most_in_flight <= 8
    assert [r["prompt"] for r in records("o.jsonl")] == [f"row {i}" for i in range(500)]


def test_show_limits_what_is_printed(engines: list[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["prompts=[a,b,c,d]", "show=2", "out=o.jsonl"]) == run.OK
    shown = capsys.readouterr()
    assert shown.out.count("prompt:") == 2 and "further rows" in shown.err


def test_max_errors_stops_the_run(engines: list[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["prompts=[too long 1,fine,too long 2,x,y]", "out=o.jsonl", "scheduler.max_running_requests=1"]
    assert run.main([*words, "max_errors=1"]) == run.FAILED
    assert not Path("o.jsonl").exists()
    assert [row["data"]["prompt"] for row in journaled("o.jsonl.run") if "error" in row] == ["too long 1", "too long 2"]
    assert "stopped by max_errors=1" in capsys.readouterr().out
    assert run.main([*words, "max_errors=2"]) == run.FAILED and Path("o.jsonl").exists()  # as many as may fail


def test_an_interrupt_keeps_what_is_finished(engines: list[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    """Also the rows behind one that has not finished; where they are is told."""
    assert run.main(["prompts=[one,hang,three,interrupt,hang]", "out=o.jsonl"]) == run.INTERRUPTED
    assert [row["data"]["prompt"] for row in journaled("o.jsonl.run")] == ["one", "three"]
    assert not Path("o.jsonl").exists() and not engines[0].open
    shown = capsys.readouterr()
    assert "interrupted: 2 rows" in shown.out and "o.jsonl.run" in shown.out
    assert "Traceback" not in shown.err


def test_an_interrupted_run_goes_on(engines: list[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    """The same command computes the rows that are missing, and ends with the bytes of an uninterrupted run."""
    Path("in.txt").write_text("one\nhang\nthree\ninterrupt\nhang on\n")
    words = ["prompts=in.txt", "out=o.jsonl"]
    assert run.main(words) == run.INTERRUPTED
    assert "to go on, run the same command" in capsys.readouterr().err and not Path("o.jsonl").exists()
    FakeEngine.calm = True
    try:
        assert run.main(words) == run.OK
        assert [call["prompt"] for call in engines[1].calls] == ["hang", "interrupt", "hang on"]
        assert run.main(["prompts=in.txt", "out=whole.jsonl"]) == run.OK
        assert Path("o.jsonl").read_bytes() == Path("whole.jsonl").read_bytes()
        Path("o.jsonl").unlink()
        assert run.main(words) == run.OK and len(engines) == 3, "all rows are there: nothing is loaded"
        assert Path("o.jsonl").read_bytes() == Path("whole.jsonl").read_bytes()
    finally:
        FakeEngine.calm = False
    assert run.main(["diff", "o.jsonl", "whole.jsonl"]) == run.OK
    assert run.main(["report", "o.jsonl", "out=r.html"]) == run.OK


def test_a_run_whose_model_did_not_load_leaves_its_place_to_another(engines: list[FakeEngine]) -> None:
    for words, code in ((["model.path=missing"], run.USAGE), (["seed=2"], run.OK), (["seed=3"], run.USAGE)):
        assert run.main(["prompts=[a]", "out=o.jsonl", *words]) == code, words


def test_the_file_of_another_run_is_not_overwritten(
    engines: list[FakeEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(["prompts=[a]", "out=o.jsonl"]) == run.OK
    before = Path("o.jsonl").read_bytes()
    assert run.main(["prompts=[a]", "out=o.jsonl", "seed=1"]) == run.USAGE
    assert "seed: 0 → 1" in capsys.readouterr().err
    Path("mine.jsonl").write_text("precious")
    assert run.main(["prompts=[a]", "out=mine.jsonl"]) == run.USAGE
    assert "is there already" in capsys.readouterr().err and Path("mine.jsonl").read_text() == "precious"
    Path("empty.jsonl").touch()  # of mktemp: there is nothing to lose
    assert run.main(["prompts=[a]", "out=empty.jsonl"]) == run.OK and Path("empty.jsonl").read_bytes()
    assert Path("o.jsonl").read_bytes() == before and len(engines) == 2


def test_one_prompt_runs_as_it_stands(engines: list[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["What is it's name?"], ["prompts=What is its name?"], ["is a = b so?"]):
        assert run.main([*words, "view=quiet"]) == run.OK
    assert [engine.calls[0]["prompt"] for engine in engines] == [
        *("What is it's name?", "What is its name?", "is a = b so?")
    ]
    for word, said in (
        ("serv", "did you mean fengine serve?"),
        ("Eval", "did you mean fengine eval?"),
        ("xyz", "there are eval"),
    ):
        assert run.main([word]) == run.USAGE and said in capsys.readouterr().err


def test_a_model_that_is_here_is_read_without_a_word(
    engines: list[FakeEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(["one word more", "view=plain", "sampling.max_new_tokens=4"]) == run.OK
    told = capsys.readouterr().err
    assert told.startswith("loading box ...") and "reading" not in told


def test_escapes_are_what_they_say(engines: list[FakeEngine]) -> None:
    """A value typed in a shell holds a backslash and an n; the run, and its record, hold what is meant."""
    words = [r"""prompts=["a\nb\tc", 'd\\ne']""", r"""sampling.stop=["\n\n"]""", "view=quiet", "out=o.jsonl"]
    assert run.main(words) == run.OK
    assert [call["prompt"] for call in engines[0].calls] == ["a\nb\tc", "d\\ne"]
    assert engines[0].calls[0]["sampling_params"]["stop"] == ["\n\n"]
    config = json.loads(Path("o.jsonl.run/manifest.json").read_text())["identity"]["config"]
    assert config["sampling.stop"] == ["\n\n"] and config["task.prompts"] == ["a\nb\tc", "d\\ne"]


def test_interrupt_ends_a_sweep(engines: list[FakeEngine], capsys: Any) -> None:
    assert run.main(["prompts=[interrupt]", "-m", "seed=1,2,3", "out='o${seed}.jsonl'"]) == run.INTERRUPTED
    assert len(engines[0].calls) == 1 and capsys.readouterr().err.endswith("to go on, run the same command\n")


def test_dead_engine_ends_the_run(engines: list[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["prompts=[one,death,three]", "out=o.jsonl"]) == run.FAILED
    shown = capsys.readouterr()
    assert "the engine's loop failed" in shown.err and "Traceback" not in shown.err
    assert "finished before, in o.jsonl.run" in shown.err
    assert not Path("o.jsonl").exists()


# -- sweeps ------------------------------------------------------------------------------------------------------------


def test_sweep_loads_once(engines: list[FakeEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["prompts=[a]", "-m", "sampling.temperature=0,0.8", "seed=1,2"]) == run.OK
    assert len(engines) == 1 and not engines[0].open
    found = sorted(tmp_path.glob("runs/*/*/*/output.jsonl"))
    assert [p.parent.name for p in found] == ["0", "1", "2", "3"]
    seeds = [records(p)[0]["sampling_seed"] for p in found]
    assert seeds == [derive_seed(1, 0), derive_seed(2, 0)] * 2
    assert [c["sampling_params"]["temperature"] for c in engines[0].calls] == [0, 0, 0.8, 0.8]
    shown = capsys.readouterr()
    assert "point 2 of 4: sampling.temperature=0  seed=2" in shown.err and "reused" in shown.out


def test_sweep_over_engines_keeps_one_open(engines: list[FakeEngine]) -> None:
    Path("x").mkdir()
    Path("y").mkdir()
    assert run.main(["prompts=[a]", "-m", "model.path=x,y", "seed=1,2", "view=quiet"]) == run.OK
    assert [e.config.model.path for e in engines] == ["x", "y"] and not any(e.open for e in engines)


def test_one_bad_point_does_not_stop_the_others(engines: list[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    Path("x").mkdir()
    assert run.main(["prompts=[a]", "-m", "model.path=missing,x"]) == run.USAGE
    assert [e.config.model.path for e in engines] == ["x"]
    assert "'missing' does not exist" in capsys.readouterr().err


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["sampling.temprature=1"], "did you mean sampling.temperature"),
        (["prompts=nope.jsonl"], "does not exist"),
        (["prompts=nope.csv"], "neither .txt"),
        (["prompts=[a]", "out=/proc/nope/o.jsonl"], "cannot be written"),
        (["prompts=[a]", "out=."], "not a regular file"),
        (["prompts=[a]", "hydra.run.dir=/proc/nope"], "hydra.run.dir"),
        (["prompts=[a]", "model.path=missing"], "ModelLoadError: model directory 'missing'"),
        (["+x._target_=os.system"], "refused"),
        (["--experimental-rerun", "x.pickle"], "refused"),
    ],
)
def test_mistakes_end_with_2(
    words: list[str], expected: str, engines: list[FakeEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(words) == run.USAGE
    err = capsys.readouterr().err
    assert expected in err and "Traceback" not in err and 1 <= len(err.strip().splitlines()) <= 6
    assert engines == [], "the engine was opened before the mistake was found"


def test_full_error_shows_the_traceback(
    engines: list[FakeEngine], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert run.main(["sampling.temprature=1"]) == run.USAGE
    assert "Traceback" in capsys.readouterr().err


def test_full_disk_is_an_error_of_the_run(engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    assert run.main(["prompts=[a]", "out=/dev/full"]) == run.FAILED


# -- the process -------------------------------------------------------------------------------------------------------


def process(*words: str, code: str = "") -> subprocess.CompletedProcess[str]:
    """A new interpreter that runs the command line, then `code`."""
    script = f"import sys\nfrom fengine.run import main\ncode = main({list(words)!r})\n{code}\nsys.exit(code)"
    return subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_help_needs_no_torch() -> None:
    heavy = ("torch", "transformers", "triton", "tokenizers")
    done = process("--help", code=f"print([m for m in {heavy!r} if m in sys.modules], file=sys.stderr)")
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert "Examples:" in done.stdout and "sampling.temperature=0.8" in done.stdout
    assert re.search(r"^model: [^:]*\bllama, llama3.1-8b", done.stdout, re.MULTILINE)
    assert "temperature: 1.0" in done.stdout and "Exit codes" in done.stdout


def test_mistakes_need_no_torch() -> None:
    done = process("modl=llama", code="print('torch' in sys.modules)")
    assert (done.returncode, done.stdout) == (run.USAGE, "False\n")


def test_config_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--cfg", "job", "sampling=greedy"]) == run.OK
    assert "temperature: 0.0" in capsys.readouterr().out
    assert run.main(["--cfg", "job", "--resolve", "out=${oc.env:NO_SUCH}"]) == run.USAGE
    assert "'NO_SUCH' not found" in capsys.readouterr().err
    assert [run.main(words) for words in (["--cfg", "job", "-cn", "eval"], ["eval", "--cfg", "job"])] == [2, 0]


def test_unknown_flag_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--frobnicate"]) == run.USAGE
    assert "--frobnicate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("fengine model=ll", "model=llama"),
        ("fengine sampling.temp", "sampling.temperature="),
        ("fengine sam", "sampling"),
    ],
)
def test_completion(
    line: str, expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setenv("COMP_POINT", str(len(line)))
    assert run.main(["-sc", "query=bash"]) == run.OK
    assert expected in capsys.readouterr().out.split()[0]


def test_broken_pipe_is_quiet(engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def row(self: view.PlainView, row: Shown) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with open(os.devnull, "w") as out:
        monkeypatch.setattr(view.PlainView, "row", row)
        monkeypatch.setattr(sys, "stdout", out)
        assert run.main(["prompts=[a]", "out=o.jsonl"]) == run.FAILED
        assert "box is ready" in (said := capsys.readouterr().err) and said.endswith("to go on, run the same command\n")
        assert run.main(["-m", "prompts=[a]", "seed=1,2"]) == run.FAILED
        assert "Traceback" not in (said := capsys.readouterr().err) and "point 2" not in said


# -- the real engine ---------------------------------------------------------------------------------------------------


def test_the_model_in_the_box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The front door with nothing replaced: a sweep, sensible text, and the same bytes whatever the batch was."""
    monkeypatch.chdir(tmp_path)
    words = ["-m", "sampling.temperature=0,0.8", "sampling.max_new_tokens=12", "compile=none", "return_logprob=true"]
    assert run.main([*words, "model=llama", "view=quiet", "out='${sampling.temperature}.jsonl'"]) == run.OK
    rows = records("0.0.jsonl")
    assert rows[2]["prompt"] == "The capital of France is" and rows[2]["text"].startswith(" Paris")
    assert all(len(r["output_token_logprobs"]) == len(r["output_ids"]) for r in rows)
    alone = [
        "scheduler=one_by_one",
        "cache=no_prefix",
        "cache.page_size=4",
        "out='${sampling.temperature}-alone.jsonl'",
    ]
    assert run.main([*words, "view=quiet", *alone]) == run.OK
    for name in ("0.0", "0.8"):
        assert Path(f"{name}-alone.jsonl").read_bytes() == Path(f"{name}.jsonl").read_bytes()
    assert Path("0.0.jsonl").read_bytes() != Path("0.8.jsonl").read_bytes()
    assert run.main(["verify", "0.8.jsonl", "verify.layouts=[permuted,alone]"]) == run.OK
    verdict = json.loads(Path("0.8.jsonl.run/verify.json").read_text())
    assert verdict["identical"] and verdict["layouts"][0]["logprobs"] > 100
    assert run.main(["rerun", "0.8.jsonl.run", "out=again"]) == run.OK
    engine = importlib.import_module("fengine.api.engine").Engine  # torch: not for the tests above
    with engine(model_path="box", random_seed=0) as llm:
        row = llm.generate(["a", "b", rows[2]["prompt"]], {"temperature": 0.8, "max_new_tokens": 12})[2]
    assert row["output_ids"] == records("0.8.jsonl")[2]["output_ids"], "row i of a run is request i of an Engine"


# -- what is seen ------------------------------------------------------------------------------------------------------


def terminal(width: int) -> Console:
    return Console(width=width, force_terminal=True, color_system=None, record=True, file=io.StringIO())


def rendered(block: Any, width: int) -> str:
    console = terminal(width)
    console.print(block)
    return console.export_text()


@pytest.mark.parametrize("width", [40, 80, 120])
def test_live_lines_fit_and_keep_their_height(width: int) -> None:
    console = terminal(width)
    heights = set()
    for done in (0, 5, 12):
        growing = tuple(Shown(i, "a long prompt " * 9, "words and words " * done) for i in range(1, done % 7 + 1))
        moment = Progress(
            done, 12, done // 5, 7, 123, 45678.9, 1234.5, done * 99, 1200, 61.0, growing, 9.0, "exact_match 0.5"
        )
        lines = console.render_lines(view.live_block(moment, width), pad=False)
        heights.add(len(lines))
        assert all(sum(s.cell_length for s in line) <= width for line in lines)
    assert len(heights) == 1


def test_row_block_shows_prompt_once_and_the_whole_text() -> None:
    console = terminal(60)
    console.print(
        view.row_block(Shown(3, "What\nis " + "this " * 30, "It is\n\na \x1b[31mtrick\x07.", "9 → 4 tokens, stop"))
    )
    text = console.export_text()
    assert "\x1b" not in text and "\\x1b[31mtrick\\x07." in text
    assert text.splitlines()[0].startswith("   3 What is this") and text.splitlines()[0].endswith("9 → 4 tokens, stop")
    assert [line.rstrip() for line in text.splitlines()[1:4]] == ["     It is", "", "     a \\x1b[31mtrick\\x07."]


def test_live_run_in_a_terminal(engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    console = terminal(80)
    monkeypatch.setattr(view, "choose", lambda _: view.LiveView(console))
    assert run.main(["prompts=[one,too long,three]", "out=o.jsonl"]) == run.FAILED
    text = console.export_text()
    assert text.index("one") < text.index("too long") < text.index("three")
    assert "1 failed" in text and "first token" in text and "o.jsonl" in text
    assert [c.get("stream", False) for c in engines[0].calls] == [True] * 3


def test_the_rest_of_a_run_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the pace of this process's rows: 10 rows in 20 s, 20 of 100 before them, so that 70 take 140 s."""
    now = [100.0]
    monkeypatch.setattr(meter.time, "perf_counter", lambda: now[0])
    names = ("running", "waiting", "pages_used", "pages_total", "computed_tokens", "output_tokens")
    one = meter.Meter(lambda: dict.fromkeys(names, 0))
    assert one.progress(20, 100, ()).remaining is None
    now[0] = 120.0
    for i in range(10):
        one.count([], i < 2, {} if i < 2 else {"extracted": "7", "exact_match": i > 3})
    moment = one.progress(20, 100, ())
    assert moment.remaining == 140.0 and moment.time == "0:20, 2:20 left" and moment.score == "exact_match 0.750"
    assert "exact_match 0.750" in rendered(view.live_block(moment, 80), 80)
    assert one.progress(20, None, ()).remaining is None


def test_small_words() -> None:
    assert [clock(s) for s in (7.9, 754, 3723)] == ["0:07", "12:34", "1:02:03"]
    assert (tail("abcdef", 4), tail("abc", 4)) == ("…def", "abc")
    assert clean("a\tb\nc\x1b\x7f\x9b") == "a\tb\nc\\x1b\\x7f\\x9b"


def test_closed_streams_are_the_null_device(engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert run.main(["one word more", "view=plain"]) == run.OK
