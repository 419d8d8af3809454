"""How an embedding model's hidden states become one vector: what the checkpoint says, and the arithmetic.

    vector = pool(hidden states of the prompt);  dense layers;  vector[:dimensions];  vector / |vector|

sentence-transformers describes it by `modules.json` (a list of modules, each with a folder) and the modules'
`config.json`. A checkpoint without them is pooled as SGLang does: the last token, normalised. What is done to a text
before it is tokenized stands in `sentence_bert_config.json` and `config_sentence_transformers.json`."""

import math
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch

from fengine.errors import InvalidRequestError, ModelLoadError, UnsupportedFeatureError
from fengine.models.kv_state import Params
from fengine.models.modernbert import EPS as HEAD_EPS
from fengine.ops.activations import activate
from fengine.ops.layer_norm import layer_norm
from fengine.ops.linear import linear
from fengine.worker.pools import pools_of
from fengine.worker.safetensors_file import SINGLE, read_header, read_json, reading

FLAGS = {  # pooling_mode_*, the older spelling, and the word for it, in the order in which several are joined
    "cls_token": "cls", "max_tokens": "max", "mean_tokens": "mean", "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean_tokens": "weightedmean", "lasttoken": "lasttoken",
}  # fmt: skip
CROSS = "a cross-encoder's sentence_bert_config.json"
MODULES, ACTIVATIONS = ("Transformer", "Pooling", "Dense", "Normalize"), ("Identity", "Tanh")  # the latter of Dense
# The keys of each file, read or without effect: names and versions; the similarity that nobody asks for here, and what
# is made of a score, which comes as it is; and, of the Transformer module, the ways to run a text model.
KEYS = {
    "modules.json": "idx name path type",
    "the Pooling module's config.json": "word_embedding_dimension embedding_dimension pooling_mode include_prompt",
    "a Dense module's config.json": "in_features out_features bias activation_function",
    "a Normalize module's config.json": "",
    "sentence_bert_config.json": "max_seq_length do_lower_case",
    CROSS: "max_seq_length do_lower_case",
    "config_sentence_transformers.json":
        "prompts default_prompt_name __version__ similarity_fn_name model_type activation_fn",
}  # fmt: skip
VECTOR = {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding"}
USUAL: dict[str, dict[str, Any]] = {
    "sentence_bert_config.json": {
        "transformer_task": "feature-extraction",
        "module_output_name": "token_embeddings",
        "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    },
    CROSS: {
        "transformer_task": "sequence-classification",
        "module_output_name": "scores",
        "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
    },
    "a Dense module's config.json": VECTOR,
    "a Normalize module's config.json": VECTOR,
}


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """A layer behind pooling, in float64."""

    weight_OD: np.ndarray
    bias_O: np.ndarray
    tanh: bool

    def __call__(self, vector_D: np.ndarray) -> np.ndarray:
        vector_O = self.weight_OD @ vector_D + self.bias_O
        return np.tanh(vector_O) if self.tanh else vector_O


@dataclass(frozen=True, slots=True)
class Pooling:
    """`pool` names one of POOLS, or several with "+" between them, whose vectors are joined. `sizes` are the dimensions
    a matryoshka model names. A text gets `prompt` in front, in lower case if `lower`, and is cut to `max_length` tokens
    (None: it is not)."""

    pool: str = "last"
    normalize: bool = True
    sizes: tuple[int, ...] = ()
    prompt: str = ""
    lower: bool = False
    max_length: int | None = None
    dense: tuple[Dense, ...] = ()
    activation: Any = None  # of a cross-encoder's score, as its own file names it: nothing here applies it

    def dressed(self, texts: list[str]) -> list[str]:
        """As they are tokenized. Pure."""
        return [(self.prompt + text).lower() if self.lower else self.prompt + text for text in texts]


def read_pooling(directory: Path, config: dict[str, Any]) -> Pooling:
    """What `directory`, whose parsed config.json is `config`, says. Errors: ModelLoadError, UnsupportedFeatureError."""
    sizes, has_modules = _dimensions(config), os.path.lexists(directory / "modules.json")
    if classifies(config) and (not has_modules or [kind for kind, _ in _modules(directory)] == ["Transformer"]):
        return _cross_encoder(directory)
    if not has_modules:
        return Pooling(sizes=sizes, activation=_own(directory)[1])
    folders = _modules(directory)
    normalize = _normalizes([kind for kind, _ in folders])
    prompt, activation = _own(directory)
    pool, with_prompt = _pool(folders[1][1] / "config.json", config.get("hidden_size"))
    if prompt and pool != "last" and not with_prompt:
        raise UnsupportedFeatureError("the Pooling module leaves out the prompt (include_prompt false): not built.")
    dense, size = [], (config.get("hidden_size") or 0) * len(pools_of(pool))
    for _, folder in folders[2 : len(folders) - normalize]:
        dense.append(_dense(folder, size))
        size = len(dense[-1].bias_O)
    if normalize and folders[-1][1] != directory and os.path.lexists(path := folders[-1][1] / "config.json"):
        _read(path, "a Normalize module's config.json")
    lower, most = _text_limits(directory, positions=config.get("max_position_embeddings"))
    return Pooling(pool, normalize, sizes, prompt, lower, most, tuple(dense), activation)


def classifies(config: dict[str, Any]) -> bool:
    return str(config.get("architectures")).endswith("ForSequenceClassification']")


def _cross_encoder(directory: Path) -> Pooling:
    """Of one alone only how its pairs are cut. Errors: as `read_pooling`."""
    (lower, most), (prompt, activation) = _text_limits(directory, CROSS), _own(directory)
    if lower or prompt:
        raise UnsupportedFeatureError("do_lower_case and default_prompt_name of a cross-encoder are not built.")
    return Pooling(max_length=most, activation=activation)


def _dimensions(config: dict[str, Any]) -> tuple[int, ...]:
    sizes = config.get("matryoshka_dimensions") or []
    if not isinstance(sizes, list) or any(type(size) is not int or size < 1 for size in sizes):
        raise ModelLoadError(f"config.json: matryoshka_dimensions must be a list of sizes, got {sizes!r:.80}.")
    return tuple(sizes)


def _normalizes(kinds: list[str]) -> bool:
    """Whether the last of these modules is Normalize. Errors: UnsupportedFeatureError, ModelLoadError."""
    if unknown := sorted(set(kinds) - set(MODULES)):
        raise UnsupportedFeatureError(f"modules.json: the modules {', '.join(unknown)} are not built.")
    normalize = kinds[-1:] == ["Normalize"]
    if kinds[:2] != [*MODULES[:2]] or set(kinds[2 : len(kinds) - normalize]) - {"Dense"}:
        raise ModelLoadError(f"modules.json: expected Transformer, Pooling, perhaps Dense and Normalize, got {kinds}.")
    return normalize


def _read(path: Path, where: str = "", kind: type = dict) -> Any:
    """An object, or a list of objects, whose keys are all known to KEYS[where], or off. Errors: ModelLoadError;
    UnsupportedFeatureError with every other key."""
    value, where = read_json(path, kind), where or path.name
    objects = value if kind is list else [value]
    if not all(isinstance(one, dict) for one in objects):
        raise ModelLoadError(f"{path} must be a list of objects.")
    bad = [f"{k} = {v!r:.80}" for one in objects for k, v in one.items() if not _is_known(k, v, where)]
    if bad:
        raise UnsupportedFeatureError(f"{where} has keys that may change the result: {', '.join(bad)}: not built.")
    return value


def _is_known(key: str, value: Any, where: str) -> bool:
    """Whether a key is read, has no effect, is off, or says what is built anyway."""
    is_read = key in KEYS[where].split() or key.startswith("pooling_mode_")
    return is_read or value in (None, False, 0, "", [], {}) or USUAL.get(where, {}).get(key) == value


def _modules(directory: Path) -> list[tuple[str, Path]]:
    """(class name, folder) of each module, in order."""
    found: list[tuple[str, Path]] = []
    for entry in _read(directory / "modules.json", kind=list):
        kind, path = entry.get("type"), entry.get("path", "")
        if not isinstance(kind, str) or not isinstance(path, str):
            raise ModelLoadError("modules.json: every module needs a type and a path, both strings.")
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            raise ModelLoadError(f"modules.json: the path {path!r} of {kind} leaves the model's directory.")
        found.append((kind.rpartition(".")[2], directory / path))
    return found


def _pool(path: Path, hidden_size: Any) -> tuple[str, bool]:
    """The pooling that a Pooling module's config names, and whether it reads the prompt. Without a word, the mean of
    all tokens."""
    config = _read(path, "the Pooling module's config.json")
    size = config.get("word_embedding_dimension", config.get("embedding_dimension", hidden_size))
    if size != hidden_size:
        raise ModelLoadError(f"the Pooling module expects vectors of {size!r:.80}, the model has {hidden_size!r:.80}.")
    modes = config.get("pooling_mode")
    if modes is None:
        flags = {key.partition("pooling_mode_")[2] for key, on in config.items() if on} - {""}
        modes = [FLAGS[flag] for flag in FLAGS if flag in flags] + sorted(flags - FLAGS.keys()) or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or not modes or not all(mode in FLAGS.values() for mode in modes):
        raise UnsupportedFeatureError(f"the pooling {modes!r:.80} is not built; built are {', '.join(FLAGS.values())}.")
    return "+".join(modes).replace("lasttoken", "last"), bool(config.get("include_prompt", True))


def _dense(folder: Path, size: Any) -> Dense:
    """The Dense module of a folder, behind vectors of `size`. Errors: ModelLoadError, UnsupportedFeatureError."""
    config = _read(folder / "config.json", "a Dense module's config.json")
    act = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if act not in ACTIVATIONS:
        raise UnsupportedFeatureError(f"{folder}: activation_function {act!r:.80} is not built: {ACTIVATIONS} are.")
    path = folder / SINGLE
    entries = {entry.name: entry for entry in read_header(path)}
    with reading(entries) as read:
        tensors = {name: read(name).double().numpy() for name in entries}
    wanted = {"linear.weight": (config.get("out_features"), size)}
    wanted |= {"linear.bias": wanted["linear.weight"][:1]} if config.get("bias", True) else {}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    if shapes != wanted or config.get("in_features") != size:
        raise ModelLoadError(f"{path}: expected {wanted}, got {shapes}; in_features is {config.get('in_features')!r}.")
    weight = tensors["linear.weight"]
    return Dense(weight, tensors.get("linear.bias", np.zeros(len(weight))), act == "Tanh")


def _own(directory: Path) -> tuple[str, Any]:
    """What stands before every text that names no prompt of its own; what is made of a cross-encoder's score."""
    config = _read(path) if os.path.lexists(path := directory / "config_sentence_transformers.json") else {}
    prompts, name = config.get("prompts") or {}, config.get("default_prompt_name")
    texts = {k: v for k, v in prompts.items() if isinstance(v, str)} if isinstance(prompts, dict) else {}
    if not isinstance(prompts, dict) or name not in (None, *texts):
        raise ModelLoadError(f"{path}: default_prompt_name {name!r:.80} must be null or name a text in prompts.")
    return "" if name is None else texts[name], config.get("activation_fn")


def _of_tokenizer(tokens: Path, positions: Any) -> Any:
    most = read_json(tokens).get("model_max_length") if os.path.lexists(tokens) else None
    most = int(most) if type(most) is float and math.isfinite(most) else most
    sizes = [size for size in (most, positions) if type(size) is int and size != -1]  # of positions
    return min(sizes) if sizes and (most is None or type(most) is int) else most


def _text_limits(directory: Path, where: str = "", positions: Any = None) -> tuple[bool, int | None]:
    """(whether texts are in lower case, at most how many tokens of a text count; None: all)."""
    path, tokens = directory / "sentence_bert_config.json", directory / "tokenizer_config.json"
    config = _read(path, where) if os.path.lexists(path) else {}
    lower, most = config.get("do_lower_case", False), config.get("max_seq_length")
    if not isinstance(lower, bool):
        raise ModelLoadError(f"{path}: do_lower_case must be true or false, got {lower!r:.80}.")
    path, most = (tokens, _of_tokenizer(tokens, positions)) if most is None else (path, most)
    if not (most is None or (type(most) is int and most > 0)):
        raise ModelLoadError(f"{path}: the longest text must be a size or null, got {most!r:.80}.")
    return lower, most


def check_dimensions(dimensions: Any, pooling: Pooling, hidden_size: int) -> int | None:
    """How many numbers of each vector are wanted; None: all. Errors: InvalidRequestError."""
    if dimensions is None:
        return None
    hidden_size = len(pooling.dense[-1].bias_O) if pooling.dense else hidden_size * len(pools_of(pooling.pool))
    if type(dimensions) is not int or not 1 <= dimensions <= hidden_size:
        raise InvalidRequestError(
            f"dimensions must be a whole number from 1 to {hidden_size}, the model's size, got {dimensions!r:.80}."
        )
    if pooling.sizes and dimensions not in pooling.sizes:
        raise InvalidRequestError(f"dimensions must be one of {list(pooling.sizes)} for this model, got {dimensions}.")
    return dimensions


def finish_vector(vector_D: np.ndarray, pooling: Pooling, dimensions: int | None) -> list[float]:
    """The pooled vector behind dense layers, cut to `dimensions` and, where the model asks for it, of length 1. Pure.
    In float64, whatever came from the device; a vector of zeros stays what it is (torch's `normalize` divides it by
    1e-12)."""
    vector_D = vector_D.astype(np.float64)
    for dense in pooling.dense:
        vector_D = dense(vector_D)
    vector_D = vector_D[:dimensions]
    if pooling.normalize:
        vector_D = vector_D / max(float(np.sqrt(np.square(vector_D).sum())), 1e-12)
    return vector_D.astype(np.float32).tolist()


def apply_head(params: Params, pooled_D: np.ndarray) -> np.ndarray:
    """The classification or reward head on one pooled hidden state: float32 [C]. Pure. Encoders have a dense layer in
    front of it: ModernBERT's is followed by gelu and a norm, the others' by tanh."""
    norm_D = params["final_norm_D"]  # of the activations' device and dtype
    x_1D = torch.from_numpy(pooled_D)[None].to(norm_D)
    if "score_dense" in params:
        x_1D = linear(x_1D, params["score_dense"], params.get("score_dense_bias_D"))
        if "score_norm_D" in params:
            x_1D = layer_norm(activate(x_1D, "gelu"), params["score_norm_D"], HEAD_EPS)
        else:
            x_1D = x_1D.tanh()
    y_1C = linear(x_1D, params["score"], params.get("score_bias_C"), out_dtype=torch.float32)
    return y_1C[0].cpu().numpy()
