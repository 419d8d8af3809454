"""OpenAI's answers of choices: what those of completions and chats share, and completions whole and in pieces."""

import math
import time
from abc import abstractmethod
from codecs import getincrementaldecoder
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from fengine.api.outputs import Output
from fengine.server.answers import DONE, Writer, counted, event, new_id, usage_of
from fengine.server.openai_body import OpenAIRequest, prompt_ids
from fengine.server.template_facts import ThoughtLimit
from fengine.tokenizer.tokenizer import Tokenizer

LEAST = -9999.0  # OpenAI's number for a logprob of minus infinity, which JSON cannot hold


def shown(data: bytes) -> str:
    """Bytes as text; if they are not whole characters, in OpenAI's notation for bytes. Pure."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def finite(logprob: float | None) -> float | None:
    return LEAST if logprob is not None and not math.isfinite(logprob) else logprob


def hidden_states(output: Output) -> dict[str, Any]:
    """{"hidden_states": the last one} of a complete output, if it was asked for. Pure."""
    found = output["meta_info"].get("hidden_states")
    return {} if found is None else {"hidden_states": found.tolist()}


class Offsets:
    """Where tokens start in the text that they make, in characters. Modifies: itself, as tokens come."""

    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._at = 0

    def after(self, pieces: Iterable[bytes]) -> list[int]:
        """The start of each of the next pieces."""
        starts = []
        for piece in pieces:
            starts.append(self._at)
            self._at += len(self._decoder.decode(piece))
        return starts


class ChoiceWriter(Writer):
    """An answer of choices. `arguments`: of GenerateReqInput. `head`: what every chunk repeats. `prompts`: ids of each
    prompt, None where nobody asks. Modifies: itself, in a stream."""

    names = ("", "", "")  # prefix of the id, object of the answer and of its chunks
    limit: ThoughtLimit | None = None  # of what is drawn

    def __init__(
        self, request: OpenAIRequest, arguments: dict[str, Any], tokenizer: Tokenizer, head: Mapping[str, Any],
        prompts: list[list[int]] | None,
    ) -> None:  # fmt: skip
        self.request, self.given, self.arguments = request, request.given, arguments
        self.tokenizer, self.prompts = tokenizer, prompts
        prefix, kind, chunk = self.names
        kind = chunk if self.given["stream"] else kind
        self.head = {"id": new_id(prefix), "object": kind, "created": int(time.time()), **head}
        options = self.given["stream_options"]
        self._usage = options["include_usage"]
        self._continuous = self._usage and options["continuous_usage_stats"]
        self.of_each = self.given["return_token_ids"] or self.given["logprobs"] is not None  # token, something is told
        self._drawn = [0] * (request.prompts * self.given["n"])  # tokens of each choice so far

    def around(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """The whole answer. Pure."""
        return {**self.head, "choices": choices, "usage": usage}

    @abstractmethod
    def choice(self, index: int, output: Output) -> dict[str, Any]:
        """The choice of a complete output."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a choice's stream starts with, before there is any token."""
        return None

    @abstractmethod
    def chunk(self, index: int, output: Output) -> dict[str, Any] | None:
        """The choice of what is new; None if it shows nothing yet."""

    def beside(self, outputs: list[Output]) -> dict[str, Any]:
        """What stands beside the choices: of complete outputs, or with none in the first chunk."""
        return {}

    def usage(self, outputs: list[Output]) -> dict[str, Any]:
        return usage_of(outputs, self.given["n"])

    def whole(self, outputs: list[Output]) -> dict[str, Any]:
        choices = [self.choice(i, output) for i, output in enumerate(outputs)]
        return self.around(choices, self.usage(outputs)) | self.beside(outputs)

    def first(self) -> bytes:
        found = [choice for index in range(len(self._drawn)) if (choice := self.opening(index)) is not None]
        return b"".join(self._event(choice, {} if i else self.beside([])) for i, choice in enumerate(found))

    def piece(self, index: int, output: Output) -> bytes:
        self._drawn[index] += len(output["output_ids"])
        choice = self.chunk(index, output)
        return b"" if choice is None else self._event(choice)

    def last(self, outputs: list[Output]) -> bytes:
        """With the usage, if it was asked for."""
        if not self._usage:
            return DONE
        return event(self.around([], self.usage(outputs))) + DONE

    def _event(self, choice: dict[str, Any], beside: Mapping[str, Any] | None = None) -> bytes:
        usage, index = None, choice["index"]
        if self._continuous and self.prompts is not None:
            usage = counted(len(self.prompts[index // self.given["n"]]), self._drawn[index])
        told = {"usage": usage} if self._usage else {}
        return event({**self.head, "choices": [choice], **told, **(beside or {})})

    # Parts of choices.

    def framed(self, index: int, output: Output, said: Mapping[str, Any], logprobs: Any, whole: bool) -> dict[str, Any]:
        """A choice with what all of them tell: SGLang's `matched_stop`, vLLM's `stop_reason`, which is none for the
        model's own end, and ids."""
        finish = output["meta_info"]["finish_reason"]
        choice = {"index": index, **said, "logprobs": logprobs, "finish_reason": finish and finish["type"]}
        if finish is not None:
            matched = finish.get("matched")
            choice |= {"matched_stop": matched, "stop_reason": None if matched in self.tokenizer.eos_ids else matched}
        if whole or self.given["return_token_ids"]:
            choice["token_ids"] = output["output_ids"] if self.given["return_token_ids"] else None
        return choice

    def shown(self, token: int) -> str:
        """What a token is called in logprobs: by its text, or token_id:ID, vLLM's way."""
        if self.given["return_tokens_as_token_ids"]:
            return f"token_id:{token}"
        return shown(self.tokenizer.decoding.data(token))

    def tops(self, output: Output, side: str, count: int) -> list[list[Any]]:
        """(logprob, id, None) of the tokens that are told beside each of `count`: the likeliest, or those asked for by
        id. `side`: input or output. Pure."""
        by_id = self.given["logprob_token_ids"] is not None
        found = output["meta_info"].get(f"{side}_{'token_ids_logprobs' if by_id else 'top_logprobs'}", [()] * count)
        return [list(top or ())[: None if by_id else self.given["logprobs"]] for top in found[:count]]

    def prompt_logprobs(self, output: Output) -> list[dict[str, Any] | None] | None:
        """vLLM's: at each position {id: {"logprob", "rank", "decoded_token"}} of the token and of the likeliest; the
        rank of a token that is not among them is not known. Pure."""
        if (most := self.given["prompt_logprobs"]) is None:
            return None
        meta, found = output["meta_info"], list[dict[str, Any] | None]()
        entries = meta["input_token_logprobs"]
        for (logprob, token, _), top in zip(entries, meta.get("input_top_logprobs", [()] * len(entries)), strict=True):
            ranked = {t: (p, i + 1) for i, (p, t, _) in enumerate(list(top or [])[:most])}
            told: dict[int, Any] = {token: ranked.get(token, (logprob, None))} | ranked
            entry = {str(t): {"logprob": finite(p), "rank": rank, "decoded_token": self.shown(t)}
                     for t, (p, rank) in told.items()}  # fmt: skip
            found.append(None if logprob is None else entry)
        return found


class CompletionWriter(ChoiceWriter):
    """Answers to /v1/completions. `echoes`: the prompts' texts, None: no echo. Modifies: itself, in a stream. The text
    of a prompt of ids leaves special tokens out where that of outputs does."""

    names = ("cmpl-", "text_completion", "text_completion")

    def __init__(self, request: OpenAIRequest, tokenizer: Tokenizer, context: int, head: Mapping[str, Any]) -> None:
        """Errors: InvalidRequestError, ContextLengthError."""
        given, arguments, ids = request.given, dict(request.arguments), None
        texts, cut, add_special = arguments.get("text"), given["truncation"], given["add_special_tokens"]
        counts = given["return_prompt_token_ids"] or given["stream_options"]["continuous_usage_stats"]
        if cut or not add_special or counts:
            kind = "input_ids" if texts is None else "text"
            ids = prompt_ids(tokenizer, kind, arguments[kind], add_special, cut, context)
            arguments |= {"text": None, "input_ids": ids}
        super().__init__(request, arguments, tokenizer, head, ids)
        self.skip_special = arguments["sampling_params"].get("skip_special_tokens") is not False
        self.echoes: list[str] | None = None
        if given["echo"] and texts is not None and cut is None:
            self.echoes = [texts] if isinstance(texts, str) else texts
        elif given["echo"]:
            self.echoes = self._decoded(arguments["input_ids"], texts is None and self.skip_special)
        self.begun = set[int]()  # choices whose prompt is told
        self.offsets = defaultdict[int, Offsets](Offsets)  # of choices

    def _decoded(self, ids: Any, skip_special: bool) -> list[str]:
        rows, known = ids if isinstance(ids[0], list) else [ids], range(2**32)  # others are refused by the engine
        return [self.tokenizer.decode([token for token in row if token in known], skip_special) for row in rows]

    def choice(self, index: int, output: Output) -> dict[str, Any]:
        choice = {"prompt_token_ids": None} | self._choice(index, output, whole=True)
        return choice | {"prompt_logprobs": self.prompt_logprobs(output)}

    def chunk(self, index: int, output: Output) -> dict[str, Any] | None:
        choice = self._choice(index, output, whole=False)
        shows = choice["text"] or choice["finish_reason"] or self.of_each or "prompt_token_ids" in choice
        return choice if shows else None

    def _choice(self, index: int, output: Output, whole: bool) -> dict[str, Any]:
        """What is new of one choice, its prompt included where that is asked for."""
        first, prompt = index not in self.begun, index // self.given["n"]
        self.begun.add(index)
        echo = None if self.echoes is None or not first else self.echoes[prompt]
        logprobs = None if self.given["logprobs"] is None else self._logprobs(index, output, echo)
        choice = self.framed(index, output, {"text": (echo or "") + output["text"]}, logprobs, whole)
        if choice["finish_reason"] is not None:
            choice |= hidden_states(output)
        if first and self.given["return_prompt_token_ids"] and self.prompts is not None:
            choice["prompt_token_ids"] = self.prompts[prompt]
        return choice

    def _logprobs(self, index: int, output: Output, echo: str | None) -> dict[str, Any]:
        """OpenAI's four lists; the first token of a prompt has no logprob."""
        meta, count = output["meta_info"], len(output["output_ids"])
        entries, tops = meta["output_token_logprobs"][:count], self.tops(output, "output", count)
        widths = [self._width(token) for _, token, _ in entries]
        if echo is not None:
            before = meta["input_token_logprobs"]
            entries, tops = before + entries, self.tops(output, "input", len(before)) + tops
            widths = self._prompt_widths(echo, [token for _, token, _ in before]) + widths
        told: list[dict[str, float | None] | None] = []  # at each position the token itself, then the likeliest
        for (logprob, token, _), top in zip(entries, tops, strict=True):
            pairs = [(token, logprob), *((t, p) for p, t, _ in top)]
            told.append(None if logprob is None else {self.shown(t): finite(p) for t, p in pairs})
        return {
            "tokens": [self.shown(token) for _, token, _ in entries],
            "token_logprobs": [finite(logprob) for logprob, _, _ in entries],
            "top_logprobs": told,
            "text_offset": self.offsets[index].after(widths),
        }

    def _width(self, token: int) -> bytes:
        """What a drawn token adds to the text: nothing, if it is a special one that is left out."""
        return self.tokenizer.decoding.data(token, self.skip_special)

    def _prompt_widths(self, echo: str, ids: list[int]) -> list[bytes]:
        """What the prompt's tokens add; one that the tokenizer put in front stands in no text."""
        if "text" not in self.request.arguments:
            return [self._width(token) for token in ids]
        pieces = [self.tokenizer.decoding.data(token) for token in ids]
        if ids and ids[0] == self.tokenizer.bos_id and not echo.startswith(pieces[0].decode("utf-8", "replace")):
            pieces[0] = b""
        return pieces
