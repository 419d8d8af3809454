"""What type checkers and editors see of `fengine`: the names that `__init__.py` loads on first use."""

from fengine.api.engine import Engine as Engine
from fengine.api.server_args import ServerArgs as ServerArgs
from fengine.compat import install_as_sglang as install_as_sglang
from fengine.config import EngineConfig as EngineConfig
from fengine.core.sampling_params import SamplingParams as SamplingParams
from fengine.eval.commands.evaluate import evaluate as evaluate
from fengine.server.runtime import Runtime as Runtime

__version__: str
