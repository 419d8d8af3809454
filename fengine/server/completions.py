"""`/v1/completions`: a body's prompts to token ids where that is needed, outputs to choices."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from fengine.api.outputs import Output
from fengine.server.answers import finish_reason, stopped_by
from fengine.server.openai_body import OpenAIRequest
from fengine.server.prompts import prompt_ids
from fengine.server.token_text import Offsets, TokenNames, finite, hidden_states, prompt_logprobs, token_bytes
from fengine.tokenizer.tokenizer import Tokenizer


def prepare(request: OpenAIRequest, tokenizer: Tokenizer, context: int) -> tuple[dict[str, Any], "CompletionForm"]:
    """(fields of GenerateReqInput, how the outputs read). Errors: InvalidRequestError, ContextLengthError."""
    arguments, ids = dict(request.arguments), None
    texts, cut, add_special = arguments.get("text"), request.truncation, request.add_special_tokens
    if cut or not add_special or request.return_prompt_ids or request.continuous_usage:
        kind = "input_ids" if texts is None else "text"
        ids = prompt_ids(tokenizer, kind, arguments[kind], add_special, cut, context)
        arguments |= {"text": None, "input_ids": ids}
    echoes = _echoes(arguments, texts if cut is None else None, tokenizer) if request.echo else None
    skip_special = arguments["sampling_params"].get("skip_special_tokens") is not False
    return arguments, CompletionForm(tokenizer, request, skip_special, echoes, ids)


def _echoes(arguments: dict[str, Any], texts: str | list[str] | None, tokenizer: Tokenizer) -> list[str]:
    """The text of each prompt. Pure."""
    if texts is not None:
        return [texts] if isinstance(texts, str) else texts
    limit = range(2**32)  # others are refused by the engine
    ids = arguments["input_ids"]
    rows = ids if isinstance(ids[0], list) else [ids]
    return [tokenizer.decode([token for token in row if token in limit], skip_special_tokens=False) for row in rows]


@dataclass(slots=True)
class CompletionForm:
    """How outputs read as choices. `echoes`: the prompts' texts, None: no echo."""

    tokenizer: Tokenizer
    request: OpenAIRequest
    skip_special: bool
    echoes: list[str] | None
    prompt_ids: list[list[int]] | None
    begun: set[int] = field(default_factory=set)  # choices
    offsets: defaultdict[int, Offsets] = field(default_factory=lambda: defaultdict(Offsets))  # of choices
    id_prefix: str = "cmpl"
    object: str = "text_completion"
    chunk_object: str = "text_completion"

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def beside(self, outputs: list[Output]) -> dict[str, Any]:
        return {}

    def whole(self, index: int, output: Output) -> dict[str, Any]:
        choice, most = self._choice(index, output), self.request.prompt_logprobs
        choice.setdefault("prompt_token_ids", None)
        choice["token_ids"] = output["output_ids"] if self.request.return_token_ids else None
        choice["prompt_logprobs"] = None if most is None else prompt_logprobs(self._names, output, most)
        return choice

    def chunk(self, index: int, output: Output) -> dict[str, Any] | None:
        choice = self._choice(index, output)
        if self.request.return_token_ids:
            choice["token_ids"] = output["output_ids"]
        shows = choice["text"] or choice["finish_reason"] or self.request.return_token_ids
        return choice if shows or self.request.logprobs is not None else None

    def _choice(self, index: int, output: Output) -> dict[str, Any]:
        """What is new of one choice, its prompt included where that is asked for."""
        first, finish = index not in self.begun, finish_reason(output)
        self.begun.add(index)
        prompt, echoed = index // self.request.samples, first and self.echoes is not None
        echo = self.echoes[prompt] if first and self.echoes is not None else ""
        choice = {"index": index, "text": echo + output["text"], "logprobs": None, "finish_reason": finish}
        if self.request.logprobs is not None:
            choice["logprobs"] = self._logprobs(index, output, echoed)
        if finish is not None:
            choice |= stopped_by(output, self.tokenizer.eos_ids) | hidden_states(output)
        if first and self.request.return_prompt_ids and self.prompt_ids is not None:
            choice["prompt_token_ids"] = self.prompt_ids[prompt]
        return choice

    @property
    def _names(self) -> TokenNames:
        return TokenNames(self.tokenizer, self.request.tokens_as_ids)

    def _logprobs(self, index: int, output: Output, with_prompt: bool) -> dict[str, Any]:
        """OpenAI's four lists; the first token of a prompt has no logprob."""
        meta, count, names = output["meta_info"], len(output["output_ids"]), self._names
        entries = meta["output_token_logprobs"][:count]
        tops = meta.get("output_top_logprobs", [()] * count)[:count]
        widths = [self._width(token) for _, token, _ in entries]
        if with_prompt:
            before = meta["input_token_logprobs"]
            entries, tops = before + entries, meta.get("input_top_logprobs", [()] * len(before)) + tops
            widths = self._prompt_widths(index, [token for _, token, _ in before]) + widths
        return {
            "tokens": [names.shown(token) for _, token, _ in entries],
            "token_logprobs": [finite(logprob) for logprob, _, _ in entries],
            "top_logprobs": self._tops(entries, tops, names),
            "text_offset": self.offsets[index].after(widths),
        }

    def _tops(self, entries: list[Any], tops: list[Any], names: TokenNames) -> list[dict[str, float | None] | None]:
        """Each position's alternatives, the token itself among them."""
        found: list[dict[str, float | None] | None] = []
        for (logprob, token, _), top in zip(entries, tops, strict=True):
            pairs = [*((t, p) for p, t, _ in (top or ())[: self.request.logprobs]), (token, logprob)]
            found.append(None if logprob is None else {names.shown(t): finite(p) for t, p in pairs})
        return found

    def _width(self, token: int) -> bytes:
        """What a drawn token adds to the text: nothing, if it is a special one that is left out."""
        if self.skip_special and self.tokenizer.decoding.tables[True][token] in (b"", None):
            return b""
        return token_bytes(self.tokenizer, token)

    def _prompt_widths(self, index: int, ids: list[int]) -> list[bytes]:
        """What the prompt's tokens add; one that the tokenizer put in front stands in no text."""
        echo = "" if self.echoes is None else self.echoes[index // self.request.samples]
        pieces = [token_bytes(self.tokenizer, token) for token in ids]
        if ids and ids[0] == self.tokenizer.bos_id and not echo.startswith(pieces[0].decode("utf-8", "replace")):
            pieces[0] = b""
        return pieces
