"""The calls of transformers' tokenizers, over fengine's own: for programs that reach through SGLang's engine for one.

`engine.tokenizer_manager.tokenizer` is such an object. Ids and texts equal transformers'; what is not here (padding,
tensors, offsets) is refused by Python itself, as an unknown argument or attribute.
"""

from collections.abc import Sequence
from typing import Any

from fengine.core.scalars import exact_int
from fengine.errors import ChatTemplateError, InvalidRequestError
from fengine.tokenizer.tokenizer import Tokenizer
from fengine.worker.hub import resolve_model

NO_LIMIT = int(1e30)  # transformers' own number for it


class Encoding(dict[str, Any]):
    """`encoding["input_ids"]` or `encoding.input_ids`, as transformers' BatchEncoding."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class HFTokenizer:
    """Thread-safe. What programs set before they pad (`pad_token`, `pad_token_id`, `padding_side`) may be set; nothing
    here pads."""

    def __init__(self, tokenizer: Tokenizer, context_length: int) -> None:
        self._tokenizer = tokenizer
        self.model_max_length = context_length
        self.padding_side = "right"
        self._pad_token = tokenizer.special_tokens.get("pad_token")

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        add_special_tokens: bool = True,
        truncation: bool = False,
        max_length: int | None = None,
        return_attention_mask: bool = True,
    ) -> Encoding:
        """Ids of a text or of each of several. `truncation` cuts behind `max_length`, else the context's end."""
        single = isinstance(text, str)
        rows = self._tokenizer.encode_batch([text] if single else list(text), add_special_tokens=add_special_tokens)
        if truncation:
            rows = [ids[: self.model_max_length if max_length is None else max_length] for ids in rows]
        found = Encoding(input_ids=rows[0] if single else rows)
        if return_attention_mask:
            masks = [[1] * len(ids) for ids in rows]
            found["attention_mask"] = masks[0] if single else masks
        return found

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of one id or of several."""
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids  # type: ignore[union-attr]
        one = exact_int(ids)
        return self._tokenizer.decode(ids if one is None else [one], skip_special_tokens=skip_special_tokens)  # type: ignore[arg-type]

    def batch_decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The id of a piece of the vocabulary (None: there is no such piece), or of each of several."""
        if isinstance(tokens, str):
            return self._tokenizer.backend.token_to_id(tokens)
        return [self._tokenizer.backend.token_to_id(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        one = exact_int(ids)
        if one is not None:
            return self._tokenizer.backend.id_to_token(one)
        return [self._tokenizer.backend.id_to_token(i) for i in ids]  # type: ignore[union-attr]

    def get_vocab(self) -> dict[str, int]:
        return self._tokenizer.backend.get_vocab(with_added_tokens=True)

    def __len__(self) -> int:
        return self._tokenizer.vocab_size

    @property
    def vocab_size(self) -> int:
        """Without added tokens, as transformers counts."""
        return self._tokenizer.backend.get_vocab_size(with_added_tokens=False)

    @property
    def bos_token(self) -> str | None:
        return self._tokenizer.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self._tokenizer.special_tokens.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        return self._pad_token

    @pad_token.setter
    def pad_token(self, token: str | None) -> None:
        """Errors: InvalidRequestError for a text that is no token of the vocabulary."""
        if token is not None and self._id(token) is None:
            raise InvalidRequestError(f"pad_token must be a token of the vocabulary, got {token!r:.80}.")
        self._pad_token = token

    @property
    def bos_token_id(self) -> int | None:
        return self._id(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        return self._id(self.eos_token)

    @property
    def pad_token_id(self) -> int | None:
        return self._id(self.pad_token)

    @pad_token_id.setter
    def pad_token_id(self, token_id: int | None) -> None:
        """Errors: InvalidRequestError for an id that the vocabulary has not."""
        token = None if token_id is None else self._tokenizer.backend.id_to_token(token_id)
        if token is None and token_id is not None:
            raise InvalidRequestError(f"pad_token_id must be an id of the vocabulary, got {token_id!r:.80}.")
        self._pad_token = token

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.backend.token_to_id(token)

    @property
    def chat_template(self) -> str | None:
        return self._tokenizer.chat_templates.get("default")

    def apply_chat_template(
        self,
        conversation: Sequence[dict[str, Any]],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        return_dict: bool = True,
        **values: Any,
    ) -> Any:
        """The chat as text (tokenize=False), as an Encoding, or (return_dict=False) as ids.

        `continue_final_message` ends the text behind the last message's content, for the model to go on with it.
        """
        if continue_final_message:
            if add_generation_prompt:
                raise InvalidRequestError("continue_final_message and add_generation_prompt cannot both be set.")
            text = self._open_ended(conversation, values)
            found = self._tokenizer.encode(text, add_special_tokens=False) if tokenize else text
        else:
            read = self._tokenizer.encode_chat if tokenize else self._tokenizer.apply_chat_template
            found = read(conversation, add_generation_prompt=add_generation_prompt, **values)
        return Encoding(input_ids=found, attention_mask=[1] * len(found)) if tokenize and return_dict else found

    def _open_ended(self, conversation: Sequence[dict[str, Any]], values: dict[str, Any]) -> str:
        text = self._tokenizer.apply_chat_template(conversation, add_generation_prompt=False, **values)
        content = conversation[-1].get("content")
        at = text.rfind(content.strip()) if isinstance(content, str) else -1
        if not isinstance(content, str) or at < 0:
            raise ChatTemplateError(
                "continue_final_message: the last message's content does not appear in the rendered chat as it is."
            )
        kept = content.lstrip()
        return text[: at + len(kept if text[at:].startswith(kept) else content.strip())]


def get_tokenizer(
    tokenizer_name: str,
    *,
    tokenizer_mode: str = "auto",
    trust_remote_code: bool = False,
    tokenizer_revision: str | None = None,
) -> HFTokenizer:
    """SGLang's helper: the tokenizer of a directory or hub id. Errors: ModelLoadError and its kinds.

    `trust_remote_code` is a permission, and code of a checkpoint is never run; `tokenizer_mode` has no effect.
    """
    directory = resolve_model(tokenizer_name, tokenizer_revision, weights=False)
    return HFTokenizer(Tokenizer.from_directory(directory), NO_LIMIT)
