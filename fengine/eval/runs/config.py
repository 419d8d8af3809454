"""The schema of a run: `RunConfig`, whose defaults `conf/` repeats for readers, and `check`. No torch, no Hydra."""

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from fengine import config as engine_config
from fengine.config import EngineConfig
from fengine.core.request import SamplingParams
from fengine.errors import FengineError
from fengine.eval.cli.schema import Schema
from fengine.tokenizer.stop_regex import compile_patterns


class View(Enum):
    auto = "auto"  # live in a terminal, plain otherwise
    live = "live"
    plain = "plain"
    quiet = "quiet"


@dataclass(frozen=True)
class SamplingConfig:
    """`fengine.core.request.SamplingParams` as a caller writes it: temperature 0 is greedy, top_k None is off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()
    no_stop_trim: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    sampling_seed: int | None = None

    def __post_init__(self) -> None:
        """OmegaConf gives lists for tuples."""
        for name in ("stop", "stop_token_ids", "stop_regex"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def as_dict(self) -> dict[str, Any]:
        """The mapping that `Engine.generate` takes. Pure."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


@dataclass(frozen=True)
class RunConfig:
    """One job: prompts in, records out. Two runs with equal `engine` share one; users write its sections at the top."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    prompts: Any = None  # None: built in; a list of prompts; or the name of a .txt or .jsonl file
    chat: bool = False
    out: str | None = None
    seed: int = 0
    adapter: str | None = None  # the LoRA adapter of all rows: a name of lora.paths
    return_logprob: bool = False
    max_errors: int | None = None
    show: int = 32
    view: View = View.auto


def check(config: RunConfig) -> list[str]:
    """Every problem that can be seen without loading anything, one line each. Pure."""
    problems = engine_config.check(config.engine) + engine_config.check_adapter(config.adapter, config.engine.lora)
    try:
        compile_patterns(SamplingParams.of(config.sampling.as_dict()).stop_regex)
    except FengineError as error:
        problems.append(f"sampling.{error}")
    for name in ("max_errors", "show"):
        value = getattr(config, name)
        if value is not None and value < 0:
            problems.append(f"{name} must be at least 0, got {value}")
    if not -(2**63) <= config.seed < 2**63:
        problems.append(f"seed must be in [-2**63, 2**63 - 1], got {config.seed}")
    if config.out is not None and not config.out.strip():
        problems.append("out must name a file; leave it out for output.jsonl in the run's own directory")
    if not (config.prompts is None or isinstance(config.prompts, (str, list))):
        problems.append(f"prompts must be a list or a file's name, got {config.prompts!r}")
    if config.prompts in ("", []):
        problems.append("prompts is empty; leave it out to run the built-in prompts")
    if config.chat and config.engine.model.skip_tokenizer_init:
        problems.append("chat=true needs a tokenizer: set model.skip_tokenizer_init=false")
    return problems


RUN = Schema(RunConfig, "config", "run_schema", check)
