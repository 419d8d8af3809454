"""The engine behind a harness's model: opened, written down, its texts and chats to ids and back. No lm_eval here."""

import hashlib
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from fengine import __version__
from fengine.api.engine import Engine
from fengine.errors import ChatTemplateError, ConfigError, InvalidRequestError, UnsupportedFeatureError
from fengine.eval.cli.engines import model_directory
from fengine.eval.runs.manifest import in_force
from fengine.eval.runs.provenance import adapter_digests, canonical, code_digest, file_digests
from fengine.tokenizer.tokenizer import Tokenizer

MAX_CHARS = 1 << 28  # of one text: documents are cut to windows after they are tokenized
logger = logging.getLogger(__name__)


def open_engine(model: str | Engine, harness: str, settings: dict[str, Any], adapter: str | None) -> Engine:
    """A new engine with these fields of ServerArgs; or `model` itself, which then takes no settings. `adapter`: the
    LoRA adapter that answers. Errors: UnknownParameterError, ConfigError, ModelLoadError and kinds,
    UnsupportedFeatureError (no text comes of it)."""
    if isinstance(model, Engine) and settings:
        raise ConfigError(f"{', '.join(settings)} cannot be set on an engine that runs already")
    engine = model if isinstance(model, Engine) else Engine(model_path=model, **settings)
    generates, known = engine.tokenizer_manager.is_generation, engine.lora_adapters()
    names = ", ".join(known)
    try:
        if not generates or engine.tokenizer is None:
            lacks = "a tokenizer, and skip_tokenizer_init is on" if generates else "a model that generates text"
            raise UnsupportedFeatureError(f"{harness} needs {lacks}")
        if adapter is not None and adapter not in known:
            raise ConfigError(f"adapter={adapter!r:.80}: the engine has {names or 'none; lora_paths loads some'}")
        if adapter is None and known and engine is not model:  # else the base model would answer
            raise ConfigError(f"lora_paths loads {names}: adapter=NAME says which of them answers")
    except (UnsupportedFeatureError, ConfigError):
        if engine is not model:
            engine.shutdown()
        raise
    return engine


def engine_facts(engine: Engine, adapter: str | None = None) -> dict[str, Any]:
    """Under lm-eval's names: size, dtype, revision and a digest of the weights' files; and what else bits depend on,
    with the `adapter` that answers. Reads the checkpoint's files once; their digests are kept. Errors: StorageError."""
    info, digests = engine.get_model_info(), file_digests(model_directory(engine.config.model))
    weights = {name: digest for name, digest in digests.items() if name.endswith(".safetensors")}
    adapted = {} if adapter is None else {"adapter": adapter, "adapters": adapter_digests(engine.config.lora)}
    return {
        "model_num_parameters": info["num_parameters"],
        "model_dtype": ", ".join(info["weight_dtypes"]),
        "model_revision": engine.server_args.revision or "",
        "model_sha": canonical(weights),
        "fengine": {
            "version": __version__,
            "code_sha256": code_digest(),
            "model_files": digests,
            "weight_version": info["weight_version"],
            **adapted,
            **in_force(engine, adapter),
        },
    }


def template_digest(template: str | None) -> str:
    """The first digits of a chat template's SHA-256. Pure."""
    return "none" if template is None else hashlib.sha256(template.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Texts:
    """`add_bos`: True and False say whether texts begin with the bos token, None leaves it to the tokenizer.
    `prefix` stands before the first token of a text without context, in place of bos or eos."""

    tokenizer: Tokenizer
    add_bos: bool | None = None
    prefix: int | None = None
    chat_values: dict[str, Any] = field(default_factory=dict)  # what chat templates are given besides the chat

    @cached_property
    def unlimited(self) -> Tokenizer:
        """The tokenizer for texts of any length."""
        return replace(self.tokenizer, max_chars=MAX_CHARS)

    @property
    def eot(self) -> int | None:
        """The token that ends texts, if there is one."""
        eos = self.tokenizer.backend.token_to_id(self.tokenizer.special_tokens.get("eos_token", ""))
        return min(self.tokenizer.eos_ids, default=None) if eos is None else eos

    def first(self) -> int:
        """The id before a text's first. Errors: InvalidRequestError if there is none."""
        for token in (self.prefix, self.tokenizer.bos_id, self.eot):
            if token is not None:
                return token
        raise InvalidRequestError("the tokenizer has neither bos nor eos to begin a text with; give prefix_token_id")

    @cached_property
    def _begin(self) -> str:
        with suppress(InvalidRequestError):
            return self.tokenizer.decode([self.first()], skip_special_tokens=False)
        return ""

    def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Ids of a text. Unless told, with the tokenizer's special tokens, or as `add_bos` says, but none before a text
        that begins with such a token, as rendered chats do. Errors: InvalidRequestError."""
        if not isinstance(text, str):
            raise InvalidRequestError(f"a text must be a string, got {type(text).__name__}")
        if add_special_tokens is not None:
            return self.unlimited.encode(text, add_special_tokens=add_special_tokens)
        begins = self._begin != "" and text.startswith(self._begin)
        ids = self.unlimited.encode(text, add_special_tokens=self.add_bos is not False and not begins)
        bos = self.tokenizer.bos_id
        return [bos, *ids] if self.add_bos and not begins and bos is not None and ids[:1] != [bos] else ids

    def chat(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool) -> str:
        """A chat as text; without a generation prompt its last message is left open, for the model to go on with it.
        Where the template refuses a system message, it is left out, with a warning. Errors: InvalidRequestError (no
        template), UnknownParameterError, ChatTemplateError."""
        try:
            return self._rendered(messages, add_generation_prompt)
        except ChatTemplateError:
            rest = [message for message in messages if message.get("role") != "system"]
            if len(rest) == len(messages):
                raise
            logger.warning("The chat template refuses this chat with its system message, which is left out.")
            return self._rendered(rest, add_generation_prompt)

    def _rendered(self, messages: Sequence[dict[str, Any]], complete: bool) -> str:
        return self.unlimited.apply_chat_template(
            messages, add_generation_prompt=complete, continue_final_message=not complete, **self.chat_values
        )

    def template(self, name: bool | str | None) -> str | None:
        """The chat template in force; None if none is to be used. Errors: ConfigError for another one's name."""
        if isinstance(name, str) and name != "default":
            known = ", ".join(sorted(self.tokenizer.chat_templates)) or "none"
            raise ConfigError(
                f"the chat template is chosen with the model argument hf_chat_template_name={name}; there are: {known}"
            )
        return self.tokenizer.chat_templates.get("default") if name else None
