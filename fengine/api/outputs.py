"""From requests to SGLang's output dicts: the requests of a call are queued, and waited for."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fengine.api import output_details
from fengine.api.context import EngineContext
from fengine.api.hidden_states import hidden_of
from fengine.api.sessions import Turn
from fengine.core.request import Request
from fengine.engine.engine_core import EngineCore
from fengine.engine.request_state import RequestOutput, RequestState, version_spans
from fengine.tokenizer.detokenizer import Detokenizer
from fengine.tokenizer.stop_regex import StopRegex, compile_patterns

Output = dict[str, Any]  # types.GenerateOutput or EncodeOutput, while it is made
Result = Callable[[Output, RequestState], Output]  # what is returned of a finished one's output
Notify = Callable[[RequestState], None]


def complete(
    context: EngineContext, requests: Sequence[Request], turns: Mapping[str, Turn], single: bool,
    result: Result = lambda output, state: output,
) -> Output | list[Output]:  # fmt: skip
    """Queues the requests of a call and waits for their outputs. Errors: as `submit`, and those of requests."""
    ended, outputs = context.parts.core.system.queue(), dict[RequestState, Output]()
    notify: Notify = lambda state: ended.put(state) if state.done else None  # noqa: E731
    states = submit(context, requests, turns, [notify] * len(requests))
    try:
        while len(outputs) < len(states):
            state = ended.get()
            outputs[state] = result(result_of(context, state), state)
    finally:
        abandon(context.parts.core, [state for state in states if state not in outputs])
    return outputs[states[0]] if single else [outputs[state] for state in states]


def submit(
    context: EngineContext, requests: Sequence[Request], turns: Mapping[str, Turn], notify: Sequence[Notify],
    stream: bool = False,
) -> list[RequestState]:  # fmt: skip
    """Queues all requests or none; those of sessions enter their trees. Errors: EngineClosedError, EngineDeadError,
    MemoryReleasedError, InvalidRequestError (a rid is in use), SessionError (a session was closed or changed meanwhile;
    nothing of the call goes on)."""
    core, tokenizer = context.parts.core, context.parts.tokenizer
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
    has_text, metrics = context.parts.tokenizer is not None, context.args.enable_metrics
    return output_of(state, output, RequestOutput(), has_text=has_text, metrics=metrics)


def output_of(
    state: RequestState, output: RequestOutput, before: RequestOutput, *, has_text: bool, metrics: bool,
    brief: bool = False,
) -> Output:  # fmt: skip
    """SGLang's dict for one request: what `output` has and `before` has not. Pure but for the clock. `brief`:
    `meta_info` has no more than `finish_reason` and what was asked for of each token."""
    request, start, count = state.request, state.request.prompt_len, output.num_tokens
    ids = request.token_ids[start + before.num_tokens : start + count]
    meta = {"finish_reason": None} if brief else _meta(request, output)
    if request.images and not brief:
        meta |= output_details.images(request.images)
    if request.drafting is not None and not brief:
        meta |= output_details.speculation(request.drafting, request.num_output, count)
    if request.params.return_logprob:
        meta |= output_details.logprobs(state, before.num_tokens, count, ids)
    if request.params.hidden is not None:
        meta["hidden_states"] = hidden_of(state, count)
    if output.finish is not None and state.finished is not None:
        meta |= {"e2e_latency": state.finished - state.submitted, "response_sent_to_client_ts": time.time()}
        meta |= output_details.metrics(state, state.finished, count) if metrics else {}
    found: Output = {"text": output.text[len(before.text) :]} if has_text else {}
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
