"""What `meta_info` holds only where it was asked for: logprobs, how drafts fared, the moments of a request."""

import hashlib
from typing import Any

from fengine.core.images import ImageSpan
from fengine.core.request import Drafting
from fengine.engine.request_state import RequestState


def speculation(drafting: Drafting, num_output: int, count: int) -> dict[str, Any]:
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


def images(spans: tuple[ImageSpan, ...]) -> dict[str, Any]:
    """How many of a prompt's tokens are images', and the hash of all that the model is shown of these. Pure."""
    shown = hashlib.sha256(b"".join(image.key for _, image in spans)).hexdigest()
    return {"image_tokens": sum(image.tokens for _, image in spans), "pixels_sha256": shown}


def logprobs(state: RequestState, first: int, count: int, ids: list[int]) -> dict[str, Any]:
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


def metrics(state: RequestState, finished: float, count: int) -> dict[str, Any]:
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
