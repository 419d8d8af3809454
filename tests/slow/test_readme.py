"""The READMEs' code runs as printed, and the front door's commands are those that CI runs."""

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "fengine").glob("*/README.md")), ROOT / "scripts" / "README.md"]
SHOWN = {  # what an example prints, by page
    "README.md": ["Paris"],
    "fengine/api/README.md": ["Paris", "1  5", "UpdateResult(success=True", "upside down", "[256, 256]"],
    "fengine/worker/README.md": ["Once upon a time"],
}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.S)


def test_front_door_commands_are_there_word_for_word() -> None:
    shell = "".join(blocks(PAGES[0], "sh"))
    assert "pip install -e . && python -m fengine.run model=llama sampling.temperature=0.8\n" in shell
    command = "pip install -e '.[dev]' && pytest -n auto\n"
    assert command in shell and command in (ROOT / ".ci" / "run").read_text()


def test_the_front_page_stays_short() -> None:
    assert len(PAGES[0].read_text().splitlines()) <= 180


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_examples_run(page: Path, capsys: Any) -> None:
    printed = ""
    for source in blocks(page, "python"):
        exec(compile(source, str(page), "exec"), {})
        printed += capsys.readouterr().out
    for shown in SHOWN.get(str(page.relative_to(ROOT)), []):
        assert shown in printed


def test_links_of_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page}: {target}"
