"""The names, shapes and dtypes of a checkpoint against what its architecture declares, before anything is allocated."""

from pathlib import Path

import torch
from torch import Tensor

from fengine.errors import CorruptCheckpointError, UnsupportedFormatError
from fengine.models.spec import ModelSpec
from fengine.models.weights import EMBEDDING, HEAD, Weight
from fengine.worker.safetensors_file import DTYPES, TensorEntry

BARE_EMBEDDING = "embed_tokens.weight"
HARMLESS = (".rotary_emb.inv_freq",)  # a table that old checkpoints store; ours is computed


def full_names(entries: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The tensors of a decoder that was saved alone ("layers.0…") under the names it has inside a model. Pure."""
    if BARE_EMBEDDING not in entries or EMBEDDING in entries:
        return entries
    bare = ("embed_tokens.", "layers.", "norm.")
    names = {name: f"model.{name}" if name.startswith(bare) else name for name in entries}
    return {new: entries[old]._replace(name=new) for old, new in names.items()}


def check_entries(
    directory: Path, spec: ModelSpec, weights: list[Weight], entries: dict[str, TensorEntry], mixed: bool
) -> None:
    """Names, shapes and dtypes against the architecture. `mixed` allows matrices of several dtypes."""
    needed = [weight for weight in weights if not weight.optional or weight.sources[0].name in entries]
    expected = {source.name: source.shape for weight in needed for source in weight.sources}
    spare_head = spec.tie_embeddings or not spec.generates
    allowed = expected | ({HEAD: expected[EMBEDDING]} if spare_head else {})
    absent = [name for name in expected if name not in entries]
    problems = [f"tensor {name!r} of shape {list(expected[name])} is missing" for name in absent]
    if HEAD in absent:
        problems.append(f"without {HEAD!r} config.json should say tie_word_embeddings = true")
    for name in sorted(entries.keys() - allowed.keys()):
        if not name.endswith(HARMLESS):
            problems.append(f"tensor {name!r} is not part of {spec.architecture} with this config.json")
    used = [entries[name] for name in allowed if name in entries]
    for entry in used:
        if entry.shape != allowed[entry.name]:
            wanted = list(allowed[entry.name])
            problems.append(f"tensor {entry.name!r}: expected shape {wanted}, got {list(entry.shape)}")
        if entry.dtype not in DTYPES:
            raise UnsupportedFormatError(
                f"{entry.path}: tensor {entry.name!r} is {entry.dtype}; supported: {', '.join(DTYPES)}."
            )
    matrices = {source.name for weight in needed if weight.matrix for source in weight.sources}
    kinds = {entry.dtype: entry.name for entry in used if entry.name in matrices}
    if len(kinds) > 1 and not mixed:
        examples = ", ".join(f"{dtype} ({name})" for dtype, name in sorted(kinds.items()))
        problems.append(f"matrices have several dtypes: {examples}; set model.dtype to convert them to one")
    if problems:
        shown = problems[:10] + [f"and {len(problems) - 10} more"] * (len(problems) > 10)
        raise CorruptCheckpointError(f"{directory} does not fit its config.json:\n  " + "\n  ".join(shown))


def check_tied(head: Tensor, embedding: Tensor) -> None:
    """A stored output head of a tied model must be the embedding, or the two of them contradict each other."""
    if head.dtype != embedding.dtype or not torch.equal(head.view(torch.uint8), embedding.view(torch.uint8)):
        raise CorruptCheckpointError(
            f"config.json ties the embeddings, but {HEAD!r} is stored and differs from {EMBEDDING!r}; set "
            "tie_word_embeddings to false in config.json if the head is meant."
        )
