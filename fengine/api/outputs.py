"""From requests to SGLang's output dicts: the requests of a call are queued, and what came of each is told."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fengine.api.context import EngineContext
from fengine.api.hidden_states import hidden_of
from fengine.api.sessions import Turn
from fengine.core.images import ImageSpan
from fengine.core.request import Drafting, Request
from fengine.engine.engine_core import EngineCore
from fengine.engine.request_state import RequestOutput, RequestState, version_spans
from fengine.errors import InvalidRequestError
from fengine.tokenizer.detokenizer import Detokenizer
from fengine.tokenizer.stop_regex import StopRegex, compile_patterns

Output = dict[str, Any]  # types.GenerateOutput or EncodeOutput, while it is made
Result = Callable[[Output, RequestState], Output]  # what is returned of a finished one's output
Notify = Callable[[RequestState], None]


def submit(
    context: EngineContext, requests: Sequence[Request], turns: Mapping[str, Turn], notify: Sequence[Notify],
    stream: bool = False,
) -> list[RequestState]:  # fmt: skip
    """Queues all requests or none; those of sessions enter their trees. Errors: EngineClosedError, EngineDeadError,
    MemoryReleasedError, InvalidRequestError (a rid is in use), SessionError (a session was closed or changed meanwhile;
    nothing of the call goes on)."""
    core, tokenizer = context.parts.core, context.parts.tokenizer
    if core.owns_thread():
        raise InvalidRequestError("a logit processor cannot ask its engine for text: the engine waits for it.")
    patterns: dict[tuple[str, ...], tuple[StopRegex, ...]] = {}  # compiled once for all of them
    states = []
    for request, told in zip(requests, notify, strict=True):
        params, detokenizer = request.params, None
        live = stream or bool(params.stop or params.stop_regex)
        if live and tokenizer is not None:
            if params.stop_regex and params.stop_regex not in patterns:
                patterns[params.stop_regex] = compile_patterns(params.stop_regex)
            detokenizer = Detokenizer(tokenizer, params, patterns=patterns.get(params.stop_regex, ()))
        clock, decode = core.system, None if tokenizer is None else tokenizer.decode
        state = RequestState(request, detokenizer, live, told, clock.now, decode, clock.wall(), clock.now())
        states.append(state)
        if (turn := turns.get(request.rid)) is not None:
            turn.state = state
    core.submit(states)
    try:
        if turns:  # not before: what they replace is aborted
            context.sessions.enter(list(turns.values()))
    except BaseException:
        abandon(core, states)
        raise
    if context.log is not None:
        context.log.received(requests)
    return states


def abandon(core: EngineCore, states: Sequence[RequestState]) -> None:
    """Ends requests whose caller goes away."""
    for state in states:
        state.abandoned = True
    if states:
        core.abort(states)


def result_of(context: EngineContext, state: RequestState) -> Output:
    """The output of a request that has ended. Errors: its own."""
    if state.error is not None:
        if context.log is not None:
            context.log.died(state.error)
        raise state.error
    output = state.output
    if context.log is not None and output.finish is not None:
        context.log.finished(state.request, output.finish)
    return output_of(context, state, output, RequestOutput())


def output_of(
    context: EngineContext, state: RequestState, output: RequestOutput, before: RequestOutput, brief: bool = False
) -> Output:
    """SGLang's dict for one request: what `output` has and `before` has not. Pure but for the clock. `brief`:
    `meta_info` has no more than `finish_reason` and what was asked for of each token."""
    request, start, count = state.request, state.request.prompt_len, output.num_tokens
    ids = request.token_ids[start + before.num_tokens : start + count]
    meta = {"finish_reason": None} if brief else _meta(request, output)
    if request.images and not brief:
        meta |= images_of(request.images)
    if request.drafting is not None and not brief:
        meta |= speculation_of(request.drafting, request.num_output, count)
    if request.params.return_logprob:
        meta |= logprobs_of(state, before.num_tokens, count, ids)
    if request.params.hidden is not None:
        meta["hidden_states"] = hidden_of(state, count)
    if output.finish is not None and state.finished is not None:
        meta |= {"e2e_latency": state.finished - state.submitted, "response_sent_to_client_ts": time.time()}
        meta |= timings(state, state.finished, count) if context.args.enable_metrics else {}
    found: Output = {} if context.parts.tokenizer is None else {"text": output.text[len(before.text) :]}
    return found | {"output_ids": ids, "meta_info": meta}


def _meta(request: Request, output: RequestOutput) -> dict[str, Any]:
    spans = version_spans(request, output.num_tokens)
    return {
        "id": request.rid,
        "finish_reason": output.finish and dict(output.finish),
        "prompt_tokens": request.prompt_len,
        "completion_tokens": output.num_tokens,
        "reasoning_tokens": 0,
        "cached_tokens": request.num_cached,
        "cached_tokens_details": {"device": request.num_cached, "host": 0},
        "weight_version": spans[-1]["version"] if spans else "default",
        "weight_versions": spans,
        "num_retractions": request.num_preempted,
    }


# -- what `meta_info` holds only where it was asked for ----------------------------------------------------------------


def speculation_of(drafting: Drafting, num_output: int, count: int) -> dict[str, Any]:
    """SGLang's keys. Every step that drew behind the first token counts as a verification, one without drafts too: so
    `spec_accept_length` is how many tokens a step brought."""
    steps = num_output - 1 - drafting.correct
    if steps < 1:
        return {}
    histogram = [0, *drafting.histogram[1:]]
    histogram[0] = steps - sum(histogram)
    return {
        "spec_accept_rate": drafting.correct / drafting.proposed if drafting.proposed else 0.0,
        "spec_accept_length": count / steps,
        "spec_num_correct_drafts": drafting.correct,
        "spec_num_proposed_drafts": drafting.proposed,
        "spec_verify_ct": steps,
        "spec_correct_drafts_histogram": histogram,
    }


def images_of(spans: tuple[ImageSpan, ...]) -> dict[str, Any]:
    """How many of a prompt's tokens are images', and the hash of all that the model is shown of these. Pure."""
    shown = hashlib.sha256(b"".join(image.key for _, image in spans)).hexdigest()
    return {"image_tokens": sum(image.tokens for _, image in spans), "pixels_sha256": shown}


def logprobs_of(state: RequestState, first: int, count: int, ids: list[int]) -> dict[str, Any]:
    """Tuples (logprob, id, None). A request for no tokens still tells of the one that was drawn."""
    request, params = state.request, state.request.params
    drawn = list(zip(request.logprobs[first:count], ids, strict=True))
    if request.unasked is not None:
        drawn = [request.unasked]
    meta: dict[str, Any] = {
        "input_token_logprobs": _triples(state.input_logprobs),
        "output_token_logprobs": _triples(drawn),
        "output_token_logprobs_length": first + len(drawn),  # so far, also where a chunk holds only what is new
    }
    last = max(count, first + len(drawn))
    for asked, name, before, after in (
        (params.top_logprobs, "top_logprobs", state.input_top, state.output_top),
        (params.logprob_ids, "token_ids_logprobs", state.input_ids, state.output_ids),
    ):
        if asked:
            meta[f"input_{name}"] = [None if entry is None else _triples(entry) for entry in before]
            meta[f"output_{name}"] = [_triples(entry) for entry in after[first:last]]
    return meta


def _triples(pairs: Any) -> list[tuple[float | None, int, None]]:
    return [(logprob, token, None) for logprob, token in pairs]


def timings(state: RequestState, finished: float, count: int) -> dict[str, Any]:
    """Seconds since the call came, and moments (`time.time`) derived from them."""

    def moment(at: float) -> float:
        return state.received + at - state.submitted

    times: dict[str, Any] = {
        "request_received_ts": state.received,
        "api_server_dispatch_finish_ts": state.received,
        "request_finished_ts": moment(finished),
    }
    if state.started is not None:
        times |= {"queue_time": state.started - state.submitted, "forward_entry_time": moment(state.started)}
    if state.first_token is not None:
        decoding = finished - state.first_token
        times |= {
            "first_token_latency": state.first_token - state.submitted,
            "prefill_finished_time": moment(state.first_token),
            "decode_throughput": (count - 1) / decoding if count > 1 and decoding > 0 else 0.0,
        }
    return times
