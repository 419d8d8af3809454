"""Engines in processes of their own: how those end, what they refuse after a fork, and what they can do without."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from forked import run


def test_the_interpreter_exits_with_requests_still_running() -> None:
    done = run(
        "from checksum import *\n"
        "models.MODELS = {SPEC.architecture: Model(lambda _: SPEC, forward, unembed, lambda _: [])}\n"
        "engine = Engine.from_parts(checksum_parts(pool=512))\n"
        "stream = engine.generate(input_ids=[1], sampling_params={'max_new_tokens': 250}, stream=True)\n"
        "next(stream)\n"
        "print('leaving')\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "leaving\n", "")


def test_ctrl_c_aborts_the_call_and_the_engine_lives_on() -> None:
    """The model itself sends the signal in its fifth step, so there is nothing to wait for."""
    done = run(
        "import os, signal\n"
        "from checksum import *\n"
        "def interrupting(params, spec, kv, batch):\n"
        "    if len(params['calls']) == 8:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    return forward(params, spec, kv, batch)\n"
        "models.MODELS = {SPEC.architecture: Model(lambda _: SPEC, interrupting, unembed, lambda _: [])}\n"
        "greedy = lambda n: {'temperature': 0, 'max_new_tokens': n}\n"
        "with Engine.from_parts(checksum_parts(pool=2048, rows=8)) as engine:\n"
        "    try:\n"
        "        engine.generate(input_ids=[[i] for i in range(8)], sampling_params=greedy(250))\n"
        "    except KeyboardInterrupt:\n"
        "        print('interrupted')\n"
        "    out = engine.generate(input_ids=[3, 4], sampling_params=greedy(5))['output_ids']\n"
        "    assert out == expected([3, 4], 5), out\n"
        "    stats = engine.stats()\n"
        "    assert stats['running'] == stats['waiting'] == 0, stats\n"
        "    in_loop(engine._parts.core, lambda: check_scheduler(engine._parts.core.stepper.scheduler))\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")


LATE = (
    "def late():\n"
    "    threading.main_thread().join()  # which has begun to exit\n"
    "    print('ended by a daemon' if threading.current_thread().daemon else 'ended', flush=True)\n"
    "engine._parts.memory.close = late\n"
)


@pytest.mark.parametrize(("late", "told"), [("", "closed\n"), (LATE, "closed\nended\n")])
def test_a_processor_may_shut_its_engine_down(late: str, told: str) -> None:
    """The process waits for the end, which another thread brings about."""
    done = run(
        "import threading\n"
        "from checksum import *\n"
        "from fengine.errors import *\n"
        "models.MODELS = {SPEC.architecture: Model(lambda _: SPEC, forward, unembed, lambda _: [])}\n"
        f"engine = Engine.from_parts(checksum_parts())\n{late}"
        "def processor(logits, params):\n"
        "    engine.shutdown()\n"
        "    return logits\n"
        "try:\n"
        "    engine.generate(input_ids=[1], sampling_params={'max_new_tokens': 9}, custom_logit_processor=processor)\n"
        "except EngineClosedError:\n"
        "    print('closed', flush=True)\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, told, "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_in_a_forked_child_every_call_refuses() -> None:
    done = run(
        "import os, warnings\n"
        "from checksum import *\n"
        "from fengine.errors import *\n"
        "models.MODELS = {SPEC.architecture: Model(lambda _: SPEC, forward, unembed, lambda _: [])}\n"
        "with Engine.from_parts(checksum_parts()) as engine:\n"
        "    session = engine.open_session(10)\n"
        "    engine.next = engine.generate(input_ids=[1], stream=True).__next__\n"
        "    calls = {'next': {},\n"
        "        'generate': dict(input_ids=[1]), 'open_session': dict(capacity_of_str_len=1), 'stats': {},\n"
        "        'close_session': dict(session_id=session), 'abort': dict(rid='a'), 'flush_cache': {},\n"
        "        'get_load': {}, 'get_server_info': {}, 'get_model_info': {}, 'pause_generation': {},\n"
        "        'continue_generation': {}, 'release_memory_occupation': {}, 'resume_memory_occupation': {},\n"
        "        'start_profile': {}, 'ping': {},\n"
        "        'stop_profile': {}, 'update_weights_from_tensor': dict(named_tensors=[]), 'begin_weight_update': {},\n"
        "        'get_weights_by_name': dict(name='a'), 'unload_lora_adapter': dict(lora_name='a'),\n"
        "        'destroy_weights_update_group': dict(group_name='g'), 'encode': dict(prompt=[1]),\n"
        "    }\n"
        "    warnings.simplefilter('ignore')  # Python 3.12 warns of forks beside threads\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        wrong = []\n"
        "        for name, arguments in calls.items():\n"
        "            try:\n"
        "                getattr(engine, name)(**arguments)\n"
        "                wrong.append(name)\n"
        "            except EngineClosedError as error:\n"
        "                if 'fork' not in str(error): wrong.append(name)\n"
        "            except Exception as error:\n"
        "                wrong.append((name, repr(error)))\n"
        "        os.write(1, repr(wrong).encode() + b'\\n')\n"
        "        os._exit(0)\n"
        "    os.waitpid(child, 0)\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_memory_that_ends_while_an_engine_is_made_is_one_error(tmp_path: Path) -> None:
    """Wherever it ends: at the file of weights, a tensor, the pool, a thread. The child's address space is limited."""
    code = """if True:
        import os, resource
        from pathlib import Path
        from fengine import Engine
        from fengine.errors import OutOfMemoryError
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        for free in (1, 9, 20, 40):
            if os.fork() == 0:
                resource.setrlimit(resource.RLIMIT_AS, (used + (free << 20),) * 2)
                try:
                    Engine(model_path="box", max_total_tokens=4096, enable_torch_compile=False)
                except OutOfMemoryError as error:
                    print(free, "max_total_tokens" in str(error), flush=True)
                finally:
                    os._exit(0)
            os.wait()
    """
    told = run(code, tmp_path)
    assert told.stdout.split("\n")[:-1] == ["1 True", "9 True", "20 True", "40 True"], told.stderr


def test_a_machine_without_triton_and_hydra_generates_on_its_cpu() -> None:
    code = (
        "import sys\n"
        "for name in ('triton', 'triton.language', 'triton.experimental', 'hydra', 'omegaconf'):\n"
        "    sys.modules[name] = None\n"
        "from fengine import Engine, ServerArgs, SamplingParams\n"
        "with Engine(model_path='box', device='cpu') as engine:\n"
        "    assert engine.generate('hello', {'max_new_tokens': 2})['meta_info']['completion_tokens'] == 2"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
