"""`Runtime`, SGLang's server as an object: a process of its own, whose answers are JSON texts."""

import json
import shlex
import sys
import urllib.error
import urllib.request
from dataclasses import MISSING, fields
from typing import Any

from fengine.api.server_args import ServerArgs
from fengine.core.owned import finalize
from fengine.errors import EngineClosedError, EngineDeadError
from fengine.tokenizer.hf_tokenizer import get_tokenizer
from fengine.utils import launch_server_cmd, terminate_process, wait_for_server


def command_of(args: ServerArgs) -> str:
    """The command line that says what differs from the defaults. Pure."""
    words = [sys.executable, "-m", "fengine.launch_server"]
    for f in fields(args):
        value = getattr(args, f.name)
        default = f.default if f.default_factory is MISSING else f.default_factory()
        if f.name == "port" or value is None or value == default:
            continue
        name = f.name.replace("_", "-")
        parts = [] if isinstance(value, bool) else value if isinstance(value, (list, tuple)) else [value]
        said = [json.dumps(one) if isinstance(one, dict) else str(one) for one in parts]
        words += [f"--no-{name}" if value is False else f"--{name}", *said]
    return shlex.join(words)


class Runtime:
    """A server with the settings of an Engine, at `url`. Ends with this object or process, or with `shutdown`."""

    def __init__(self, log_level: str = "error", launch_timeout: float = 300.0, **settings: Any) -> None:
        """Errors: those of ServerArgs; EngineDeadError, TimeoutError if the server does not start."""
        self.server_args = ServerArgs(log_level=log_level, **settings)
        wanted = settings.get("port")
        self._process, port = launch_server_cmd(command_of(self.server_args), port=wanted)
        self.url = f"http://127.0.0.1:{port}"
        self._end = finalize(self, terminate_process, self._process)
        try:
            wait_for_server(self.url, launch_timeout, self._process)
        except (EngineDeadError, TimeoutError):
            self.shutdown()
            raise

    def generate(
        self, prompt: str | list[str], sampling_params: Any = None, return_logprob: Any = False,
        logprob_start_len: Any = None, top_logprobs_num: Any = None, lora_path: Any = None,
    ) -> str:  # fmt: skip
        """JSON of what `Engine.generate` gives, or of the error's body."""
        return self._ask("/generate", {
            "text": prompt, "sampling_params": sampling_params, "return_logprob": return_logprob,
            "logprob_start_len": logprob_start_len, "top_logprobs_num": top_logprobs_num, "lora_path": lora_path,
        })  # fmt: skip

    def encode(self, prompt: Any) -> str:
        """JSON of what `Engine.encode` gives, or of the error's body."""
        return self._ask("/encode", {"text": prompt})

    def get_tokenizer(self) -> Any:
        return get_tokenizer(self.server_args.tokenizer_path or self.server_args.model_path)

    def shutdown(self) -> None:
        self._end()

    def _ask(self, path: str, body: dict[str, Any]) -> str:
        """Errors: EngineClosedError behind a shutdown."""
        if not self._end.alive:
            raise EngineClosedError("this Runtime has been shut down")
        headers, key = {"Content-Type": "application/json"}, vars(self.server_args)["api_key"]
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.read().decode()
