"""The values that flow through a step.

Dimension key: T tokens in this step, padded · R request rows, padded · B row boundaries (R+1) · P pages (page 0 = null
page, target of padding writes) · S slots per page · N page-table width · L layers · D model · F mlp · H query heads ·
G kv heads · K head width · V vocabulary. Of LoRA: A tokens with an adapter · S slots of adapters. Where windowed layers
have pages of their own: U tokens, as T · Y page-table width, as N.

What a step may overwrite: see `worker/README.md`."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from fengine.errors import StaleStateError

# What a forward pass may know of requests, by name: those of BATCH, and where there is such a thing the others.
#   token_T, pos_T, slot_T       of each token; slot = page * S + offset, where its k and v go
#   q_start_B, kv_len_R          row r owns tokens q_start_B[r] : q_start_B[r+1], the last of its kv_len_R[r] tokens
#   logit_index_R                index into T of each row's last token
#   window_slot_U, window_table_RY   slot_T and page_table_RN of layers with a window that have pages of their own
#   token_A, start_S             of LoRA: adapter slot s owns token_A[start_S[s] : start_S[s + 1]]; behind is padding
#   image_row_I                  of each token its row of the table of images' embeddings; -1: it is a word
#   last_key_J                   the position of the last key that each token sees; else its own
#   rope_pos_3I                  where tokens stand on the three axes of rotary embedding; else at pos_T
# All int32. Padding tokens lie behind q_start_B[-1] and write to slot 0, in the null page; padding rows have no tokens.
Tensors = Mapping[str, Tensor]
BATCH = ("token_T", "pos_T", "slot_T", "q_start_B", "kv_len_R", "page_table_RN", "logit_index_R")
Params = dict[str, Any]  # nested dicts and lists; leaf keys carry the shape: params["layers"][3]["wqkv"]


class KVState(NamedTuple):
    """Keys and values of every page, one whole tensor per layer; and where the spec has `feature_layers`, one tensor of
    these streams side by side, of X columns. A pytree. `window_layers` have pages of their own, under other ids; where
    it is empty all layers share one group of pages."""

    k_PSGK: tuple[Tensor, ...]
    v_PSGK: tuple[Tensor, ...]
    feature_PSX: tuple[Tensor, ...] = ()
    window_layers: tuple[int, ...] = ()

    @property
    def parts(self) -> tuple[tuple[Tensor, ...], ...]:
        return self.k_PSGK, self.v_PSGK, self.feature_PSX

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.k_PSGK + self.v_PSGK + self.feature_PSX

    @property
    def num_pages(self) -> int:
        """Of the layers that are not `window_layers`."""
        return next(k.shape[0] for layer, k in enumerate(self.k_PSGK) if layer not in self.window_layers)

    @property
    def page_size(self) -> int:
        return self.k_PSGK[0].shape[1]


class KVHandle:
    """The one owner of a live KV state. `take()` gives the state away and kills the handle."""

    def __init__(self, kv: KVState) -> None:
        self._kv: KVState | None = kv

    @property
    def alive(self) -> bool:
        return self._kv is not None

    def take(self) -> KVState:
        """The state, once. Errors: StaleStateError on the second call."""
        if self._kv is None:
            raise StaleStateError(
                "this KV state was already given to a step, which may have overwritten it.\n"
                "  wrong:  step(params, spec, handle.take(), ...); step(params, spec, handle.take(), ...)\n"
                "  right:  kv, out = step(params, spec, handle.take(), ...); handle = KVHandle(kv)\n"
                "To keep a past state, snapshot its pages before the step."
            )
        kv, self._kv = self._kv, None
        return kv
