"""The pure functions of a model, closed over its spec."""

from fengine.models import lookup
from fengine.models.layers import decoder
from fengine.models.spec import ModelSpec
from fengine.worker.compiled import compiled_layers
from fengine.worker.step import ForwardFn, UnembedFn


def make_forward(spec: ModelSpec, *, compiled: bool = False) -> ForwardFn:
    """The forward pass with `spec` closed over; its layers under torch.compile if asked.

    It modifies the storage of the KV state, which is dead after the call; the returned state is the only live one.
    """
    model = lookup(spec.architecture)
    forward = decoder(compiled_layers(model.layer)) if compiled and model.layer is not None else model.forward
    return lambda params, kv, batch: forward(params, spec, kv, batch)


def make_unembed(spec: ModelSpec) -> UnembedFn:
    """From hidden states to logits, with `spec` closed over. Pure."""
    unembed = lookup(spec.architecture).unembed
    return lambda params, hidden_RD: unembed(params, spec, hidden_RD)
