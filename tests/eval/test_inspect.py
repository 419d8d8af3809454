"""fengine as a model provider of inspect-ai: local tasks with its own scorers, offline."""

import asyncio
import gc
import importlib.util
import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_adapters

pytest.importorskip("inspect_ai", reason="needs the extra: pip install 'fengine[inspect-ai]'")

from inspect_ai import Task
from inspect_ai import eval as inspect_eval
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import (
    ChatMessageAssistant,
    ChatMessageSystem,
    ChatMessageTool,
    ChatMessageUser,
    ContentImage,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    ResponseSchema,
    get_model,
)
from inspect_ai.scorer import choice, includes, perplexity, target_perplexity
from inspect_ai.solver import generate, multiple_choice
from inspect_ai.tool import ToolCall, ToolFunction, ToolInfo, ToolParams
from inspect_ai.util import JSONSchema
from transformers import AutoTokenizer

import fengine.eval.harness.inspect_registry  # noqa: F401  (an installed fengine is found by its entry point)
from fengine.errors import (
    ConfigError,
    EngineClosedError,
    InvalidRequestError,
    ModelLoadError,
    UnknownParameterError,
    UnsupportedFeatureError,
)
from fengine.eval.harness.inspect_model import NAME_ONLY, FengineAPI
from fengine.server.output_parser import parse_output
from fengine.worker.hub import BOX

COUNTRIES = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo", "Egypt": "Cairo", "Peru": "Lima"}
EAGER = {"enable_torch_compile": False, "dtype": "float32"}


@pytest.fixture(scope="module")
def api() -> Iterator[FengineAPI]:
    model = FengineAPI("box", **EAGER)
    yield model
    model.close()


def ask(api: FengineAPI, messages: Any, tools: Any = (), tool_choice: Any = "auto", **config: Any) -> Any:
    chat = [ChatMessageUser(content=messages)] if isinstance(messages, str) else messages
    return asyncio.run(api.generate(chat, list(tools), tool_choice, GenerateConfig(**config)))


def run(task: Task, folder: Path, model_args: dict[str, Any] | None = None, **more: Any) -> Any:
    more = {"model": "fengine/box", "log_dir": str(folder), "display": "none", **more}
    (log,) = inspect_eval(task, model_args={**EAGER, **(model_args or {})}, **more)
    assert log.status == "success", log.error
    return log


def capitals(epochs: int = 1, **config: Any) -> Task:
    rows = [Sample(input=f"What is the capital of {land}?", target=city) for land, city in COUNTRIES.items()]
    return Task(
        MemoryDataset(rows), solver=generate(), scorer=includes(), epochs=epochs, config=GenerateConfig(**config)
    )


def texts(log: Any) -> list[str]:
    samples = sorted(log.samples, key=lambda sample: (sample.id, sample.epoch))
    return [choice.message.text for sample in samples for choice in sample.output.choices]


# -- evaluations -------------------------------------------------------------------------------------------------------


def test_an_evaluation_with_its_own_scorer(tmp_path: Path) -> None:
    log = run(capitals(temperature=0, max_tokens=16), tmp_path)
    assert log.results.scores[0].metrics["accuracy"].value == 1.0
    usage = log.stats.model_usage["fengine/box"]
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens > 60
    assert {sample.output.stop_reason for sample in log.samples} == {"stop"}
    assert json.loads(json.dumps([sample.model_dump(mode="json") for sample in log.samples]))


def test_the_same_texts_however_many_run_together(tmp_path: Path) -> None:
    """Sampled, without a seed, three epochs: alone, together, with another engine and in another order."""
    task = {"epochs": 3, "temperature": 4.0, "max_tokens": 12, "top_p": 0.99}
    logs = [
        run(capitals(**task), tmp_path / str(i), settings, max_connections=limit, max_samples=limit)
        for i, (limit, settings) in enumerate([(1, {}), (24, {}), (5, {"page_size": 8, "max_running_requests": 3})])
    ]
    first = texts(logs[0])
    assert len(first) == 18 and len(set(first)) > 12 and all(texts(log) == first for log in logs)
    usages = [log.stats.model_usage["fengine/box"] for log in logs]
    assert usages[0] == usages[1] == usages[2]  # no count depends on the company either
    assert texts(run(capitals(**task), tmp_path / "seeded", {"random_seed": 1})) != first


def test_multiple_choice(tmp_path: Path) -> None:
    rows = [
        Sample(input=f"The capital of {land}?", choices=["Oslo", city], target="B") for land, city in COUNTRIES.items()
    ]
    task = Task(MemoryDataset(rows), solver=multiple_choice(), scorer=choice())
    log = run(task, tmp_path, max_tokens=8, temperature=0)
    assert len(log.samples) == 6 and 0 <= log.results.scores[0].metrics["accuracy"].value <= 1


def test_perplexities_equal_prompt_logprobs(tmp_path: Path) -> None:
    rows = [
        Sample(input=f"The capital of {land} is {city}.", metadata={"target_text": f" {city}."})
        for land, city in COUNTRIES.items()
    ]
    task = Task(MemoryDataset(rows), solver=generate(), scorer=[perplexity(), target_perplexity()])
    log = run(task, tmp_path, {"use_chat_template": False}, max_tokens=1, prompt_logprobs=1)
    model = FengineAPI("box", use_chat_template=False, **EAGER)
    for sample in log.samples:
        ids = model.engine.tokenizer.encode(sample.input)  # type: ignore[union-attr]
        meta: Any = model.engine.generate(
            input_ids=ids, sampling_params={"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0
        )["meta_info"]  # type: ignore[call-overload]
        wanted = [entry[0] for entry in meta["input_token_logprobs"][1:]]
        assert [entry.logprob for entry in sample.output.choices[0].prompt_logprobs.content] == wanted
        assert sample.scores["perplexity"].value == pytest.approx(-sum(wanted) / len(wanted))
        count = len(model.engine.tokenizer.encode(sample.metadata["target_text"], add_special_tokens=False))  # type: ignore[union-attr]
        assert sample.scores["target_perplexity"].value == pytest.approx(-sum(wanted[-count:]) / count)
    model.close()


def test_an_error_stops_the_evaluation_and_says_why(tmp_path: Path) -> None:
    (log,) = inspect_eval(
        capitals(best_of=3), model="fengine/box", model_args=EAGER, log_dir=str(tmp_path), display="none"
    )
    assert log.status == "error" and "best_of=3" in log.error.message


def test_the_readmes_task(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("capitals", BOX.parents[2] / "scripts" / "harness" / "capitals.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    log = run(module.capitals(), tmp_path, {"use_chat_template": False}, limit=10, temperature=0, max_tokens=16)
    assert len(log.samples) == 10 and log.results.scores[0].metrics["accuracy"].value > 0.9


# -- one call ----------------------------------------------------------------------------------------------------------


def test_prompts_are_those_of_transformers(api: FengineAPI) -> None:
    chat = [
        ChatMessageSystem(content="Be brief."),
        ChatMessageUser(content=[ContentText(text="What is"), ContentText(text="2 + 3?")]),
        ChatMessageAssistant(content=[ContentReasoning(reasoning="hm"), ContentText(text="5")]),
        ChatMessageUser(content="Sure?"),
    ]
    plain = [{"role": m.role, "content": m.text} for m in chat]
    hf = AutoTokenizer.from_pretrained(BOX)
    wanted = hf.apply_chat_template(plain, add_generation_prompt=True)["input_ids"]
    assert ask(api, chat, max_tokens=1).usage.input_tokens == len(wanted)
    assert api._prompt(chat, [], GenerateConfig()) == wanted


def test_options_reach_the_engine(api: FengineAPI) -> None:
    prompt = "Tell me a story."
    ids = api._prompt([ChatMessageUser(content=prompt)], [], GenerateConfig())
    config: dict[str, Any] = {
        "max_tokens": 20,
        "temperature": 0.9,
        "top_p": 0.9,
        "top_k": 50,
        "seed": 7,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.25,
        "stop_seqs": [" the"],
        "logit_bias": {300: -5.0},
        "num_choices": 2,
    }
    output = ask(api, prompt, extra_body={"min_p": 0.01}, **config)
    same = {"top_p": 0.9, "top_k": 50, "frequency_penalty": 0.5, "presence_penalty": 0.25, "min_p": 0.01, "n": 2}
    same |= {"max_new_tokens": 20, "temperature": 0.9, "sampling_seed": 7, "stop": " the", "logit_bias": {"300": -5}}
    wanted: Any = api.engine.generate(input_ids=ids, sampling_params=same)
    assert [c.message.text for c in output.choices] == [w["text"] for w in wanted]
    assert output.usage.output_tokens == sum(w["meta_info"]["completion_tokens"] for w in wanted)
    reasons = {"stop": "stop", "length": "max_tokens"}
    assert [c.stop_reason for c in output.choices] == [reasons[w["meta_info"]["finish_reason"]["type"]] for w in wanted]


def test_logprobs(api: FengineAPI) -> None:
    config: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "logprobs": True, "top_logprobs": 3}
    (found,) = ask(api, "What is the capital of France?", prompt_logprobs=2, **config).choices
    tokens = found.logprobs.content
    assert len(tokens) == 6 or found.stop_reason == "stop"
    shown = bytes(byte for token in tokens for byte in token.bytes).decode()
    assert shown.startswith(found.message.text) and "Paris" in shown
    for token in tokens:
        assert len(token.top_logprobs) == 3 and token.top_logprobs[0].logprob == token.logprob
        assert token.top_logprobs[0].token == token.token
    ids = api._prompt([ChatMessageUser(content="What is the capital of France?")], [], GenerateConfig())
    prompt = found.prompt_logprobs.content
    assert len(prompt) == len(ids) - 1 and {len(token.top_logprobs) for token in prompt} == {2}
    (bare,) = ask(api, "What is the capital of France?", temperature=0, max_tokens=6, prompt_logprobs=1).choices
    assert bare.logprobs is None and {token.top_logprobs for token in bare.prompt_logprobs.content} == {None}
    assert [t.logprob for t in bare.prompt_logprobs.content] == [t.logprob for t in prompt]


def test_lengths_and_what_ends_them(api: FengineAPI) -> None:
    assert ask(api, "Tell me a story.", temperature=0, max_tokens=5).stop_reason == "max_tokens"
    small = FengineAPI("box", context_length=40, **EAGER)
    story = ask(small, "Tell me a story.", temperature=0)
    assert story.stop_reason == "model_length" and story.usage.total_tokens == 40
    for long in ("word " * 60, "word " * 5000):
        output = ask(small, long)
        assert output.stop_reason == "model_length" and "context length" in output.error or "characters" in output.error
    small.close()


def test_equal_calls_outside_of_samples_draw_anew(api: FengineAPI) -> None:
    def three(model: FengineAPI) -> list[str]:
        return [ask(model, "Tell me a story.", temperature=1.0, max_tokens=12).completion for _ in range(3)]

    fresh = FengineAPI("box", **EAGER)
    first, again = three(api), three(fresh)
    assert len(set(first)) == 3 and first == again
    fresh.close()


def test_a_cancelled_call_leaves_the_engine_well(api: FengineAPI) -> None:
    async def cancel() -> None:
        config = GenerateConfig(max_tokens=900, extra_body={"ignore_eos": True})
        task = asyncio.ensure_future(api.generate([ChatMessageUser(content="Hi")], [], "auto", config))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while api.engine.stats()["running"]:
            await asyncio.sleep(0.01)

    asyncio.run(cancel())
    assert ask(api, "What is the capital of Italy?", temperature=0, max_tokens=12).completion


def test_thoughts_are_parts_of_their_own() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<think>{% endif %}"
    model = FengineAPI("box", chat_template=template, **EAGER)
    output = ask(model, "The capital of France is", temperature=0, max_tokens=6)
    (thoughts,) = [part for part in output.message.content if part.type == "reasoning"]
    assert thoughts.reasoning and output.completion == ""  # cut before it came to an answer
    model.close()


def test_an_adapter_answers(tmp_path: Path) -> None:
    """A strong one, so that its answers are others."""
    paths = {"a": str(tiny_adapters.random_adapter(tmp_path, BOX, 2))}
    with pytest.raises(ConfigError, match="lora_paths loads a: adapter=NAME says which of them"):
        FengineAPI("box", lora_paths=paths, **EAGER)
    with pytest.raises(ConfigError, match="adapter='b': the engine has a"):
        FengineAPI("box", lora_paths=paths, adapter="b", **EAGER)
    model = FengineAPI("box", lora_paths=paths, adapter="a", **EAGER)
    found = ask(model, "What is the capital of France?", temperature=0, max_tokens=12, logprobs=True)
    ids = model._prompt([ChatMessageUser(content="What is the capital of France?")], [], GenerateConfig())
    asked: Any = {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 12}, "return_logprob": True}
    for adapter in ("a", None):
        wanted = model.engine.generate(lora_path=adapter, **asked)["meta_info"]["output_token_logprobs"]
        same = [one.logprob for one in found.choices[0].logprobs.content] == [entry[0] for entry in wanted]
        assert same is (adapter == "a")
    model.close()


def test_variables_of_the_template() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %} {{ mood }} {{ tone }}"
    engine_has = {"chat_template": template, "default_chat_template_kwargs": {"mood": "glad", "tone": "low"}}
    model = FengineAPI("box", chat_template_args={"tone": "high"}, **engine_has, **EAGER)
    ids = model._prompt([ChatMessageUser(content="Hi")], [], GenerateConfig())
    assert model.engine.tokenizer.decode(ids) == "Hi glad high"  # type: ignore[union-attr]
    model.close()


# -- tools -------------------------------------------------------------------------------------------------------------

TOOLED = (
    "{% if tools %}<tool_call> {% for t in tools %}{{ t.function.name }} {% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }};{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
ADD = ToolInfo(name="add", description="Adds.", parameters=ToolParams(properties={"x": JSONSchema(type="integer")}))


def test_tools_where_the_template_has_them() -> None:
    model = FengineAPI("box", chat_template=TOOLED, **EAGER)
    chat = [
        ChatMessageUser(content="2 + 3?"),
        ChatMessageAssistant(content="", tool_calls=[ToolCall("call_0", "add", {"x": 2})]),
        ChatMessageTool(content="5", tool_call_id="call_0", function="add"),
    ]
    ids = model._prompt(chat, [ADD], GenerateConfig())
    text = model.engine.tokenizer.decode(ids)  # type: ignore[union-attr]
    assert text == '<tool_call> add user: 2 + 3?;assistant: ;add{"x": 2}tool: 5;'
    output = {"text": 'So <tool_call>{"name": "add", "arguments": {"x": 3}}</tool_call>', "output_ids": [5]}
    output |= {"meta_info": {"finish_reason": {"type": "stop"}}}
    read = partial(parse_output, form=model._facts([ADD], "auto").form, thinks=True, opened=False)
    found = model._choice(output, GenerateConfig(), read, False, lambda _, i: f"call_{1 + i}")
    assert found.stop_reason == "tool_calls" and found.message.text == "So"
    assert found.message.tool_calls == [ToolCall("call_1", "add", {"x": 3})]
    assert ask(model, "2 + 3?", [ADD], max_tokens=3).choices
    with pytest.raises(UnsupportedFeatureError, match="tool_choice='any' is not built"):
        ask(model, "2 + 3?", [ADD], "any")
    with pytest.raises(UnsupportedFeatureError, match="tool_choice=ToolFunction"):
        ask(model, "2 + 3?", [ADD], ToolFunction(name="add"))
    model.close()
    plain = FengineAPI("box", chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}", **EAGER)
    with pytest.raises(UnsupportedFeatureError, match="the model's chat template describes no tools"):
        ask(plain, "2 + 3?", [ADD])
    plain.close()


@pytest.mark.parametrize(
    ("mark", "written", "shown"),
    [
        ("[TOOL_CALLS]", '[TOOL_CALLS][{"name": "add", "arguments": {"x": 3}}]', ""),
        ("<|channel|>", "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>3", "3"),
    ],
)
def test_calls_and_thoughts_between_special_tokens(
    mark: str, written: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The box with a special token that such models have."""
    folder, asked = shutil.copytree(BOX, tmp_path / "marked"), []
    for file in folder.glob("tokenizer*.json"):
        file.write_text(file.read_text().replace("<|pad|>", mark))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{# " + mark + " functions #}"
    model = FengineAPI(str(folder), chat_template=template, **EAGER)

    async def answer(**call: Any) -> Any:
        asked.append(call["sampling_params"].get("skip_special_tokens", True))
        meta = {"finish_reason": {"type": "stop"}, "completion_tokens": 5}
        return {"text": written, "output_ids": [5], "meta_info": meta}

    monkeypatch.setattr(model.engine, "async_generate", answer)
    tools = [ADD] if mark == "[TOOL_CALLS]" else []
    (found,) = ask(model, "2 + 3?", tools).choices
    assert asked == [False] and found.message.text == shown
    if tools:
        assert found.message.tool_calls[0].function == "add" and found.message.tool_calls[0].arguments == {"x": 3}
    else:
        assert found.message.content[0].reasoning == "Hm"
    model.close()


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (
            {"response_schema": ResponseSchema(name="x", json_schema=JSONSchema())},
            UnsupportedFeatureError,
            "response_sc",
        ),
        ({"best_of": 2, "reasoning_effort": "high"}, UnsupportedFeatureError, "best_of=2, reasoning_effort='high'"),
        ({"reasoning_tokens": 10}, UnsupportedFeatureError, "reasoning_tokens"),
        ({"temperature": -1.0}, InvalidRequestError, "temperature"),
        ({"top_p": 0.0}, InvalidRequestError, "top_p"),
        ({"stop_seqs": [""]}, InvalidRequestError, "stop"),
        ({"num_choices": 0}, InvalidRequestError, "n must be"),
        ({"max_tokens": -1}, InvalidRequestError, "max_new_tokens"),
        ({"extra_body": {"temprature": 1}}, UnknownParameterError, "Did you mean 'temperature'"),
        ({"extra_body": {"top_p": 0.5}, "top_p": 0.4}, InvalidRequestError, "extra_body has top_p"),
        (
            {"extra_body": {"chat_template_kwargs": {"bos_token": "x"}}},
            UnknownParameterError,
            "'bos_token' has a meaning",
        ),
    ],
)
def test_wrong_calls(api: FengineAPI, call: dict[str, Any], error: type[Exception], said: str) -> None:
    before = api.engine.stats()["steps"]
    with pytest.raises(error, match=said):
        ask(api, "Hi", **call)
    assert api.engine.stats()["steps"] == before


def test_images_and_raw_prompts(api: FengineAPI) -> None:
    image = ChatMessageUser(content=[ContentImage(image="data:image/png;base64,AA==")])
    with pytest.raises(UnsupportedFeatureError, match=r"messages\[0\] holds a part of type 'image'"):
        ask(api, [image])
    raw = FengineAPI("box", use_chat_template=False, **EAGER)
    assert "Paris" in ask(raw, "The capital of France is", temperature=0, max_tokens=4).completion
    ids = raw.engine.tokenizer.encode("The capital of France is")  # type: ignore[union-attr]
    given = ChatMessageUser(content="", metadata={"prompt_token_ids": ids})
    assert "Paris" in ask(raw, [given], temperature=0, max_tokens=4).completion
    for bad in ("x", [-1], [0.5], []):
        with pytest.raises(InvalidRequestError):
            ask(raw, [ChatMessageUser(content="", metadata={"prompt_token_ids": bad})])
    with pytest.raises(InvalidRequestError, match="takes a single user message"):
        ask(raw, [ChatMessageSystem(content="a"), ChatMessageUser(content="b")])
    with pytest.raises(UnsupportedFeatureError, match="tools need the chat template"):
        ask(raw, "Hi", [ADD])
    raw.close()


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"model_name": "/no/such/place"}, ModelLoadError, "does not exist"),
        ({"context_lenght": 3}, UnknownParameterError, "Did you mean 'context_length'"),
        ({"base_url": "http://x"}, UnsupportedFeatureError, "leave base_url and api_key out"),
        ({"use_chat_template": "no"}, ConfigError, "use_chat_template must be true or false"),
        ({"skip_tokenizer_init": True}, UnsupportedFeatureError, "needs a tokenizer"),
        ({"config": GenerateConfig(best_of=4)}, UnsupportedFeatureError, "best_of=4"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        FengineAPI(**{"model_name": "box", **EAGER, **arguments})


def test_the_engine_ends_with_the_provider() -> None:
    named = get_model("fengine/box", api_key=NAME_ONLY)
    assert named.api._engine is None  # type: ignore[attr-defined]
    with get_model("fengine/box", memoize=False, **EAGER) as model:
        engine = model.api.engine  # type: ignore[attr-defined]
    with pytest.raises(EngineClosedError):
        engine.generate("Once")
    other = FengineAPI("box", **EAGER)
    engine = other.engine
    del other
    gc.collect()
    with pytest.raises(EngineClosedError):
        engine.generate("Once")
