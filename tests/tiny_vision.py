"""Tiny random checkpoints that take images, written by transformers itself, and pictures for them."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

TEXT = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 3, "image_size": 28, "patch_size": 7,
}  # fmt: skip
TOKEN = 120  # of images


def _llava(**more: Any) -> Any:
    text = TEXT | {"model_type": "llama"} | more.pop("text_config", {})
    config = transformers.LlavaConfig(vision_config=CLIP, text_config=text, image_token_index=TOKEN, **more)
    return transformers.LlavaForConditionalGeneration(config)


def _clip_processor() -> Any:
    side = {"height": 28, "width": 28}
    return transformers.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=side)


FAMILIES: dict[str, tuple[Any, Any]] = {"llava": (_llava, _clip_processor)}


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


def picture(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    """Coarse random colours, so that resizing leaves them apart."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR)
