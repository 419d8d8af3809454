"""Text to ids and back, through a pipeline of the `tokenizers` library: no torch, no code of a checkpoint.

`Tokenizer.encode(text)` gives the ids of transformers 5's `AutoTokenizer` (tests compare them).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import models

from fengine.errors import ChatTemplateError, ConfigError, ContextLengthError, InvalidRequestError
from fengine.tokenizer.chat import ChatTemplate, check_messages, check_roles, left_open, plain
from fengine.tokenizer.chat_ids import Marks, SpecialText
from fengine.tokenizer.decoding import Decoding, clean_up
from fengine.tokenizer.pipeline import library_errors, load_pipeline
from fengine.tokenizer.tokenizer_files import read_files, read_template

CHARS_PER_TOKEN = 8  # cap on text before tokenizing, which can be slow on text made to be slow
SLACK_CHARS = 4096
DEFAULT_CONTEXT = 131_072  # where neither the caller nor config.json tells


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Immutable and thread-safe. Build with `from_directory`.

    `special_tokens` maps "bos_token", "eos_token", … to their text. `eos_ids` is the union of the tokenizer's, the
    model config's and the generation config's end-of-sequence ids. `max_chars` caps the length of one text.
    """

    backend: Backend = field(repr=False)
    special_tokens: dict[str, str]
    bos_id: int | None
    eos_ids: frozenset[int]
    max_chars: int
    chat_templates: dict[str, str] = field(repr=False)
    cleanup: bool
    directory: Path

    @classmethod
    def from_directory(
        cls, path: str | Path, *, context_length: int | None = None, max_chars: int | None = None
    ) -> "Tokenizer":
        """Reads tokenizer.json, tokenizer_config.json, chat_template.jinja, special_tokens_map.json, and of
        config.json and generation_config.json the end-of-sequence ids and the context length.

        `max_chars` defaults to 8 characters per token of context, plus some.
        Errors: ModelLoadError (missing, corrupt, SentencePiece only), UnsupportedFeatureError (unknown decoder).
        """
        files = read_files(Path(path))
        backend, special = load_pipeline(files)
        ids = {name: backend.token_to_id(token) for name, token in special.items()}
        context = context_length or files.context_length or DEFAULT_CONTEXT
        tokenizer = cls(
            backend=backend,
            special_tokens=special,
            bos_id=ids.get("bos_token"),
            eos_ids=files.model_eos_ids | {i for i in [ids.get("eos_token")] if i is not None},
            max_chars=max_chars or CHARS_PER_TOKEN * context + SLACK_CHARS,
            chat_templates=files.chat_templates,
            cleanup=files.cleanup and not isinstance(backend.model, models.BPE),
            directory=files.directory,
        )
        _ = tokenizer.decoding  # refuses unknown decoders now rather than at the first request
        return tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of ids with a text, added tokens included; the logits may be wider."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def decoding(self) -> Decoding:
        return Decoding(self.backend, self.cleanup)

    # -- text to ids and back -----------------------------------------------------------------------------------------

    def check_text(self, text: Any, name: str = "prompt") -> str:
        """Errors: InvalidRequestError (not a str, lone surrogate), ContextLengthError (over `max_chars`)."""
        if isinstance(text, (bytes, bytearray)):
            raise InvalidRequestError(f"{name} is bytes; decode it first: {name}.decode('utf-8').")
        if not isinstance(text, str):
            raise InvalidRequestError(f"{name} must be a string, got {type(text).__name__}.")
        if len(text) > self.max_chars:
            raise ContextLengthError(
                f"{name} has {len(text)} characters, more than the limit of {self.max_chars} "
                f"({CHARS_PER_TOKEN} per token of context); shorten it or pass input_ids."
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"{name} holds a lone surrogate U+{ord(text[error.start]):04X} at character {error.start}, which no "
                "UTF-8 text can hold; remove it or repair the decoding that made it."
            ) from None
        return text

    def encode(self, text: str, *, add_special_tokens: bool = True, max_length: int | None = None) -> list[int]:
        """Ids of one text; special-token text in it is parsed as special, as transformers does.

        With `max_length` the text is cut so that the ids with those added are no more. Errors: InvalidRequestError,
        ContextLengthError.
        """
        ids = self._ids([self.check_text(text)], add_special_tokens)[0]
        if max_length is None or len(ids) <= max_length:
            return ids
        encoding = self.backend.encode(text, add_special_tokens=False)
        added = self.backend.num_special_tokens_to_add(False) if add_special_tokens else 0
        encoding.truncate(max(0, max_length - added))
        return self.backend.post_process(encoding, None, add_special_tokens).ids

    def with_special_tokens(self, ids: list[int]) -> list[int]:
        """The ids between those that the tokenizer adds to a text. Pure."""
        bare, whole = (self.backend.encode("a", add_special_tokens=added).ids for added in (False, True))
        start = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
        return [*whole[:start], *ids, *whole[start + len(bare) :]]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of each text, in parallel. Errors: InvalidRequestError that lists every bad item."""
        problems: list[str] = []
        kinds: set[type[InvalidRequestError]] = set()
        for i, text in enumerate(texts):
            try:
                self.check_text(text, f"prompt[{i}]")
            except InvalidRequestError as error:
                problems.append(str(error))
                kinds.add(type(error))
        if problems:
            raise (kinds.pop() if len(kinds) == 1 else InvalidRequestError)("\n".join(problems))
        return self._ids(list(texts), add_special_tokens)

    def _ids(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        with library_errors(InvalidRequestError, "the tokenizer fails on this text"):
            return [e.ids for e in self.backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of whole ids, as transformers decodes them: with its clean-up of spaces only where the tokenizer asks
        for it and is not BPE. Ids outside the vocabulary add nothing. Errors: InvalidRequestError (not ids)."""
        try:
            text = self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except (TypeError, OverflowError) as error:
            raise InvalidRequestError(f"token ids must be integers in [0, 2**32): {error}.") from None
        return clean_up(text) if self.cleanup else text

    # -- chats --------------------------------------------------------------------------------------------------------

    def apply_chat_template(
        self, messages: Sequence[dict[str, Any]], /, *, add_generation_prompt: bool = True, **values: Any
    ) -> str:
        """The chat as text, rendered by the model's own template. `values` are variables that the template reads.

        Errors: InvalidRequestError (messages, no template), UnknownParameterError (a variable with a meaning of its
        own), ContextLengthError, ChatTemplateError.
        """
        checked = check_messages(messages)
        return self._render(checked, self._checked_values(values), add_generation_prompt)

    def with_chat_template(self, source: str | None = None, name: str | None = None) -> "Tokenizer":
        """The same with another default chat template: `source` (a file, or the template itself), or that of its own
        with this `name`. Errors: ConfigError."""
        if source is None and name is None:
            return self
        if source is not None and name is not None:
            raise ConfigError("chat_template and hf_chat_template_name are two templates; give one")
        if source is not None:
            text = read_template(source)
            try:
                ChatTemplate(text)
            except ChatTemplateError as error:
                raise ConfigError(f"chat_template: {error}") from error
            return replace(self, chat_templates={"default": text})
        if name not in self.chat_templates:
            known = ", ".join(sorted(self.chat_templates)) or "none"
            raise ConfigError(f"hf_chat_template_name is {name!r}, but the tokenizer's chat templates are: {known}")
        return replace(self, chat_templates={"default": self.chat_templates[name]})

    def encode_chat(
        self, messages: Sequence[dict[str, Any]], /, *, add_generation_prompt: bool = True,
        continue_final_message: bool = False, **values: Any,
    ) -> list[int]:  # fmt: skip
        """Ids of the rendered chat; special-token text in contents is plain text and cannot end a turn. With
        `continue_final_message` they end where the last message's text ends.

        Equals transformers' `apply_chat_template(tokenize=True)` for contents without special-token text.
        Errors: as `apply_chat_template`; InvalidRequestError if a content holds special-token text and this template
        or tokenizer leaves no exact way to keep it text.
        """
        checked, extra = check_messages(messages), self._checked_values(values)
        text = self.check_text(self._render(checked, extra, add_generation_prompt), "chat")
        special = self._special_text
        marks = Marks.spare(text + repr([checked, extra]))
        marked, marked_extra = special.mark(checked, marks), special.mark(extra, marks)
        if special.in_keys([checked, extra]):
            raise InvalidRequestError("a key in messages or tools holds special-token text; rename it.")
        told = left_open(checked, text) if continue_final_message else text
        if marked == checked and marked_extra == extra:
            return self._ids([told], add_special_tokens=False)[0]
        found = marks.remove(self._render(marked, marked_extra, add_generation_prompt))
        ids = special.encode(told, found[1]) if found is not None and found[0] == text else None
        if ids is None:
            raise InvalidRequestError(
                "a message's content holds special-token text, and this model's chat template or tokenizer changes it "
                "so that it cannot safely be kept as plain text; remove it from the content."
            )
        return ids

    @staticmethod
    def _checked_values(values: dict[str, Any]) -> dict[str, Any]:
        return {name: plain(value, name) for name, value in values.items()}

    def _render(self, messages: list[dict[str, Any]], values: dict[str, Any], add_generation_prompt: bool) -> str:
        if not isinstance(add_generation_prompt, bool):
            raise InvalidRequestError(
                f"add_generation_prompt must be True or False, got {add_generation_prompt!r:.80}."
            )
        size = sum(len(m["content"]) for m in messages if isinstance(m.get("content"), str))
        if size > self.max_chars:
            raise ContextLengthError(
                f"the chat's contents have {size} characters, more than the limit of {self.max_chars}; shorten them."
            )
        template = self._template("tool_use" if values.get("tools") is not None else "default")
        text = template.render(
            messages,
            self.special_tokens,
            values,
            add_generation_prompt=add_generation_prompt,
            max_chars=self.max_chars,
        )
        check_roles(messages, text)
        return text

    def template_of(self, tools: bool) -> tuple[str, frozenset[str]]:
        """(source, variables a caller may set) of the chat template, the one for tools if there is one.

        Errors: InvalidRequestError, ChatTemplateError.
        """
        name = "tool_use" if tools and "tool_use" in self.chat_templates else "default"
        variables = self._template(name).variables
        return self.chat_templates[name], variables - self.special_tokens.keys()

    def _template(self, name: str) -> ChatTemplate:
        if not self.chat_templates:
            raise InvalidRequestError(
                "this model has no chat template; pass prompt= instead of messages, or put a chat_template.jinja into "
                "the tokenizer's directory."
            )
        if name not in self.chat_templates and (name := "default") not in self.chat_templates:
            known = ", ".join(sorted(self.chat_templates))
            raise ChatTemplateError(f"this model has no default chat template, only: {known}.")
        if name not in self._compiled:
            self._compiled[name] = ChatTemplate(self.chat_templates[name])
        return self._compiled[name]

    @cached_property
    def _compiled(self) -> dict[str, ChatTemplate]:
        """Memo of compiled templates, filled at first use: compiling takes milliseconds, and most runs never chat."""
        return {}

    @cached_property
    def _special_text(self) -> SpecialText:
        return SpecialText(self.backend)
