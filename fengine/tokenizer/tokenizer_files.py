"""Reads a tokenizer's directory, as transformers 5 does. `add_bos_token` and `add_eos_token` are ignored, for the
post-processor of tokenizer.json decides."""

import os
from pathlib import Path
from typing import Any, NamedTuple

from fengine.core.files import read_file
from fengine.core.json_text import parse_json
from fengine.errors import ConfigError, ModelLoadError

MAX_FILE_BYTES = 256 << 20
FLAGS = ("add_bos_token", "add_eos_token", "add_prefix_space", "clean_up_tokenization_spaces", "split_special_tokens")


class TokenizerFiles(NamedTuple):
    """What the files of one directory say: tokenizer.json as text, tokenizer_config.json and config.json parsed."""

    directory: Path
    tokenizer_json: str
    config: dict[str, Any]
    model: dict[str, Any]
    tokens: dict[str, str]  # that the config names: each one's text
    chat_templates: dict[str, str]
    model_eos_ids: frozenset[int]


def _text(path: Path) -> str:
    try:
        return read_file(path, MAX_FILE_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"{path} is not UTF-8 (byte {error.start}); download it again.") from None


def _json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; {} where there is no such file."""
    if not os.path.lexists(path):
        return {}
    try:
        value = parse_json(_text(path))
    except ValueError as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}; download it again.") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, not {type(value).__name__}.")
    return value


def _tokenizer_json(directory: Path) -> str:
    if not directory.is_dir():
        raise ModelLoadError(f"tokenizer directory {directory} does not exist.")
    if os.path.lexists(directory / "tokenizer.json"):
        return _text(directory / "tokenizer.json")
    others = ("vocab.json", "tekken.json")
    found = sorted(p.name for p in directory.iterdir() if p.suffix == ".model" or p.name in others)
    why = f"there is only {', '.join(found)}, a format that is not read" if found else "the file is missing"
    raise ModelLoadError(
        f"{directory} has no tokenizer.json: {why}. Convert it once with transformers "
        "(AutoTokenizer.from_pretrained(path).save_pretrained(path)), or start with skip_tokenizer_init=True and pass "
        "input_ids."
    )


def _tokens(config: dict[str, Any], where: str) -> dict[str, str]:
    """The text of every token that the config names: bos_token and its kin, and further ones."""
    found = {key: value for key, value in config.items() if key.endswith("_token") and isinstance(value, (str, dict))}
    more = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if not isinstance(more, (list, dict)):
        raise ModelLoadError(f"{where}: extra_special_tokens must be a list or an object of tokens, got {more!r:.80}.")
    found |= more if isinstance(more, dict) else {f"{i}": value for i, value in enumerate(more)}
    texts: dict[str, str] = {}
    for key, value in found.items():
        text = value.get("content") if isinstance(value, dict) else value
        if not isinstance(text, str):
            raise ModelLoadError(f'{where}: {key} must be a string or an object with a string "content".')
        texts[key] = text
    _check_listed(config, where)
    _check_flags(config, texts, where)
    return texts


def _check_flags(config: dict[str, Any], tokens: dict[str, str], where: str) -> None:
    for name in FLAGS:
        if not isinstance(value := config.get(name), (bool, type(None))):
            raise ModelLoadError(f"{where}: {name} must be true, false or null, got {value!r:.80}.")
    for name in ("bos_token", "eos_token"):
        if config.get(f"add_{name}") and name not in tokens:
            raise ModelLoadError(f"{where}: add_{name} is true, but there is no {name}; name it, or remove add_{name}.")


def _check_listed(config: dict[str, Any], where: str) -> None:
    listed = config.get("added_tokens_decoder", {})
    if not isinstance(listed, dict) or not all(i.isdecimal() and isinstance(t, dict) for i, t in listed.items()):
        raise ModelLoadError(f"{where}: added_tokens_decoder must be an object of tokens by id.")


def _templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """name -> source. Files win over tokenizer_config.json, as in transformers."""
    folder = directory / "additional_chat_templates"
    files = {p.stem: _text(p) for p in sorted(folder.glob("*.jinja"))} if folder.is_dir() else {}
    if os.path.lexists(directory / "chat_template.jinja"):
        files["default"] = _text(directory / "chat_template.jinja")
    value, where = config.get("chat_template"), directory / "tokenizer_config.json"
    if files or value is None:
        return files
    if isinstance(value, list) and all(isinstance(t, dict) and isinstance(t.get("name"), str) for t in value):
        value = _by_name(value, where)
    value = {"default": value} if isinstance(value, str) else value
    if not isinstance(value, dict) or any(not isinstance(x, str) for item in value.items() for x in item):
        raise ModelLoadError(f'{where}: chat_template must be a string or a list of {{"name", "template"}}.')
    return value


def _by_name(templates: list[dict[str, Any]], where: Path) -> dict[str, Any]:
    names = [template["name"] for template in templates]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ModelLoadError(f"{where}: two chat templates are named {twice!r:.80}; remove one.")
    return dict(zip(names, (template.get("template") for template in templates), strict=True))


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


def read_files(directory: Path) -> TokenizerFiles:
    """Errors: ModelLoadError naming the file and the remedy."""
    text = _tokenizer_json(directory)
    config, model = _json(directory / "tokenizer_config.json"), _json(directory / "config.json")
    if "added_tokens_decoder" not in config:
        config = {**config, **_json(directory / "special_tokens_map.json")}
    ends = [found.get("eos_token_id") for found in (model, _json(directory / "generation_config.json"))]
    eos_ids = frozenset(i for end in ends for i in (end if isinstance(end, list) else [end]) if type(i) is int)
    tokens = _tokens(config, str(directory / "tokenizer_config.json"))
    return TokenizerFiles(directory, text, config, model, tokens, _templates(directory, config), eos_ids)
