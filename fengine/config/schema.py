"""Frozen dataclasses that are the schema of every configuration. YAML files under `conf/` only select values.
`Engine(...)` builds the same dataclasses without Hydra. No torch here. None means "auto" everywhere; `resolve` replaces
it before anything is loaded."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

PACKAGED = {name: Path(__file__).parent.parent / "models" / name for name in ("box", "box-vl")}  # come with the package
BOX = PACKAGED["box"]


class LoadFormat(Enum):
    auto = "auto"
    safetensors = "safetensors"
    dummy = "dummy"


class Dtype(Enum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Policy(Enum):
    """Who begins first of those that wait; no result depends on it."""

    fcfs = "fcfs"
    lpm = "lpm"
    lof = "lof"
    random = "random"
    shortest_prefill_first = "shortest_prefill_first"


class Numerics(Enum):
    """`exact`: an output's bits do not depend on the batch. `fast`: linear layers may break this on CUDA; on the CPU it
    is the same code, and gives the same bits."""

    exact = "exact"
    fast = "fast"


@dataclass(frozen=True)
class ModelConfig:
    """The checkpoint, and what is read of it. Of an open engine `sampling_defaults` are the model's own, as JSON.
    `quantization` is one of QUANTIZATIONS; "fp8" of a checkpoint in 16 bits encodes matrices at load; "w8a8_fp8", of
    such a one or one in FP8, multiplies with activations in FP8, too."""

    path: str = "box"  # "box" or "box-vl" (the models in the package), a directory, or a hub id
    tokenizer_path: str | None = None  # null: the model's own
    revision: str | None = None  # of a hub id
    load_format: LoadFormat = LoadFormat.auto
    dtype: Dtype = Dtype.auto  # auto keeps matrices as stored
    device: str | None = None  # cpu, cuda or cuda:N
    gpu_id: int = 0  # N, where the device names none
    json_overrides: str = ""  # a JSON object whose values take the place of config.json's
    context_length: int | None = None  # tokens, at most the checkpoint's
    skip_tokenizer_init: bool = False  # ids in, ids out
    is_embedding: bool = False  # a language model without its output head, for embeddings
    sampling_defaults: str = "openai"  # model: where a request gives nothing, generation_config.json's hold
    quantization: str | None = None  # null: the checkpoint's own; fp8: matrices are encoded at load
    download_dir: str | None = None  # of a hub id's files; null: the hub's cache


@dataclass(frozen=True)
class CacheConfig:
    """The KV pool: `max_total_tokens` slots in pages of `page_size`. `mem_fraction_static` is used where the first is
    None, and on the CPU never. `kv_cache_dtype` is one of KV_DTYPES: auto keeps keys and values as activations are."""

    page_size: int | None = None
    max_total_tokens: int | None = None
    mem_fraction_static: float | None = None
    prefix_cache: bool = True
    kv_cache_dtype: str = "auto"

    @property
    def page(self) -> int:
        """`page_size`, once that of the device stands where none was given."""
        assert self.page_size is not None
        return self.page_size


@dataclass(frozen=True)
class SchedulerConfig:
    """Which requests a step computes. `overlap` None: on a GPU."""

    max_running_requests: int | None = None
    max_step_tokens: int | None = None
    policy: Policy = Policy.fcfs
    overlap: bool | None = None
    max_queued_requests: int | None = None
    waiting_timeout: float | None = None
    running_timeout: float | None = None
    record: str | None = None


class Algorithm(Enum):
    """Who guesses tokens ahead. `ngram`: what followed an earlier copy of a request's last tokens; `standalone`: a
    small model of the same vocabulary; `eagle3`: a head trained for the model, which goes on from its streams."""

    none = "none"
    ngram = "ngram"
    standalone = "standalone"
    eagle3 = "eagle3"

    @property
    def drafts(self) -> bool:
        """Whether it is a model, with a checkpoint."""
        return self in (Algorithm.standalone, Algorithm.eagle3)


@dataclass(frozen=True)
class SpeculationConfig:
    """Guessed tokens are computed with a row's last one and kept where the row draws them itself: no bit changes. A
    step that has `step_tokens` tokens already is full of work and gets none."""

    algorithm: Algorithm = Algorithm.none
    num_draft_tokens: int | None = None
    step_tokens: int | None = None
    ngram_min_match: int = 2
    ngram_max_match: int = 12
    draft: str | None = None
    ngram_first: bool = False
    adaptive: bool = True


@dataclass(frozen=True)
class CompileConfig:
    """torch.compile, and CUDA graphs. `enabled` None: compiled on a GPU without graphs. In a graph what the layers hold
    beside our own ops takes no time that could be seen, and the compiler takes ten seconds of each start, also with
    filled caches; on a CPU three."""

    enabled: bool | None = None
    cuda_graph: bool = True
    prefill_graphs: bool = True
    graph_rows: int | None = None


@dataclass(frozen=True)
class ParallelConfig:
    """Processes that hold the model together, and replicas of them. No bit changes."""

    tp_size: int = 1
    dp_size: int = 1
    dp_restart: bool = False


class Tuples:
    """A dataclass whose fields get tuples where OmegaConf, or a caller, gives lists."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))


@dataclass(frozen=True)
class LoraConfig(Tuples):
    """LoRA adapters. `paths` are those loaded at the start. Device memory is set aside for `max_loras_per_batch`
    adapters of rank `max_lora_rank` (None without any `paths`: DEFAULT_RANK) over `target_modules`."""

    enabled: bool | None = None
    paths: tuple[str, ...] = ()
    pinned: tuple[str, ...] = ()
    max_loras_per_batch: int = 8
    max_lora_rank: int | None = None
    target_modules: tuple[str, ...] | None = None
    max_loaded_loras: int | None = None

    @property
    def on(self) -> bool:
        return bool(self.paths) if self.enabled is None else self.enabled

    def named(self) -> list[tuple[str, str]]:
        """(name, path) of `paths`. Pure."""
        parts = [path.partition("=") for path in self.paths]
        return [(name, path if equals else name) for name, equals, path in parts]


@dataclass(frozen=True)
class MultimodalConfig(Tuples):
    """Images. Of URLs that come over HTTP addresses of a private network are read only for `image_hosts` that are
    named, and behind redirects never."""

    cache_mib: int = 256
    max_image_mib: int = 64
    max_image_pixels: int = 1 << 26
    allow_image_urls: bool = False
    image_hosts: tuple[str, ...] = ()
    image_folder: str | None = None


@dataclass(frozen=True)
class EngineConfig:
    """All that an engine is built from. Two equal configs may share one engine. Seeds that requests do not bring derive
    from `random_seed` and the request's index."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    multimodal: MultimodalConfig = field(default_factory=MultimodalConfig)
    numerics: Numerics = Numerics.exact
    random_seed: int = 0
