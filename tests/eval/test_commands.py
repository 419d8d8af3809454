"""The frame of the verbs: words, help, exit codes; starting one needs no torch."""

import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hydra")

from fengine import run
from fengine.errors import ConfigError, EngineDeadError, StorageError
from fengine.eval.cli import command, lines
from fengine.eval.runs.folder import write_file

ROOT = Path(run.__file__).resolve().parent.parent
OPTIONS = {
    "v.fraction": command.number(0, 1, above=True),
    "v.seed": command.whole(0, 9),
    "v.of": command.names(["a", "b"]),
}


def test_words_are_sorted_by_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t=0.7").mkdir()
    words = command.parse(["x", "v.fraction=0.5", "--json", "t=0.7", "v.seed=3", "v.of=[b, a]"], OPTIONS, ["--json"])
    assert words.places == ("x", "t=0.7") and words.flags == {"--json"} and words.overrides == ()
    assert words.options == {"v.fraction": 0.5, "v.seed": 3, "v.of": ["b", "a"]}
    assert command.parse(["x", "seed=3"], OPTIONS, overrides=True).overrides == ("seed=3",)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("v.fracton=0.5", "did you mean v.fraction"),
        ("--jsn", "did you mean --json"),
        ("fraction=0.5", "did you mean v.fraction=0.5?"),
        ("--fraction", "did you mean v.fraction?"),
        *(
            (f"v.fraction={bad}", "must be a number above 0 and at most 1")
            for bad in ("0", "1.1", "nan", "-1", "x", "")
        ),
        *((f"v.seed={bad}", "must be") for bad in ("-1", "10", "1.5", "", "1e3")),
        ("v.of=c", "'c' is none of a, b"),
        ("v.of=[]", "choose of a, b"),
        ("v.of=a,a", "twice"),
    ],
)
def test_wrong_words_are_named(word: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        command.parse([word], OPTIONS, ["--json"])


def test_twice() -> None:
    with pytest.raises(ConfigError, match="v.seed is given twice"):
        command.parse(["v.seed=1", "v.seed=2"], OPTIONS)


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (ConfigError("no"), command.USAGE),
        (StorageError("no"), command.USAGE),
        (EngineDeadError("no"), command.DIFFERS),
        (KeyboardInterrupt(), command.INTERRUPTED),
    ],
)
def test_errors_become_exit_codes(raised: BaseException, code: int, capsys: Any) -> None:
    def work(argv: Any) -> int:
        raise raised

    assert command.run("usage", work, []) == code
    assert "fengine: " in capsys.readouterr().err
    assert command.run("how to use it", work, ["x", "--help"]) == command.OK
    assert capsys.readouterr().out == "how to use it\n"


def test_the_first_help_tells_of_every_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--help"]) == 0
    said = capfd.readouterr().out.split("Commands")[1].split("Groups")[0].split()
    assert set(run.COMMANDS) <= set(said)


class Terminal(io.StringIO):
    """A stream that says it is one; `lines.width_of` is told how wide."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("width", [40, 80, 120])
def test_lines_end_between_words_where_a_terminal_does(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "width_of", lambda stream: width if stream.isatty() else None)
    long = f"packages:     {', '.join(f'package-{i} 2.{i}.0' for i in range(12))}"
    word = "x" * 200
    lines.say(long, word, stream=(screen := Terminal()))
    lines.say(long, word, stream=(piped := io.StringIO()))
    assert piped.getvalue() == f"{long}\n{word}\n", "as it is where nobody counts columns"
    shown = screen.getvalue().splitlines()
    assert shown[-1] == word and all(len(line) <= width for line in shown[:-1])
    assert all(line.startswith(" " * 14) for line in shown[1:-1])
    assert "".join(line.strip() for line in shown[:-1]).replace(" ", "") == long.replace(" ", "")


@pytest.mark.parametrize("name", ["", *(name for name in run.COMMANDS if name != "lm-eval")])  # which has its own
def test_help_fits_a_terminal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "width_of", lambda stream: 80)
    monkeypatch.setattr(sys, "stdout", screen := io.StringIO())
    assert run.main([*([name] if name else []), "--help"]) == 0
    shown = screen.getvalue().splitlines()
    assert [line for line in shown if len(line) > 80] == []
    assert name != "eval" or "  fengine eval task=jsonl task.data=mine.jsonl model=qwen3-0.6b" in shown


@pytest.mark.parametrize("words, own", [([], "sampling"), (["eval"], "task"), (["serve"], "cache")])
def test_help_lists_the_groups_that_a_command_takes(
    words: list[str], own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main([*words, "--help"]) == run.OK
    listed = dict(re.findall(r"(?m)^(\w+): ([\w.-]+)", capsys.readouterr().out.partition("\nConfiguration (")[0]))
    assert {own, "model", "parallel"} <= listed.keys()
    chosen = [f"{group}={option}" for group, option in listed.items()]
    assert run.main([*words, *chosen, "--cfg", "job"]) == run.OK, capsys.readouterr().err


def test_help_has_a_word_on_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["eval", "--help", "task=capitals"]) == run.OK
    lines = {line.split(":")[0].strip(): line for line in capsys.readouterr().out.splitlines() if "  # " in line}
    assert (
        lines["match"].endswith("# none | exact | prefix | contains | number | f1 | regex | json")
        and "# auto | live" in lines["view"]
    )
    assert lines["temperature"].endswith("# Divides the logits; 0 is greedy.")
    assert lines["samples"].endswith("# answers for each row; scores are their means")
    assert not any("…" in line for line in lines.values()) and len(lines) > 50


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("fengine ev", {"eval"}),
        ("fengine re", {name for name in run.COMMANDS if name.startswith("re")}),
        ("fengine eval task=cap", {"task=capitals"}),
        ("fengine eval sampling.temp", {"sampling.temperature="}),
        ("fengine serve serve.por", {"serve.port="}),
        ("fengine sampling=gre", {"sampling=greedy"}),
        ("fengine diff runs/", set()),
    ],
)
def test_the_shell_completes(
    line: str, wanted: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    assert run.main(["-sc", "query=bash"]) == run.OK
    assert set(capsys.readouterr().out.split()) == wanted


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="Not a directory"):
        write_file(tmp_path / "file" / "x.html", b"x")
    (tmp_path / "folder").mkdir()
    with pytest.raises(StorageError, match="Is a directory"):
        write_file(tmp_path / "folder", {})
    assert {p.name for p in tmp_path.iterdir()} == {"file", "folder"}


LONG = "n" * 5000


@pytest.mark.parametrize(
    "words",
    [
        *([verb, LONG] for verb in ("verify", "rerun", "report")),
        *([verb, LONG, LONG] for verb in ("diff", "merge", "report")),
        *([verb, "pipe"] for verb in ("verify", "rerun", "report")),
        ["diff", "pipe", "pipe"],
        ["diff", "of a pipe", "of a pipe"],
        ["report", "file", f"out={LONG}"],
        ["eval", f"task={LONG}"],
        ["eval", "task=capitals", f"out={LONG}"],
        ["eval", "task=capitals", "out=of a pipe"],
        ["eval", "task=capitals", "out=file"],
        ["eval", "task=jsonl", f"task.data={LONG}.jsonl"],
        ["eval", "task=jsonl", "task.data=pipe", "task.format=jsonl"],
        ["eval", "task=capitals", "task.samples=1000000000"],
        ["eval", "task=capitals", f"seed={'9' * 5000}"],
        ["-m", "seed=range(1000000000)"],
        ["~nosuch"],
        ["~model"],
        [f"{LONG}=1"],
        [LONG],
        ["--config-dir", LONG],
        ["--config-name", LONG],
        ["--config-dir", "conf", "--config-name", "bomb"],
        ["--config-dir", "conf", "--config-name", "broken"],
        ["--config-dir", "conf", "--config-name", "binary"],
        ["--config-dir", "conf", "--config-name", "pipe"],
        ["prompts=[a]", "out=folder"],
        ["prompts=[a]", f"out={LONG}"],
        ["prompts=[a]", f"model.path={LONG}"],
        ["prompts=[a]", f"hydra.run.dir={LONG}"],
        [f"prompts={LONG}.txt"],
        ["diff", "a", "b", f"show={'9' * 5000}"],
        ["verify", "a", f"verify.fraction={'9' * 5000}"],
    ],
    ids=lambda words: " ".join(word[:40] for word in words),
)
def test_what_no_command_can_take_is_told_in_a_few_lines(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names too long for the system, pipes where files should be, files that would not end: no trace, no waiting."""
    monkeypatch.chdir(tmp_path)
    for folder in ("conf", "folder", "of a pipe"):
        Path(folder).mkdir()
    for pipe in ("pipe", "conf/pipe.yaml", "of a pipe/manifest.json"):
        os.mkfifo(pipe)
    Path("file").touch()
    bomb = ["a0: &a0 [x, x]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 40))]
    Path("conf/bomb.yaml").write_text("\n".join(bomb))
    Path("conf/broken.yaml").write_text("a: [")
    Path("conf/binary.yaml").write_bytes(b"\xff\xfe")
    assert run.main(words) == run.USAGE
    said = capsys.readouterr().err
    assert said.startswith("fengine") and "Traceback" not in said and "GlobalHydra" not in said
    assert len(said) < 1500 and len(said.splitlines()) <= 6, said


def test_memory_that_ends_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> int:
        raise MemoryError

    assert command.ended(work) == run.USAGE and "the host's memory ended" in capsys.readouterr().err


def test_memory_that_ends_while_words_are_read_is_told(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("hydra._internal.hydra.Hydra.compose_config", full)
    assert run.main(["prompts=[a]"]) == run.USAGE and "the host's memory ended" in capsys.readouterr().err


def test_help_of_every_command_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from fengine.run import COMMANDS, main\n"
        "for words in (['--help'], *([name, '--help'] for name in COMMANDS)):\n"
        "    assert main(words) == 0, words\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("number", "said"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_a_signal_while_a_command_is_imported_ends_it(
    number: signal.Signals, said: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(run, "import_module", lambda name: signal.raise_signal(number))
    before = signal.getsignal(number)
    assert [run.main(words) for words in (["eval"], ["verify", "x"], ["prompts=[]"])] == [128 + number] * 3
    assert capsys.readouterr().err == f"fengine: {said}\n" * 3 and signal.getsignal(number) == before


@pytest.mark.parametrize("words", ["--cfg job", "env"])
def test_output_that_cannot_be_written_is_told_once(words: str) -> None:
    command = f"exec {sys.executable} -m fengine {words} > /dev/full"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (run.FAILED, "fengine: StorageError: no space left on device\n")


def test_a_current_directory_that_is_gone_is_told(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert run.main(["--cfg", "job"]) == run.USAGE
    assert capsys.readouterr().err.endswith("the current directory does not exist any more; cd into one that does\n")


def test_a_locale_of_few_characters(tmp_path: Path) -> None:
    """Neither what is read nor what is shown depends on it."""
    few = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    both = (["models", "llama"], ["two words", "sampling.max_new_tokens=2", "out=x.jsonl"])
    code = f"import sys; from fengine.run import main; sys.exit(any([main(words) for words in {both}]))"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | few, cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert b"\\u2013" in done.stdout and b"prompt: two words" in done.stdout


def test_no_device_pipe_or_record_is_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "manifest.json").write_text("{}")
    for name, said in (("pipe", "no regular file"), ("outputs.jsonl", "a run's record"), ("manifest.json", "record")):
        with pytest.raises(StorageError, match=said):
            write_file(tmp_path / name, "x")
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "manifest.json").read_text() == "{}"
    write_file(tmp_path / "report.html", "x")
