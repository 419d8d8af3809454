"""A request as SGLang's output dict: text, ids, `meta_info` with finish reason, logprobs, hidden states, times."""

import time
from typing import Any

from fengine.api.hidden_states import hidden_of
from fengine.core.request import Drafting, Request
from fengine.engine.request_state import RequestOutput, RequestState, version_spans

Output = dict[str, Any]  # types.GenerateOutput or EncodeOutput, while it is made


def output_of(
    state: RequestState, output: RequestOutput, before: RequestOutput, *, has_text: bool, metrics: bool,
    brief: bool = False,
) -> Output:  # fmt: skip
    """SGLang's dict for one request: what `output` has and `before` has not. Pure but for the clock.

    `brief`: `meta_info` has no more than `finish_reason` and what was asked for of each token.
    """
    request, start, count = state.request, state.request.prompt_len, output.num_tokens
    ids = request.token_ids[start + before.num_tokens : start + count]
    meta = {"finish_reason": None} if brief else _meta(request, output)
    if request.drafting is not None and not brief:
        meta |= _speculation(request.drafting, request.num_output, count)
    if request.params.return_logprob:
        meta |= _logprobs(state, before.num_tokens, count, ids)
    if request.params.hidden is not None:
        meta["hidden_states"] = hidden_of(state, count)
    if output.finish is not None:
        meta |= _times(state, count, metrics)
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


def _speculation(drafting: Drafting, num_output: int, count: int) -> dict[str, Any]:
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


def _logprobs(state: RequestState, first: int, count: int, ids: list[int]) -> dict[str, Any]:
    """Tuples (logprob, id, None). A request for no tokens still tells of the one that was drawn."""
    request, params = state.request, state.request.params
    drawn = list(zip(request.logprobs[first:count], ids, strict=True))
    if request.unasked is not None:
        drawn = [request.unasked]
    meta: dict[str, Any] = {
        "input_token_logprobs": _triples(state.input_logprobs),
        "output_token_logprobs": _triples(drawn),
        "output_token_logprobs_length": len(drawn),
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


def _times(state: RequestState, count: int, metrics: bool) -> dict[str, Any]:
    """Seconds since the call came, and moments (`time.time`) derived from them."""
    if state.finished is None:
        return {}

    def moment(at: float) -> float:
        return state.received + at - state.submitted

    times: dict[str, Any] = {
        "e2e_latency": state.finished - state.submitted,
        "response_sent_to_client_ts": time.time(),
    }
    if not metrics:
        return times
    times |= {
        "request_received_ts": state.received,
        "api_server_dispatch_finish_ts": state.received,
        "request_finished_ts": moment(state.finished),
    }
    if state.started is not None:
        times |= {"queue_time": state.started - state.submitted, "forward_entry_time": moment(state.started)}
    if state.first_token is not None:
        decoding = state.finished - state.first_token
        times |= {
            "first_token_latency": state.first_token - state.submitted,
            "prefill_finished_time": moment(state.first_token),
            "decode_throughput": (count - 1) / decoding if count > 1 and decoding > 0 else 0.0,
        }
    return times
