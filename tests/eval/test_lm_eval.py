"""`FengineLM` in lm-evaluation-harness: local tasks, beside its own backend for transformers on the same checkpoint."""

import gc
import json
import logging
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_adapters
import tiny_checkpoints

pytest.importorskip("lm_eval", reason="needs the extra: pip install 'fengine[lm-eval]'")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from fengine.errors import (
    ConfigError,
    EngineClosedError,
    InvalidRequestError,
    ModelLoadError,
    UnknownParameterError,
    UnsupportedFeatureError,
)
from fengine.eval.commands import lm_eval as verb
from fengine.eval.harness.lm_eval_model import FengineLM, batch_of
from fengine.worker.hub import BOX

WORDS = "the cat sat on a mat and Paris is in France while two plus 3 = 5 Rome Madrid because once upon time".split()
TASKS = {
    "choices": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}, {metric: acc_norm}, {metric: acc_mutual_info}]
""",
    "letters": """
output_type: multiple_choice
doc_to_text: "{{question}}\\nAnswer:"
doc_to_target: "{{answer}}"
doc_to_choice: ["A", "B", "C", "D"]
num_fewshot: 2
metric_list: [{metric: acc}]
""",
    "document": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "words": """
output_type: loglikelihood
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
metric_list: [{metric: perplexity}, {metric: acc}]
""",
    "write": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: [".", "\\n"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
    "draw": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: ""
repeats: 2
generation_kwargs: {until: ["\\n"], max_gen_toks: 12, do_sample: true, temperature: 0.9, top_p: 0.95}
metric_list: [{metric: exact_match}]
""",
}
Write = Callable[[str], Path]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    folder, draw = tmp_path_factory.mktemp("tasks"), random.Random(3)

    def text(low: int, high: int) -> str:
        return " ".join(draw.choice(WORDS) for _ in range(draw.randint(low, high)))

    rows = [
        {
            "question": text(1, 25),
            "choices": [" " + text(1, 1), " " + text(1, 4), " " + text(2, 6)],
            "answer": draw.randrange(3),
            "text": text(5, 700),
        }
        for _ in range(12)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, body in TASKS.items():
        head = f"task: {name}\ndataset_path: json\ntest_split: test\nfewshot_split: test\n"
        data = f"dataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}\n"
        (folder / f"{name}.yaml").write_text(head + data + body)
    return TaskManager(include_path=str(folder), include_defaults=False)


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def checkpoint(folder: Path, family: str) -> Path:
    """A tiny random model with the box's tokenizer, or the box."""
    if family == "box":
        return BOX
    tiny_checkpoints.write(folder, family, vocab_size=2048, max_position_embeddings=256, bos_token_id=0)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).write_bytes((BOX / name).read_bytes())
    return folder


def fengine(path: Path | str, **more: Any) -> FengineLM:
    return FengineLM(str(path), dtype="float32", enable_torch_compile=False, **more)


def run(model: Any, tasks: TaskManager, names: list[str], **more: Any) -> dict[str, Any]:
    found = simple_evaluate(model=model, tasks=names, task_manager=tasks, bootstrap_iters=0, **more)
    assert found is not None
    return found


def answers(found: dict[str, Any], name: str) -> list[Any]:
    """Raw answers of a task in the order of its rows."""
    samples = sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
    return [response for sample in samples for response in sample["resps"]]


def flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from flat(item)
    else:
        yield value


# -- beside transformers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "box"])
def test_metrics_equal_those_of_the_transformers_backend(tmp_path: Path, tasks: TaskManager, family: str) -> None:
    path = checkpoint(tmp_path, family)
    names = ["choices", "letters", "document", "words", "write"]
    theirs = run(HFLM(str(path), dtype="float32", device="cpu", batch_size=5), tasks, names)
    with_fengine = fengine(path)
    ours = run(with_fengine, tasks, names)
    with_fengine.close()
    for name in names:
        for metric, value in theirs["results"][name].items():
            found = ours["results"][name][metric]
            assert found == (pytest.approx(value, rel=1e-4) if isinstance(value, float) else value), (name, metric)
        mine, other = list(flat(answers(ours, name))), list(flat(answers(theirs, name)))
        assert len(mine) == len(other) > 10
        for one, two in zip(mine, other, strict=True):
            assert one == (pytest.approx(two, abs=2e-3, rel=1e-5) if isinstance(two, float) else two), name


@pytest.mark.parametrize("options", [{"add_bos_token": False}, {"max_length": 40}, {"prefix_token_id": 7}], ids=str)
def test_options_mean_what_they_mean_there(tmp_path: Path, tasks: TaskManager, options: dict[str, Any]) -> None:
    path = checkpoint(tmp_path, "llama")
    names = ["choices", "document", "write"]
    theirs = run(HFLM(str(path), dtype="float32", device="cpu", batch_size=3, **options), tasks, names)
    ours = run(model := fengine(path, **options), tasks, names)
    model.close()
    for name in names:
        for one, two in zip(flat(answers(ours, name)), flat(answers(theirs, name)), strict=True):
            assert one == (pytest.approx(two, abs=2e-3, rel=1e-5) if isinstance(two, float) else two), name


def test_chats_equal_theirs(tasks: TaskManager) -> None:
    chat: dict[str, Any] = {"apply_chat_template": True, "fewshot_as_multiturn": True, "num_fewshot": 2}
    chat["system_instruction"] = "Be brief."
    names = ["write", "choices"]
    theirs = run(HFLM(str(BOX), dtype="float32", device="cpu", batch_size=3), tasks, names, **chat)
    ours = run(model := fengine("box"), tasks, names, **chat)
    model.close()
    for name in names:
        prompts = [
            [sample["arguments"] for sample in sorted(found["samples"][name], key=lambda s: s["doc_id"])]
            for found in (ours, theirs)
        ]
        assert prompts[0] == prompts[1]
        for one, two in zip(flat(answers(ours, name)), flat(answers(theirs, name)), strict=True):
            assert one == (pytest.approx(two, abs=2e-3, rel=1e-5) if isinstance(two, float) else two), name


# -- bits --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def box() -> Iterator[FengineLM]:
    model = fengine("box")
    yield model
    model.close()


def test_the_same_bits_whatever_the_batch(tasks: TaskManager, box: FengineLM) -> None:
    names = list(TASKS)
    whole = run(box, tasks, names)
    for options in ({"batch_size": 2}, {"batch_size": 7, "max_batch_size": 3}, {"disable_radix_cache": True}):
        model = fengine("box", chunked_prefill_size=24, **options)
        again = run(model, tasks, names[::-1])
        model.close()
        for name in names:
            assert answers(again, name) == answers(whole, name)
            assert again["results"][name] == whole["results"][name]
    drawn = [tuple(pair) for pair in answers(whole, "draw")]
    assert len(drawn) == 12 and len(set(flat(drawn))) > 20  # two draws of a row differ
    other = run(FengineLM(box.engine, seed=None), tasks, ["draw"])
    assert answers(other, "draw") == answers(whole, "draw")
    seeded = fengine("box", seed=5)
    assert answers(run(seeded, tasks, ["draw"]), "draw") != answers(whole, "draw")
    seeded.close()


def requests(kind: str, *arguments: Any) -> list[Any]:
    return [Instance(request_type=kind, doc={}, arguments=args, idx=i) for i, args in enumerate(arguments)]  # type: ignore[arg-type]


def test_order_and_repeats(box: FengineLM) -> None:
    sampled = {"until": ["\n"], "max_gen_toks": 8, "temperature": 1.0}
    asked = [(f"{word} and", sampled) for word in WORDS[:6]]
    first = box.generate_until(requests("generate_until", *asked, asked[0]))
    again = box.generate_until(requests("generate_until", *asked[::-1], asked[0]))
    assert again[:6] == first[:6][::-1] and again[6] == first[6] != first[0]


# -- what it promises beside scores ------------------------------------------------------------------------------------


def test_answers_are_cached_by_request(tmp_path: Path, box: FengineLM) -> None:
    caching: Any = CachingLM(box, str(tmp_path / "answers.db"))
    scored = requests("loglikelihood", ("The capital of France is", " Paris"), ("The capital of France is", " Rome"))
    written = requests("generate_until", ("2 + 3 =", {"until": ["\n"], "max_gen_toks": 4}))
    whole = requests("loglikelihood_rolling", ("Once upon a time",))
    before = [caching.loglikelihood(scored), caching.generate_until(written), caching.loglikelihood_rolling(whole)]
    kept = dict(caching.dbdict)
    assert len(kept) == 4
    box.set_cache_hook(caching.get_cache_hook())
    caching.dbdict.clear()
    box.loglikelihood(scored), box.generate_until(written), box.loglikelihood_rolling(whole)
    assert dict(caching.dbdict) == kept  # partial results are found by the same keys
    steps = box.engine.stats()["steps"]
    assert [
        caching.loglikelihood(scored),
        caching.generate_until(written),
        caching.loglikelihood_rolling(whole),
    ] == before
    assert box.engine.stats()["steps"] == steps


def test_thoughts_are_cut_off() -> None:
    model = fengine("box", think_end_token=" is")
    asked = requests("generate_until", ("The capital of France", {"until": [" is", "."], "max_gen_toks": 4}))
    (text,) = model.generate_until(asked)
    assert text.startswith("Paris") and "." not in text
    number = model.tok_encode(" is", add_special_tokens=False)
    assert len(number) == 1
    by_id = FengineLM(model.engine, think_end_token=str(number[0]))
    assert by_id.think_end_token == number[0]
    asked = requests("generate_until", ("The capital of France", {"until": ["."], "max_gen_toks": 4}))
    assert by_id.generate_until(asked) == [text]
    model.close()


def test_prompts_are_cut_on_the_asked_side(box: FengineLM, caplog: pytest.LogCaptureFixture) -> None:
    text, greedy = " ".join(WORDS * 60), {"until": ["\n"], "max_gen_toks": 5}
    ids = box.tok_encode(text)
    room = box.max_length - 5
    wanted = {"left": ids[-room:], "right": ids[:room], "middle": ids[: room // 2] + ids[-(room - room // 2) :]}
    for side, kept in wanted.items():
        caplog.clear()
        model = FengineLM(box.engine, truncation_side=side)
        (found,) = model.generate_until(requests("generate_until", (text, greedy)))
        output: Any = box.engine.generate(input_ids=kept, sampling_params={"temperature": 0, "max_new_tokens": 5})
        assert found == output["text"].partition("\n")[0] and f"side {side}" in caplog.text
    with caplog.at_level(logging.WARNING):
        box.loglikelihood(requests("loglikelihood", (text, " x"), ("short", " x")))
    assert f"1 of 2 requests are longer than max_length={box.max_length}" in caplog.text


def test_the_record_names_weights_and_engine(box: FengineLM, tasks: TaskManager) -> None:
    found = run(box, tasks, ["write"], limit=2)
    assert found["config"]["fengine"]["numerics"] == "exact" and len(found["config"]["model_sha"]) == 64
    assert found["config"]["model_dtype"] == "torch.float32"
    assert box.tokenizer_name.startswith("box__") and len(box.tokenizer_name) == len("box__") + 12
    assert box.chat_template(True) == box.tokenizer.chat_template and box.chat_template() is None


def test_variables_of_the_template() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %} {{ mood }} {{ tone }}"
    engine_has = {"chat_template": template, "default_chat_template_kwargs": {"mood": "glad", "tone": "low"}}
    model = fengine("box", chat_template_args={"tone": "high"}, **engine_has)
    assert model.apply_chat_template([{"role": "user", "content": "Hi"}]) == "Hi glad high"
    model.close()


def test_an_adapter_answers(tmp_path: Path) -> None:
    """A strong one, so that its answers are others."""
    model = fengine("box", lora_paths={"a": str(tiny_adapters.random_adapter(tmp_path, BOX, 2))}, adapter="a")
    base = FengineLM(model.engine)
    args, ids = ("The capital of France is", " Paris"), model.tok_encode("The capital of France is Paris")
    (told,), (plain,) = (one.loglikelihood(requests("loglikelihood", args)) for one in (model, base))
    read: Any = {"sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": len(ids) - 2}
    wanted = [model.engine.generate(input_ids=ids, lora_path=name, **read)["meta_info"] for name in ("a", None)]
    assert [told[0], plain[0]] == [meta["input_token_logprobs"][-1][0] for meta in wanted] and told[0] != plain[0]
    model.close()


def test_the_engine_ends_with_the_model(box: FengineLM) -> None:
    model = fengine("box")
    engine = model.engine
    del model
    gc.collect()
    with pytest.raises(EngineClosedError):
        engine.generate("Once")
    FengineLM(box.engine).close()
    assert box.engine.generate("Once", {"max_new_tokens": 1})  # the caller's own goes on


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"pretrained": "/no/such/place"}, ModelLoadError, "does not exist"),
        ({"max_running_request": 3}, UnknownParameterError, "Did you mean 'max_running_requests'"),
        ({"nnodes": 2}, UnsupportedFeatureError, "nnodes=2"),
        ({"batch_size": 0}, ConfigError, 'batch_size must be "auto" or at least 1'),
        ({"batch_size": "many"}, ConfigError, "batch_size"),
        ({"max_length": 5000}, ConfigError, r"max_length must be in \[2, 1024\]"),
        ({"max_length": 10, "max_model_len": 10}, ConfigError, "mean the same"),
        ({"max_length": "long"}, InvalidRequestError, "max_length must be an integer"),
        ({"truncation_side": "up"}, ConfigError, "truncation_side must be one of left, right, middle"),
        ({"enable_thinking": True}, ConfigError, "think_end_token"),
        ({"skip_tokenizer_init": True}, UnsupportedFeatureError, "needs a tokenizer"),
        ({"incremental_streaming_output": True}, ConfigError, "incremental_streaming_output: here whole outputs"),
        ({"stream_output": True}, ConfigError, "stream_output: here whole outputs"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        FengineLM(**{"pretrained": "box", "enable_torch_compile": False, **arguments})


@pytest.mark.parametrize(
    ("gen_kwargs", "error", "said"),
    [
        ({"max_gen_toks": 1024}, InvalidRequestError, "leaves a prompt no room"),
        ({"num_beams": 3}, UnsupportedFeatureError, "num_beams"),
        ({"temprature": 1}, UnknownParameterError, "Did you mean 'temperature'"),
        ({"do_sample": True, "temperature": float("nan")}, InvalidRequestError, "temperature"),
        ({"until": ["x"] * 10 + [str(i) for i in range(40)]}, InvalidRequestError, "at most 32 stop strings"),
    ],
)
def test_wrong_requests(box: FengineLM, gen_kwargs: dict[str, Any], error: type[Exception], said: str) -> None:
    good = ("Once", {"until": ["\n"], "max_gen_toks": 3})
    before = box.engine.stats()["steps"]
    with pytest.raises(error, match=said):
        box.generate_until(requests("generate_until", good, ("Once", gen_kwargs)))
    assert box.engine.stats()["steps"] == before  # nothing ran
    assert box.generate_until(requests("generate_until", good))[0]


def test_texts_that_are_none(box: FengineLM) -> None:
    assert box.loglikelihood(requests("loglikelihood", ("a", ""))) == [(0.0, True)]
    for pair, said in ((("", ""), "nothing to score"), (("a\ud800", " b"), "lone surrogate")):
        with pytest.raises(InvalidRequestError, match=said):
            box.loglikelihood(requests("loglikelihood", pair))
    with pytest.raises(InvalidRequestError, match="a text must be a string, got int"):
        box.generate_until(requests("generate_until", (5, {})))


def test_thinking_models_score_no_continuations(box: FengineLM) -> None:
    model = FengineLM(box.engine, enable_thinking=True, think_end_token="</think>")
    with pytest.raises(InvalidRequestError, match="enable_thinking=True is for tasks that generate"):
        model.loglikelihood(requests("loglikelihood", ("a", " b")))
    with pytest.raises(ConfigError, match="cannot be set on an engine that runs already"):
        FengineLM(box.engine, dtype="float32")
    assert box.loglikelihood([]) == [] == box.loglikelihood_rolling([]) == box.generate_until([])
    assert [batch_of(x) for x in ("auto", "auto:4", 1, "1", 5, "5")] == [1 << 16] * 4 + [5, 5]


# -- the command line --------------------------------------------------------------------------------------------------


def test_the_command_line(tasks: TaskManager, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fengine"])
    folder = next(iter(tasks.include_path)) if not isinstance(tasks.include_path, (str, Path)) else tasks.include_path
    words = ["run", "--model", "fengine", "--model_args", "pretrained=box,enable_torch_compile=False,dtype=float32"]
    words += ["--include_path", str(folder), "--tasks", "write,letters", "--limit", "3", "--batch_size", "auto"]
    assert verb.main([*words, "--output_path", str(tmp_path / "out"), "--log_samples"]) == 0
    assert "exact_match" in capsys.readouterr().out
    (written,) = (tmp_path / "out").rglob("results_*.json")
    record = json.loads(written.read_text())
    assert record["config"]["fengine"]["version"] and record["results"]["letters"]["acc,none"] >= 0
    wrong = [word.replace("pretrained=box", "pretrained=/nowhere") for word in words]
    assert verb.main(wrong) == 2 and "/nowhere" in capsys.readouterr().err
    assert verb.main(["--help"]) == 0 and "--model fengine" in capsys.readouterr().out


def test_the_readmes_tasks(monkeypatch: pytest.MonkeyPatch, box: FengineLM) -> None:
    root = Path(__file__).resolve().parents[2]
    monkeypatch.chdir(root)
    manager = TaskManager(include_path=str(root / "scripts" / "harness"), include_defaults=False)
    found = run(box, manager, ["box_letters", "box_answers"], limit=20)["results"]
    assert found["box_letters"]["acc,none"] > 0.9 and found["box_answers"]["exact_match,trimmed"] > 0.9
