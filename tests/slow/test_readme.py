"""The README's code runs as printed, and its commands are those that CI runs."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.S)


def test_front_door_commands_are_there_word_for_word() -> None:
    shell = "".join(blocks("sh"))
    assert "pip install -e . && python -m fengine.run model=llama sampling.temperature=0.8\n" in shell
    command = "pip install -e '.[dev]' && pytest\n"
    assert command in shell and command in (ROOT / ".ci" / "run").read_text()


def test_python_examples_run(capsys) -> None:  # noqa: ANN001
    printed = {}
    for source in blocks("python"):
        exec(compile(source, "README.md", "exec"), {})
        printed[source] = capsys.readouterr().out
    (tour,) = [out for source, out in printed.items() if "open_session" in source]
    for shown in ("Paris", "1  5", "UpdateResult(success=True", "upside down", "[256, 256]"):
        assert shown in tour
    assert any("Once upon a time" in out for out in printed.values())
