"""Which label of the weights drew which tokens of a request. `Request.versions` holds (label, first output token)."""

from typing import Any

from fengine.core.request import Request


def relabel(request: Request, version: str) -> None:
    """Tokens drawn from now on belong to `version`. Modifies: the request; no step may be in flight."""
    before = [span for span in request.versions if span[1] < request.num_output]
    request.versions = (*before, (version, request.num_output))


def version_spans(request: Request, count: int) -> list[dict[str, Any]]:
    """SGLang's `weight_versions` of the first `count` output tokens, in order; one span for an empty output. Pure."""
    spans = []
    ends = [start for _, start in request.versions[1:]] + [count]
    for (version, start), end in zip(request.versions, ends, strict=True):
        end = min(end, count)
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = max(end, spans[-1]["end"])
        elif start < end or not spans:
            spans.append({"version": version, "start": start, "end": end})
    return spans
