"""What people type who know other programs is read as they mean it, or answered with key, value and remedy."""

import json
from pathlib import Path

import pytest

pytest.importorskip("hydra")

from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from fengine import run
from fengine.errors import ConfigError, InputFileError
from fengine.eval.cli.compose import parse, points
from fengine.eval.cli.mistakes import quoted
from fengine.eval.commands.evaluate import with_prompts
from fengine.eval.commands.serve import SERVE
from fengine.eval.runs.config import EVAL, RUN, evaluation_of
from fengine.eval.tasks.kinds import open_task


def config(*words: str):  # noqa: ANN201
    return points(parse(with_prompts(words), RUN), RUN)[0].config


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("model=null", "model=null: it takes the name of one option"),
        ("sampling=[greedy,creative]", "it takes the name of one option; -m sweeps"),
        ("=1", "'=1' names no key"),
        *(
            (f"model.json_overrides='{bad}'", "model.json_overrides must be a JSON object")
            for bad in ("[1]", "null", "{bad", '{"a":1,"a":2}', '{"a":NaN}', "[" * 9999)
        ),
        *(
            (f"chat.template_kwargs='{bad}'", "chat.template_kwargs must be a JSON object")
            for bad in ("[1]", '{"a":1,"a":2}', '{"a":NaN}')
        ),
        ("tp=2", "unknown key tp; fengine's word for it is parallel.tp_size"),
        ("engine.dp_size=2", "unknown key engine.dp_size; did you mean parallel.dp_size?"),
        ("gpu_memory_utilization=0.5", "cache.mem_fraction_static"),
        ("enforce_eager=true", "compile.cuda_graph=false"),
        ("dp_size=2", "parallel.dp_size"),
        ("trust_remote_code=true", "never run"),
        ("model.max_tokens=3", "sampling.max_new_tokens"),
        ("quantization=fp8", "model.quantization"),
        ("--temperature 0.8", "settings are written key=value; fengine's word for it is sampling.temperature=0.8"),
        ("--max-tokens=5", "sampling.max_new_tokens=5"),
        ("--tensor-parallel-size 2", "parallel.tp_size=2"),
        ("--temprature 1", "did you mean sampling.temperature=1?"),
        ("--frobnicate", "no option --frobnicate"),
        ("-p 9000", "-p (--package) and --resolve are of --cfg; settings are written key=value"),
        ("--resolve", "are of --cfg;"),
        ("Hello", """write key=value: a prompt is fengine 'prompts=["Hello"]', or typed in fengine chat; a model is"""),
        ("lora.paths=[x=/a,y=/b]", """quote the texts of a list: lora.paths='["x=/a", "y=/b"]'"""),
        ('out={"a":"b"}', """quoted twice, for the shell and for fengine: out='"{"a":"b"}"'"""),
        ("--model qwen3-8b", "settings are written key=value; write model=qwen3-8b"),
        ("--model=Qwen/Qwen3-8B", "write model.path=Qwen/Qwen3-8B"),
        ("model=Qwen/Qwen3-8B", "no preset; a hub id or a directory is model.path=Qwen/Qwen3-8B"),
        ("n=4", "task.samples"),
        ("chat.enable_thinking=false", """chat.template_kwargs='{"enable_thinking": false}'"""),
        ("rows.jsonl", "write prompts=rows.jsonl"),
        ("sampling.num_beams=4", "beam search is not built"),
        ("""sampling.logit_bias={"5":-1}""", "unknown key sampling.logit_bias; fengine's word for it is a row's own"),
        ("model.load_in_8bit=true", "model.quantization=fp8"),
        ("task.num_fewshot=3", "tasks are run by fengine eval task=NAME"),
        ("task.prompt_file=a.txt", "task.prompt=@FILE"),
        ("+sampling=greedy", "write sampling=greedy, without a +"),
        (f"sampling.json_schema={__file__}", f"what is in it is sampling.json_schema=@{__file__}"),
        ("sampling.stop_token_ids=5", "sampling.stop_token_ids must be a list"),
        ("sampling.stop=END", """sampling.stop must be a list: sampling.stop='["one","two"]'"""),
        ("sampling.regex=a sampling.json_schema={}", "sampling: Only one of json_schema"),
        ("sampling.json_schema=@/no/such.json", "sampling.json_schema=@/no/such.json cannot be read: No such file"),
    ],
)
def test_foreign_words_are_told_ours(words: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(*words.split())
    assert said in str(caught.value) and len(str(caught.value).splitlines()) <= 2


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("task/mine", "fewshot: 3", "task/mine.yaml: unknown key task.fewshot; fengine's word for it is task.shots"),
        ("task/mine", "stop: x", "task/mine.yaml: task.stop must be a list"),
        ("task/mine", "prompt: {q}", "task/mine.yaml: task.prompt must be a text; in YAML"),
        ("experiment/mine", "sampling: {top_p: 1}", "experiment/ begins with the line # @package _global_"),
        ("mine", "seed: 3", "a primary config of your own begins with defaults: [config, _self_]"),
    ],
)
def test_faults_in_files_are_told_by_file_and_key(file: str, content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / f"{file}.yaml").write_text(content)
    group, _, name = file.rpartition("/")
    with pytest.raises(ConfigError) as caught:
        points(parse([f"--config-dir={tmp_path}", f"{group}={name}" if group else "--config-name=mine"], EVAL), EVAL)
    assert said in str(caught.value)
    if not group:
        with pytest.raises(ConfigError, match="begin the defaults of your own primary config with `- eval`"):
            points(parse([f"--config-dir={tmp_path}", "--config-name=mine", "out=a"], EVAL), EVAL)


def test_a_name_may_be_a_tasks_where_there_are_tasks() -> None:
    with pytest.raises(ConfigError, match="write key=value: a task is task=hellaswag; a model is model=hellaswag"):
        points(parse(["hellaswag"], EVAL), EVAL)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("task=capitals", "tasks are run by fengine eval task=NAME"),
        ("sampling.top_p=0.5", "each request to a server brings its own"),
        ("prompts=q.txt", "a file of prompts is run by fengine prompts=FILE"),
        ("Hello", "write key=value: a model is model=Hello or model.path=DIR"),
        ("--reasoning-parser qwen3", "is told apart"),
        ("--ssl-keyfile k", "there is no TLS; put a proxy in front"),
        ("seed=1,2", "seed=1,2: several values. Give one,"),
        ("hydra.mode=MULTIRUN", "a server has one configuration: leave -m and hydra.mode out"),
    ],
)
def test_what_a_server_lacks_is_told_where_it_is(words: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        points(parse(words.split(), SERVE), SERVE)
    assert said in str(caught.value)


@pytest.mark.parametrize(("words", "said"), [("run", "needs none: fengine prompts="), ("model", "model=VALUE")])
def test_settings_are_no_commands(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(words.split()) == run.USAGE and said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "said"),
    [({"sampling": []}, "sampling must be an object"), ({"sampling_params": {}}, "its name here is sampling"),
     ({"stop": ["a"]}, '"sampling": {"stop"')],
)  # fmt: skip
def test_a_row_s_wishes_are_never_ignored(row: dict[str, object], said: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "x"} | row))
    task = open_task(evaluation_of(config(f"prompts={tmp_path}/a.jsonl"), ()).task, tmp_path)
    with pytest.raises(InputFileError, match=said):
        [task.asks(one) for one in task.rows()]  # type: ignore[arg-type]


def test_words_of_a_server_are_known_to_it() -> None:
    with pytest.raises(ConfigError, match="serve.port=80$"):
        parse(["--port", "80"], SERVE)
    with pytest.raises(ConfigError, match="serve.model_name=x$"):
        parse(["--served-model-name=x"], SERVE)


def test_a_prompt_stands_anywhere_and_needs_no_quotes_of_its_own() -> None:
    assert config("What is 2+2?").prompts == ["What is 2+2?"]
    assert config("seed=3", 'Say "no", then a=b', "It's 5").prompts == ['Say "no", then a=b', "It's 5"]
    assert config("prompts=Hello, my name is").prompts == "Hello, my name is"
    assert evaluation_of(config("prompts=Hello, my name is"), ()).task.prompts == ("Hello, my name is",)


def test_home_grammars_and_files_of_grammars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert config("model.path=~/it's").engine.model.path == f"{tmp_path}/it's"
    for key in ("out", "scheduler.record", "multimodal.image_folder", "model.download_dir"):
        with pytest.raises(ConfigError, match=f"{key}='~nosuchuser' begins with ~"):
            config(f"{key}='~nosuchuser'")
    assert config("sampling.regex=~").sampling.regex == "~"
    assert config("sampling.regex=[0-9]").sampling.regex == "[0-9]"
    assert config(r"sampling.regex=(a|\d+){1,2}").sampling.regex == r"(a|\d+){1,2}"
    schema = json.dumps({"type": "object", "properties": {"a": {"enum": ["x, y", '"']}}})
    assert config(f"sampling.json_schema={schema}").sampling.json_schema == schema
    (tmp_path / "s.json").write_text(schema)
    assert config(f"sampling.json_schema=@{tmp_path}/s.json").sampling.json_schema == schema
    assert config("sampling.json_schema=null").sampling.json_schema is None
    assert config("""sampling.regex='"[a,b]"'""".replace("'", "")).sampling.regex == "[a,b]"


def test_texts_and_paths_need_no_second_quotes(tmp_path: Path) -> None:
    assert config('chat.system=Say "no", (or) {yes}').chat.system == 'Say "no", (or) {yes}'
    assert config("model.path=/my models/ü (v2)").engine.model.path == "/my models/ü (v2)"
    assert config("out=/home/josé/a.jsonl").out == "/home/josé/a.jsonl"
    assert config("prompts=a=ü.txt").prompts == "a=ü.txt"
    found = points(parse([r"task.extract=(\d+), (a)", "task=capitals"], EVAL), EVAL)[0].config
    assert found.task.extract == r"(\d+), (a)"
    words = ["task=capitals", r"task.judge={prompt: '{response}?\n', choices: [no, yes]}"]
    assert points(parse(words, EVAL), EVAL)[0].config.task.judge.prompt == "{response}?\n"
    assert [p.config.out for p in points(parse(["-m", "out=a.jsonl,b.jsonl"], RUN), RUN)] == ["a.jsonl", "b.jsonl"]
    (rows := tmp_path / "rows.jsonl").touch()
    with pytest.raises(ConfigError, match=r"prompts=\[…\] is a list of texts, and .*is a file"):
        config(f'prompts=["{rows}", "b"]')


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20).filter(lambda t: "${" not in t))
def test_quoted_texts_come_back(text: str) -> None:

    assert OverridesParser.create(None).parse_override(f"key={quoted(text)}").value() == text


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("-", "", "cat > rows.jsonl"),
        ("/dev/stdin", "", "cat > rows.jsonl"),
        ("a.json", "", "jq -c"),
        ("a.csv", "", "lines=True"),
        ("a.parquet", "", "read_parquet"),
        ("a.jsonl.gz", "", "unpack it"),
        (".", "", "prompts='.' ends in neither"),
        ("/dev/null", "", "prompts='/dev/null'"),
        ("https://a.b/c.jsonl", "", "is a URL"),
        ("a.jsonl", '[\n{"prompt": "x"}]', "holds one JSON array"),
        ("a.jsonl", '[{"prompt": "x"}]', "jq -c"),
    ],
)
def test_files_of_other_kinds_are_told_a_way(name: str, content: str, said: str, tmp_path: Path) -> None:
    if content:
        (tmp_path / name).write_text(content)
    task = evaluation_of(config(f"prompts={name}"), ()).task
    with pytest.raises(InputFileError, match=said):
        list(open_task(task, tmp_path).rows())


def test_help_of_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["help", "temperature"]) == 0
    assert "sampling.temperature=1.0" in (told := capsys.readouterr().out) and "Divides the logits" in told
    assert run.main(["help", "access_log"]) == 0 and "serve.access_log=false" in capsys.readouterr().out
    assert run.main(["help", "frob"]) == run.USAGE and "no key has 'frob'" in capsys.readouterr().err
    assert run.main(["help", "temprature"]) == run.USAGE and "did you mean temperature?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (['sampling.json_schema={"type": "objekt"}'], "sampling.json_schema: Failed to compile json grammar: Invalid"),
        (["sampling.regex=a+", "sampling.stop=[b]"], "sampling.regex says where a text ends; leave out sampling.stop"),
        (
            ["sampling.max_new_tokens=1024"],
            "max_new_tokens=1,024 leaves no room for a prompt in the context of box, which",
        ),
        (["sampling.max_new_tokens=64", "model.context_length=64"], "has 64 tokens: at most 63"),
        (["eval", "task=capitals", "sampling.max_new_tokens=8"], "the task's own counts, task.max_new_tokens=64"),
        (["eval", "task=capitals", "++sampling.max_new_tokens=8"], "the task's own counts, task.max_new_tokens=64"),
        (["out=a.csv"], "one JSON object a line; name it out=FILE.jsonl"),
        (["out=-"], "one JSON object a line; name it out=FILE.jsonl"),
    ],
)
def test_what_every_request_would_be_refused_for_is_told_before_the_load(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    verb = ["chat"] if "model.context_length=64" in words else ["prompts=[a]"]
    assert run.main([*(verb if words[0] != "eval" else []), *words]) == run.USAGE
    told = capsys.readouterr().err
    assert said in told and "loading" not in told and not any(tmp_path.rglob("manifest.json"))


ASKED = ["eval", "task=jsonl", "task.data=in.jsonl", "task.prompt={q}", "task.match=exact", "task.target=answer"]


@pytest.mark.parametrize(
    ("rows", "words", "said"),
    [
        ([{"q": "a"}] * 30, ["prompts=in.jsonl"], "(it has 'q'); give exactly one"),
        ([{"q": "a"}] * 30, ["prompts=in.jsonl"], "none of the first 20 rows can be used"),
        (["a", "b"], ["prompts=in.jsonl"], "line 1 (byte 0) must be a JSON object, got str; none of its 2 rows"),
        ([{"custom_id": "r", "body": {}}], ["prompts=in.jsonl"], "fengine batch IN.jsonl OUT.jsonl runs these"),
        (
            [{"q": "a"}],
            ["eval", "task=jsonl", "task.data=in.jsonl", "task.prompt={p}"],
            "has no column 'p'; it has 'q'",
        ),
        ([{"q": "a", "answer": 1}], [*ASKED, "task.group_by=topic"], "has no column 'topic'; it has 'q', 'answer'"),
        ([{"q": "a", "answer": " "}], [*ASKED[:4], "task.match=contains", ASKED[5]], "which any text contains"),
        ([{"q": "a", "answer": "b"}], [*ASKED[:4], "task.match=number", ASKED[5]], "'answer' holds no number, got 'b'"),
    ],
)
def test_rows_of_which_none_can_be_asked_are_told_before_the_load(
    rows: list[object], words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run.main(words) == run.USAGE
    told = capsys.readouterr().err
    assert said in told and "loading" not in told
