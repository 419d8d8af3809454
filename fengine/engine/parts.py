"""`Parts`: what makes up one engine, from its start to its end."""

import gc
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fengine.config import EngineConfig
from fengine.engine.engine_core import EngineCore
from fengine.engine.memory import Memory
from fengine.engine.profiling import Profile
from fengine.engine.weights.live import LiveWeights
from fengine.engine.weights.updates import WeightUpdates
from fengine.models.spec import ModelSpec
from fengine.worker.pooling import Pooling

STATS = {  # of the counters of core, by the names that callers read
    **{name: name for name in ("running", "waiting", "finished", "preemptions", "output_tokens", "steps")},
    "pages_total": "pages", "pages_used": "used_pages", "pages_cached": "cached_pages", "cached_tokens": "hit_tokens",
    "draft_tokens": "drafts", "correct_draft_tokens": "correct_drafts",
}  # fmt: skip


@dataclass
class Parts:
    """Everything that makes up one engine. Built once; `close` ends it."""

    config: EngineConfig
    spec: ModelSpec
    tokenizer: Any
    context_length: int
    pool_tokens: int
    eos_ids: frozenset[int]
    core: EngineCore
    model_dir: Path
    start_seconds: float
    compile_seconds: float
    compiles_at_start: int
    weights: LiveWeights
    updates: WeightUpdates
    memory: Memory
    profile: Profile
    kv_dtype: torch.dtype
    kv_bytes: int  # of the KV pool
    adapters: Any = None  # of LoRA, where it is enabled
    pooling: Pooling | None = None
    images: Any = None  # of a model that takes images: what reads those of a call
    ranks: Any = None  # `Ranks` or `Replicas`, where other processes hold a part of the model, or a replica
    closed: bool = field(default=False)
    phases: Mapping[str, float] = field(default_factory=dict)  # seconds of parts of the start, by SGLang's names
    ready_at: float = field(default_factory=time.perf_counter)

    def close(self) -> None:
        """Ends the engine. One of its own threads cannot wait for the end: another thread does, for which the process
        waits when it exits. Idempotent."""
        if self.closed:
            return
        self.closed = True
        if self.core.owns_thread():
            threading.Thread(target=self._close, name="fengine-close", daemon=False).start()  # its maker is a daemon
        else:
            self._close()

    def _close(self) -> None:
        self.profile.close()
        self.core.close()
        self.updates.close()
        self.weights.close()
        self.memory.close()
        for part in filter(None, (self.adapters, self.images, self.ranks)):
            part.close()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def stats(self, core_stats: dict[str, Any] | None = None) -> dict[str, Any]:
        """Counters since the start and gauges of this moment, as plain numbers; or those of a moment before. Errors:
        EngineClosedError in a forked child."""
        counters = self.core.stats() if core_stats is None else core_stats
        computed = counters["computed_tokens"] - counters["drafts"] + counters["correct_drafts"]
        return {name: counters[own] for name, own in STATS.items()} | {
            "computed_tokens": computed,
            "compiles": compile_count() - self.compiles_at_start,
            "compile_seconds": self.compile_seconds,
            "start_seconds": self.start_seconds,
        }


def compile_count() -> int:
    """How many graphs torch.compile has made in this process so far."""
    if "torch._dynamo" not in sys.modules:  # importing it takes longer than importing torch
        return 0
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
