"""The schema of every configuration (`schema.py`), its checks and what "auto" means (`checks.py`)."""

from fengine.config.checks import (
    BOUNDS,
    DEFAULT_RANK,
    KV_DTYPES,
    MAX_ADAPTERS,
    MAX_DRAFTS,
    MAX_PAGE_SIZE,
    MAX_PROCESSES,
    MAX_RANK,
    MAX_ROWS,
    QUANTIZATIONS,
    Hardware,
    check,
    check_adapter,
    check_home,
    check_seed,
    held,
    outside,
    resolve,
)
from fengine.config.schema import (
    Algorithm,
    CacheConfig,
    CompileConfig,
    Dtype,
    EngineConfig,
    LoadFormat,
    LoraConfig,
    ModelConfig,
    MultimodalConfig,
    Numerics,
    ParallelConfig,
    Policy,
    SchedulerConfig,
    SpeculationConfig,
    Tuples,
)

__all__ = [
    "BOUNDS", "DEFAULT_RANK", "Hardware", "KV_DTYPES", "MAX_ADAPTERS", "MAX_DRAFTS", "MAX_PAGE_SIZE",
    "MAX_PROCESSES", "MAX_RANK", "MAX_ROWS", "QUANTIZATIONS", "check", "check_adapter", "check_home", "check_seed",
    "held", "outside", "resolve", "Algorithm", "CacheConfig", "CompileConfig", "Dtype", "EngineConfig", "LoadFormat",
    "LoraConfig", "ModelConfig", "MultimodalConfig", "Numerics", "ParallelConfig", "Policy", "SchedulerConfig",
    "SpeculationConfig", "Tuples",
]  # fmt: skip
