"""Former paths, SGLang's paths, and `import sglang` where it was asked for: the very modules, in fresh processes."""

import subprocess
import sys

import forked
import pytest

import fengine.compat
import fengine.utils
from fengine.compat import MOVED, real_name


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_names_lead_to_where_modules_lie() -> None:
    assert real_name("fengine.serve.app") == "fengine.server.app" and real_name("fengine.api.engine") is None
    assert real_name("fengine.srt.managers.io_struct") == "fengine.api.io_struct"
    assert real_name("sglang") == "fengine" and real_name("sglang.srt.utils") == "fengine.utils"
    assert real_name("sglang.test.doc_patch") == "fengine.utils" and real_name("numpy.sglang") is None
    for name, target in MOVED.items():
        assert real_name(f"{name}.x") is not None and real_name(target) is None  # no alias of an alias


def test_every_module_has_one_copy_whatever_its_name() -> None:
    run(
        "import sys, importlib, fengine\n"
        "assert 'torch' not in sys.modules and 'hydra' not in sys.modules\n"
        "assert not any(name.partition('.')[0] == 'sglang' for name in sys.modules)\n"
        "from fengine.srt.server_args import ServerArgs\n"
        "from fengine.srt.hf_transformers_utils import get_tokenizer\n"
        "from fengine.srt.utils.hf_transformers_utils import get_tokenizer as again\n"
        "from fengine.srt.managers.io_struct import GenerateReqInput\n"
        "from fengine.srt.utils import kill_process_tree\n"
        "from fengine.srt.parser.reasoning_parser import ReasoningParser\n"
        "from fengine.srt.function_call.function_call_parser import FunctionCallParser\n"
        "from fengine.srt.managers.io_struct import Function, ReleaseMemoryOccupationReqInput, Tool\n"
        "from fengine.srt.entrypoints.http_server import launch_server\n"
        "from fengine.srt.sampling.sampling_params import SamplingParams\n"
        "from fengine.srt.constants import GPU_MEMORY_TYPE_KV_CACHE, GPU_MEMORY_TYPE_WEIGHTS\n"
        "from fengine.srt.sampling.custom_logit_processor import CustomLogitProcessor\n"
        "from fengine.server_args import ServerArgs as former\n"
        "from fengine.request import SamplingParams as params\n"
        "from fengine.engine import Engine\n"
        "assert get_tokenizer is again and former is ServerArgs is fengine.ServerArgs and Engine is fengine.Engine\n"
        "assert params is SamplingParams is fengine.SamplingParams\n"
        "for old, new in fengine.compat.MOVED.items():\n"
        "    module = importlib.import_module(old)\n"
        "    assert module is importlib.import_module(new), old\n"
        "    assert module.__name__ == module.__spec__.name == new, old\n"
        "from fengine.serve.app import make_app\n"
        "import fengine.server.app\n"
        "assert make_app is fengine.server.app.make_app\n"
        "tokenizer = get_tokenizer('box')\n"
        "tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, 'left'\n"
        "assert tokenizer.pad_token_id == tokenizer.eos_token_id\n"
        "tokenizer.pad_token_id = tokenizer.bos_token_id\n"
        "assert tokenizer.pad_token == tokenizer.bos_token\n"
    )


def test_sglang_means_fengine_once_it_is_asked_for() -> None:
    done = forked.run(
        "import fengine\n"
        "try:\n"
        "    import sglang\n"
        "except ModuleNotFoundError:\n"
        "    fengine.install_as_sglang()\n"
        "    fengine.install_as_sglang()\n"
        "    import sglang as sgl, sglang.test.doc_patch\n"
        "    from sglang.srt.server_args import ServerArgs\n"
        "    from sglang.utils import print_highlight, launch_server_cmd, wait_for_server, terminate_process\n"
        "    from sglang.test.test_utils import is_in_ci\n"
        "    assert sgl is fengine and ServerArgs is fengine.ServerArgs and sgl.Engine is fengine.Engine\n"
        "    import sglang.utils, fengine.utils\n"
        "    assert sglang.utils is fengine.utils\n"
        "    try:\n"
        "        import sglang.lang.interpreter\n"
        "    except ModuleNotFoundError as error:\n"
        "        assert 'fengine.lang' in str(error), error\n"
        "    with sgl.Engine(model_path='box') as llm:\n"
        "        assert llm.generate('hello', {'max_new_tokens': 2})['meta_info']['completion_tokens'] == 2\n"
        "else:\n"
        "    assert sglang is not fengine\n"  # it is installed
    )
    assert done.returncode == 0, done.stderr


def test_an_imported_sglang_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", sys.modules["json"])
    with pytest.raises(RuntimeError, match="imported already"):
        fengine.compat.install_as_sglang()


def test_former_commands_still_run() -> None:
    for module in ("fengine.serve", "fengine.evaluate"):
        result = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, timeout=300)
        assert result.returncode == 0 and "fengine" in result.stdout + result.stderr, result.stderr


def test_a_servers_command_is_started_awaited_and_ended() -> None:
    serve = (
        "import http.server, sys\n"
        "class Handler(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self): self.send_response(200); self.end_headers()\n"
        "    def log_message(self, *_): pass\n"
        "http.server.HTTPServer((\"127.0.0.1\", int(sys.argv[-1])), Handler).serve_forever()\n"
    )  # fmt: skip
    process, port = fengine.utils.launch_server_cmd(f"{sys.executable} -c '{serve}'")
    fengine.utils.wait_for_server(f"http://127.0.0.1:{port}", timeout=60, process=process)
    fengine.utils.terminate_process(process)
    assert process.returncode is not None
    with pytest.raises(TimeoutError, match="did not answer"):
        fengine.utils.wait_for_server(f"http://127.0.0.1:{port}", timeout=0)
    broken = fengine.utils.execute_shell_command(f"{sys.executable} -c 'raise SystemExit(3)'")
    broken.wait()
    with pytest.raises(fengine.errors.EngineDeadError, match="status 3"):
        fengine.utils.wait_for_server("http://127.0.0.1:9", process=broken)
