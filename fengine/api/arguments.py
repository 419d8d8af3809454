"""Arguments of public calls: a name that is unknown, or missing, is an InvalidRequestError with a suggestion."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from difflib import get_close_matches
from functools import wraps
from itertools import product
from typing import Any, Concatenate, ParamSpec, TypeVar

from fengine.core.parameter_kinds import OTHER_NAMES
from fengine.core.sampling_params import PARAMETERS
from fengine.core.scalars import flag, told
from fengine.errors import FengineError, InvalidRequestError, OutOfMemoryError, UnknownParameterError

# Names of vLLM, OpenAI and transformers -> ours, of an engine and of a call.
WORDS = {
    "tensor_parallel_size": "tp_size", "data_parallel_size": "dp_size", "gpu_memory_utilization": "mem_fraction_static",
    "max_model_len": "context_length", "max_num_seqs": "max_running_requests", "block_size": "page_size",
    "max_num_batched_tokens": "chunked_prefill_size", "enforce_eager": "disable_cuda_graph", "seed": "random_seed",
    "tokenizer": "tokenizer_path", "adapters": "lora_paths", "tp": "tp_size", "dp": "dp_size", "model": "model_path",
    "model_name": "model_path", "model_id": "model_path", "model_name_or_path": "model_path",
    "text": "prompt", "prompts": "prompt", "inputs": "prompt", "images": "image_data", "prompt_token_ids": "input_ids",
    "logprobs": "return_logprob", "lora_request": "lora_path",
}  # fmt: skip
P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C")
F = TypeVar("F", bound=Callable[..., Any])


def takes(record: Callable[P, Any]) -> Callable[[Callable[..., R]], Callable[Concatenate[Any, P], R]]:
    """Gives a method (self, *args, **kwargs) the parameters of a dataclass, also for type checkers."""
    return described_by(record)


def described_by(record: Callable[..., Any]) -> Callable[[F], F]:
    """Gives a method (self, *args, **kwargs) the signature of a request's dataclass, whose `text` is called `prompt`.
    Fields that the call has not, as SGLang's (`input_embeds`), are marked `metadata={"call": False}`."""
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    hidden = {f.name for f in fields(record) if not f.metadata.get("call", True)}  # type: ignore[arg-type]
    kept = [p.replace(annotation=p.empty) for n, p in inspect.signature(record).parameters.items() if n not in hidden]
    signature = inspect.Signature([own, *(p.replace(name="prompt") if p.name == "text" else p for p in kept)])

    def mark(method: F) -> F:
        method.__signature__ = signature  # type: ignore[attr-defined]
        return method

    return mark


def record_of(record: Callable[..., C], args: tuple[Any, ...], kwargs: dict[str, Any]) -> C:
    """The dataclass that the arguments of a call make; `prompt` is its `text`. Errors: TypeError."""
    if "text" in kwargs:
        raise TypeError("got an unexpected keyword argument 'text'")
    if "prompt" in kwargs:
        kwargs["text"] = kwargs.pop("prompt")
    return record(*args, **kwargs)


def checked_calls(cls: type[C]) -> type[C]:
    """Wraps the public methods of an engine: wrong arguments and calls in a forked child raise FengineErrors. `submit`
    is behind others, or a server's."""
    for name, method in list(vars(cls).items()):
        if inspect.isfunction(method) and not name.startswith("_") and name not in ("shutdown", "submit"):
            setattr(cls, name, _checked(method))
    return cls


# What may fail in a value of any class, numpy's arrays among them: they have no one truth.
PROBES: tuple[Callable[[Any], Any], ...] = (
    repr, str, bool, lambda value: bool(value == ""), lambda v: hasattr(v, "tolist"),
    lambda v: isinstance(v, (list, tuple, dict)) and len(list(v)),
)  # fmt: skip


def _checked(method: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(method)
    flags = [name for name, p in signature.parameters.items() if p.annotation is bool]

    @contextmanager
    def explained(engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        engine._parts.core.check_process()
        try:
            given = signature.bind(engine, *args, **kwargs).arguments if flags else {}
            for name in given.keys() & flags:
                flag(name, given[name])
            yield
        except FengineError:
            raise
        except MemoryError as error:
            raise OutOfMemoryError("the host's memory ended during the call; free some and try again") from error
        except Exception as error:
            _explain(method, (engine, *args), kwargs, error)
            raise

    @wraps(method)
    async def call_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        with explained(self, args, kwargs):
            return await method(self, *args, **kwargs)

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with explained(self, args, kwargs):
            return method(self, *args, **kwargs)

    return call_async if inspect.iscoroutinefunction(method) else call


def _explain(method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], fault: Exception) -> None:
    """Raises what is wrong with the arguments; returns if they are those of the method."""
    signature = inspect.signature(method)
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        known = list(signature.parameters)[1:]  # without the engine itself
        for name in kwargs:
            if name not in known:
                raise unknown(f"{method.__name__}()", name, known) from None
        raise InvalidRequestError(f"{method.__name__}(): {error}; its arguments are {', '.join(known)}.") from None
    for (name, value), probe in product(list(given.items())[1:], PROBES):
        try:
            probe(value)
        except Exception as error:  # of a class whose methods raise; of what is too large, or nested too deep
            if probe is repr or (type(error), str(error)) == (type(fault), str(fault)):
                raise InvalidRequestError(f"{name} is {told(value)}, which cannot be read: {fault}") from fault


def unknown(where: str, name: str, known: Iterable[str]) -> UnknownParameterError:
    """The error for an argument that nothing has: with our word for it, or the nearest name that is known. Pure."""
    known, drawn = list(known), {**dict.fromkeys(PARAMETERS), **OTHER_NAMES}
    near = get_close_matches(name[:80], [*known, *drawn], n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    if (ours := WORDS.get(name)) in known:
        hint = f" It is {ours!r} here."
    elif near and near[0] in drawn:
        given = f"{{{drawn[near[0]] or near[0]!r}: …}}"
        what = "It is a" if name in drawn else "The nearest is a"
        hint = f" {what} sampling parameter of a call: generate(prompt, {given})."
        if "sampling_params" in known:
            hint = f" Sampling parameters go together: sampling_params={given}."
    return UnknownParameterError(f"{where} got an unknown argument {told(name)}.{hint}")
