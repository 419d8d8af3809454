"""transformers' image processor of a checkpoint, in its form without torchvision."""

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fengine.errors import ModelLoadError


def load_processor(directory: Path) -> Any:
    """Errors: ModelLoadError."""
    from transformers import AutoImageProcessor  # half a second that models for text need not wait

    newer = find_spec("transformers.image_processing_backends") is not None
    how: dict[str, Any] = {"backend": "pil"} if newer else {"use_fast": False}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return AutoImageProcessor.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False, **how
            )
    except Exception as error:  # whatever its code raises over a file
        raise ModelLoadError(f"{directory} has no image processor: {str(error)[:500]}") from error
