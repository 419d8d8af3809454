"""`fengine verify`: what was recorded is computed again under other schedules; every difference is found and named."""

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hydra")

from eval_fakes import ROWS, FakeEngine, Run, fake_runs, next_float32, records, refused, rewrite, write_rows

from fengine import run
from fengine.config import Algorithm, EngineConfig, SpeculationConfig, check
from fengine.errors import ConfigError, EngineDeadError, OutOfMemoryError
from fengine.eval.cli import engines as engines_file
from fengine.eval.cli.recompose import restore
from fengine.eval.cli.schema import flat
from fengine.eval.commands import verify
from fengine.eval.commands.layouts import LAYOUTS, Sizes, layout
from fengine.eval.commands.replay import replay
from fengine.eval.commands.verify import drawn
from fengine.eval.runs import manifest
from fengine.eval.runs.config import EVAL, EvalConfig
from fengine.ops import linear

FAKE = "verify.layouts=[permuted,alone,batch,chunks,pages,uncached]"  # a fake engine has neither cache nor pool


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(engines_file, "open_engine", FakeEngine)
    return fake_runs(tmp_path, monkeypatch)


def verdict(folder: str = "a") -> dict[str, Any]:
    return json.loads((Path(folder) / "verify.json").read_text())


# -- a fake engine -----------------------------------------------------------------------------------------------------


def test_identical(make: Run, capsys: Any) -> None:
    make("a")
    before = {p.name: p.read_bytes() for p in Path("a").iterdir()}
    assert run.main(["verify", "a", FAKE]) == 0
    said = capsys.readouterr().out
    line = next(line for line in said.splitlines() if "permuted " in line)
    assert line.split()[:7] == ["✓", "permuted", "identical", "12", "24", "24", "0"]
    assert all(len(line) <= 80 for line in said.splitlines() if not line.startswith("verdict"))
    assert "verdict: identical under permuted, alone, batch, chunks, pages, uncached; in a/verify.json" in said
    told = verdict()
    assert told["identical"] and told["sample"] == {"fraction": 1.0, "seed": 0, "rows": ROWS, "of": ROWS}
    assert [one["layout"] for one in told["layouts"]] == ["permuted", "alone", "batch", "chunks", "pages", "uncached"]
    assert all(one["rows"] == ROWS and one["first"] is None for one in told["layouts"])
    assert told["outputs_sha256"] == json.loads(before["manifest.json"])["result"]["outputs_sha256"]
    assert {p.name: p.read_bytes() for p in Path("a").iterdir() if p.name != "verify.json"} == before


def test_examples_are_found_from_another_directory(make: Run, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    write_rows(Path("shown.jsonl"), 2)
    make("a", "task.examples=shown.jsonl", "task.shots=1", "task.prompt='{prompt}'")
    Path("away").mkdir()
    monkeypatch.chdir("away")
    assert run.main(["verify", "../a", FAKE]) == 0
    shutil.copy("../shown.jsonl", "moved.jsonl")
    Path("../shown.jsonl").write_text('{"id": "r", "prompt": "other", "answer": "other"}\n')
    for command in ("verify", "rerun"):  # what is shown is part of what was asked
        assert run.main([command, "../a"]) == 2 and ': "' in (said := capsys.readouterr().err), command
    assert "examples_sha256" in said
    assert run.main(["verify", "../a", FAKE, "task.examples=moved.jsonl"]) == 0
    Path("../shown.jsonl").unlink()
    assert run.main(["verify", "../a"]) == 2 and "task.examples=" in capsys.readouterr().err


@pytest.mark.parametrize("penalty", [1.3, 1.0])
def test_what_the_model_recommends_counts_as_asked_for(
    penalty: float, make: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(config: EngineConfig) -> FakeEngine:
        engine = FakeEngine(config)
        told, engine.max_input = json.dumps({"repetition_penalty": penalty}), 64
        engine.config = dataclasses.replace(config, model=dataclasses.replace(config.model, sampling_defaults=told))
        return engine

    monkeypatch.setattr(engines_file, "open_engine", opened)
    make("a", "model.sampling_defaults=model", "sampling.temperature=1", "scheduler.max_running_requests=4")
    assert run.main(["verify", "a", "verify.layouts=rescored"]) == 1  # what the fake reads is not what it drew
    (one,) = verdict()["layouts"]
    said, left = ("differs", 0) if penalty == 1 else ("nothing to compare", ROWS)
    assert (one["verdict"], one["left_out"], one["failed"]) == (said, left, 0)


def test_a_flipped_bit_is_found_and_named(make: Run, capsys: Any) -> None:
    make("a")
    rewrite(Path("a"), lambda rows: rows[5]["answers"][0]["logprobs"].__setitem__(1, next_float32(-0.25)))
    assert run.main(["verify", "a", FAKE]) == 1
    said = capsys.readouterr().out
    assert "row 'r5', answer 0, token 1: first difference in bits of a logprob" in said
    assert "recorded  token 6, logprob -0.2500000298023224 (0xbe800001)" in said
    assert "computed  token 6, logprob -0.25 (0xbe800000)" in said and "verdict: differs under permuted, alone" in said
    for one in verdict()["layouts"]:
        assert (one["verdict"], one["differing_rows"], one["differing_tokens"]) == ("differs", 1, 0)
        assert (one["differing_logprobs"], one["differing_bits"]) == (1, 1)
        first = one["first"]
        assert first["id"] == "r5" and first["token"] is None and first["logprob"]["token"] == 1
        assert first["logprob"]["a"]["bits"] == "0xbe800001" and first["logprob"]["b"]["bits"] == "0xbe800000"


def test_another_token_is_found_and_named(make: Run, capsys: Any) -> None:
    make("a")
    for number in (9, 4):
        rewrite(Path("a"), lambda rows, n=number: rows[n]["answers"][0]["output_ids"].__setitem__(0, 7))
    assert run.main(["verify", "a", "verify.layouts=permuted"]) == 1
    said = capsys.readouterr().out
    assert "row 'r4', answer 0, token 0: first difference in tokens" in said, "the first in the run, whatever the order"
    one = verdict()["layouts"][0]
    assert (one["differing_rows"], one["differing_tokens"]) == (2, 2)
    assert (one["first"]["token"]["a"]["token"], one["first"]["token"]["b"]["token"]) == (7, 5)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (["answers", 0, "text"], "other", "text"),
        (["answers", 0, "finish_reason"], {"type": "length"}, "finish_reason"),
        (["answers", 0, "prompt"], "other", "prompt"),
        (["answers", 0, "sampling_seed"], 1, "sampling_seed"),
        (["answers", 0, "logprobs"], [-2.1], "number of logprobs"),
        (["scores", "exact_match"], True, "scores"),
    ],
)
def test_other_changes_are_named(make: Run, place: list[Any], value: Any, said: str, capsys: Any) -> None:
    def change(rows: list[Any]) -> None:
        inner = rows[2]
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = value

    make("a")
    rewrite(Path("a"), change)
    assert run.main(["verify", "a", "verify.layouts=permuted"]) == 1
    assert f"row 'r2': {said}" in capsys.readouterr().out


def test_a_changed_file_is_no_identical_run(make: Run, capsys: Any) -> None:
    """Also where the change is not among the rows that are drawn, and where the line is no record any more."""
    make("a")
    path = Path("a/outputs.jsonl")
    good = path.read_bytes()
    path.write_bytes(good.replace(b'"data": {', b'"data":  {', 1))
    assert run.main(["verify", "a", "verify.layouts=permuted"]) == 1
    said = capsys.readouterr().out
    assert "another SHA-256" in said and "identical in what was compared, but the run's files are damaged" in said
    path.write_bytes(good.replace(b'"scores"', b'"sc0res"', 1))
    assert run.main(["verify", "a", "verify.layouts=permuted"]) == 1
    said = capsys.readouterr().out
    assert "damaged in line 1 (byte 0)" in said and "1 rows are read from journal.log instead" in said
    path.write_bytes(good.replace(b"0.25", b"0.26", 1))
    assert run.main(["verify", "a", "verify.layouts=permuted"]) == 1 and "row 'r0'" in capsys.readouterr().out


def test_a_part_of_the_rows(make: Run, capsys: Any) -> None:
    make("a")
    asked = []
    for seed in (0, 0, 1):
        assert run.main(["verify", "a", "verify.layouts=alone", "verify.fraction=0.25", f"verify.seed={seed}"]) == 0
        assert verdict()["sample"] == {"fraction": 0.25, "seed": seed, "rows": 3, "of": ROWS}
        asked.append(drawn(ROWS, 0.25, seed))
    assert asked[0] == asked[1] != asked[2] and "3 rows of 12" in capsys.readouterr().out
    assert drawn(7, 1.0, 0) == list(range(7)) and len(drawn(1000, 1e-9, 0)) == 1 and drawn(0, 0.5, 0) == []
    assert len(set(drawn(1000, 0.1, 3))) == 100 and len(drawn(7, 0.5, 0)) == 4


def test_the_order_is_that_of_the_seed(make: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    make("a")
    orders = []
    monkeypatch.setattr(verify, "replay", lambda case, order, *rest: orders.append(order) or replay(case, order, *rest))
    for seed in (0, 0, 1):
        assert run.main(["verify", "a", "verify.layouts=permuted", f"verify.seed={seed}"]) == 0
    assert orders[0] == orders[1] != orders[2] and sorted(orders[0]) == sorted(orders[2])


def test_failed_rows_are_left_out(make: Run, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "rows.jsonl", 3, {"id": "s", "prompt": "sick", "answer": "x"})
    make("a", code=run.FAILED)
    assert run.main(["verify", "a", "verify.layouts=permuted"]) == 0 and verdict()["layouts"][0]["rows"] == 3
    write_rows(tmp_path / "rows.jsonl", 1, {"id": "s", "prompt": "later", "answer": "x"})
    make("b")
    generate = FakeEngine.async_generate

    async def sick(self: FakeEngine, **call: Any) -> Any:
        return await generate(self, **(call | {"prompt": call["prompt"].replace("later", "sick")}))

    with monkeypatch.context() as patch:
        patch.setattr(FakeEngine, "async_generate", sick)
        assert run.main(["verify", "b", "verify.layouts=permuted"]) == 1
    said = capsys.readouterr().out
    assert "1 row could not be computed (row 's': ContextLengthError: too long)" in said and "not verified" in said
    write_rows(tmp_path / "rows.jsonl", 0, {"id": "s", "prompt": "sick", "answer": "x"})
    make("c", code=run.FAILED)
    assert (
        run.main(["verify", "c", "verify.layouts=permuted"]) == 1 and "nothing was compared" in capsys.readouterr().out
    )


def test_an_engine_that_dies_or_does_not_start(make: Run, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make("a")

    async def dying(self: FakeEngine, **call: Any) -> Any:
        raise EngineDeadError("boom")

    with monkeypatch.context() as patch:
        patch.setattr(FakeEngine, "async_generate", dying)
        assert run.main(["verify", "a"]) == 1 and "EngineDeadError: boom" in capsys.readouterr().err
    assert not Path("a/verify.json").exists()

    def small(config: EngineConfig) -> FakeEngine:
        if config.cache.page_size == 8:
            raise OutOfMemoryError("no room")
        return FakeEngine(config)

    monkeypatch.setattr(engines_file, "open_engine", small)
    assert run.main(["verify", "a", FAKE]) == 1
    assert "12 rows could not be computed (OutOfMemoryError: no room)" in capsys.readouterr().out
    assert [one["verdict"] for one in verdict()["layouts"]] == ["identical"] * 4 + ["not computed", "identical"]


def test_an_unfinished_run(make: Run, capsys: Any) -> None:
    make("a")
    Path("a/outputs.jsonl").unlink()
    record = json.loads(Path("a/manifest.json").read_text())
    Path("a/manifest.json").write_text(json.dumps(record | {"result": None}))
    lines = Path("a/journal.log").read_bytes().splitlines(keepends=True)
    Path("a/journal.log").write_bytes(b"".join(lines[:5]))
    assert run.main(["verify", "a", "verify.layouts=permuted"]) == 0
    said = capsys.readouterr().out
    assert "a: 4 rows" in said and "note: the run has not come to its end" in said and "4 of 12 rows are there" in said


def test_what_the_run_depended_on_is_compared_first(
    make: Run, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"one")
    make("a", f"model.path={model}")
    shutil.copytree(model, tmp_path / "moved")
    (model / "model.safetensors").write_bytes(b"two")
    opened: list[Any] = []
    monkeypatch.setattr(engines_file, "open_engine", lambda config: opened.append(config) or FakeEngine(config))
    assert run.main(["verify", "a", "verify.layouts=permuted"]) == 2 and not opened
    said = capsys.readouterr().err
    assert f"model.path={model} is not that of" in said and "model.safetensors: " in said
    assert run.main(["verify", "a", "verify.layouts=permuted", f"model.path={tmp_path / 'moved'}"]) == 0
    assert opened[0].model.path == str(tmp_path / "moved")
    capsys.readouterr()
    monkeypatch.setattr(manifest, "code_digest", lambda: "two")
    monkeypatch.setattr(manifest, "cpu_name", lambda: "another")
    monkeypatch.setattr(manifest, "versions", lambda: {"torch": "99"})
    assert run.main(["verify", "a", "verify.layouts=permuted", f"model.path={tmp_path / 'moved'}"]) == 0
    said = capsys.readouterr().out
    assert 'code_sha256: "one" → "two": not the run\'s' in said and '→ "99"' in said
    assert 'hardware.cpu: "' in said and '→ "another"' in said and len(verdict()["notes"]) >= 3


def test_a_sweep_is_verified_point_by_point(make: Run, capsys: Any) -> None:
    make("s", "-m", "seed=1,2")
    rewrite(Path("s/1"), lambda rows: rows[0]["answers"][0]["output_ids"].append(3))
    assert run.main(["verify", "s", "verify.layouts=permuted"]) == 1
    assert verdict("s/0")["identical"] and not verdict("s/1")["identical"]
    said = capsys.readouterr().out
    assert "row 'r0', answer 0, token 2: first difference in tokens" in said and "the answer has ended" in said
    assert run.main(["verify", "s", "out=x.json"]) == 2
    Path("s/0/manifest.json").write_text('{"fengine_manifest": 1}')
    Path("s/1/verify.json").unlink()
    assert run.main(["verify", "s", "verify.layouts=permuted"]) == 2
    assert not verdict("s/1")["identical"] and "2 of 2 runs" in (said := capsys.readouterr().err) and "0 (2)" in said


def test_mistakes(make: Run, capsys: Any) -> None:
    make("a")
    refused(capsys, "verify", [
        ([], "takes one run folder"),
        (["nope"], "does not exist"),
        (["a", "b=1"], "unknown word b=1"),
        (["a", "seed=3"], "unknown word seed=3"),
        (["a", "verify.fraction=0"], "above 0"),
        (["a", "verify.fracton=0.1"], "unknown word verify.fracton"),
        (["a", "fraction=0.1"], "did you mean verify.fraction=0.1?"),
        (["a", "verify.layouts=permutted"], "'permutted' is none of permuted"),
        (["a", "out=nowhere/v.json"], "cannot be written"),
        (["a", "out=a"], "is a folder"),
        (["a", "out=a/journal.log", "model.path=nowhere"], "is a file of a run's record"),
        (["a", "model.path={_target_: os.system}"], "_target_ is refused"),
    ])  # fmt: skip
    assert run.main(["verify", "a", "verify.layouts=permuted", "out=v.json"]) == 0
    assert Path("v.json").exists() and not Path("a/verify.json").exists()
    if os.getuid():
        Path("a").chmod(0o555)
        assert run.main(["verify", "a"]) == 2 and "out=FILE" in capsys.readouterr().err
        Path("a").chmod(0o755)


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", [None, "box"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_another_valid_engine(name: str, draft: str | None) -> None:
    base, guesses = EvalConfig().engine, SpeculationConfig()
    if draft is not None:
        guesses = SpeculationConfig(Algorithm.standalone, draft=draft)
    base = dataclasses.replace(base, speculation=guesses)
    for page in (2 if draft else 1, 4, 16, 64):
        for rows, step in ((1, 1), (1, 64), (64, 512), (512, 8192)):
            for requests, prompt, longest in ((1, 1, 2), (5, 3, 9), (1000, 300, 4000)):
                one = layout(name, base, Sizes(page, rows, step, requests, prompt, longest))
                assert not check(one.config)
                if draft and one.config.speculation.draft and one.config.cache.page_size:
                    assert (one.config.speculation.num_draft_tokens or 6) <= one.config.cache.page_size
                assert (one.config == base) == (name in ("permuted", "rescored"))
                if name == "preempted":
                    assert (one.config.cache.max_total_tokens or 0) >= longest
                if name == "pages":
                    assert one.config.cache.page_size != page
                if name == "batch":
                    assert one.config.scheduler.max_running_requests not in (1, rows)


def test_a_recorded_config_comes_back() -> None:
    config = dataclasses.replace(EvalConfig(), seed=3, top_logprobs=2)
    config = dataclasses.replace(config, task=dataclasses.replace(config.task, name="t", data="${x}", stop=("a", "b")))
    assert restore(flat(config), [], EVAL) == config
    few = {"task.name": "t", "task.data": "x"}
    assert restore(few, [], EVAL).seed == 0  # keys that were not recorded have their defaults
    again = restore(flat(config), ["seed=4", "task.stop=[c]", "numerics=fast", "sampling.top_k=null"], EVAL)
    assert (again.seed, again.task.stop, again.engine.numerics.value, again.task.data) == (4, ("c",), "fast", "${x}")
    again = restore(flat(config), [r"task.extract=(\d+)", "model.path=~/m, n"], EVAL)  # as on every command line
    assert (again.task.extract, again.engine.model.path) == (r"(\d+)", str(Path("~/m, n").expanduser()))
    for word, said in (
        ("sampling=greedy", "change single keys, such as sampling.max_new_tokens"),
        ("sampling.temprature=1", "did you mean sampling.temperature"),
        ("sampling.temperature=x", "sampling.temperature"),
        ("sampling.temperature=-1", "temperature"),
        ("seed=1,2", "single values"),
        ("+seed=1", "single values"),
        ("~seed", "taken away"),
        ("seed={_target_: x}", "_target_ is refused"),
        ("hydra.run.dir=x", "hydra"),
    ):
        with pytest.raises(ConfigError, match=said):
            restore(flat(config), [word], EVAL)
    with pytest.raises(ConfigError, match="keys that this version lacks: new.key"):
        restore(flat(config) | {"new.key": 1}, [], EVAL)
    with pytest.raises(ConfigError, match="recorded config"):
        restore(flat(config) | {"numerics": "none"}, [], EVAL)


# -- the real engine ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of the model in the box: drawn at temperatures 0.8 and 1, greedy, multiple choice, perplexity."""
    top = tmp_path_factory.mktemp("box")
    common = ["view=quiet", "compile=none", "scheduler.max_running_requests=8", "trace=off"]
    for name, words in {
        "warm": ["task=addition", "task.limit=10", "sampling.temperature=0.8"],
        "one": ["task=sorting", "task.limit=3", "sampling.temperature=1", "task.samples=2", "top_logprobs=2"],
        "greedy": ["task=capitals", "task.limit=6"],
        "penalty": ["task=capitals", "task.limit=4", "sampling.repetition_penalty=1.5"],
        "choice": ["task=multiple_choice", "task.limit=4"],
        "stories": ["task=stories", "task.limit=2"],
    }.items():
        assert run.main(["eval", *common, *words, f"out={top / name}"]) == run.OK
    return top


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("warm", ["guessed"]),
        ("one", ["guessed"]),
        ("greedy", ["guessed"]),
        ("penalty", ["rescored", "guessed"]),
        ("choice", ["rescored", "preempted", "guessed"]),
        ("stories", ["rescored", "preempted", "warm", "guessed"]),
    ],
)
def test_the_box_under_every_layout(box: Path, name: str, without: list[str], capsys: Any) -> None:
    assert run.main(["verify", str(box / name)]) == 0
    told = verdict(str(box / name))
    verdicts = {one["layout"]: one["verdict"] for one in told["layouts"]}
    assert list(verdicts) == list(LAYOUTS), capsys.readouterr().out
    assert {layout for layout, found in verdicts.items() if found != "identical"} <= set(without)
    assert all(one["tokens"] > 0 for one in told["layouts"] if one["verdict"] == "identical")


@pytest.fixture
def careless() -> Iterator[None]:
    """Linear layers are summed in two halves of K whenever a step has more than one row."""
    honest = linear.linear

    def halves(x_TK: Any, w: Any, bias_N: Any = None, adapters: Any = None, out_dtype: Any = None, **more: Any) -> Any:
        if x_TK.shape[0] < 2:
            return honest(x_TK, w, bias_N, adapters, out_dtype, **more)
        first = x_TK.clone()
        first[:, x_TK.shape[1] // 2 :] = 0
        y_TN: Any = sum(honest(x, w, None, adapters, None, **more) for x in (first, x_TK - first))
        return (y_TN if bias_N is None else y_TN + bias_N).to(out_dtype or x_TK.dtype)

    linear.linear = halves
    try:
        yield
    finally:
        linear.linear = honest


@pytest.mark.parametrize("name", ["warm", "choice"])
def test_an_engine_whose_bits_depend_on_the_batch_is_caught(box: Path, name: str, careless: None, capsys: Any) -> None:
    assert run.main(["verify", str(box / name), "verify.layouts=[permuted,alone]", f"out={box / 'caught.json'}"]) == 1
    told = json.loads((box / "caught.json").read_text())
    assert told["layouts"][0]["verdict"] == "differs" and told["layouts"][0]["differing_bits"] > 0
    assert "first difference in bits of a logprob" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["warm", "greedy"])
def test_rescoring_finds_a_flipped_bit(box: Path, name: str, tmp_path: Path) -> None:
    shutil.copytree(box / name, tmp_path / "r")
    last = len(records(tmp_path / "r" / "outputs.jsonl")[1]["answers"][0]["logprobs"]) - 1

    def change(rows: list[Any]) -> None:
        values = rows[1]["answers"][0]["logprobs"]
        values[last] = next_float32(values[last])

    rewrite(tmp_path / "r", change)
    assert run.main(["verify", str(tmp_path / "r"), "verify.layouts=rescored"]) == 1
    (one,) = verdict(str(tmp_path / "r"))["layouts"]
    assert one["differing_logprobs"] == 1 and one["first"]["logprob"]["token"] == last


def test_what_a_grammar_leaves_is_not_rescored(tmp_path: Path) -> None:
    out, few = tmp_path / "a", ["task=capitals", "task.limit=2", "view=quiet", "compile=none", "trace=off"]
    assert run.main(["eval", *few, 'sampling.regex="[0-9]+"', f"out={out}"]) == run.OK
    assert run.main(["verify", str(out), "verify.layouts=rescored"]) == 1
    (one,) = verdict(str(out))["layouts"]
    assert (one["verdict"], one["left_out"]) == ("nothing to compare", 2)
