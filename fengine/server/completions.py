"""`/v1/completions`: outputs to choices."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from fengine.api.outputs import Output
from fengine.server.openai_body import OpenAIRequest
from fengine.server.responses import finish_reason
from fengine.server.token_text import Offsets, finite, shown, token_bytes
from fengine.tokenizer.tokenizer import Tokenizer


def form_of(request: OpenAIRequest, tokenizer: Tokenizer) -> "CompletionForm":
    skip_special = request.arguments["sampling_params"].get("skip_special_tokens") is not False
    return CompletionForm(tokenizer, request, skip_special, _echoes(request, tokenizer) if request.echo else None)


def _echoes(request: OpenAIRequest, tokenizer: Tokenizer) -> list[str]:
    """The text of each prompt. Pure."""
    prompts = request.arguments.get("text")
    if prompts is not None:
        return [prompts] if isinstance(prompts, str) else prompts
    ids = request.arguments["input_ids"]
    rows = ids if isinstance(ids[0], list) else [ids]
    limit = range(2**32)  # others are refused by the engine
    return [tokenizer.decode([token for token in row if token in limit], skip_special_tokens=False) for row in rows]


@dataclass(slots=True)
class CompletionForm:
    """How outputs read as choices. `echoes`: the prompts' texts, None: no echo."""

    tokenizer: Tokenizer
    request: OpenAIRequest
    skip_special: bool
    echoes: list[str] | None
    begun: set[int] = field(default_factory=set)  # choices
    offsets: defaultdict[int, Offsets] = field(default_factory=lambda: defaultdict(Offsets))  # of choices
    id_prefix: str = "cmpl"
    object: str = "text_completion"
    chunk_object: str = "text_completion"

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def whole(self, index: int, output: Output) -> dict[str, Any]:
        first = index not in self.begun
        self.begun.add(index)
        echo = self.echoes[index // self.request.samples] if first and self.echoes is not None else ""
        choice = {"index": index, "text": echo + output["text"], "logprobs": None}
        if self.request.logprobs is not None:
            choice["logprobs"] = self._logprobs(index, output, first and self.echoes is not None)
        choice["finish_reason"] = finish_reason(output)
        if self.request.return_token_ids:
            choice["token_ids"] = output["output_ids"]
        return choice

    def chunk(self, index: int, output: Output) -> dict[str, Any] | None:
        choice = self.whole(index, output)
        shows = choice["text"] or choice["finish_reason"] or self.request.return_token_ids
        return choice if shows or self.request.logprobs is not None else None

    def _logprobs(self, index: int, output: Output, with_prompt: bool) -> dict[str, Any]:
        """OpenAI's four lists; the first token of a prompt has no logprob."""
        meta, count = output["meta_info"], len(output["output_ids"])
        entries = meta["output_token_logprobs"][:count]
        tops = meta.get("output_top_logprobs", [None] * count)[:count]
        widths = [self._width(token) for _, token, _ in entries]
        if with_prompt:
            before = meta["input_token_logprobs"]
            entries, tops = before + entries, meta.get("input_top_logprobs", [None] * len(before)) + tops
            widths = self._prompt_widths(index, [token for _, token, _ in before]) + widths
        return {
            "tokens": [self._shown(token) for _, token, _ in entries],
            "token_logprobs": [finite(logprob) for logprob, _, _ in entries],
            "top_logprobs": self._tops(entries, tops) if self.request.logprobs else None,
            "text_offset": self.offsets[index].after(widths),
        }

    def _tops(self, entries: list[Any], tops: list[Any]) -> list[dict[str, float | None] | None]:
        """Each position's alternatives, the token itself among them."""
        found: list[dict[str, float | None] | None] = []
        for (logprob, token, _), top in zip(entries, tops, strict=True):
            pairs = [] if top is None else [*((t, p) for p, t, _ in top), (token, logprob)]
            found.append(None if top is None else {self._shown(t): finite(p) for t, p in pairs})
        return found

    def _shown(self, token: int) -> str:
        return shown(token_bytes(self.tokenizer, token))

    def _width(self, token: int) -> bytes:
        """What a drawn token adds to the text: nothing, if it is a special one that is left out."""
        if self.skip_special and self.tokenizer.decoding.tables[True][token] in (b"", None):
            return b""
        return token_bytes(self.tokenizer, token)

    def _prompt_widths(self, index: int, ids: list[int]) -> list[bytes]:
        """What the prompt's tokens add; one that the tokenizer put in front stands in no text."""
        assert self.echoes is not None
        pieces = [token_bytes(self.tokenizer, token) for token in ids]
        if ids and ids[0] == self.tokenizer.bos_id and not self.echoes[index // self.request.samples].startswith(
            pieces[0].decode("utf-8", "replace")
        ):  # fmt: skip
            pieces[0] = b""
        return pieces
