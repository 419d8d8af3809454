"""What plugs into every engine of this package: tokenizer, LoRA adapters, speculation."""

from fengine.engine.workers import Features
from fengine.lora.adapters import open_adapters
from fengine.lora.shared import SharedAdapters
from fengine.multimodal.images import open_images
from fengine.speculative.proposers import speculation_of
from fengine.tokenizer.tokenizer import Tokenizer

FEATURES = Features(
    tokenizer=Tokenizer.from_directory,
    adapters=open_adapters,
    speculation=speculation_of,
    images=open_images,
    shared=SharedAdapters,
)
