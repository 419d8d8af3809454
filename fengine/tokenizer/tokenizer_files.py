"""Reads a tokenizer's directory, as transformers 5 does.

The special and added tokens of tokenizer_config.json (or special_tokens_map.json) are added where missing.
`add_bos_token` and `add_eos_token` are ignored, for the post-processor of tokenizer.json decides.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from fengine.errors import ConfigError, ModelLoadError

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MAX_FILE_BYTES = 256 << 20


@dataclass(frozen=True)
class TokenizerFiles:
    """What the files of one directory say. `tokenizer_json` is the text of tokenizer.json."""

    directory: Path
    tokenizer_json: str
    tokenizer_class: str | None  # as declared
    model_type: str | None
    config: dict[str, Any]
    special_tokens: dict[str, str]
    extra_tokens: list[AddedToken]
    chat_templates: dict[str, str]
    cleanup: bool  # clean_up_tokenization_spaces, which transformers obeys for models other than BPE
    context_length: int | None
    model_eos_ids: frozenset[int]


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ModelLoadError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB; this is no tokenizer file.")
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"{path} is not UTF-8 (byte {error.start}); download it again.") from None


def _json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; {} where there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}; download it again.") from None
    except RecursionError:
        raise ModelLoadError(f"{path} is nested too deep.") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, not {type(value).__name__}.")
    return value


def _tokenizer_json(directory: Path) -> str:
    if not directory.is_dir():
        raise ModelLoadError(f"tokenizer directory {directory} does not exist.")
    if (directory / "tokenizer.json").is_file():
        return _text(directory / "tokenizer.json")
    others = ("vocab.json", "tekken.json")
    found = sorted(p.name for p in directory.iterdir() if p.suffix == ".model" or p.name in others)
    why = f"there is only {', '.join(found)}, a format that is not read" if found else "the file is missing"
    raise ModelLoadError(
        f"{directory} has no tokenizer.json: {why}. Convert it once with transformers "
        "(AutoTokenizer.from_pretrained(path).save_pretrained(path)), or start with skip_tokenizer_init=True and pass "
        "input_ids."
    )


def _added(value: Any, where: str) -> AddedToken:
    """A token from its string or dict form. `normalized` is the library's default for special tokens given as text."""
    if isinstance(value, str):
        return AddedToken(value, special=True)
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        names = ("single_word", "lstrip", "rstrip", "normalized")
        flags = {name: value[name] for name in names if isinstance(value.get(name), bool)}
        return AddedToken(value["content"], special=bool(value.get("special", True)), **flags)
    raise ModelLoadError(f'{where} must be a string or an object with a string "content", got {value!r:.80}.')


def _listed(config: dict[str, Any], where: str) -> list[AddedToken]:
    """The tokens of added_tokens_decoder, in the order of their ids."""
    decoder = config.get("added_tokens_decoder")
    decoder = decoder if isinstance(decoder, dict) else {}
    for index, token in decoder.items():
        if not (index.isdecimal() and isinstance(token, dict)):
            raise ModelLoadError(f"{where}: added_tokens_decoder[{index!r}] is malformed.")
    return [_added({"special": False, **decoder[index]}, where) for index in sorted(decoder, key=int)]


def _tokens(config: dict[str, Any], where: str) -> tuple[dict[str, str], list[AddedToken]]:
    """(named special tokens, tokens to add where missing, in transformers' order)."""
    extra = _listed(config, where)
    keys = [*NAMED, *(key for key in config if key.endswith("_token") and key not in NAMED)]
    found = {key: _added(config[key], f"{where}: {key}") for key in keys if isinstance(config.get(key), (str, dict))}
    extra += found.values()
    named = {key: token.content for key, token in found.items() if key in NAMED}
    for token in extra:
        token.special = token.special or token.content in named.values()
    more = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    extra += [_added(t, where) for t in (more.values() if isinstance(more, dict) else more)]
    return named, extra


def _templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """name -> source. Files win over tokenizer_config.json, as in transformers."""
    folder = directory / "additional_chat_templates"
    files = {p.stem: _text(p) for p in sorted(folder.glob("*.jinja"))} if folder.is_dir() else {}
    if (directory / "chat_template.jinja").is_file():
        files["default"] = _text(directory / "chat_template.jinja")
    value = config.get("chat_template")
    if files or value is None:
        return files
    if isinstance(value, list) and all(isinstance(t, dict) for t in value):
        value = {t.get("name"): t.get("template") for t in value}
    value = {"default": value} if isinstance(value, str) else value
    if not isinstance(value, dict) or any(not isinstance(x, str) for item in value.items() for x in item):
        raise ModelLoadError(f"{directory / 'tokenizer_config.json'}: chat_template must be a string or a list of "
                             '{"name", "template"}.')  # fmt: skip
    return value


def read_template(source: str) -> str:
    """A chat template given as a file's name, or as itself. Errors: ConfigError."""
    try:
        is_file = "\n" not in source and len(source) < 4096 and Path(source).is_file()
    except (OSError, ValueError):  # no name that a file could have
        is_file = False
    if is_file and not source.endswith(".json"):
        try:
            return _text(Path(source))
        except ModelLoadError as error:
            raise ConfigError(f"chat_template: {error}") from error
    if not is_file and ("{{" in source or "{%" in source):
        return source
    raise ConfigError(
        f"chat_template is {source!r:.80}: neither a file with a jinja template nor one itself. SGLang's templates "
        "by name or as .json are not built; leave it out for the model's own."
    )


def _ids(value: Any) -> set[int]:
    """The ids in an eos_token_id field: an int, a list, or nothing. Pure."""
    return {i for i in (value if isinstance(value, list) else [value]) if type(i) is int}


def read_files(directory: Path) -> TokenizerFiles:
    """Errors: ModelLoadError naming the file and the remedy."""
    text = _tokenizer_json(directory)
    config, model = _json(directory / "tokenizer_config.json"), _json(directory / "config.json")
    if "added_tokens_decoder" not in config:
        config = {**config, **_json(directory / "special_tokens_map.json")}
    special, extra = _tokens(config, str(directory / "tokenizer_config.json"))
    declared, model_type = config.get("tokenizer_class") or model.get("tokenizer_class"), model.get("model_type")
    context = model.get("max_position_embeddings")
    generation = _json(directory / "generation_config.json")
    return TokenizerFiles(
        directory=directory,
        tokenizer_json=text,
        tokenizer_class=declared if isinstance(declared, str) else None,
        model_type=model_type if isinstance(model_type, str) else None,
        config=config,
        special_tokens=special,
        extra_tokens=extra,
        chat_templates=_templates(directory, config),
        cleanup=config.get("clean_up_tokenization_spaces") is True,
        context_length=context if isinstance(context, int) and context > 0 else None,
        model_eos_ids=frozenset(_ids(model.get("eos_token_id")) | _ids(generation.get("eos_token_id"))),
    )
