"""The configuration: every file composes, defaults are the dataclasses', and nothing in a config can name code."""

import dataclasses
import importlib.util
import itertools
import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("hydra")

from fengine.config import Dtype, EngineConfig, Numerics, Policy
from fengine.errors import ConfigError
from fengine.eval.cli import compose as composing
from fengine.eval.cli.compose import inspect, is_inspection, parse
from fengine.eval.cli.schema import Point, Schema, conf_dir, leaves, notes_of
from fengine.eval.runs.config import EVAL, RUN, RunConfig, SamplingConfig, View

FILES = sorted(p.relative_to(conf_dir()) for p in conf_dir().rglob("*.yaml"))
OPTIONS = [(str(f.parent), f.stem) for f in FILES if len(f.parts) == 2 and f.parts[0] != "task"]  # that is of eval


def points(command: Namespace, schema: Schema = RUN) -> list[Point]:
    return composing.points(command, schema)


def load_config(words: Sequence[str] = ()) -> RunConfig:
    return points(parse(words))[0].config


def compose(*words: str) -> list[RunConfig]:
    return [point.config for point in points(parse(words))]


def problem(*words: str) -> str:
    """The message of the ConfigError that these words give: one to five lines."""
    with pytest.raises(ConfigError) as caught:
        points(parse(words))
    message = str(caught.value)
    assert 1 <= len(message.splitlines()) <= 5, message
    return message


# -- the files ---------------------------------------------------------------------------------------------------------


def test_defaults_are_the_dataclasses() -> None:
    assert load_config() == RunConfig()


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_composes(group: str, option: str) -> None:
    more = {"eagle3": ["speculation.draft=box"], "standalone": ["speculation.draft=box"], "temperatures": ["-m"]}
    config = load_config([f"{group}={option}", *more.get(option, [])])
    if option in ("default", "llama"):
        assert config == RunConfig()
    else:
        assert config != RunConfig(), f"{group}/{option}.yaml changes nothing"


def test_every_file_is_an_option() -> None:
    others = [str(f) for f in FILES if len(f.parts) != 2]
    assert sorted(others) == [
        "config.yaml",
        "eval.yaml",
        "hydra/help/eval.yaml",
        "hydra/help/fengine.yaml",
        "hydra/help/serve.yaml",
        "serve.yaml",
    ]
    assert {group for group, _ in OPTIONS} == {
        "parallel",
        "multimodal",
        "model",
        "cache",
        "scheduler",
        "compile",
        "speculation",
        "lora",
        "sampling",
        "experiment",
    }


def test_default_files_list_every_key() -> None:
    """A reader of conf/ sees every key that exists."""
    for f in [*dataclasses.fields(RunConfig), *dataclasses.fields(EngineConfig)]:
        if dataclasses.is_dataclass(f.type) and f.name not in ("model", "engine", "resume", "chat"):
            text = (conf_dir() / f.name / "default.yaml").read_text()
            for key in dataclasses.fields(f.type):
                assert f"\n{key.name}:" in f"\n{text}", (f.name, key.name)
    for schema in (RUN, EVAL):
        assert [key for key in leaves(schema.keys) if not notes_of(schema).get(key)] == [], "help tells of every key"


def test_the_model_in_the_box_is_the_default() -> None:
    assert load_config(["model=llama"]).engine.model.path == "box"
    assert load_config(["model=qwen2.5-0.5b"]).engine.model.path == "Qwen/Qwen2.5-0.5B-Instruct"


def test_overrides_have_types() -> None:
    config = load_config(
        ["sampling.temperature=0.8", "model.dtype=bfloat16", "scheduler.policy=lpm", "numerics=fast", "view=plain"]
        + ["sampling.stop=[a,'b c']", "sampling.stop_token_ids=[1,2]", "cache.page_size=4", "seed=7"]
    )
    assert config.sampling == SamplingConfig(temperature=0.8, stop=("a", "b c"), stop_token_ids=(1, 2))
    assert (config.engine.model.dtype, config.engine.scheduler.policy) == (Dtype.bfloat16, Policy.lpm)
    assert (config.engine.numerics, config.view, config.engine.cache.page_size, config.seed) == (
        Numerics.fast,
        View.plain,
        4,
        7,
    )


def test_engine_part_ignores_what_is_not_the_engines() -> None:
    one = load_config(["seed=1", "sampling.temperature=0", "out=a.jsonl"]).engine
    assert one == load_config(["seed=2", "sampling=creative"]).engine
    assert one != load_config(["cache.page_size=4"]).engine
    assert len({one, load_config().engine}) == 1


def test_experiments() -> None:
    pressure = load_config(["experiment=pressure"])
    assert (pressure.engine.cache.max_total_tokens, pressure.sampling.temperature) == (1024, 0.0)
    swept = compose("-m", "experiment=temperatures")
    assert [(c.sampling.temperature, c.seed) for c in swept] == list(itertools.product([0, 0.5, 1.0], [1, 2]))
    assert "is for sweeps: add -m" in problem("experiment=temperatures")
    assert {c.seed for c in compose("-m", "experiment=temperatures", "++seed=5")} == {5}, "what is given counts"


def test_a_users_directory(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("path: /models/mine\ndtype: float32\n")
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "exam.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /model: mine\nseed: 5\n"
    )
    (tmp_path / "night.yaml").write_text("defaults:\n  - config\n  - _self_\nsampling:\n  top_k: 3\n")
    mine = ["--config-dir", str(tmp_path)]
    assert compose(*mine, "model=mine")[0].engine.model.path == "/models/mine"
    exam = compose(*mine, "experiment=exam", "prompts=[a]")[0]
    assert (exam.engine.model.path, exam.seed, exam.prompts) == ("/models/mine", 5, ["a"])
    assert compose(*mine, "--config-name", "night")[0].sampling.top_k == 3
    for odd in ("5", "~: x", f"path: {'9' * 5000}"):
        (tmp_path / "model" / "mine.yaml").write_text(odd)
        assert "model/mine" in problem(*mine, "model=mine")
    assert "no such directory" in problem("--config-dir", str(tmp_path / "nope"))


# -- sweeps ------------------------------------------------------------------------------------------------------------


def test_sweep_is_the_product_in_order() -> None:
    found = points(parse(["-m", "sampling.temperature=0,0.8", "seed=1,2"]))
    assert [(p.config.sampling.temperature, p.config.seed) for p in found] == [(0, 1), (0, 2), (0.8, 1), (0.8, 2)]
    assert [p.swept for p in found][1] == ("sampling.temperature=0", "seed=2")
    assert len({p.directory for p in found}) == 4 and len({p.directory.parent for p in found}) == 1


def test_flags_may_stand_anywhere() -> None:
    assert len(compose("model=llama", "-m", "seed=1,2", "view=plain")) == 2
    assert len(compose("seed=range(0,3)", "--multirun")) == 3
    assert len(compose("-m", "model=glob(qwen2*)")) == 2


def test_directories_do_not_collide() -> None:
    found = {points(parse([]))[0].directory for _ in range(3)}
    assert len(found) == 3


def test_sweep_problems() -> None:
    assert "add -m" in problem("seed=1,2").lower()
    assert "at most 1,000 are allowed" in problem("-m", "seed=range(0,100000)")
    assert "several points" in problem("-m", "seed=1,2", "out=a.jsonl")
    assert len(compose("-m", "seed=1,2", "out='a-${seed}.jsonl'")) == 2
    assert "no grid" in problem("-m", "seed=interval(0,1)")
    assert "sampling.temperature" in problem("-m", "seed=1,2", "sampling.temperature=0,-1")


# -- mistakes ----------------------------------------------------------------------------------------------------------

MISTAKES = [
    ("sampling.temprature=1", "unknown key sampling.temprature; did you mean sampling.temperature?"),
    ("temprature=1", "did you mean sampling.temperature?"),
    ("model.page_size=1", "did you mean cache.page_size?"),
    ("modl=llama", "did you mean model?"),
    ("+frobnicate=1", "unknown key frobnicate"),
    ("++sampling.zzz=1", "sampling has max_new_tokens, temperature, top_p"),
    ("model=nope", "options: bge-reranker-base, bge-small-en"),
    ("sampling=gredy", "did you mean greedy?"),
    ("experiment=x", "no option 'x' in group 'experiment'"),
    ("sampling.temperature=abc", "sampling.temperature: Value 'abc'"),
    ("sampling.temperature=null", "sampling.temperature"),
    ("sampling.temperature=-1", "sampling.temperature must be a non-negative"),
    ("sampling.temperature=nan", "finite"),
    ("sampling.stop=a", "sampling.stop"),
    ("seed=1.5", "seed: Value '1.5'"),
    ("seed=9223372036854775808", "seed must be in"),
    ("model.dtype=float8", "expected one of [auto, float32, bfloat16, float16]"),
    ("cache.page_size=0", "cache.page_size must be at least 1, got 0"),
    ("cache.mem_fraction_static=1.5", "must be in (0, 1)"),
    ("prompts=???", "leaves it open"),
    ("prompts=[]", "prompts is empty"),
    ("prompts=7", "prompts must be"),
    ("prompts=${nokey}", "prompts: Interpolation key 'nokey' not found"),
    ("prompts=${oc.env:FENGINE_NOT_SET}", "FENGINE_NOT_SET"),
    ("model.path=${model.path}", "model.path"),
    ("prompts=Hello,you", "quote what is one text"),
    ("no equal sign", "write key=value"),
    ("=3", "'=3' names no key"),
    ("model=[llama", "write key=value"),
    ("max_errors=-1", "max_errors must be at least 0"),
    ("hydra.job.chdir=true", "fixed"),
    ("hydra/launcher=joblib", "fixed"),
    ("~nosuch", "no key can be taken away"),
    ("~model", "no key can be taken away"),
    ("chat=5", "must be true or false"),
    ("seed=range(1000000000)", "several values"),
    (f"seed={'1' * 5000}", "cannot read the override"),
    (f"seed={'[' * 3000}", "cannot read the override"),
    (f"model={'x' * 5000}", "too long"),
    (f"{'x' * 5000}=1", "too long"),
]


@pytest.mark.parametrize(("words", "expected"), MISTAKES, ids=[w[:40] for w, _ in MISTAKES])
def test_mistakes_are_named(words: str, expected: str) -> None:
    assert expected in problem(words)


BOMB = "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in itertools.pairwise("abcdefgh"))
FILES_WITHOUT_END = {
    "aliases that multiply": ("a: &a [1,2,3]\n" + BOMB + "prompts: *h\n", "more than 200,000 values"),
    "an alias of itself": ("prompts: &x [*x]\n", "more than 200,000 values"),
    "half a list": ("prompts: [\n", "cannot be read"),
    "no text": ("\x00", "cannot be read"),
}


@pytest.mark.parametrize("name", FILES_WITHOUT_END)
def test_files_that_cannot_be_read_are_told(name: str, tmp_path: Path) -> None:
    text, expected = FILES_WITHOUT_END[name]
    (tmp_path / "experiment").mkdir()
    for path in ("experiment/x.yaml", "mine.yaml"):
        (tmp_path / path).write_text(text)
    for words in (["experiment=x"], ["--config-name", "mine"], ["-m", "seed=1,2", "experiment=x"]):
        found = problem("--config-dir", str(tmp_path), *words)
        assert expected in found and ".yaml" in found


def test_a_named_pipe_is_no_config(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    os.mkfifo(tmp_path / "experiment" / "x.yaml")
    assert "no option 'x'" in problem("--config-dir", str(tmp_path), "experiment=x")


def test_sweeps_that_would_not_end_are_told() -> None:
    assert "at most 1,000 are allowed" in problem("-m", "seed=range(1000000000)")
    assert "must not be zero" in problem("-m", "seed=range(0,1,0)")


def test_all_problems_at_once() -> None:
    words = ["cache.page_size=0", "sampling.top_p=2", "max_errors=-1", "trace=steps"]
    message = problem(*words, "parallel.dp_size=2", "scheduler.record=r")
    names = ["cache.page_size", "sampling.top_p", "max_errors", "trace=steps is", "scheduler.record is"]
    assert [name for name in names if name not in message] == [] and message.count("dp_size=1") == 2


def test_given_twice() -> None:
    assert "seed is given twice" in problem("seed=1", "seed=2")


# -- code in configs ---------------------------------------------------------------------------------------------------

OVERRIDES = [
    "+x._target_={mod}.boom",
    "+_target_={mod}.boom",
    "model._target_={mod}.boom",
    "+model={{_target_: {mod}.boom}}",
    "prompts=[{{prompt: a, x: [{{_target_: {mod}.boom}}]}}]",
    "prompts=[{{_partial_: true}}]",
    "++sampling.stop={{_recursive_: true}}",
    "+x={{_convert_: all}}",
    "hydra.callbacks.x._target_={mod}.Boom",
    "+hydra.callbacks={{x: {{_target_: {mod}.Boom}}}}",
    "+hydra.job_logging.handlers.x={{class: {mod}.Boom}}",
    "++hydra.hydra_logging.handlers.x.class={mod}.Boom",
    "hydra.searchpath=[pkg://{mod}]",
    "hydra.launcher._target_={mod}.Boom",
    "+hydra.sweeper.x={{_target_: {mod}.boom}}",
    "hydra/callbacks={mod}",
    "+hydra.job.env_set={{X: y}}",
]
FILES_WITH_CODE = {
    "_target_": "# @package _global_\nprompts:\n- {{_target_: {mod}.boom}}\n",
    "callbacks": "# @package hydra\ncallbacks:\n  x:\n    _target_: {mod}.Boom\n",
    "job_logging": "# @package hydra.job_logging\nhandlers:\n  x:\n    class: {mod}.Boom\n",
    "hydra_logging": "# @package hydra.hydra_logging\nroot:\n  level: INFO\nhandlers:\n  x:\n    (): {mod}.boom\n",
    "env": "# @package hydra.job.env_set\nPYTHONPATH: /tmp\n",
    "launcher": "# @package hydra.launcher\n_target_: {mod}.Boom\n",
    "python tag": "# @package _global_\nprompts: !!python/object/apply:{mod}.boom []\n",
}


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable module that leaves a file when it is imported."""
    mark = tmp_path / "mark"
    module = tmp_path / "lib" / "fengine_canary.py"
    module.parent.mkdir()
    module.write_text(f"open({str(mark)!r}, 'w').close()\n\nclass Boom: ...\n\ndef boom(*_, **__): ...\n")
    monkeypatch.syspath_prepend(str(module.parent))
    assert importlib.util.find_spec("fengine_canary") is not None
    return mark


@pytest.mark.parametrize("word", OVERRIDES)
def test_code_in_overrides_is_refused(word: str, canary: Path) -> None:
    word = word.format(mod="fengine_canary")
    for words in ([word], ["-m", word, "seed=1,2"]):
        message = problem(*words)
        assert message.startswith(word) and ("is refused" in message or "is fixed" in message)
    assert not canary.exists()


@pytest.mark.parametrize("name", FILES_WITH_CODE)
def test_code_in_files_is_refused(name: str, canary: Path, tmp_path: Path) -> None:
    conf = tmp_path / "conf" / "experiment"
    conf.mkdir(parents=True)
    (conf / "x.yaml").write_text(FILES_WITH_CODE[name].format(mod="fengine_canary"))
    for words in (["experiment=x"], ["-m", "experiment=x,null"], ["--cfg", "all", "experiment=x"]):
        command = parse(["--config-dir", str(conf.parent), *words])
        with pytest.raises(ConfigError):
            inspect(command, RUN) if is_inspection(command) else points(command)
        assert not canary.exists()


@pytest.mark.parametrize("path", ["pkg://fengine_canary", "file:///tmp"])
def test_search_path_of_a_primary_config_is_refused(path: str, canary: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"defaults:\n  - config\nhydra:\n  searchpath:\n    - {path}\n")
    assert "searchpath" in problem("--config-dir", str(tmp_path), "--config-name", "mine")
    assert not canary.exists()


def test_flags_that_could_load_code_are_refused() -> None:
    for flag in ("--config-path", "--experimental-rerun"):
        with pytest.raises(ConfigError, match="refused"):
            parse([flag, "x"])


def test_adapters_of_a_run() -> None:
    config = load_config(['lora.paths=["sql=adapters/sql", other]', "adapter=sql"])
    assert config.engine.lora.named() == [("sql", "adapters/sql"), ("other", "other")] and config.engine.lora.on
    assert not load_config().engine.lora.on
    for words, told in (
        (["adapter=sql"], "adapter='sql' is not in lora.paths"),
        (['lora.paths=["a=x", "a=y"]'], "lora.paths has 'a' twice"),
        (["lora.paths=[a]", "lora.enabled=false"], "lora.enabled is false"),
        (["lora.pinned=[a]"], "lora.pinned has 'a'"),
    ):
        with pytest.raises(ConfigError, match=told):
            load_config(words)
