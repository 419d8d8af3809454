"""The names, shapes and dtypes of a checkpoint against what its architecture declares, before anything is allocated."""

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fengine import models
from fengine.errors import CorruptCheckpointError, UnsupportedFormatError
from fengine.models.spec import ModelSpec
from fengine.models.weights import EMBEDDING, HEAD, Weight
from fengine.worker.safetensors_file import DTYPES, TensorEntry, read_shards

BARE_EMBEDDING = "embed_tokens.weight"
HARMLESS = (".rotary_emb.inv_freq",)  # a table that old checkpoints store; ours is computed


def read_entries(directory: Path, spec: ModelSpec) -> dict[str, TensorEntry]:
    """The tensors by our names, those of a decoder that was saved alone ("layers.0…") as inside a model.

    Errors: as `read_shards`.
    """
    entries, rename = read_shards(directory), partial(models.lookup(spec.architecture).rename, spec)
    entries = {new: entries[old]._replace(name=new) for old in entries if (new := rename(old))}
    if BARE_EMBEDDING not in entries or EMBEDDING in entries:
        return entries
    bare = ("embed_tokens.", "layers.", "norm.")
    names = {name: f"model.{name}" if name.startswith(bare) else name for name in entries}
    return {new: entries[old]._replace(name=new) for old, new in names.items()}


def listed(problems: list[str]) -> str:
    """The first of them, one a line. Pure."""
    shown = problems[:10] + [f"and {len(problems) - 10} more"] * (len(problems) > 10)
    return "\n  ".join(["", *shown])


def check_entries(
    directory: Path, spec: ModelSpec, weights: list[Weight], entries: dict[str, TensorEntry], mixed: bool
) -> list[Weight]:
    """Checks names, shapes and dtypes against the architecture; `mixed` allows matrices of several dtypes.

    Returns the weights to read: optional ones where they are stored. Errors: CorruptCheckpointError with every problem,
    UnsupportedFormatError.
    """
    needed = [weight for weight in weights if not weight.optional or weight.sources[0].name in entries]
    expected = {source.name: source.shape for weight in needed for source in weight.sources}
    problems = [f"tensor {n!r} of shape {list(s)} is missing" for n, s in expected.items() if n not in entries]
    if HEAD in expected.keys() - entries.keys():
        problems.append(f"without {HEAD!r} config.json should say tie_word_embeddings = true")
    if spec.tie_embeddings or not spec.generates:  # a head may be stored all the same
        expected[HEAD] = expected[EMBEDDING]
    problems += _foreign(sorted(entries.keys() - expected.keys()), spec)
    problems += _misshapen(expected, entries)
    problems += [] if mixed else _several_dtypes(needed, entries)
    if problems:
        raise CorruptCheckpointError(f"{directory} does not fit its config.json:{listed(problems)}")
    return needed


def _foreign(names: list[str], spec: ModelSpec) -> list[str]:
    drafts = tuple(f"model.layers.{spec.num_layers + index}." for index in range(spec.draft_layers))
    return [
        f"tensor {name!r} is not part of {spec.architecture} with this config.json"
        for name in names
        if not name.endswith(HARMLESS) and not name.startswith(drafts)
    ]


def _misshapen(expected: dict[str, tuple[int, ...]], entries: dict[str, TensorEntry]) -> list[str]:
    """Errors: UnsupportedFormatError for a dtype."""
    problems = []
    for entry in (entries[name] for name in expected if name in entries):
        name, wanted = entry.name, expected[entry.name]
        if entry.shape != wanted:
            problems.append(f"tensor {name!r}: expected shape {list(wanted)}, got {list(entry.shape)}")
        if entry.dtype not in DTYPES:
            known = ", ".join(DTYPES)
            raise UnsupportedFormatError(f"{entry.path}: tensor {name!r} is {entry.dtype}; supported: {known}.")
    return problems


def _several_dtypes(weights: list[Weight], entries: dict[str, TensorEntry]) -> list[str]:
    names = [source.name for weight in weights if weight.matrix for source in weight.sources]
    kinds = {entries[name].dtype: name for name in names if name in entries}
    if len(kinds) < 2:
        return []
    examples = ", ".join(f"{dtype} ({name})" for dtype, name in sorted(kinds.items()))
    return [f"matrices have several dtypes: {examples}; set model.dtype to convert them to one"]


def check_tied(head: Tensor, embedding: Tensor) -> None:
    """A stored output head of a tied model must be the embedding, or the two of them contradict each other."""
    if head.dtype != embedding.dtype or not torch.equal(head.view(torch.uint8), embedding.view(torch.uint8)):
        raise CorruptCheckpointError(
            f"config.json ties the embeddings, but {HEAD!r} is stored and differs from {EMBEDDING!r}; set "
            "tie_word_embeddings to false in config.json if the head is meant."
        )
