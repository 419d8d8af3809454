"""Tiny random checkpoints that take images, written by transformers itself, and pictures for them."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TEXT = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 3, "image_size": 28, "patch_size": 7,
}  # fmt: skip
TOKEN = 120  # of images
GRID = [[30, 30], [30, 60], [60, 30], [60, 60], [30, 90]]


def _llava(**more: Any) -> Any:
    text = TEXT | {"model_type": "llama"} | more.pop("text_config", {})
    config = transformers.LlavaConfig(vision_config=CLIP, text_config=text, **{"image_token_index": TOKEN} | more)
    return transformers.LlavaForConditionalGeneration(config)


def _llava_onevision(**more: Any) -> Any:
    """A tile has two pixels that no patch reads; an image keeps as many patches as one tile has."""
    vision = CLIP | {"model_type": "siglip_vision_model", "vision_use_head": False, "image_size": 30}
    config = transformers.LlavaOnevisionConfig(
        vision_config=vision, text_config=TEXT | {"model_type": "qwen2"}, image_token_index=TOKEN,
        image_grid_pinpoints=GRID, vision_aspect_ratio="anyres_max_1", **more
    )  # fmt: skip
    return transformers.LlavaOnevisionForConditionalGeneration(config)


def _grid_processor() -> Any:
    return transformers.LlavaOnevisionImageProcessorPil(size={"height": 30, "width": 30}, image_grid_pinpoints=GRID)


def _clip_processor() -> Any:
    side = {"height": 28, "width": 28}
    return transformers.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=side)


VISION = {
    "depth": 3, "hidden_size": 48, "intermediate_size": 70, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 64,
}  # fmt: skip
QWEN_TOKENS = {"image_token_id": TOKEN, "video_token_id": 121, "vision_start_token_id": 122, "vision_end_token_id": 123}


def _qwen2_5_vl(**more: Any) -> Any:
    axes = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    text = TEXT | {"rope_parameters": axes} | more.pop("text_config", {})
    vision = VISION | {"window_size": 16, "fullatt_block_indexes": [1]} | more.pop("vision_config", {})
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **QWEN_TOKENS, **more)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def _qwen3_vl(**more: Any) -> Any:
    axes = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    text = TEXT | {"head_dim": 16, "rope_parameters": axes, "num_hidden_layers": 3}
    vision = VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2]}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **QWEN_TOKENS, **more)
    return transformers.Qwen3VLForConditionalGeneration(config)


def _qwen_processor() -> Any:
    return transformers.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, size={"shortest_edge": 8 * 8, "longest_edge": 48 * 48}
    )


def _smolvlm(**more: Any) -> Any:
    vision = CLIP | {"model_type": "smolvlm_vision"}
    config = transformers.SmolVLMConfig(
        text_config=TEXT | {"model_type": "llama"}, vision_config=vision, image_token_id=TOKEN, scale_factor=2, **more
    )
    return transformers.SmolVLMForConditionalGeneration(config)


def _idefics3(**more: Any) -> Any:
    vision = CLIP | {"model_type": "idefics3_vision"}
    config = transformers.Idefics3Config(
        text_config=TEXT | {"model_type": "llama"}, vision_config=vision, image_token_id=TOKEN, scale_factor=2, **more
    )
    return transformers.Idefics3ForConditionalGeneration(config)


def _tile_processor() -> Any:
    return transformers.SmolVLMImageProcessorPil(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})


def _internvl(**more: Any) -> Any:
    vision = CLIP | {"model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [7, 7]}
    vision |= {"attention_bias": True, "intermediate_size": 80, "hidden_act": "gelu"}
    config = transformers.InternVLConfig(
        text_config=TEXT | {"model_type": "qwen2"}, vision_config=vision, image_token_id=TOKEN, **more
    )
    return transformers.InternVLForConditionalGeneration(config)


def _crop_processor() -> Any:
    return transformers.GotOcr2ImageProcessorPil(
        size={"height": 28, "width": 28}, crop_to_patches=True, min_patches=1, max_patches=4
    )


def _gemma3(**more: Any) -> Any:
    """Two tokens of a side of an image; a window that does not reach over one."""
    vision = CLIP | {"model_type": "siglip_vision_model", "vision_use_head": False}
    text = TEXT | {"model_type": "gemma3_text", "head_dim": 16} | more.pop("text_config", {})
    tokens = {"image_token_index": TOKEN, "boi_token_index": 122, "eoi_token_index": 123} | more
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3, "query_pre_attn_scalar": 16}
    config = transformers.Gemma3Config(
        text_config=text | layers, vision_config=vision, mm_tokens_per_image=4, **tokens
    )  # fmt: skip
    return transformers.Gemma3ForConditionalGeneration(config)


def _gemma_processor() -> Any:
    return transformers.Gemma3ImageProcessorPil(size={"height": 28, "width": 28}, do_pan_and_scan=False)


FAMILIES: dict[str, tuple[Any, Any]] = {
    "llava": (_llava, _clip_processor),
    "llava_onevision": (_llava_onevision, _grid_processor),
    "qwen2_5_vl": (_qwen2_5_vl, _qwen_processor),
    "qwen3_vl": (_qwen3_vl, _qwen_processor),
    "smolvlm": (_smolvlm, _tile_processor),
    "idefics3": (_idefics3, _tile_processor),
    "internvl": (_internvl, _crop_processor),
    "gemma3": (_gemma3, _gemma_processor),
}


def write(directory: Path, family: str = "llava", seed: int = 0, **overrides: Any) -> Path:
    """Every weight is random, sharper than a fresh model's, so that logits depend on pictures."""
    make, processor = FAMILIES[family]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make(**overrides)
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0.0, 1.5 * parameter[0].numel() ** -0.5)
            elif "norm" in name and not name.endswith("bias"):
                parameter.data.normal_(1.0, 0.3)
            else:
                parameter.data.normal_(0.0, 0.3)
    model.save_pretrained(directory)
    processor().save_pretrained(directory)
    return directory


CHAT = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}<image>{{ '\n' }}{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_with_text(directory: Path, family: str = "llava") -> Path:
    """A LLaVA or Gemma whose tokens are bytes, up to three line ends, and special ones; with a chat template."""
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ", "ĊĊĊ"]
    vocabulary = {letter: i for i, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("Ċ", "Ċ"), ("ĊĊ", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<image>", "<start_of_image>", "<end_of_image>"])
    text = {"vocab_size": 263, "bos_token_id": 258, "eos_token_id": 259}
    own = {} if family == "llava" else {"boi_token_index": 261, "eoi_token_index": 262}
    write(directory, family, text_config=text, image_token_index=260, **own)
    chat = CHAT if family == "llava" else CHAT.replace("<image>{{ '\n' }}", "<start_of_image>")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=chat
    ).save_pretrained(directory)
    return directory


def picture(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    """Coarse random colours, so that resizing leaves them apart."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR)


def in_place(engine: Any, prompt: list[int], pictures: list[Any]) -> list[int]:
    """The prompt with every placeholder; a word stands in front of each further piece of a picture."""
    ids, left = list[int](), iter(engine._parts.images.read(pictures))
    for id in prompt:
        pieces = next(left).pieces if id == TOKEN else ()
        for i, piece in enumerate(pieces):
            ids += [30 + i] * (i > 0) + [TOKEN] * piece.tokens
        ids += [] if id == TOKEN else [id]
    return ids
