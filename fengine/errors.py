"""Every error that fengine raises on purpose. Plain Python, imports nothing. A message names the parameter, the value
it had, the limit, and what to do about it. Errors about a call are raised in the caller's thread before any work is
queued, so nothing is lost and no other request is touched."""


class FengineError(Exception):
    """Root of all typed errors."""


class InvalidRequestError(FengineError, ValueError):
    """A prompt, sampling parameter or call argument is outside its documented range."""


class UnknownParameterError(InvalidRequestError, TypeError):
    """A parameter name is not known; the message suggests the nearest known name."""


class ContextLengthError(InvalidRequestError):
    """The prompt, or the prompt plus the requested new tokens, exceeds the model's context length."""


class CapacityError(InvalidRequestError):
    """The request could never fit into the page pool, however long it waited."""


class SessionError(InvalidRequestError):
    """A session or one of its turns does not exist, or cannot be continued now. The session stays usable."""


class ChatTemplateError(InvalidRequestError):
    """The chat template failed, refused the messages, or ran past its limits."""


class GrammarError(InvalidRequestError):
    """A json_schema, regex, ebnf or structural_tag cannot be used, or left its own request no token to draw."""


class UnsupportedFeatureError(FengineError, NotImplementedError, ValueError):
    """The feature is known but not built; the message names it."""


class MissingExtraError(UnsupportedFeatureError, ImportError):
    """An optional library is not installed; the message names the `pip install`."""

    @classmethod
    def of(cls, what: str, library: str, extra: str) -> "MissingExtraError":
        """The error that tells that `what` needs `library`, which comes with the extra `extra`. Pure."""
        return cls(f"{what} needs {library}, which is not installed: pip install 'fengine[{extra}]'")


class InputFileError(FengineError, ValueError):
    """A prompt file or one of its lines cannot be used."""


class ConfigError(FengineError, ValueError):
    """Configuration that is unknown, of the wrong type, or contradictory. Lists every problem, one a line."""


class ModelLoadError(FengineError):
    """The model directory or hub repository cannot be used."""


class CorruptCheckpointError(ModelLoadError):
    """A checkpoint file contradicts itself, its index, or the model's config."""


class UnsupportedArchitectureError(ModelLoadError):
    """The architecture, or a feature of its config, is not implemented; lists what is."""


class UnsupportedFormatError(ModelLoadError):
    """Weights are in a format that is never opened (pickle-based or quantized)."""


class AdapterError(ModelLoadError, ValueError):
    """A LoRA adapter cannot be used with this model and these settings; nothing was loaded."""


class StaleStateError(FengineError, RuntimeError):
    """A KV state was used after it had been given away."""


class NumericsError(FengineError, ArithmeticError):
    """A row produced non-finite logits."""


class LogitProcessorError(FengineError, RuntimeError):
    """A request's own logit processor raised, or returned what no token can be drawn from."""


class OutOfMemoryError(FengineError, MemoryError):
    """Device memory does not suffice; the message names the knobs."""


class MemoryReleasedError(FengineError, RuntimeError):
    """The call needs memory that `release_memory_occupation` gave back, or weights that were lost with it."""


class EngineBusyError(FengineError, RuntimeError):
    """The call needs an idle engine, and requests are running or waiting."""


class QueueFullError(FengineError, RuntimeError):
    """As many requests wait already as `max_queued_requests` lets wait; a later call may find room."""


class TimedOutError(FengineError, TimeoutError):
    """A request waited or ran for longer than the engine's configuration lets it."""


class ProfileError(FengineError, RuntimeError):
    """Profiling is on already, or off, or its trace cannot be written."""


class InvariantError(FengineError, AssertionError):
    """The engine's own books do not balance: a bug in fengine. The engine stops rather than go on with wrong output."""


class EngineClosedError(FengineError, RuntimeError):
    """The engine was shut down before or during the call."""


class AbortedError(FengineError, RuntimeError):
    """A request was aborted before it had what the call is about."""


class EngineDeadError(FengineError, RuntimeError):
    """The engine's loop failed; the cause is chained. Every waiting call gets this error."""


class StorageError(FengineError, OSError):
    """An output path cannot be written."""

    @classmethod
    def of(cls, told: str, error: OSError) -> "StorageError":
        """What is told of an error of the system, with its number. Pure."""
        found = cls(told)
        found.errno = error.errno
        return found


class ResumeMismatchError(ConfigError):
    """A run cannot go on in this folder: what its results depend on has changed; lists what."""


class CacheSecurityError(FengineError, PermissionError):
    """A cache directory belongs to somebody else or is writable by others, so code in it cannot be trusted."""
