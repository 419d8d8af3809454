"""What a simulated request must answer: its tokens as if alone, its text as if detokenized at once."""

from typing import Any

from simulated_plan import EOS, PIECES, Job

from fengine.core.request import Request, SamplingParams
from fengine.core.simulated_device import content_of
from fengine.engine.request_state import RequestState
from fengine.tokenizer.detokenizer import Detokenizer

ALL = range(len(PIECES))
HALVES = ALL[::2], ALL[1::2]  # what a grammar allows, by turns


class Solo:
    """The model: a draw is a function of weights, adapter, seed and all tokens before."""

    def draw(self, job: Job, seed: int, prefix: int, count: int) -> tuple[int, float]:
        """The output token number `count` and its logprob."""
        if job.nan_at == count:
            return 0, float("nan")
        value = hash((seed, prefix))
        choice = HALVES[count % 2] if job.grammar else ALL
        if count < job.least:
            choice = [t for t in choice if t != EOS and t not in job.stop_ids]
        return choice[value % len(choice)], -(value % 1009) / 1009

    def prefix(self, ids: list[int], weights: int, request: Request) -> int:
        value = hash((weights, -1 if request.adapter is None else request.adapter.number))
        for token in self.seen(ids, weights, request):
            value = hash((value, token))
        return value

    def seen(self, ids: list[int], weights: int, request: Request) -> list[int]:
        """What stands for each token: its id, or what an image has at its place."""
        found = list(ids)
        for start, image in request.images:
            for k in range(min(image.tokens, len(ids) - start)):
                found[start + k] = content_of(image.key, k, weights)
        return found

    def scores(self, request: Request, weights: int) -> list[tuple[float | None, int]]:
        """Logprobs of the prompt's tokens from `logprob_start` on."""
        ids, start = request.token_ids[: request.prompt_len], request.params.logprob_start
        if start is None:
            return []
        prefix, seen, found = self.prefix([], weights, request), self.seen(ids, weights, request), []
        for position, token in enumerate(seen[:-1]):
            prefix = hash((prefix, token))
            if position >= start:
                found.append((self.score(prefix, ids[position + 1]), ids[position + 1]))
        return [(None, ids[start]), *found]

    @staticmethod
    def score(prefix: int, token: int) -> float:
        """The logprob of a prompt's token behind a prefix; a float32."""
        return -(hash((prefix, token)) % 1024) / 1024

    def follow(self, job: Job, request: Request, weights: int, count: int) -> list[int]:
        """The next tokens of a request with these weights."""
        ids, found = list(request.token_ids), []
        prefix = self.prefix(ids, weights, request)
        for _ in range(count):
            token, _ = self.draw(job, request.seed, prefix, len(ids) + len(found) - request.prompt_len)
            found.append(token)
            prefix = hash((prefix, token))
        return found

    def answer(
        self, job: Job, request: Request, labels: dict[str, int]
    ) -> tuple[list[int], list[float], tuple[str, Any]]:
        """Tokens, logprobs and why it ends, with the weights that the request says to have had."""
        tokens: list[int] = []
        logprobs: list[float] = []
        prompt = request.token_ids[: request.prompt_len]
        weights, prefix = -1, 0
        for count in range(max(job.new, 1)):
            now = labels[[label for label, start in request.versions if start <= count][-1]]
            if now != weights:
                weights, prefix = now, self.prefix(prompt + tokens, now, request)
            if job.fails_at == count:
                return tokens, logprobs, ("error", None)
            token, logprob = self.draw(job, request.seed, prefix, count)
            if logprob != logprob:
                return tokens, logprobs, ("error", None)
            if job.new == 0:
                return [], [], ("length", 0)
            tokens.append(token)
            logprobs.append(logprob)
            if token in job.stop_ids and len(tokens) < job.new or token in job.stop_ids:
                return tokens, logprobs, ("stop", token)
            prefix = hash((prefix, token))
        return tokens, logprobs, ("length", len(tokens))


def text_of(tokens: list[int], params: SamplingParams, tokenizer: Any, stops: bool) -> tuple[str, int, str | None]:
    """Text, number of its tokens, the stop string in it, all at once. `stops`: the last one is a stop id."""
    detokenizer = Detokenizer(tokenizer, params)
    text = detokenizer.push(list(tokens), trim_last=stops)
    text += detokenizer.finish()
    count = len(tokens) if detokenizer.matched_tokens is None else detokenizer.matched_tokens
    return text, count, detokenizer.matched


def judge(
    solo: Solo, state: RequestState, job: Job, labels: dict[str, int], tokenizer: Any, excused: bool
) -> str | None:
    """What is wrong with an answer. `excused`: somebody ended it."""
    request, finish = state.request, state.output.finish
    assert finish is not None
    if not request.versions:  # ended before the loop saw it
        return None if excused and finish["type"] == "abort" else "it never ran"
    tokens, logprobs, (kind, why) = solo.answer(job, request, labels)
    drawn = request.token_ids[request.prompt_len :]
    if drawn != tokens[: len(drawn)] or request.logprobs != logprobs[: len(drawn)]:
        return f"tokens {drawn}, alone {tokens}"
    scores = solo.scores(request, labels[request.versions[0][0]])
    read = state.input_logprobs
    if read != scores[: len(read)] or (len(read) < len(scores) and (finish["type"] != "abort" or drawn)):
        return f"input logprobs {read}, alone {scores}"
    stops = bool(drawn) and drawn[-1] in job.stop_ids
    text, count, matched = text_of(drawn, request.params, tokenizer, stops)
    if (shown := state.output[:2]) != (text, count):
        return f"text {shown}, at once {(text, count)}"
    found = finish["type"], finish.get("matched" if finish["type"] == "stop" else "length")
    if matched is not None:
        return None if found == ("stop", matched) else f"it ends with {found}, but its text with {matched!r}"
    if finish["type"] == "abort":
        return None if excused or kind == "error" else f"nobody aborted it: {finish}"
    if found != (kind, why) or len(drawn) != len(tokens):
        return f"it ends with {found} after {len(drawn)}, alone with {(kind, why)} after {len(tokens)}"
    return None
