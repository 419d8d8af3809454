"""The `tokenizers` pipeline of a tokenizer's directory: what transformers' AutoTokenizer runs, tried before it is used.

A plain `tokenizer.json` is loaded by the tokenizers library alone. Where transformers takes a class with behaviour of
its own, or adds tokens that only tokenizer_config.json declares, transformers builds the pipeline; it is imported only
then.

Files are untrusted. One whose features can hang the library or fill the memory is tried in a child process first."""

import json
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from tokenizers import Tokenizer as Backend
from tokenizers import models, processors

from fengine.errors import ModelLoadError, UnsupportedFeatureError
from fengine.tokenizer import trial
from fengine.tokenizer.tokenizer_files import TokenizerFiles

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")  # of an added token
PLAIN = ("PreTrainedTokenizerFast", "TokenizersBackend")  # classes without behaviour of their own
_CASE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
KNOWN_SPLITS = frozenset((  # which take time linear in the text; others are tried
    rf"{_CASE}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}",  # Llama 3
    rf"{_CASE}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}",  # Qwen 2
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CASE}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CASE}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}",  # GPT-4o
    rf"'(?:s|t|re|ve|m|ll|d)| ?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+|{_REST}",  # the model in the box
    r"\p{N}{1,3}", r"\p{N}", r"\d", r"\s+", r"\s?\p{L}+", r"\s?\p{P}+", r"[\r\n]", r"[一-龥぀-ゟ゠-ヿ]+",
))  # fmt: skip
SAMPLE = "Hello, world! It's 1234.5\n\tx = naïve 字 🙂 \x00\ue000"
RUN = 20_000  # characters alike, on which a catastrophic pattern shows
LIMITS = trial.Limits(2.0, 2 << 30)  # of a trial
MAX_GROWTH = 16  # of a text by all replacements together, without a trial
MAX_INSERTED = 256  # characters that are put before each text, without a trial


def load_pipeline(files: TokenizerFiles) -> tuple[Backend, dict[str, str], str]:
    """(pipeline, named special tokens, the side on which a text is cut). Errors: ModelLoadError,
    UnsupportedFeatureError."""
    where = files.directory / "tokenizer.json"
    with library_errors(ModelLoadError, f"{where} is not a valid tokenizer"):
        found, special = _plain(files) or _by_transformers(files.directory)
        side = files.config.get("truncation_side") or (found.truncation or {}).get("direction", "right")
        found.no_truncation()
        found.no_padding()
        risky = may_hang(found)
    if risky:
        with closing(trial.Trials(__name__, limits=LIMITS)) as child:
            try:
                child.ask(files.tokenizer_json)
            except trial.Refused as error:
                raise ModelLoadError(f"{where} cannot be used: {error}.") from None
    with library_errors(ModelLoadError, f"{where} is not a valid tokenizer"):
        exercise(found, [SAMPLE])
    if side not in ("left", "right"):
        raise ModelLoadError(f"{files.directory}: truncation_side must be 'left' or 'right', got {side!r:.80}.")
    return found, special, side


@contextmanager
def library_errors(kind: type[Exception], what: str) -> Iterator[None]:
    """Whatever the library raises as `kind`."""
    try:
        yield
    except BaseException as error:
        raise_as(kind, what, error)


def raise_as(kind: type[Exception], what: str, error: BaseException) -> NoReturn:
    """Raises `kind` for what the library has raised: bare Exceptions, and panics that are no Exception."""
    ours = isinstance(error, (ModelLoadError, UnsupportedFeatureError))
    if ours or not (isinstance(error, Exception) or type(error).__name__ == "PanicException"):
        raise error
    raise kind(f"{what}: {error!s:.300}.") from error


def _is_plain(files: TokenizerFiles) -> bool:
    """Whether transformers takes tokenizer.json as it is."""
    declared, kind = (
        files.config.get("tokenizer_class") or files.model.get("tokenizer_class"),
        files.model.get("model_type"),
    )
    if files.config.get("fix_mistral_regex"):
        return False
    if not isinstance(declared, str) and not isinstance(kind, str):
        return True
    return declared in PLAIN and not (isinstance(kind, str) and _has_own_class(kind))


def _has_own_class(model_type: str) -> bool:
    """Whether transformers distrusts the declared class of such models: read from its source, an import takes 1 s."""
    found = find_spec("transformers")
    source = Path(found.origin if found and found.origin else "").parent / "models/auto/tokenization_auto.py"
    listed = re.search(r"MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS\b[^{]*\{([^}]*)\}", source.read_text("utf-8"))
    return listed is None or f'"{model_type}"' in listed[1]


def _plain(files: TokenizerFiles) -> tuple[Backend, dict[str, str]] | None:
    """The file as it is; None where transformers would change it."""
    if not _is_plain(files):
        return None
    backend = Backend.from_str(files.tokenizer_json)
    known = backend.get_added_tokens_decoder()
    listed = files.config.get("added_tokens_decoder", {})
    tokens = ({"pad_token": backend.padding["pad_token"]} if backend.padding else {}) | files.tokens
    if {*tokens.values()} - {token.content for token in known.values() if token.special} or any(
        int(i) not in known or any(getattr(known[int(i)], flag) != token.get(flag, False) for flag in FLAGS)
        for i, token in listed.items()
    ):
        return None
    backend.encode_special_tokens = files.config.get("split_special_tokens") is True
    if backend.post_processor is None:
        backend.post_processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])
    return backend, {name: text for name, text in tokens.items() if name in NAMED}


def auto_tokenizer(directory: Path) -> Any:
    """transformers' tokenizer of a directory. Errors: the library's own."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)


def _by_transformers(directory: Path) -> tuple[Backend, dict[str, str]]:
    tokenizer = auto_tokenizer(directory)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise UnsupportedFeatureError(f"{directory}: {type(tokenizer).__name__} is no tokenizer of `tokenizers`.")
    return backend, {name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}


def attempt(tokenizer_json: str) -> None:
    """In the child: loads and exercises a file. Errors: trial.Refused."""
    with library_errors(trial.Refused, "the library fails"):
        backend = Backend.from_str(tokenizer_json)
        patterns = "".join(json.dumps(state) for state in _states(backend))
        letters = dict.fromkeys("aA0 \n\t.é字_-" + "".join(c for c in patterns if c.isalnum())[:100])
        exercise(backend, [SAMPLE, *(c * RUN + "!" for c in letters)])


def exercise(backend: Backend, texts: list[str]) -> None:
    """Encodes and decodes. Errors: the library's own."""
    for text in texts:
        backend.decode(backend.encode(text).ids)


def _states(backend: Backend) -> list[Any]:
    parts = (backend.normalizer, backend.pre_tokenizer, backend.decoder)
    return [json.loads(part.__getstate__()) for part in parts if part is not None]


def may_hang(backend: Backend) -> bool:
    """Whether time or memory to encode may grow faster than the text, by features that few tokenizers have. Pure."""
    growth, states = 1.0, _states(backend)
    for node in _objects(states):
        pattern = node["pattern"] if isinstance(node.get("pattern"), dict) else {}
        if "Regex" in pattern and pattern["Regex"] not in KNOWN_SPLITS:
            return True
        if node.get("type") == "Replace":
            growth *= max(1.0, len(node["content"]) / max(1, len(pattern.get("String", ""))))
        if node.get("type") == "Precompiled" or len(str(node.get("prepend", ""))) > MAX_INSERTED:
            return True
    return growth > MAX_GROWTH or isinstance(backend.model, models.WordPiece)


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    if isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _objects(item)
