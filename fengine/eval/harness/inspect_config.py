"""inspect-ai's GenerateConfig as sampling parameters. Duck-typed: no inspect_ai here, and no torch."""

from typing import Any

from fengine.core.sampling_params import PARAMETERS
from fengine.errors import InvalidRequestError, UnsupportedFeatureError

DEFAULT_MAX_TOKENS = 2048  # as inspect-ai's other local providers
SAMPLING = {row.openai: name for name, row in PARAMETERS.items() if row.openai and name != "max_new_tokens"}
SAMPLING |= {"top_k": "top_k", "stop_seqs": SAMPLING.pop("stop"), "num_choices": SAMPLING.pop("n")}  # its own words
READ = {"max_tokens", "logprobs", "top_logprobs", "prompt_logprobs", "extra_body"}
# What inspect-ai does itself around a provider, and hints that no bit of an output depends on.
OUTSIDE = {
    "max_retries", "timeout", "attempt_timeout", "stream_idle_timeout", "max_connections", "adaptive_connections",
    "system_message", "max_tool_output", "reasoning_history", "fail_on_refusal", "cache", "cache_prompt",
    "internal_tools",
}  # fmt: skip
OFF = {  # values with which a field says nothing
    "best_of": 1, "batch": False, "reasoning_effort": "none", "modalities": [], "extra_headers": {},
    "parallel_tool_calls": True,
}  # fmt: skip


def sampling_of(config: Any) -> dict[str, Any]:
    """The sampling parameters of a call, without its length. Pure.

    `extra_body` holds more of them, such as min_p, beside `chat_template_kwargs`. Errors: UnsupportedFeatureError for
    fields that would change the output and are not built, all at once; InvalidRequestError.
    """
    given = {name: value for name in type(config).model_fields if (value := getattr(config, name)) is not None}
    bad = [
        f"{name}={value!r:.80}"
        for name, value in given.items()
        if name not in {*SAMPLING, *READ, *OUTSIDE} and not (name in OFF and value == OFF[name])
    ]
    if bad:
        raise UnsupportedFeatureError(f"not built: {', '.join(bad)}. Leave these fields out of GenerateConfig.")
    extra = dict(given.get("extra_body", {}))
    extra.pop("chat_template_kwargs", None)
    sampling = {SAMPLING[name]: value for name, value in given.items() if name in SAMPLING}
    if twice := sorted(sampling.keys() & extra.keys()):
        raise InvalidRequestError(f"extra_body has {', '.join(twice)}, which GenerateConfig has, too; give it once")
    if sampling.get("top_k") == 0:
        del sampling["top_k"]
    return sampling | extra


def logprob_arguments(config: Any) -> dict[str, Any]:
    """What `Engine.generate` is asked for about logprobs. Pure."""
    asked = bool(config.logprobs) or config.prompt_logprobs is not None
    tops = [config.top_logprobs or 0 if config.logprobs else 0, config.prompt_logprobs or 0]
    top = max(tops[0], tops[1] if tops[1] > 1 else 0)
    start = -1 if config.prompt_logprobs is None else 0
    return {"return_logprob": True, "top_logprobs_num": top, "logprob_start_len": start} if asked else {}
