"""What a harness writes down about the engine behind its results."""

import hashlib
import math
from typing import Any

from fengine import __version__
from fengine.api.engine import Engine
from fengine.eval.runs.digests import canonical, code_digest, file_digests
from fengine.eval.runs.manifest import in_force


def engine_facts(engine: Engine) -> dict[str, Any]:
    """Under lm-eval's names: size, dtype, revision and a digest of the weights' files; and what else bits depend on.

    Reads the checkpoint's files once; their digests are kept. Errors: StorageError.
    """
    parts = engine._parts
    digests = file_digests(parts.model_dir)
    weights = {name: digest for name, digest in digests.items() if name.endswith(".safetensors")}
    places = parts.weights.places.values()
    return {
        "model_num_parameters": sum(math.prod(place.shape) for place in places),
        "model_dtype": ", ".join(sorted({str(place.leaf.dtype) for place in places})),
        "model_revision": engine.server_args.revision or "",
        "model_sha": canonical(weights),
        "fengine": {
            "version": __version__,
            "code_sha256": code_digest(),
            "model_files": digests,
            "weight_version": parts.weights.version,
            **in_force(engine.config, int(engine.get_server_info()["max_req_input_len"])),
        },
    }


def template_digest(template: str | None) -> str:
    """The first digits of a chat template's SHA-256. Pure."""
    return "none" if template is None else hashlib.sha256(template.encode()).hexdigest()[:12]
