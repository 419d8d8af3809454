"""Images in prompts: what comes in, what is drawn, and that no neighbour changes a bit of it."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import eagle_heads
import numpy as np
import pytest
import tiny_vision
import torch
import transformers
from tiny_vision import TOKEN, picture

from fengine import Engine
from fengine.config import EngineConfig, ModelConfig, SchedulerConfig
from fengine.core.images import Image, Placed, RopePositions
from fengine.core.request import Request, SamplingParams
from fengine.core.scheduler_output import SchedulerOutput
from fengine.errors import (
    CapacityError,
    EngineClosedError,
    InvalidRequestError,
    QueueFullError,
    UnsupportedFeatureError,
)
from fengine.multimodal.images import Images, Picture, _hash
from fengine.worker.images import ImageInputs

GREEDY = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}
ONE, TWO = [5, TOKEN, 7, 8], [9, TOKEN, 10, TOKEN, 11, 12, 13]
OPTIONS: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "max_total_tokens": 2048}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision.write(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Engine]:
    with Engine(model_path=str(checkpoint), **OPTIONS) as made:
        yield made


def bits(output: dict[str, Any]) -> list[Any]:
    return output["output_ids"] + [row[0] for row in output["meta_info"]["output_token_logprobs"]]


def ask(engine: Engine, ids: Any, images: Any, **more: Any) -> Any:
    return engine.generate(None, GREEDY, ids, image_data=images, return_logprob=True, **more)


def test_programs_are_told_that_it_takes_images(engine: Engine) -> None:
    assert engine.tokenizer_manager.model_config.is_multimodal and engine.get_model_info()["has_image_understanding"]


def test_ids_and_logprobs_are_those_of_transformers(engine: Engine, checkpoint: Path) -> None:
    reference = transformers.LlavaForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
    processor = transformers.CLIPImageProcessorPil.from_pretrained(checkpoint)
    pictures = [picture(1), picture(2, 33, 64)]
    output = ask(engine, TWO, pictures, logprob_start_len=0)
    ids = [id for token in TWO for id in ([token] * 16 if token == TOKEN else [token])]
    assert output["meta_info"]["prompt_tokens"] == len(ids)
    whole = torch.tensor([ids + output["output_ids"]])
    pixels = processor(pictures, return_tensors="pt").pixel_values
    with torch.no_grad():
        logprobs = reference(input_ids=whole, pixel_values=pixels).logits[0].log_softmax(-1)
    got = output["meta_info"]["input_token_logprobs"][1:] + output["meta_info"]["output_token_logprobs"]
    for position, (logprob, token, _) in enumerate(got):
        assert abs(logprob - logprobs[position, token]) < 1e-4
    assert output["output_ids"] == logprobs[len(ids) - 1 : -1].argmax(-1).tolist()


def test_images_of_an_engine_that_was_shut_down_are_refused(checkpoint: Path) -> None:
    with Engine(model_path=str(checkpoint), **OPTIONS) as made:
        pass
    with pytest.raises(EngineClosedError):
        ask(made, ONE, picture(1))


def test_another_picture_gives_other_logprobs(engine: Engine) -> None:
    assert bits(ask(engine, ONE, picture(1))) != bits(ask(engine, ONE, picture(3)))


def test_every_form_of_a_call(engine: Engine) -> None:
    first, second = picture(1), picture(2)
    one, two = bits(ask(engine, ONE, first)), bits(ask(engine, TWO, [first, second]))
    assert bits(ask(engine, ONE, [first])) == one
    assert [bits(o) for o in ask(engine, [ONE, ONE], first)] == [one, one]
    assert [bits(o) for o in ask(engine, [ONE, TWO], [first, [first, second]])] == [one, two]
    assert [bits(o) for o in ask(engine, [ONE, TWO], [[first], [first, second]])] == [one, two]
    text = bits(engine.generate(None, GREEDY, [5, 6, 7], return_logprob=True))
    for none, given in ((None, first), ([None], [None, first])):
        assert [bits(o) for o in ask(engine, [[5, 6, 7], ONE], [none, given])] == [text, one]
    expanded = [5, *[TOKEN] * 16, 7, 8]
    assert bits(ask(engine, expanded, first)) == one


LAYOUTS: dict[str, dict[str, Any]] = {
    "chunks inside of images": {"chunked_prefill_size": 5, "max_running_requests": 3},
    "no cache": {"disable_radix_cache": True},
    "preempted": {"max_total_tokens": 100, "page_size": 4, "disable_radix_cache": True},
    "pages of one token": {"page_size": 1},
    "guessed ahead": {"speculative_algorithm": "NGRAM"},
    "overlapped": {"disable_overlap_schedule": False},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_are_the_requests_own(engine: Engine, checkpoint: Path, layout: str) -> None:
    """Alone, and among others of other sizes, in chunks, preempted, without a cache."""
    pictures = [picture(seed, 20 + 7 * seed, 60 - 5 * seed) for seed in range(6)]
    prompts = [ONE, TWO, [5, 6, 7, 8, 9], [TOKEN, 4], TWO, ONE]
    images = [pictures[0], pictures[1:3], None, pictures[3], [pictures[0], pictures[0]], pictures[5]]

    def drawn(llm: Engine, ids: Any, given: Any) -> Any:
        return llm.generate(None, GREEDY | {"max_new_tokens": 24}, ids, image_data=given, return_logprob=True)

    alone = [bits(drawn(engine, ids, given)) for ids, given in zip(prompts, images, strict=True)]
    with Engine(model_path=str(checkpoint), **(OPTIONS | LAYOUTS[layout])) as other:
        assert [bits(output) for output in drawn(other, prompts, images)] == alone
        assert [bits(output) for output in drawn(other, prompts[::-1], images[::-1])] == alone[::-1]
        assert layout != "preempted" or other.stats()["preemptions"] > 0


@pytest.mark.parametrize("algorithm", ["STANDALONE", "EAGLE3"])
def test_drafts_beside_images_change_no_bit(algorithm: str, tmp_path: Path) -> None:
    """A draft sees placeholders where images stand: it may guess worse, and the model says what is right."""
    model = tiny_vision.write(tmp_path / "model", text_config={"num_hidden_layers": 4})
    draft = str(tmp_path / "draft")
    if algorithm == "EAGLE3":
        eagle_heads.write(Path(draft), tiny_vision.TEXT)
    else:
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**tiny_vision.TEXT)).save_pretrained(draft)
    found, pictures = [], [picture(1, 48, 48), picture(2)]
    guessing = {
        "speculative_algorithm": algorithm,
        "speculative_draft_model_path": draft,
        "speculative_adaptive": False,
    }
    for options in ({}, guessing):
        with Engine(model_path=str(model), **(OPTIONS | options)) as engine:
            sampling = GREEDY | {"max_new_tokens": 20, "temperature": 0.5, "sampling_seed": 3}
            drawn = engine.generate(
                None, sampling, [ONE, TWO, [5, 6, 7]], image_data=[pictures[0], pictures, None], return_logprob=True
            )  # fmt: skip
            found.append([bits(output) for output in drawn])
            assert not options or engine.stats()["draft_tokens"] > 0
    assert found[0] == found[1]


def test_the_same_picture_behind_the_same_text_is_a_prefix_hit(engine: Engine) -> None:
    engine.flush_cache()
    prompt = [*range(20, 40), TOKEN, *range(40, 60)]
    cold = ask(engine, prompt, picture(1))
    again, other = ask(engine, prompt, picture(1)), ask(engine, prompt, picture(2))
    assert (cold["meta_info"]["cached_tokens"], again["meta_info"]["cached_tokens"]) == (0, 48)
    assert other["meta_info"]["cached_tokens"] == 16  # the text in front of it
    assert bits(again) == bits(cold) != bits(other)


def test_a_picture_is_encoded_once(engine: Engine) -> None:
    images = engine._parts.core.stepper.scheduler.images
    assert images is not None
    ask(engine, ONE, picture(77))
    before = images.num_encoded
    ask(engine, [TWO, ONE], [[picture(77), picture(78)], picture(77)])
    assert images.num_encoded == before + 1


def test_a_small_table_gives_the_same_bits(engine: Engine, checkpoint: Path) -> None:
    """Embeddings are driven out and encoded again."""
    pictures = [picture(seed) for seed in range(8)]
    alone = [bits(ask(engine, ONE, one)) for one in pictures]
    with Engine(model_path=str(checkpoint), **OPTIONS) as other:
        scheduler = other._parts.core.stepper.scheduler
        assert scheduler.images is not None
        scheduler.images.capacity = 40  # of two pictures and a half
        scheduler.images.forget()
        for _ in range(2):
            assert [bits(output) for output in ask(other, [ONE] * 8, pictures)] == alone
        with pytest.raises(CapacityError, match="images of 48 tokens"):
            ask(other, [TOKEN] * 3, pictures[:3])


def test_samples_streams_and_weights(engine: Engine) -> None:
    drawn = engine.generate(
        None, {"max_new_tokens": 4, "n": 3, "sampling_seed": 5}, ONE, image_data=picture(1), return_logprob=True
    )
    first = engine.generate(
        None, {"max_new_tokens": 4, "sampling_seed": 5}, ONE, image_data=picture(1), return_logprob=True
    )
    assert len(drawn) == 3 and bits(drawn[0]) == bits(first)
    chunks = list(ask(engine, ONE, picture(1), stream=True))
    assert bits(chunks[-1]) == bits(ask(engine, ONE, picture(1)))


@pytest.mark.parametrize(
    "ids, images, why",
    [
        (ONE, None, "0 images, but the prompt has 1 placeholder"),
        ([5, 6], "x", r"image_data\[0\]: 'x' cannot be read"),
        (TWO, [picture(1)], "1 image, but the prompt has 2"),
        (TWO, [picture(1), 5], r"image_data\[1\]: it must be a path"),
        ([ONE, ONE], [picture(1)], "The length of image_data should be equal to the batch size"),
        ([ONE, TWO], [picture(1), [picture(1), b"GIF89a"]], r"prompt 1: image_data\[1\]"),
    ],
)
def test_bad_images_are_named(engine: Engine, ids: Any, images: Any, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        ask(engine, ids, images)


WRONG = [
    ("llava", {"do_center_crop": False}), ("llava", {"crop_size": {"height": 14, "width": 14}}),
    ("smolvlm", {"max_image_size": {"longest_edge": 35}}), ("llava_onevision", {"size": {"height": 20, "width": 20}}),
    ("qwen2_5_vl", {"patch_size": 8}), ("qwen2_5_vl", {"merge_size": 1}),
]  # fmt: skip


@pytest.mark.parametrize("family, change", WRONG)
def test_a_processor_that_does_not_fit_the_tower_ends_no_engine(
    family: str, change: dict[str, Any], tmp_path: Path
) -> None:
    config = tiny_vision.write(tmp_path, family) / "preprocessor_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with Engine(model_path=str(tmp_path), **OPTIONS) as engine:
        with pytest.raises(InvalidRequestError, match=r"image_data\[0\]: its processor makes pixels of"):
            ask(engine, ONE, picture(1, 100, 30))
        assert engine.generate(None, GREEDY, [5, 6])["output_ids"]


def test_a_model_for_text_takes_none() -> None:
    with Engine(model_path="box", device="cpu") as text, pytest.raises(InvalidRequestError, match="takes no images"):
        text.generate("hello", image_data=[picture(1)])


def test_what_is_not_built_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    model = ModelConfig(str(checkpoint), device="cpu", skip_tokenizer_init=True)
    config = EngineConfig(model=model, scheduler=SchedulerConfig(record=str(tmp_path / "steps.jsonl")))
    with pytest.raises(UnsupportedFeatureError, match="scheduler.record with a model that takes images"):
        Engine.from_config(config)


def test_new_weights_of_the_tower_count_for_images_that_were_encoded(checkpoint: Path, tmp_path: Path) -> None:
    other = tiny_vision.write(tmp_path, seed=1)
    with Engine(model_path=str(checkpoint), **OPTIONS) as engine, Engine(model_path=str(other), **OPTIONS) as fresh:
        before, want = bits(ask(engine, ONE, picture(1))), bits(ask(fresh, ONE, picture(1)))
        assert engine.update_weights_from_disk(str(other))[0]
        assert bits(ask(engine, ONE, picture(1))) == want != before
        assert engine.update_weights_from_disk(str(checkpoint))[0]
        assert bits(ask(engine, ONE, picture(1))) == before


def test_embeddings_of_prompts_with_images(checkpoint: Path) -> None:
    with Engine(model_path=str(checkpoint), is_embedding=True, **OPTIONS) as engine:
        one, two = engine.encode([ONE, TWO], image_data=[picture(1), [picture(1), picture(2)]])
        assert engine.encode(ONE, image_data=picture(1))["embedding"] == one["embedding"] != two["embedding"]
        assert engine.encode(ONE, image_data=picture(2))["embedding"] != one["embedding"]


def test_hidden_states_penalties_and_processors_go_beside_images(engine: Engine) -> None:
    asked = {"frequency_penalty": 0.7, "logit_bias": {"9": 2.0}} | GREEDY
    alone = [engine.generate(None, asked, ONE, image_data=picture(i), return_logprob=True) for i in range(3)]
    both = engine.generate(None, asked, [ONE] * 3, image_data=[picture(i) for i in range(3)], return_logprob=True)
    assert [bits(output) for output in both] == [bits(output) for output in alone]


def test_two_pictures_whose_placeholders_are_in_place(engine: Engine) -> None:
    ids = [id for token in TWO for id in ([token] * 16 if token == TOKEN else [token])]
    pictures = [picture(1), picture(2)]
    assert bits(ask(engine, ids, pictures)) == bits(ask(engine, TWO, pictures))
    with pytest.raises(InvalidRequestError, match="torn apart at position 17"):
        ask(engine, [TOKEN] * 16 + [9] + [TOKEN] * 8 + [9] + [TOKEN] * 8, pictures)


def test_pictures_are_told_apart_by_all_that_an_encoder_sees() -> None:
    arrays = [np.zeros((2, 3), np.float32), np.zeros((3, 2), np.float32), np.zeros((2, 3), np.int32), np.ones((2, 3))]
    told = [{name: array} for array in arrays for name in ("pixels", "grid")]
    assert len({_hash(one) for one in told}) == len(told)
    assert _hash({"a": arrays[0], "b": arrays[1]}) == _hash({"b": arrays[1], "a": arrays[0].copy()})


def test_line_ends_are_tokenized_together_behind_a_picture_alone() -> None:
    """Those of the text stay as they were given."""
    texts = {1: "\n", 2: "\n\n", 5: "x", 9: "<image>"}
    images = Images.__new__(Images)
    images.spec = cast(Any, SimpleNamespace(token=9, begin=8))
    images.family = cast(Any, SimpleNamespace(positions=None))
    images.tokenizer = SimpleNamespace(
        decode=lambda ids: "".join(texts[id] for id in ids),
        ids_of=lambda some, add_special_tokens: [[2] * (len(text) // 2) + [1] * (len(text) % 2) for text in some],
    )
    shown = Picture((Image(b"", 2, 1, {}),), (("", "\n"),))
    assert images.prompt([1, 8, 1, 5, 1, 1, 5], [shown]).ids == [1, 9, 9, 2, 5, 1, 1, 5]
    assert images.prompt([8, 2, 1, 5], [shown]).ids == [9, 9, 2, 2, 5]


def test_rows_and_positions_of_images_are_those_of_their_request_alone() -> None:
    """Its tokens see each other, and nothing behind; whoever has the slot next stands at its indices."""
    inputs: Any = ImageInputs.__new__(ImageInputs)
    inputs.row_P, inputs.pos_3P, inputs.last_P, inputs.delta, inputs.bidirectional = {}, {}, {}, np.zeros(2, int), True
    request = Request("r", 5, [1] * 5, SamplingParams(), 0, 1, frozenset(), row=1, placed=(Placed(1, [7, 8]),))
    request.rope = RopePositions(np.arange(15).reshape(3, 5), -2)
    inputs.admit(request)
    first = SchedulerOutput(0, rows=[1], starts=[0], counts=[5])
    found = inputs.fields(first, np.arange(5), np.ones(5, int))
    assert found["image_row_I"].tolist() == [-1, 7, 8, -1, -1] and found["last_key_J"].tolist() == [0, 2, 2, 3, 4]
    assert found["rope_pos_3I"].tolist() == np.arange(15).reshape(3, 5).tolist()
    behind = SchedulerOutput(1, rows=[1], starts=[5], counts=[1])
    positions = [inputs.fields(behind, np.array([5]), np.array([1]))["rope_pos_3I"].tolist()]
    inputs.release([1])
    positions.append(inputs.fields(behind, np.array([5]), np.array([1]))["rope_pos_3I"].tolist())
    assert positions == [[[3]] * 3, [[5]] * 3]


def test_what_cannot_be_read_is_named_by_its_place(engine: Engine) -> None:
    images: Any = engine._parts.images
    for given, index in (([picture(0), 5], 1), ([[picture(0)], [picture(1), picture(2), 5]], 2), (5, 0)):
        with pytest.raises(InvalidRequestError, match=rf"image_data\[{index}\]"):
            images.read_all(given)


def test_pixels_that_came_over_http_have_a_limit(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    images: Any = engine._parts.images
    held = images.read_all([picture(1)], inside=True)
    monkeypatch.setattr("fengine.multimodal.images.MOST", 3 * 28 * 28 * 4 + 1)
    with pytest.raises(QueueFullError, match="a quarter of this machine's memory"):
        images.read_all([picture(2)] * 2, inside=True)
    images.read_all([picture(2)] * 2)  # this process may do what it likes
    del held
    assert images.read_all([picture(2)], inside=True)
