"""A small model of the target's vocabulary as a head of `DraftModel`."""

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from fengine import models
from fengine.config import EngineConfig
from fengine.errors import ConfigError
from fengine.models.kv_state import KVState, Tensors, param_bytes
from fengine.models.spec import Config, ModelSpec
from fengine.ops.edges import take
from fengine.worker.device import device_of
from fengine.worker.loader import load_params, spec_from_config


class SmallModel:
    """A model of its own, that reads the tokens alone. Immutable."""

    behind = 0

    def __init__(self, directory: Path, config: Config, target: ModelSpec, settings: EngineConfig) -> None:
        """Errors: ConfigError if it has another vocabulary; ModelLoadError and its kinds."""
        self.spec = replace(spec_from_config(config), exact=False)  # no bit depends on it
        if not self.spec.generates or not self.spec.causal or self.spec.vocab_size != target.vocab_size:
            raise ConfigError(
                f"speculation.draft_model {str(directory)!r} is {self.spec.architecture} with a vocabulary of "
                f"{self.spec.vocab_size}; a draft generates text from the target's, of {target.vocab_size}"
            )
        self.params = load_params(directory, self.spec, dtype=settings.model.dtype, device=device_of(settings))
        self.bytes = param_bytes(self.params)
        self.model = models.lookup(self.spec.architecture)

    def fuse(self, feature_TX: Tensor) -> Tensor:
        return feature_TX

    def run(self, kv: KVState, batch: Tensors, stream_TD: Tensor | None) -> tuple[KVState, Tensor, Tensor | None]:
        """(KV state, logits_RV, None) behind each row. Modifies: the storage of `kv`, which is dead then."""
        kv, hidden_TD = self.model.forward(self.params, self.spec, kv, batch)
        return kv, self.model.unembed(self.params, self.spec, take(hidden_TD, batch["logit_index_R"])), None
