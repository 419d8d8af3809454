"""Every command that a README, a comment in conf/, a help text or a script shows is one that there is.

Commands of `fengine` run, one after another in one folder and one process, with fewer rows and tokens than they show;
of scripts the words are read by their own parsers; of pip and pytest the extras, paths and markers are looked up.
"""

import argparse
import ast
import contextlib
import importlib.util
import io
import re
import runpy
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hydra")

from fengine import run
from fengine.api.server_args import prepare_server_args
from fengine.errors import ConfigError
from fengine.eval.cli import compose
from fengine.eval.cli.guard import leaves
from fengine.eval.commands import bench, evaluate, verify
from fengine.eval.commands.serve import SERVE
from fengine.eval.runs.config import EVAL, RUN

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "scripts" / "README.md", *sorted((ROOT / "fengine").rglob("README.md"))]
COMPOSED = {  # of which no more than the configuration is made, and why
    r"^serve\b": "a server runs until a signal ends it; tests/server starts it",
    r"\bmodel(\.path)?=(?!box|llama\b)|--model\b": "the model would be downloaded",
    r"hydra/launcher=": "processes of their own, or Slurm; tests/eval/test_sweep.py starts joblib's",
    r"lora\.paths=": "there is no such adapter; tests/engine has some",
}
PASSED = {  # programs of others, whose words are theirs
    "inspect": "inspect-ai's own command line", "hf": "a login", "git": "a checkout of another commit",
    "lm_eval": "lm-evaluation-harness's own command line", "lm-eval": "the same", "sha256sum": "of coreutils",
}  # fmt: skip
FEWER = {
    "eval": ["task.limit=4"],
    "verify": ["verify.layouts=[permuted,rescored]"],
    "bench": ["bench.requests=2", "bench.rounds=1", "bench.input=4", "bench.output=2"],
}
OPTIONS = {*verify.OPTIONS, *bench.OPTIONS, "rerun.changed"}
ROWS = '{"prompt": "2 + 3 ="}\n{"prompt": "The capital of France is"}\n'
BODY = '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}'
FILES = {
    **dict.fromkeys(("questions.jsonl", "rows.jsonl", "a.jsonl", "mine.jsonl"), ROWS),
    "questions.txt": "2 + 3 =\n",
    "qa.jsonl": '{"question": "2 + 3", "answer": "5"}\n',
    **dict.fromkeys(("in.jsonl", "batch.jsonl"),
                    f'{{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {BODY}}}\n'),
}  # fmt: skip


# -- what is shown -----------------------------------------------------------------------------------------------------


def in_pages() -> Iterator[tuple[str, str]]:
    """(where, command) of the READMEs: lines of shell blocks, and code between words."""
    for page in PAGES:
        text, name = page.read_text(), str(page.relative_to(ROOT))
        for language, block in re.findall(r"```(\w*)\n(.*?)```", text, flags=re.S):
            if language == "sh" or block.startswith("python "):
                yield from ((name, line) for line in block.replace("\\\n", " ").splitlines() if line.strip())
        words = re.sub(r"```.*?```", "", text, flags=re.S)
        spans = re.findall(r"`((?:fengine|python|pytest|pip|\w+\.py)\s[^`]+)`", words)
        yield from ((name, re.sub(r"\s+", " ", span)) for span in spans)


def in_help() -> Iterator[tuple[str, str]]:
    """The examples of every help text; what tells of them stands behind two blanks."""
    for words in ([], *([name] for name in run.COMMANDS)):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert run.main([*words, "--help"]) == run.OK
        for line in out.getvalue().splitlines():
            if re.match(r" +(?:[A-Z_]+=\S+ )?fengine ", line):
                yield f"help of {' '.join(words) or 'fengine'}", re.split(r"\s{2,}|  #", line.strip())[0]


def in_conf() -> Iterator[tuple[str, str]]:
    """Commands and key=value of comments in conf/; a value in quotes beside a key is one of that key."""
    for path in sorted((ROOT / "conf").rglob("*.yaml")):
        name = str(path.relative_to(ROOT))
        verb = "eval " if "task" in path.parts or path.stem == "eval" else "serve " if path.stem == "serve" else ""
        keys = [path.parent.name] if path.parent.name != "conf" and path.parent.parent.name == "conf" else []
        at = list(keys)
        for line in [] if "hydra" in path.parts else path.read_text().splitlines():
            code, _, comment = line.partition("#") if not re.search(r": +['\"][^'\"]*#", line) else (line, "", "")
            if found := re.match(r"( *)(\w+):", code):
                at = [*at[: len(keys) + len(found[1]) // 2], found[2]]
            for span in in_comment(comment, ".".join(at)):
                yield name, span if span.startswith("fengine ") else f"fengine {verb}{span}"


def in_comment(comment: str, key: str) -> Iterator[str]:
    """Commands, and words of one, of a comment on the key."""
    yield from re.findall(r"`(fengine [^`]+|\w+=[^`]+)`", comment)
    rest = re.sub(r"`[^`]*`", "", comment)
    for quoted in re.findall(r"(?<![\w=])'([^']+)'", rest):
        if re.match(r"[\w.]+=", quoted):
            yield shlex.quote(quoted)
        elif quoted[0] in '[{"':
            yield shlex.quote(f"{key}={quoted}")
    yield from re.findall(r"\b\w+\.\w+=(?:'[^']*'|[\w./-]+)", re.sub(r"(?<![\w=])'[^']+'", "", rest))


def in_scripts() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "scripts").glob("*.py")):
        text = ast.get_docstring(ast.parse(path.read_text()), clean=False) or ""
        yield from (
            (f"scripts/{path.name}", found) for found in re.findall(r"^    ((?:python|pip|fengine) .*)", text, re.M)
        )


def commands(where: str, line: str) -> Iterator[list[str]]:
    """The words of each command of a line, without variables of the environment and optional brackets."""
    if where.startswith("scripts/"):
        line = re.sub(r"(?<=\s)\[(.*?)\](?=\s|$)", r"\1", re.split(r"\s{3,}", line)[0])
    for part in re.split(r"\s&&\s", line):
        words = shlex.split(part, comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            words = words[1:]
        if words and words[0].endswith(".py"):
            words = ["python", f"scripts/{words[0]}", *words[1:]]
        yield words


@cache
def shown() -> list[tuple[str, list[str]]]:
    lines = [*in_pages(), *in_help(), *in_conf(), *in_scripts()]
    return [(where, words) for where, line in lines for words in commands(where, line) if words]


# -- what there is -----------------------------------------------------------------------------------------------------


def test_programs() -> None:
    for where, (program, *_) in shown():
        assert program in ("fengine", "python", "pip", "pytest", *PASSED), f"{where}: {program}"


def fengine_words() -> list[tuple[str, list[str]]]:
    """Each command of fengine once, with the page that shows it first."""
    found: dict[tuple[str, ...], str] = {}
    for where, words in shown():
        if words[:3] in (["python", "-m", "fengine.run"], ["python", "-m", "fengine.server"]):
            words = ["fengine", *(["serve"] if words[2].endswith("server") else []), *words[3:]]
        if words[0] == "fengine" and "..." not in words:
            found.setdefault(tuple(words[1:]), where)
    return [(where, list(words)) for words, where in found.items()]


def composed(words: list[str]) -> None:
    """Makes the configuration of a command and no more. Errors: ConfigError."""
    schema = EVAL if words[:1] == ["eval"] else SERVE if words[:1] == ["serve"] else RUN
    given = words[1:] if words[0] in run.COMMANDS else evaluate.with_prompts(words)
    if words[0] == "bench":
        given = [word for word in given if word not in bench.KINDS and word.partition("=")[0] not in bench.OPTIONS]
    given = evaluate.batch_arguments(given) if words[0] == "batch" else given
    try:
        compose.points(compose.parse(given, schema), schema)
    except ConfigError as error:
        if "needs a package that is not installed" not in str(error):
            raise


def problem(words: list[str], capsys: Any, monkeypatch: Any, run_it: bool = True) -> str:
    """What is wrong with a command; nothing is said of a good one."""
    verb = words[0] if words[0] in run.COMMANDS else ""
    if (
        verb == "lm-eval" or words == [verb] and verb not in ("chat", "env", "eval", "models")
    ):  # it is meant by its name
        return ""
    if not verb and words[0].isidentifier():
        return f"no command {words[0]}"
    try:
        if not run_it or any(re.search(pattern, " ".join(words)) for pattern in COMPOSED) and "--help" not in words:
            composed(words)
            return ""
    except ConfigError as error:
        return str(error)
    length = {"": "sampling.max_new_tokens", "eval": "task.max_new_tokens"}.get(verb)
    given = {word.partition("=")[0] for word in words}
    more = [word for word in FEWER.get(verb, []) if word.partition("=")[0] not in given and "--help" not in words]
    if length and length not in given and not {"-h", "--help"} & {*words}:
        more.append(f"{length}=2")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    code = run.main([*words, *more])
    told = capsys.readouterr()
    return "" if code == run.OK else f"exit code {code}: {(told.err or told.out)[-600:]}"


def test_commands_of_fengine_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    wrong = []
    for where, words in fengine_words():
        folder = tmp_path / re.sub(r"\W", "_", where)
        if not folder.exists():
            folder.mkdir()
            monkeypatch.chdir(folder)
            for name, content in FILES.items():
                Path(name).write_text(content)
        places = [word for word in words[1:] if "=" not in word]
        if words[0] in ("diff", "report") and len(places) == 2 and not Path(places[1]).exists():
            shutil.copytree(places[0], places[1])
        if said := problem(words, capsys, monkeypatch, run_it=not where.startswith("conf/") or "-m" in words):
            wrong.append(f"{where}: fengine {shlex.join(words)}\n    {said}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "words", ["eval task=gsm8k", "evall", "temprature=1", "serve model=qwen9", "eval task.promt=x"]
)
def test_what_is_not_there_is_found(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert problem(words.split(), capsys, monkeypatch)


def test_keys_that_pages_name_are_there() -> None:
    keys = {*leaves(RUN.keys), *leaves(EVAL.keys), *leaves(SERVE.keys), *OPTIONS}
    sections = {key.partition(".")[0] for key in keys}
    for page in PAGES:
        words = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
        for span in re.findall(r"`([^`]+)`", words):
            for key in re.findall(r"(?<![\w./-])(\w+(?:\.\w+)+)=", span):
                assert key.partition(".")[0] not in sections or key in keys, f"{page.relative_to(ROOT)}: {key}"


class Read(BaseException):
    """A script's words are read."""


def test_words_of_scripts_are_read_by_their_parsers(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    original, wrong = argparse.ArgumentParser.parse_args, []

    def read(self: Any, *args: Any, **more: Any) -> Any:
        original(self, *args, **more)
        raise Read

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", read)
    for where, words in shown():
        if words[:2] != ["python", "-m"] and words[0] == "python" and words[1] != "scripts/ray_batch.py":
            monkeypatch.setattr(sys, "argv", words[1:])
            try:
                runpy.run_path(str(ROOT / words[1]), run_name="__main__")
                wrong.append(f"{where}: {shlex.join(words)}: its words are not read")
            except Read:
                pass
            except ModuleNotFoundError as error:
                assert error.name in ("playwright", "safetensors", "transformers"), where  # of an extra
            except (SystemExit, FileNotFoundError) as error:
                wrong.append(f"{where}: {shlex.join(words)}: {capsys.readouterr().err[-300:] or error}")
    assert not wrong, "\n".join(wrong)


def test_modules_extras_tests_and_markers_are_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras, markers = project["project"]["optional-dependencies"], project["tool"]["pytest"]["ini_options"]["markers"]
    for where, words in shown():
        if words[:2] == ["python", "-m"]:
            assert importlib.util.find_spec(words[2]), where
        if words[:3] == ["python", "-m", "fengine.launch_server"]:
            prepare_server_args(words[3:])
        if words[0] == "pip":
            for names in re.findall(r"(?:fengine|\.)\[([\w,-]+)\]", " ".join(words)):
                assert {*names.split(",")} <= {*extras}, f"{where}: {names}"
        if words[0] == "pytest":
            assert all((ROOT / word).exists() for word in words if "/" in word), where
            named = [words[i + 1] for i, word in enumerate(words) if word == "-m"]
            assert all(any(marker.startswith(f"{one}:") for marker in markers) for one in named), where
