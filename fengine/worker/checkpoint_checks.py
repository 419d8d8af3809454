"""The names, shapes and dtypes of a checkpoint against what its architecture declares, before anything is allocated."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fengine import models
from fengine.errors import CorruptCheckpointError, UnsupportedFormatError
from fengine.models.spec import ModelSpec
from fengine.models.weights import EMBEDDING, HEAD, Weight
from fengine.worker.quantized_weights import Part, module_of, parts_of, scheme_of, unread
from fengine.worker.safetensors_file import DTYPES, TensorEntry, read_shards

BARE_EMBEDDING = "embed_tokens.weight"
HARMLESS = ("_emb.inv_freq", ".position_ids")  # tables that old checkpoints store; ours are computed


def read_entries(directory: Path, spec: ModelSpec) -> dict[str, TensorEntry]:
    """The tensors by our names, those of a decoder that was saved alone ("layers.0…") as inside a model. Errors: as
    `read_shards`."""
    entries = renamed(read_shards(directory), partial(models.lookup(spec.architecture).rename, spec))
    if BARE_EMBEDDING not in entries or EMBEDDING in entries:
        return entries
    bare = ("embed_tokens.", "layers.", "norm.")
    return renamed(entries, lambda name: f"model.{name}" if name.startswith(bare) else name)


def renamed(entries: dict[str, TensorEntry], rename: Callable[[str], str]) -> dict[str, TensorEntry]:
    """The tensors by our names; those without one are left out. Errors: CorruptCheckpointError for two of one name."""
    found: dict[str, TensorEntry] = {}
    for entry in entries.values():
        if (name := rename(entry.name)) in found:
            raise CorruptCheckpointError(
                f"{entry.path}: tensors {found[name].stored!r} and {entry.stored!r} are the same"
            )
        if name:
            found[name] = entry._replace(name=name)
    return found


def listed(problems: list[str]) -> str:
    """The first of them, one a line. Pure."""
    shown = problems[:10] + [f"and {len(problems) - 10} more"] * (len(problems) > 10)
    return "\n  ".join(["", *shown])


def check_entries(
    directory: Path, spec: ModelSpec, weights: list[Weight], entries: dict[str, TensorEntry], mixed: bool
) -> list[Weight]:
    """Checks names, shapes and dtypes against the architecture; `mixed` allows matrices of several dtypes. Returns the
    weights to read: optional ones where they are stored. Errors: CorruptCheckpointError with every problem,
    UnsupportedFormatError."""
    needed = [weight for weight in weights if not weight.optional or weight.sources[0].name in entries]
    expected, few_bits = _expected(spec, needed, entries)
    problems = [
        f"tensor {name!r} of shape {list(part.shapes[0])} is missing"
        for name, part in expected.items()
        if name not in entries and not part.optional
    ]
    if HEAD in expected.keys() - entries.keys():
        problems.append(f"without {HEAD!r} config.json should say tie_word_embeddings = true")
    if spec.tie_embeddings or not spec.generates:  # a head may be stored all the same
        expected[HEAD] = expected[EMBEDDING]
    foreign = sorted(name for name in entries.keys() - expected.keys() if not unread(name, few_bits))
    problems += _foreign(foreign, spec)
    problems += misshapen(expected, entries)
    problems += [] if mixed else _several_dtypes(needed, entries, few_bits)
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


def _expected(
    spec: ModelSpec, weights: list[Weight], entries: dict[str, TensorEntry]
) -> tuple[dict[str, Part], set[str]]:
    """The tensors by name, and the modules whose matrices are stored in few bits."""
    expected: dict[str, Part] = {}
    few_bits = set()
    for weight in weights:
        for source in weight.sources:
            scheme = scheme_of(weight, source, spec.quantization, entries)
            if scheme is None:
                expected[source.name] = Part((source.shape,), tuple(DTYPES))
            else:
                expected |= parts_of(source, scheme)
                few_bits.add(module_of(source))
    return expected, few_bits


def misshapen(expected: dict[str, Part], entries: dict[str, TensorEntry]) -> list[str]:
    """Errors: UnsupportedFormatError for a dtype."""
    problems = []
    for entry in (entries[name] for name in expected if name in entries):
        name, wanted = entry.name, expected[entry.name]
        if entry.shape not in wanted.shapes:
            shapes = " or ".join(str(list(shape)) for shape in wanted.shapes)
            problems.append(f"tensor {name!r}: expected shape {shapes}, got {list(entry.shape)}")
        if entry.dtype not in wanted.dtypes:
            known = ", ".join(wanted.dtypes)
            raise UnsupportedFormatError(f"{entry.path}: tensor {name!r} is {entry.dtype}; supported: {known}.")
    return problems


def _several_dtypes(weights: list[Weight], entries: dict[str, TensorEntry], few_bits: set[str]) -> list[str]:
    sources = [source for weight in weights if weight.matrix for source in weight.sources]
    names = [source.name for source in sources if module_of(source) not in few_bits]
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
