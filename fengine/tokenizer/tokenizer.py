"""Text to ids and back, through a pipeline of the `tokenizers` library: no torch, no code of a checkpoint.
`Tokenizer.encode(text)` gives the ids of transformers 5's `AutoTokenizer` (tests compare them)."""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Encoding, models
from tokenizers import Tokenizer as Backend

from fengine.errors import ContextLengthError, InvalidRequestError
from fengine.tokenizer import chat
from fengine.tokenizer.chat_ids import SpecialText
from fengine.tokenizer.decoding import Decoding, clean_up
from fengine.tokenizer.pipeline import load_pipeline, raise_as
from fengine.tokenizer.tokenizer_files import read_files

logger = logging.getLogger(__name__)

CHARS_PER_TOKEN = 8  # cap on text before tokenizing, which can be slow on text made to be slow
SLACK_CHARS = 4096
DEFAULT_CONTEXT = 131_072  # where the caller does not tell


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Immutable and thread-safe. Build with `from_directory`. `special_tokens` maps "bos_token", "eos_token", … to
    their text. `eos_ids` is the union of the tokenizer's, the model config's and the generation config's
    end-of-sequence ids. `max_chars` caps the length of a text that is not cut. `typed`: a model is told of which
    text of a pair each token is, unless its tokenizer's config names inputs without that."""

    backend: Backend = field(repr=False)
    special_tokens: dict[str, str]
    bos_id: int | None
    eos_ids: frozenset[int]
    max_chars: int
    chat_templates: dict[str, str] = field(repr=False)
    cleanup: bool
    directory: Path
    cut_side: str = "right"
    typed: bool = True

    @classmethod
    def from_directory(cls, path: str | Path, *, context_length: int = DEFAULT_CONTEXT) -> "Tokenizer":
        """Reads tokenizer.json, tokenizer_config.json, chat_template.jinja, special_tokens_map.json, and of
        config.json and generation_config.json the end-of-sequence ids.

        Errors: ModelLoadError (missing, corrupt, SentencePiece only), UnsupportedFeatureError (unknown decoder)."""
        files = read_files(Path(path))
        backend, special, cut_side = load_pipeline(files)
        inputs = files.config.get("model_input_names")
        ids = {name: backend.token_to_id(token) for name, token in special.items()}
        eom = backend.token_to_id("<|eom_id|>")  # Llama 3's end of a message, which SGLang stops at, too
        tokenizer = cls(
            backend=backend,
            special_tokens=special,
            bos_id=ids.get("bos_token"),
            eos_ids=files.model_eos_ids | {i for i in (ids.get("eos_token"), eom) if i is not None},
            max_chars=CHARS_PER_TOKEN * context_length + SLACK_CHARS,
            chat_templates=files.chat_templates,
            cleanup=files.config.get("clean_up_tokenization_spaces") is True  # which transformers obeys, but for BPE
            and not isinstance(backend.model, models.BPE),
            directory=files.directory,
            cut_side=cut_side,
            typed=not isinstance(inputs, list) or "token_type_ids" in inputs,
        )
        _ = tokenizer.decoding  # refuses unknown decoders now rather than at the first request
        return tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of ids with a text, added tokens included; the logits may be wider."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def sha256(self) -> str:
        """Of all that decides which ids a text has, and which text ids have."""
        return hashlib.sha256(f"{self.cleanup}{self.backend.to_str()}".encode()).hexdigest()

    @cached_property
    def decoding(self) -> Decoding:
        return Decoding(self.backend, self.cleanup)

    def check_text(self, text: Any, name: str = "prompt", cut: bool = False) -> str:
        """Errors: InvalidRequestError (not a str, lone surrogate), ContextLengthError (over `max_chars`, unless its ids
        are `cut` to what fits)."""
        if isinstance(text, (bytes, bytearray)):
            raise InvalidRequestError(f"{name} is bytes; decode it first: {name}.decode('utf-8').")
        if not isinstance(text, str):
            other = {
                int: "; token ids are input_ids",
                list: "; token ids are input_ids",
                dict: "; messages are for chat",
            }
            hint = other.get(type(text), "") if name == "prompt" else ""
            raise InvalidRequestError(f"{name} must be a string, got {type(text).__name__}{hint}.")
        if len(text) > self.max_chars and not cut:
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

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_length: int | None = None, side: str | None = None
    ) -> list[int]:
        """Ids of one text; special-token text in it is parsed as special, as transformers does. With `max_length` the
        text is cut, on a `side` or that of the tokenizer, so that the ids with those added are no more. Errors:
        InvalidRequestError, ContextLengthError."""
        ids = self.ids_of([self.check_text(text, cut=max_length is not None)], add_special_tokens)[0]
        if max_length is None or len(ids) <= max_length:
            return ids
        encoding = self.backend.encode(text, add_special_tokens=False)
        added = self.backend.num_special_tokens_to_add(False) if add_special_tokens else 0
        encoding.truncate(max(0, max_length - added), direction=side or self.cut_side)
        logger.info("a text of %d tokens is cut to %d", len(ids), max_length)
        return self.backend.post_process(encoding, None, add_special_tokens).ids

    def encode_pair(self, first: str, second: str, max_length: int, side: str | None = None) -> Encoding:
        """Two checked texts, joined as the tokenizer joins them; the longer one is cut first so that the ids with those
        added are no more than `max_length`, then both to halves."""
        whole = self.backend.encode(first, second)
        if len(whole.ids) <= max_length:
            return whole
        parts = [self.backend.encode(text, add_special_tokens=False) for text in (first, second)]
        room = max(0, max_length - self.backend.num_special_tokens_to_add(True))
        short, long = sorted(parts, key=lambda part: len(part.ids))
        least, side = min(len(short.ids), room // 2), side or self.cut_side
        short.truncate(least, direction=side)
        long.truncate(room - least, direction=side)
        return self.backend.post_process(parts[0], parts[1])

    def with_special_tokens(self, ids: list[int]) -> list[int]:
        """The ids between those that the tokenizer adds to a text. Pure."""
        bare, whole = (self.backend.encode("a", add_special_tokens=added).ids for added in (False, True))
        start = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
        return [*whole[:start], *ids, *whole[start + len(bare) :]]

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, cut: bool = False
    ) -> list[list[int]]:
        """`encode` of each text, in parallel; `cut`: as of `check_text`. Errors: InvalidRequestError that lists every
        bad item."""
        problems: list[InvalidRequestError] = []
        for i, text in enumerate(texts):
            try:
                self.check_text(text, f"prompt[{i}]", cut)
            except InvalidRequestError as error:
                problems.append(error)
        if problems:
            kinds = {type(error) for error in problems}
            raise (kinds.pop() if len(kinds) == 1 else InvalidRequestError)("\n".join(map(str, problems)))
        return self.ids_of(list(texts), add_special_tokens)

    def ids_of(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        """Ids of checked texts. Errors: InvalidRequestError."""
        try:
            return [e.ids for e in self.backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)]
        except BaseException as error:
            raise_as(InvalidRequestError, "the tokenizer fails on this text", error)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of whole ids, as transformers decodes them: with its clean-up of spaces only where the tokenizer asks
        for it and is not BPE. Ids outside the vocabulary add nothing. Errors: InvalidRequestError (not ids)."""
        try:
            text = self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except (TypeError, OverflowError) as error:
            raise InvalidRequestError(f"token ids must be integers in [0, 2**32): {error}.") from None
        return clean_up(text) if self.cleanup else text

    apply_chat_template = chat.apply_chat_template
    with_chat_template = chat.with_chat_template
    encode_chat = chat.encode_chat
    template_of = chat.template_of

    @cached_property
    def special_text(self) -> SpecialText:
        return SpecialText(self.backend)
