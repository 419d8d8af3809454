"""Imports point one way, the host column never imports torch, and nothing forbidden stands in the package."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "fengine"
FILES = sorted(p for p in ROOT.rglob("*.py"))

# Layer by layer; a module may import from earlier layers and, where listed together, from its own.
# Order inside a folder, where modules of it import one another.
FOLDERS: dict[str, list[str]] = {
    "host": "pages plan prefix_cache adapters rows drafts ngram waiting scheduler retract steps".split(),
    "ops": [
        "compiler",
        "cpu_library",
        "cpu",
        "registration",
        "ahead",
        "proof",
        "silu_mul",
        "linear_schedules",
        "gluon",
        "linear_hopper",
        "linear",
        "lora",
        "rms_norm",
        "rope",
        "qkv",
        "edges",
        "attention_kernels",
        "attention_hopper",
        "attention",
        "sampling",
        "edit_logits",
        "bitmask",
        "logprobs",
    ],
    "checkpoint": ["safetensors_file", "hub"],
    "doors": [
        "adapter_paths",
        "foreign_args",
        "adapters",
        "float_list",
        "arguments",
        "sessions",
        "hf_tokenizer",
        "info",
        "upkeep",
        "options",
        "results",
        "admission",
        "calls",
        "generation",
        "embedding",
        "scoring",
        "readout",
        "tokenizer_manager",
    ],
    "text": [
        "regex_parts",
        "stop_regex",
        "decoding",
        "detokenizer",
        "sandbox",
        "chat",
        "chat_ids",
        "tokenizer_files",
        "token_texts",
    ],
    "grammar": "characters regex rules ebnf references bounds schema structural_tag trial backend cursor masks".split(),
    "models": ["llama", "qwen2", "qwen3"],
    "lora": ["layout", "peft_config", "peft_files", "adapters"],
    "weights": ["places", "incoming", "group", "versions", "live", "updates"],
    "serve": "config refusals fields token_text answers completions chat embeddings metrics bodies service app "
    "exchange connection server command __main__".split(),
    "runs": "words config vet explain hydra_state compose restore launch "
    "output_file prompts builtin figures meter view generate engines".split(),
    "evals": "task extract scoring task_config tables openai_batch statistics rows kinds config journal folder resume "
    "machine digests manifest trace shards asking answering loop finish sweep points".split(),
    "reading": "lines records compare texts".split(),
    "report": "plain rows pieces schedule facts comparison sweep assemble page".split(),
    "harness": "gen_kwargs reads texts chats tool_calls inspect_config identity opening lm_eval_model "
    "inspect_model inspect_registry".split(),
    "verbs": "frame diff merge rerun layouts replay verdict verify lm_eval report".split(),
}
LAYERS: list[set[str]] = [
    {"errors"},
    {"scalars", "text.regex_parts", "text.stop_regex", "doors.adapter_paths", "doors.foreign_args"},
    {"grammar"},
    {"extras"},
    {"sampling_params"},
    {"config", "spec", "request"},
    {"device", "state", "host", "ops", "checkpoint", "text", "utils", "test", "pooling"},
    {"models", "kv_pool"},
    {"loader", "lora"},
    {"sampler"},
    {"step"},
    {"wants"},
    {"records", "batching", "tokenizer"},
    {"extended", "buckets"},
    {"runner"},
    {"tickets"},
    {"driver"},
    {"weights", "profiling"},
    {"memory"},
    {"build"},
    {"server_args"},
    {"doors"},
    {"engine"},
    {"runs"},
    {"evals"},
    {"reading"},
    {"report"},
    {"evaluate"},
    {"harness"},
    {"serve"},
    {"verbs"},
    {"run"},
    {"__main__"},
]


def module_name(path: Path) -> str:
    return ".".join(part for part in path.relative_to(ROOT).with_suffix("").parts if part != "__init__")


def layer_of(module: str) -> int:
    while module:
        for index, names in enumerate(LAYERS):
            if module in names:
                return index
        module = module.rpartition(".")[0]
    raise AssertionError(f"a module without a layer: {module!r}")


def imports_of(tree: ast.AST) -> list[tuple[str, ast.stmt]]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import hides where it points"
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fengine":
            base = node.module.removeprefix("fengine").lstrip(".")
            for alias in node.names:
                full = f"{base}.{alias.name}".lstrip(".")
                target = ROOT / Path(*full.split("."))
                is_module = target.with_suffix(".py").exists() or target.is_dir()
                found.append((full if is_module else base, node))
        elif isinstance(node, ast.Import):
            found += [(a.name.removeprefix("fengine."), node) for a in node.names if a.name.startswith("fengine.")]
    return [(name, node) for name, node in found if name]


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_point_one_way(path: Path) -> None:
    module = module_name(path)
    if not module:
        return
    own = layer_of(module)
    for name, node in imports_of(ast.parse(path.read_text())):
        folder, _, file = module.rpartition(".")
        if name.rpartition(".")[0] == folder and folder in FOLDERS:
            order = FOLDERS[folder]
            assert order.index(name.rpartition(".")[2]) < order.index(file), f"{path}:{node.lineno}: {module} <- {name}"
        elif not name.startswith(module + "."):  # a folder's __init__ may gather its files
            assert layer_of(name) < own, f"{path}:{node.lineno}: {module} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_no_forbidden_words(path: Path) -> None:
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"eval", "exec"}, f"{path}:{node.lineno}"
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = {a.name.split(".")[0] for a in node.names} | {(getattr(node, "module", None) or "").split(".")[0]}
            assert not names & {"pickle", "dill", "cloudpickle", "marshal"}, f"{path}:{node.lineno}"
            assert "TYPE_CHECKING" not in {a.name for a in node.names}, f"{path}:{node.lineno}"
    assert "torch.load(" not in source and "hydra.utils.instantiate" not in source


# The engine, on the command line: `--help` needs no torch; optional libraries.
LAZY = {
    "runs.engines",
    "evals.tables",
    "report.pieces",
    "grammar.backend",
    "verbs.lm_eval",
    "harness.inspect_registry",
    "serve.command",
}


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_no_imports_inside_functions(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inner = [n for n in ast.walk(node) if isinstance(n, (ast.Import, ast.ImportFrom))]
            assert not inner or module_name(path) in LAZY, f"{path}:{inner[0].lineno}"


def test_host_column_needs_no_torch() -> None:
    code = "import sys, fengine.host.scheduler, fengine.host.prefix_cache; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_engine_needs_no_hydra() -> None:
    code = (
        "import sys\n"
        "sys.modules['hydra'] = sys.modules['omegaconf'] = None\n"
        "from fengine import Engine, ServerArgs, SamplingParams\n"
        "assert Engine.__name__ == 'Engine'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_machine_without_triton_generates_on_its_cpu() -> None:
    code = (
        "import sys\n"
        "for name in ('triton', 'triton.language', 'triton.experimental'):\n"
        "    sys.modules[name] = None\n"
        "from fengine import Engine\n"
        "with Engine(model_path='box', device='cpu') as engine:\n"
        "    assert engine.generate('hello', {'max_new_tokens': 2})['meta_info']['completion_tokens'] == 2"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
