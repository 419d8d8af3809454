"""`SamplingParams`: all that a request may ask for; `PARAMETERS`: the table of what callers name. No torch. Each
parameter is declared once, beside its field. HTTP fields, the reader of OpenAI bodies, harness mappings, the Hydra
schema and the documentation derive from the table."""

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any

from fengine.core.parameter_kinds import CHECKS, refuse
from fengine.core.scalars import flag, integer, number, told
from fengine.errors import InvalidRequestError

SCALARS = {"number": number, "integer": integer, "flag": flag}
TOP_K_ALL = 1 << 30  # stored form of "top_k off", as SGLang does
MAX_TEMPERATURE = 1e30  # still a finite float32; above it every token is equally likely anyway
MAX_SAMPLES = 4096  # n of one prompt

RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # what generation_config.json may give
GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")  # at most one of them


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers low .. high; with `low_open` without low. `also` is one more, `words` replaces the derived text."""

    low: float
    high: float = math.inf
    low_open: bool = False
    also: int | None = None
    words: str | None = None

    def __contains__(self, value: float) -> bool:
        inside = self.low < value if self.low_open else self.low <= value
        return (inside and value <= self.high and not math.isinf(value)) or value == self.also

    def __str__(self) -> str:
        if self.words is not None:
            return self.words
        if self.high == math.inf:
            return f"at least {self.low}"
        return f"in {'(' if self.low_open else '['}{self.low}, {self.high}]"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One row of the table. `kind` names its check in SCALARS or CHECKS. `default` is written as a caller writes it.
    `stage` is the part of a request that heeds it. `openai` is the field of OpenAI's body, or vLLM's; `null`: None is a
    value of its own."""

    name: str
    kind: str
    default: Any
    stage: str
    doc: str
    range: Range | None = None
    openai: str | None = None
    null: bool = False

    def checked(self, value: Any, vocab_size: int | None = None) -> Any:
        """The value in its normal form, a copy. Errors: InvalidRequestError and its kinds."""
        if value is None and self.null:
            return None
        if self.kind not in SCALARS:
            return CHECKS[self.kind](self.name, value, vocab_size)
        found = SCALARS[self.kind](self.name, value)
        if self.range is not None and found not in self.range:
            raise InvalidRequestError(f"{self.name} must be {self.range}, got {told(found)}.")
        return found


def declare(
    default: Any, kind: str, stage: str, doc: str, range: Range | None = None, *, openai: str | None = None,
    null: bool = False, written: Any = None,
) -> Any:  # fmt: skip
    """A field of `SamplingParams` with its row of the table. `written`: the default in a caller's words."""
    row = Parameter("", kind, default if written is None else written, stage, doc, range, openai, null)
    return field(default=default, metadata={"parameter": row})


PENALTY = Range(-2, 2)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What a request asks for. `SamplingParams.of(mapping)` validates what a caller names in `sampling_params`.

    Stored values are normalised: greedy (temperature < 1e-6) becomes temperature 1 with top_k 1, top_k -1 becomes
    TOP_K_ALL, stop and stop_regex become tuples, logit_bias pairs (id, bias) in order of id.
    The fields behind `structural_tag` come from other arguments of a call.
    Errors: InvalidRequestError, UnknownParameterError, UnsupportedFeatureError."""

    max_new_tokens: int | None = declare(
        128, "integer", "length", "Most tokens to draw; None: as many as the context has room for.", Range(0),
        openai="max_tokens", null=True,
    )  # fmt: skip
    temperature: float = declare(
        1.0, "number", "draw", "Divides the logits; 0 is greedy.", Range(0, words="a non-negative finite number"),
        openai="temperature",
    )  # fmt: skip
    top_p: float = declare(
        1.0, "number", "draw", "Draws from the likeliest tokens that have this probability together.",
        Range(0, 1, low_open=True), openai="top_p",
    )  # fmt: skip
    top_k: int = declare(
        TOP_K_ALL, "integer", "draw", "Draws from so many likeliest tokens; -1: from all.",
        Range(1, also=-1, words="-1 (disable) or at least 1"), written=-1,
    )  # fmt: skip
    min_p: float = declare(
        0.0, "number", "draw", "Least probability of a token, as a share of the likeliest one's.", Range(0, 1)
    )
    frequency_penalty: float = declare(
        0.0, "number", "penalties", "Subtracted from a token's logit for each time it was drawn.", PENALTY,
        openai="frequency_penalty",
    )  # fmt: skip
    presence_penalty: float = declare(
        0.0, "number", "penalties", "Subtracted from the logit of a token that was drawn before.", PENALTY,
        openai="presence_penalty",
    )  # fmt: skip
    repetition_penalty: float = declare(  # 2**-126: the least normal float32; below it logits are divided by zero
        1.0, "number", "penalties", "Divides positive, multiplies negative logits of tokens that were drawn before.",
        Range(2**-126, 2, words="in (0, 2] (1.0 = no penalty)"),
    )  # fmt: skip
    min_new_tokens: int = declare(
        0, "integer", "penalties", "Until so many tokens are drawn the ids that end the request are banned.",
        openai="min_tokens",
    )  # fmt: skip
    n: int = declare(1, "integer", "samples", "Results of each prompt.", Range(1, MAX_SAMPLES), openai="n")
    stop: tuple[str, ...] = declare((), "stop strings", "text", "Texts that end the output.", openai="stop")
    stop_token_ids: tuple[int, ...] = declare((), "token ids", "length", "Ids that end the output, beside eos.")
    stop_regex: tuple[str, ...] = declare((), "patterns", "text", "Patterns that end the output.")
    ignore_eos: bool = declare(False, "flag", "length", "No id ends the output; under a grammar only its end does.")
    skip_special_tokens: bool = declare(True, "flag", "text", "Special tokens have no text.")
    spaces_between_special_tokens: bool = declare(
        True, "flag", "text", "Accepted either way: the tokenizers that are read here put no such spaces."
    )
    no_stop_trim: bool = declare(
        False, "flag", "text", "The text that ended the output stays in it.", openai="include_stop_str_in_output"
    )
    stream_interval: int | None = declare(
        None, "integer", "stream", "Tokens between two chunks of a stream; None: as the engine is set.", Range(1)
    )
    logit_bias: tuple[tuple[int, float], ...] = declare(
        (), "biases", "bias", "Added to the logits of single ids.", openai="logit_bias", written={}
    )
    sampling_seed: int | None = declare(
        None, "integer", "draw", "Seed of the draws; None: derived from the engine's seed and the prompt's index.",
        Range(-(2**63), 2**63 - 1, words="in [-2**63, 2**63 - 1]"), openai="seed",
    )  # fmt: skip
    custom_params: dict[str, Any] | None = declare(None, "json", "processor", "Handed to the custom logit processor.")
    json_schema: str | None = declare(None, "json grammar", "mask", "A JSON schema that the output satisfies.")
    regex: str | None = declare(None, "grammar", "mask", "A regular expression that the output satisfies.")
    ebnf: str | None = declare(None, "grammar", "mask", "A grammar that the output satisfies.")
    structural_tag: str | None = declare(None, "json grammar", "mask", "Tags whose contents satisfy schemas.")

    processor: Any = None  # (logits [1, V], [custom_params]) -> logits; may write to them
    grammar: Any = None  # the compiled form of `grammar_key`
    return_logprob: bool = False  # logprobs, those of the drawn tokens at least, are told
    logprob_start: int | None = None  # first prompt position whose input logprob is wanted; None: none
    top_logprobs: int = 0
    logprob_ids: tuple[int, ...] = ()
    hidden: str | None = None  # "full" | "last"
    pool: str | None = None  # worker.pooling.Pooling's: an embedding; the request draws nothing (max_new_tokens 0)
    head: bool = False  # apply the checkpoint's classification or reward head to the pooled hidden state

    @property
    def grammar_key(self) -> tuple[str, str] | None:
        """(which of GRAMMARS, its text): what the output must be."""
        return next(((name, text) for name in GRAMMARS if (text := getattr(self, name)) is not None), None)

    def end_ids(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """The ids that end a request, unless it has ignore_eos. Pure."""
        return eos_ids | frozenset(self.stop_token_ids)

    def stop_ids(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """The ids that do end it: a grammar's text has an end in any case. Pure."""
        return frozenset() if self.ignore_eos and self.grammar_key is None else self.end_ids(eos_ids)

    @property
    def penalised(self) -> bool:
        """Whether the logits depend on the tokens drawn before."""
        penalties = (self.frequency_penalty, self.presence_penalty, self.repetition_penalty)
        return penalties != (0.0, 0.0, 1.0)

    @property
    def asks(self) -> tuple[str, ...]:
        """What it wants of steps beside drawn tokens and their logprobs: stages of the sampler by name, and more."""
        asked = (
            ("penalties", self.penalised or self.min_new_tokens > 0),
            ("bias", bool(self.logit_bias)),
            ("processor", self.processor is not None),
            ("mask", self.grammar is not None),
            ("logprobs", bool(self.top_logprobs or self.logprob_ids)),
            ("input logprobs", self.logprob_start is not None),
            ("hidden states", self.hidden is not None or self.pool is not None),
        )
        return tuple(name for name, wanted in asked if wanted)

    @property
    def lockstep(self) -> bool:
        """Whether the host must know a row's last token before its next step is scheduled."""
        return self.processor is not None

    @property
    def bare(self) -> bool:
        """Whether a step need only draw a token for it and tell that token's logprob."""
        return not self.asks

    @classmethod
    def of(cls, values: "dict[str, Any] | SamplingParams | None", vocab_size: int | None = None) -> "SamplingParams":
        """Validates a mapping of SGLang sampling keys. `vocab_size` is the logits width, for the id checks."""
        if isinstance(values, SamplingParams):  # it may have been made by hand
            values = _written(values)
        if values is None:
            return cls()
        if not isinstance(values, dict):
            raise InvalidRequestError(f"sampling_params must be a dict, got {type(values).__name__}.")
        for key in [key for key in values if key not in PARAMETERS]:
            refuse(key, values[key], PARAMETERS)
        found = {
            name: row.checked(values[name], vocab_size)
            for name, row in PARAMETERS.items()
            if name in values and (values[name] is not None or row.null)
        }
        _check_together(found)
        return cls(**found | _normal(found))


PARAMETERS: dict[str, Parameter] = {
    f.name: replace(f.metadata["parameter"], name=f.name) for f in fields(SamplingParams) if f.metadata
}


def _check_together(found: dict[str, Any]) -> None:
    most, least = found.get("max_new_tokens", 128), found.get("min_new_tokens", 0)
    if least < 0 or (most is not None and least > most):
        raise InvalidRequestError(f"min_new_tokens must be in [0, max_new_tokens({told(most)})], got {told(least)}.")
    if sum(found.get(name) is not None for name in GRAMMARS) > 1:
        raise InvalidRequestError("Only one of json_schema, regex, ebnf, or structural_tag can be set.")


def _normal(found: dict[str, Any]) -> dict[str, Any]:
    """Temperature and top_k in their stored form, as far as they are given. Pure."""
    out: dict[str, Any] = {}
    if "top_k" in found:
        out["top_k"] = TOP_K_ALL if found["top_k"] == -1 else min(found["top_k"], TOP_K_ALL)
    if "temperature" in found:
        out["temperature"] = min(found["temperature"], MAX_TEMPERATURE)
        if found["temperature"] < 1e-6:  # SGLang's greedy
            out |= {"temperature": 1.0, "top_k": 1}
    return out


def _written(params: SamplingParams) -> dict[str, Any]:
    """The mapping that it is made of. Errors: InvalidRequestError for what comes from other arguments of a call."""
    for f in fields(params):
        if f.name not in PARAMETERS and getattr(params, f.name) != f.default:
            raise InvalidRequestError(
                f"sampling_params.{f.name} is not for callers: ask for it by the call's arguments."
            )
    return {name: getattr(params, name) for name in PARAMETERS}
