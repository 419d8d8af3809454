"""Every family that takes images against transformers in fp32: features, positions, logprobs and greedy ids."""

import copy
import json
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny_vision
import torch
from safetensors.torch import load_file, save_file
from tiny_vision import TOKEN, in_place, picture
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.llava_onevision import modeling_llava_onevision
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from fengine import Engine
from fengine.errors import FengineError, ModelLoadError, UnsupportedArchitectureError
from fengine.models import lookup, vision_onevision
from fengine.models.spec import VisionSpec
from fengine.models.vision_idefics import pieces
from fengine.worker.loader import load_params, spec_from_config
from fengine.worker.safetensors_file import read_config

TOLERANCE = 1e-4
SIZES = [(40, 30), (33, 64), (8, 8), (100, 7), (48, 48)]  # wide, tall, small: windows that are cut off


class Case(NamedTuple):
    engine: Engine
    reference: Any
    processor: Any


@pytest.fixture(scope="module", params=tiny_vision.FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    directory: Path = tiny_vision.write(tmp_path_factory.mktemp(request.param), request.param)
    processor = tiny_vision.FAMILIES[request.param][1]()
    reference = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    with Engine(model_path=str(directory), device="cpu", skip_tokenizer_init=True) as engine:
        yield Case(engine, reference, processor)


@torch.no_grad()
def test_features_are_those_of_transformers(case: Case) -> None:
    parts = case.engine._parts
    family = lookup(parts.spec.architecture).vision
    assert family is not None
    for seed, size in enumerate(SIZES):
        tiles, found = parts.images.read(picture(seed, *size))[0].pieces, list[torch.Tensor]()
        for piece in tiles:
            arrays = {name: torch.from_numpy(array) for name, array in piece.arrays.items()}
            found.append(family.encode(parts.weights.params["vision"], parts.spec.vision, arrays))
        assert [piece.tokens for piece in tiles] == [len(part) for part in found]
        features = dict(case.processor([picture(seed, *size)], return_tensors="pt"))
        output = case.reference.get_image_features(**features)
        own = torch.cat([part.view(-1, part.shape[-1]) for part in output.pooler_output])
        wanted = torch.cat([own, *(part[0] for part in getattr(output, "deepstack_features", []))], 1)
        assert torch.cat(found).shape == wanted.shape
        assert (torch.cat(found) - wanted).abs().max() < TOLERANCE


def test_logprobs_and_greedy_ids_are_those_of_transformers(case: Case) -> None:
    """Prompts of several pictures, and words between them and behind them."""
    pictures = [picture(seed, *size) for seed, size in enumerate(SIZES)]
    for given in ([0], [1, 2], [3, 4, 0]):
        chosen = [pictures[i] for i in given]
        prompt = [5] + [id for i in given for id in (122, TOKEN, 123, 20 + i)] + [9, 10]
        ids = in_place(case.engine, prompt, chosen)
        texts = [text for one in case.engine._parts.images.read(chosen) for text in one.texts]
        prompt = prompt if texts == [("", "")] * len(chosen) else ids  # there is no tokenizer
        output = case.engine.generate(
            None, {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True}, prompt, image_data=chosen,
            return_logprob=True, logprob_start_len=0,
        )  # fmt: skip
        drawn, scores = output["output_ids"], output["meta_info"]
        assert scores["prompt_tokens"] == len(ids)
        logprobs = reference_logprobs(case, ids + drawn, chosen)
        got = scores["input_token_logprobs"][1:] + scores["output_token_logprobs"]
        for position, (logprob, token, _) in enumerate(got):
            assert abs(logprob - logprobs[position, token]) < TOLERANCE, (given, position)
        assert drawn == logprobs[len(ids) - 1 : -1].argmax(-1).tolist()


@torch.no_grad()
def reference_logprobs(case: Case, ids: list[int], pictures: list[Any]) -> torch.Tensor:
    whole = torch.tensor([ids])
    features = dict(case.processor(pictures, return_tensors="pt"))
    if "image_grid_thw" in features:
        features["mm_token_type_ids"] = (whole == TOKEN).int()
    if features.pop("num_crops", None) is not None:  # Gemma's: its images' tokens see each other
        features["token_type_ids"] = (whole == TOKEN).int()
    return case.reference(input_ids=whole, **features).logits[0].log_softmax(-1)


LAYOUTS: list[dict[str, Any]] = [
    {"chunked_prefill_size": 7, "max_running_requests": 3},
    {"max_total_tokens": 120, "page_size": 4, "disable_radix_cache": True},
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_are_the_requests_own(case: Case, layout: dict[str, Any]) -> None:
    """Alone; then together, in chunks that end inside of images, preempted, and over pages that others computed."""
    pictures = [picture(seed, *size) for seed, size in enumerate(SIZES)]
    prompts = [[5, 122, TOKEN, 123, 9], [*range(20, 30), TOKEN, 7, TOKEN, 8], [6, 7, 8], [TOKEN, 11], [TOKEN, 4, TOKEN]]
    images = [pictures[0], [pictures[1], pictures[0]], None, pictures[3], [pictures[2], pictures[1]]]

    def bits(engine: Engine, ids: Any, given: Any) -> list[Any]:
        sampling = {"max_new_tokens": 32, "temperature": 0.8, "sampling_seed": 3, "ignore_eos": True}
        several = isinstance(ids[0], list)
        chats = zip(ids, given, strict=True) if several else [(ids, given)]
        whole = [in_place(engine, one, [] if own is None else own) for one, own in chats]
        found = engine.generate(
            None, sampling, whole if several else whole[0], image_data=given, return_logprob=True
        )  # fmt: skip
        found = found if isinstance(found, list) else [found]
        return [(o["output_ids"], [row[0] for row in o["meta_info"]["output_token_logprobs"]]) for o in found]

    alone = [bits(case.engine, ids, given)[0] for ids, given in zip(prompts, images, strict=True)]
    path = case.engine.server_args.model_path
    with Engine(model_path=path, device="cpu", skip_tokenizer_init=True, **layout) as other:
        assert bits(other, prompts, images) == alone
        assert bits(other, prompts[::-1], images[::-1]) == alone[::-1]
        assert "page_size" not in layout or other.stats()["preemptions"] > 0


def test_tiles_stand_behind_their_names() -> None:
    """The text around the pieces of a picture is that of transformers' processor."""
    processor = tiny_vision.FAMILIES["smolvlm"][1]()
    vision = VisionSpec(TOKEN, 48, 80, 3, 3, 7, 1e-5, "gelu", image_size=28, merge=2)
    for seed, size in enumerate(SIZES):
        features = processor([picture(seed, *size)], return_tensors="np", return_row_col_info=True)
        found = pieces(vision, features)
        told = "".join(piece.before + "<image>" * piece.tokens + piece.after for piece in found)
        rows, columns = (int(features[name][0][0]) for name in ("rows", "cols"))
        fake, whole = "<fake_token_around_image>", "<global-img>"
        assert told == get_image_prompt_string(rows, columns, 4, fake, "<image>", whole)


@pytest.mark.parametrize(
    "text", ["<start_of_image>", "a\n<start_of_image>b", "a\n\n<start_of_image>\nb<start_of_image>\n"]
)
def test_line_ends_around_an_image_are_tokenized_as_those_of_a_text(text: str, tmp_path: Path) -> None:
    """transformers' processor of Gemma 3 puts a text around an image before it tokenizes."""
    directory = tiny_vision.write_with_text(tmp_path, "gemma3")
    own = AutoTokenizer.from_pretrained(directory)
    count, around = text.count("<start_of_image>"), "\n\n<start_of_image>" + 4 * "<image>" + "<end_of_image>\n\n"
    with Engine(model_path=str(directory), device="cpu") as engine:
        images = engine._parts.images
        pictures = images.read([picture(i) for i in range(count)])
        wanted = own(text.replace("<start_of_image>", around))["input_ids"]
        assert images.prompt(own(text)["input_ids"], pictures).ids == wanted
        assert images.prompt(wanted, pictures).ids == wanted
        parts = [{"type": "image", "image": picture(0)}, {"type": "text", "text": "what?"}]
        asked = engine.chat([{"role": "user", "content": parts}], {"max_new_tokens": 1})["meta_info"]["prompt_tokens"]
        assert asked == len(own(f"user: {around}what?\nassistant: ")["input_ids"])  # the template writes no <s>


HUB: dict[str, dict[str, Any]] = {  # as the checkpoints that people use have them
    "llava-1.5-7b": {
        "architectures": ["LlavaForConditionalGeneration"], "ignore_index": -100, "image_token_index": 32000,
        "model_type": "llava", "pad_token_id": 32001, "projector_hidden_act": "gelu", "torch_dtype": "float16",
        "text_config": {"_name_or_path": "lmsys/vicuna-7b-v1.5", "architectures": ["LlamaForCausalLM"],
                        "max_position_embeddings": 4096, "model_type": "llama", "rms_norm_eps": 1e-05,
                        "torch_dtype": "float16", "vocab_size": 32064},
        "tie_word_embeddings": False, "transformers_version": "4.36.0.dev0",
        "vision_config": {"hidden_size": 1024, "image_size": 336, "intermediate_size": 4096,
                          "model_type": "clip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 24,
                          "patch_size": 14, "projection_dim": 768, "vocab_size": 32000},
        "vision_feature_layer": -2, "vision_feature_select_strategy": "default", "vocab_size": 32064,
    },
    "gemma-3-4b": {
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
        "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                        "sliding_window": 1024},
        "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
        "vision_config": {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
                          "model_type": "siglip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 27,
                          "patch_size": 14, "vision_use_head": False},
    },
    "internvl3-1b": {
        "architectures": ["InternVLForConditionalGeneration"], "downsample_ratio": 0.5, "image_seq_length": 256,
        "image_token_id": 151667, "model_type": "internvl", "projector_hidden_act": "gelu",
        "text_config": {"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
                        "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
                        "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 70,
                        "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24,
                        "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
                        "rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"},
                        "rope_theta": 1000000.0, "sliding_window": None, "torch_dtype": "bfloat16", "use_cache": True,
                        "use_sliding_window": False, "vocab_size": 151674},
        "torch_dtype": "bfloat16", "transformers_version": "4.52.0.dev0",
        "vision_config": {"architectures": ["InternVisionModel"], "attention_bias": True, "attention_dropout": 0.0,
                          "dropout": 0.0, "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "hidden_size": 1024,
                          "image_size": [448, 448], "initializer_factor": 0.1, "initializer_range": 1e-10,
                          "intermediate_size": 4096, "layer_norm_eps": 1e-06, "layer_scale_init_value": 0.1,
                          "model_type": "internvl_vision", "norm_type": "layer_norm", "num_attention_heads": 16,
                          "num_channels": 3, "num_hidden_layers": 24, "patch_size": [14, 14],
                          "projection_dropout": 0.0, "torch_dtype": "bfloat16",
                          "use_absolute_position_embeddings": True, "use_mask_token": False, "use_mean_pooling": True,
                          "use_qk_norm": False},
        "vision_feature_layer": -1, "vision_feature_select_strategy": "default",
    },
    "qwen2.5-vl-7b": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151645, "vision_start_token_id": 151652, "vision_end_token_id": 151653,
        "vision_token_id": 151654, "image_token_id": 151655, "video_token_id": 151656, "hidden_act": "silu",
        "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944, "max_position_embeddings": 128000,
        "max_window_layers": 28, "model_type": "qwen2_5_vl", "num_attention_heads": 28, "num_hidden_layers": 28,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False,
        "vision_config": {"depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420,
                          "num_heads": 16, "in_chans": 3, "out_hidden_size": 3584, "patch_size": 14,
                          "spatial_merge_size": 2, "spatial_patch_size": 14, "window_size": 112,
                          "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "temporal_patch_size": 2},
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vocab_size": 152064,
    },
    "llava-onevision-0.5b": {
        "architectures": ["LlavaOnevisionForConditionalGeneration"], "ignore_index": -100, "image_token_index": 151646,
        "image_grid_pinpoints": [[384, 384], [384, 768], [768, 384], [768, 768]], "model_type": "llava_onevision",
        "projector_hidden_act": "gelu", "tie_word_embeddings": False, "torch_dtype": "float16",
        "text_config": {"_name_or_path": "Qwen/Qwen2-0.5B-Instruct", "architectures": ["Qwen2ForCausalLM"],
                        "bos_token_id": 151643, "eos_token_id": 151645, "hidden_size": 896, "intermediate_size": 4864,
                        "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14,
                        "num_hidden_layers": 24, "num_key_value_heads": 2, "rope_theta": 1000000.0,
                        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_sliding_window": False,
                        "vocab_size": 152000},
        "use_image_newline_parameter": True, "video_token_index": 151647, "vision_aspect_ratio": "anyres_max_9",
        "vision_config": {"hidden_size": 1152, "image_size": 384, "intermediate_size": 4304,
                          "model_type": "siglip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 26,
                          "patch_size": 14, "vision_use_head": False},
        "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
    },
    "smolvlm-256m": {
        "architectures": ["Idefics3ForConditionalGeneration"], "image_token_id": 49190, "model_type": "idefics3",
        "scale_factor": 4, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
        "text_config": {"_flash_attn_2_enabled": True, "_name_or_path": "None", "architectures": ["VLlama3ForCausalLM"],
                        "head_dim": 64, "hidden_size": 576, "intermediate_size": 1536, "is_llama_config": True,
                        "max_position_embeddings": 8192, "model_type": "llama", "num_attention_heads": 9,
                        "num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2,
                        "perceiver_config": {"hidden_act": "silu", "model_type": "vllama3"},
                        "pixel_shuffle_factor": 4, "qk_layer_norms": False, "rms_norm_eps": 1e-05,
                        "rope_interleaved": False, "rope_theta": 100000, "torch_dtype": "bfloat16",
                        "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}, "use_resampler": False,
                        "vocab_size": 49280},
        "vision_config": {"hidden_size": 768, "image_size": 512, "max_image_size": {"longest_edge": 512},
                          "model_type": "idefics3", "num_attention_heads": 12, "patch_size": 16,
                          "size": {"longest_edge": 2048}, "tie_word_embeddings": False},
        "vocab_size": 49280,
    },
    "qwen3-vl-4b": {
        "architectures": ["Qwen3VLForConditionalGeneration"], "image_token_id": 151655, "model_type": "qwen3_vl",
        "text_config": {"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "dtype": "bfloat16",
                        "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560,
                        "initializer_range": 0.02, "intermediate_size": 9728, "max_position_embeddings": 262144,
                        "model_type": "qwen3_vl_text", "num_attention_heads": 32, "num_hidden_layers": 36,
                        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_theta": 5000000,
                        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20],
                                         "rope_type": "default"},
                        "tie_word_embeddings": True, "use_cache": True, "vocab_size": 151936},
        "tie_word_embeddings": True, "video_token_id": 151656, "vision_end_token_id": 151653,
        "vision_config": {"deepstack_visual_indexes": [5, 11, 17], "depth": 24, "hidden_act": "gelu_pytorch_tanh",
                          "hidden_size": 1024, "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 4096,
                          "model_type": "qwen3_vl", "num_heads": 16, "num_position_embeddings": 2304,
                          "out_hidden_size": 2560, "patch_size": 16, "spatial_merge_size": 2,
                          "temporal_patch_size": 2},
        "vision_start_token_id": 151652,
    },
}  # fmt: skip


def test_images_are_cut_as_transformers_cuts_them() -> None:
    """Of the hub's grid and of sizes at random: the tiles, and what of their patches is no padding."""
    grid = [[height, width] for height in range(384, 2305, 384) for width in range(384, 2305, 384)]
    vision = spec_from_config(HUB["llava-onevision-0.5b"] | {"image_grid_pinpoints": grid}).vision
    assert isinstance(vision, vision_onevision.OneVision)
    draw = random.Random(0)
    for _ in range(300):
        height, width = (int(2 ** draw.uniform(1, 12)) for _ in "hw")
        found = vision_onevision.cut(vision, height, width)
        assert found.tiles == modeling_llava_onevision.get_anyres_image_grid_shape((height, width), grid, 384)
        patches = torch.arange(27 * 27 * found.tiles[0] * found.tiles[1]).view(1, 27 * found.tiles[0], -1)
        unpadded = modeling_llava_onevision.unpad_image(patches, (height, width))
        assert unpadded.equal(patches[:, found.rows, found.columns])


@pytest.mark.parametrize("name", HUB)
def test_configs_of_the_hub_are_read(name: str) -> None:
    spec = spec_from_config(HUB[name])
    assert spec.vision is not None and spec.max_position >= 4096
    assert len(spec.rope_sections) in (0, spec.head_dim // 2)
    assert spec.tie_embeddings == (name in ("gemma-3-4b", "qwen3-vl-4b", "llava-onevision-0.5b"))


@pytest.mark.parametrize("family", ["gemma3", "smolvlm"])
def test_a_table_of_positions_beside_the_weights_is_not_read(family: str, tmp_path: Path) -> None:
    path = tiny_vision.write(tmp_path, family) / "model.safetensors"
    name = {"gemma3": "vision_tower.vision_model", "smolvlm": "model.vision_model"}[family] + ".embeddings.position_ids"
    save_file(load_file(path) | {name: torch.arange(16)[None]}, path, {"format": "pt"})
    assert load_params(tmp_path, spec_from_config(read_config(tmp_path)))


@pytest.mark.parametrize("name", HUB)
def test_absent_keys_are_those_of_transformers(name: str) -> None:
    config = copy.deepcopy(HUB[name])
    text, vision = config.get("text_config", config), config["vision_config"]
    for key in ("rms_norm_eps", "rope_theta"):
        text.pop(key, None)
    if vision.get("model_type") == "siglip_vision_model":
        vision.pop("num_attention_heads")
    spec, theirs = spec_from_config(config), AutoConfig.for_model(**copy.deepcopy(config))
    rope = theirs.text_config.rope_parameters
    assert spec.rope.theta == rope.get("full_attention", rope)["rope_theta"]
    assert spec.rms_eps == theirs.text_config.rms_norm_eps
    heads = "num_heads" if "num_heads" in vision else "num_attention_heads"
    assert spec.vision is not None and spec.vision.num_heads == getattr(theirs.vision_config, heads)


@pytest.mark.parametrize("name", [name for name in HUB if "text_config" in HUB[name]])
@pytest.mark.parametrize(("whole", "text"), [(True, False), (False, True)])
def test_which_config_ties_the_head(name: str, whole: bool, text: bool) -> None:
    config = copy.deepcopy(HUB[name]) | {"tie_word_embeddings": whole}
    config["text_config"]["tie_word_embeddings"] = text
    theirs = AutoConfig.for_model(**copy.deepcopy(config))
    assert spec_from_config(config).tie_embeddings == theirs.tie_word_embeddings


@pytest.mark.parametrize("name", ["llava-1.5-7b", "llava-onevision-0.5b"])
def test_the_newer_name_of_the_image_token_counts(name: str) -> None:
    config = HUB[name] | {"image_token_index": 7, "image_token_id": 8}
    vision = spec_from_config(config).vision
    assert vision is not None and vision.token == AutoConfig.for_model(**copy.deepcopy(config)).image_token_id == 8


@pytest.mark.parametrize("name", HUB)
@pytest.mark.parametrize("part", ["", "text_config", "vision_config"])
def test_a_key_that_is_not_known_is_refused(name: str, part: str) -> None:
    config = copy.deepcopy(HUB[name])
    (config[part] if part in config else config)["surprise"] = 1
    with pytest.raises(UnsupportedArchitectureError, match="surprise = 1"):
        spec_from_config(config)


@pytest.mark.parametrize("name", HUB)
def test_a_value_of_another_type_is_never_a_bare_error(name: str) -> None:
    for part in ("", *(key for key in ("text_config", "vision_config") if key in HUB[name])):
        for key in HUB[name][part] if part else HUB[name]:
            for value in ("no", [1.5], {"a": 1}, -1, 1.5, True):
                config = copy.deepcopy(HUB[name])
                (config[part] if part else config)[key] = value
                with suppress(FengineError):
                    spec_from_config(config)


@pytest.mark.parametrize(
    ("name", "part", "key", "value"),
    [
        ("llava", "", "tie_word_embeddings", "no"), ("llava", "vision_config", "hidden_act", ["gelu"]),
        ("qwen2_5_vl", "vision_config", "fullatt_block_indexes", "7"),
        ("qwen2_5_vl", "vision_config", "fullatt_block_indexes", [7, 99]),
        ("qwen3_vl", "vision_config", "deepstack_visual_indexes", [5, 5]),
        ("gemma3", "text_config", "final_logit_softcapping", 3.0),  # these are not read by transformers
        ("gemma3", "text_config", "use_bidirectional_attention", True),
        ("qwen3_vl", "text_config", "use_sliding_window", True),
        ("qwen3_vl", "", "rope_scaling", {"type": "yarn", "factor": 2.0}),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_told_with_its_key(name: str, part: str, key: str, value: object) -> None:
    config = copy.deepcopy(next(one for model, one in HUB.items() if one.get("model_type") == name))
    (config[part] if part else config)[key] = value
    with pytest.raises(FengineError, match=key):
        spec_from_config(config)


@pytest.mark.parametrize(
    "change, error",
    [
        ({"vision_config": None}, ModelLoadError),
        ({"image_token_id": 999_999, "image_token_index": 999_999}, ModelLoadError),
        ({"text_config": {"model_type": "mamba"}}, UnsupportedArchitectureError),
    ],
)
@pytest.mark.parametrize("name", HUB)
def test_what_is_not_built_is_refused(
    name: str, change: dict[str, Any], error: type[Exception], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HUB[name] | change))
    with pytest.raises(error):
        Engine(model_path=str(tmp_path), device="cpu", load_format="dummy", skip_tokenizer_init=True)
