"""Words of a command line by people who know other programs: read as they are meant, or told ours. No torch."""

import difflib
import json
import os
import re
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path

from fengine.api.sglang_args import HARMLESS, REFUSED
from fengine.errors import ConfigError

PATTERNS = ("sampling.regex", "task.extract", "task.judge.extract", "task.delimiter")
FILES = ("sampling.json_schema", "sampling.ebnf", "sampling.structural_tag", "chat.template_kwargs", "chat.system",
         "task.prompt", "task.judge.prompt", "task.judge.system", "task.judge.sampling")  # fmt: skip
TEXTS = (*PATTERNS, *FILES)  # whose values are texts with whatever is in them; those of FILES may be read as @FILE
PLAIN = re.compile(r"(?!(?:null|true|false|inf|nan)$)[a-z_/][\w./-]*", re.I | re.ASCII)  # a text to Hydra as it stands
MAX_FILE = 1 << 20  # bytes


def _each(table: dict[str, str]) -> dict[str, str]:
    """A table whose keys are several names each, by the single names. Pure."""
    return {name: told for names, told in table.items() for name in names.split()}


# vLLM's, SGLang's, llama.cpp's and OpenAI's names -> ours; those that end alike are found without a table.
WORDS = _each({
    "tp tp_size tensor_parallel_size num_gpus gpus": "parallel.tp_size",
    "max_tokens max_completion_tokens n_predict max_gen_toks": "sampling.max_new_tokens",
    "max_model_len max_seq_len ctx_size n_ctx": "model.context_length",
    "gpu_memory_utilization mem_fraction": "cache.mem_fraction_static",
    "max_num_seqs max_batch_size batch_size": "scheduler.max_running_requests",
    "max_num_batched_tokens chunked_prefill_size": "scheduler.max_step_tokens",
    "block_size": "cache.page_size",
    "model_path model_id model_name_or_path checkpoint pretrained": "model.path",
    "tokenizer tokenizer_name": "model.tokenizer_path",
    "served_model_name alias": "serve.model_name",
    "speculative_algorithm draft": "speculation.algorithm",
    "lora lora_modules enable_lora adapters": "lora.paths",
    "temp": "sampling.temperature",
    "system system_prompt": "chat.system",
    "input input_file prompt prompt_file i p file": "prompts",
    "output output_file output_dir output_path o": "out",
    "num_samples repeats n best_of num_return_sequences": "task.samples (of fengine eval)",
    "tasks dataset": "task",
    "metric metrics scorer": "task.match",
    "num_fewshot fewshot few_shot n_shot num_shots": "task.shots",
    "guided_json schema json": "sampling.json_schema",
    "v verbose": "view",
    "m": "-m (a sweep)",
})  # fmt: skip
WHOLE = {  # keys of which no part alone would tell
    "task.judge.model": "a run has one model, which judges; judge its outputs.jsonl in a run of the other model, with "
    "task.judge.response=answers.0.text",
    "task.score": "fengine's word for it is task.match; for a judge's score task.judge.prompt",
    "task.prompt_file": "fengine's word for it is task.prompt=@FILE",
    "chat.enabled": "chat=true is of a run of prompts; of an evaluation it is task.chat=true",
}
ELSEWHERE = {  # sections that only some commands have
    "task": "tasks are run by fengine eval task=NAME",
    "run": "it is a key of fengine eval",
    "journal": "it is a key of fengine eval",
    "serve": "it is a key of fengine serve",
    "sampling": "each request to a server brings its own; serve.sampling_defaults says whose defaults count",
    "prompts": "requests come over HTTP; a file of prompts is run by fengine prompts=FILE",
    "out": "a server writes no file; a file of requests is run by fengine batch IN.jsonl OUT.jsonl",
    "experiment": "it is of fengine and fengine eval; a file of experiment/ begins with the line # @package _global_",
}
OTHERS = {  # group -> what is done with none of its options
    "model": "any other: model.path=DIR, or a hub id",
    "task": "any other: your rows by task=jsonl task.data=FILE, your task/NAME.yaml by --config-dir=DIR, lm-eval's by "
    "fengine lm-eval",
}
SWITCHES = _each({  # of other programs -> what does the same
    "enforce_eager disable_cuda_graph": "compile.cuda_graph=false",
    "disable_radix_cache no_enable_prefix_caching": "cache=no_prefix",
    "enable_prefix_caching": "nothing: prefixes are cached unless cache=no_prefix",
    "trust_remote_code": "nothing: code of a checkpoint is never run",
    "apply_chat_template": "chat=true",
    "enable_thinking": """chat.template_kwargs='{"enable_thinking": false}'""",
    "do_sample": "sampling=greedy, or sampling.temperature=1",
    "num_beams use_beam_search beam_width": "nothing: beam search is not built",
    "load_in_8bit load_in_4bit": "model.quantization=fp8, or a checkpoint in AWQ or GPTQ",
    "logit_bias": """a row's own: {"prompt": "...", "sampling": {"logit_bias": {"5": -1}}}""",
    "tool_call_parser enable_auto_tool_choice": "nothing: calls are read as the template writes them",
    "reasoning_parser": "nothing: what stands between <think> and </think> is told apart",
    "ssl_keyfile ssl_certfile ssl_ca_certs": "nothing: there is no TLS; put a proxy in front",
    "runner": "model.is_embedding=true",
    "chat_template": "Engine(chat_template=…), or python -m fengine.launch_server --chat-template FILE",
    "log_requests": "serve.access_log=true, or python -m fengine.launch_server --log-requests",
    "swap_space cpu_offload_gb": "nothing: cache tiers and weights beyond the device are not built",
    "speculative_config": "speculation=ngram, or speculation=eagle3 speculation.draft=PATH",
    "stream": "nothing: texts are shown as they grow, and a server streams where a request asks",
})  # fmt: skip


def readable(word: str, multirun: bool, texts: Sequence[str] = ()) -> str:
    """An override as its writer means it: ~ is the home directory, a grammar is a text whatever signs are in it, or a
    file's with @, and what has a blank in it is one prompt. `texts`: further keys that hold a text, such as a path.
    Errors: ConfigError for an @FILE that is not there."""
    key, sign, value = word.partition("=")
    if key == "chat":
        return f"chat.enabled={value}"
    if not sign or value[:1] in ("'", '"') or multirun and "," in value:
        return word
    if key not in TEXTS and re.match(r"~(/|$)", value):
        return f"{key}={quoted(str(Path(value).expanduser()))}"
    if key in FILES and value.startswith("@"):
        return f"{key}={quoted(_content(key, value[1:]))}"
    if key in FILES and Path(value).suffix and os.path.isfile(value):
        raise ConfigError(f"{word:.500} is a file's name; what is in it is {key}=@{value}")
    return f"{key}={quoted(value)}" if _is_text(key, value, texts) and not PLAIN.fullmatch(value) else word


def _is_text(key: str, value: str, texts: Sequence[str]) -> bool:
    """Whether a value is one text, and nothing for Hydra to read: several values or a function of it. Pure."""
    if value == "null":
        return False
    if key in TEXTS or key == "prompts" and value[:1] != "[" and re.search(r"\s", value):
        return True
    several = "," in value or value[:1] in ("[", "{") or re.fullmatch(r"\w+\(.*\)", value)
    return not several and (key in texts or key == "prompts" and Path(value).suffix != "")


def quoted(text: str) -> str:
    """A text as Hydra's grammar has it. Pure."""
    text = re.sub(r"(\\*)(\"|$)", lambda found: found[1] * 2 + ("\\" if found[2] else "") + found[2], text)
    return f'"{text}"'


def _content(key: str, name: str) -> str:
    try:
        if Path(name).is_fifo() and not name.startswith("/dev/"):  # a shell's <(…) is one, which somebody writes to
            raise ValueError("it is a pipe")
        with Path(os.path.expanduser(name)).open("rb") as file:
            found = file.read(MAX_FILE + 1)
        if len(found) > MAX_FILE:
            raise ValueError(f"it has more than {MAX_FILE:,} bytes")
        return found.decode("utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}=@{name:.200} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def other_name(key: str, names: Sequence[str], value: str = "") -> str | None:
    """What to say of a key by which other programs know something; None: of no such key. `names`: our keys. Pure."""
    name = key.lstrip("-").replace("-", "_").lower()
    own = name.removeprefix("no_") if name not in SWITCHES else name
    given = f"={value}" if value else ""
    if own in SWITCHES:
        return f"fengine's word for it is {SWITCHES[own]}"
    same = [ours for ours in names if ours == own or ours.rpartition(".")[2] == own]
    if found := same[0] if same else WORDS.get(own):
        groups = {name.partition(".")[0] for name in names}
        return f"fengine's word for it is {found}{given if {found} <= groups.union(names) else ''}"
    for told, groups in (("not built", REFUSED), ("it is not needed", HARMLESS)):
        if reason := next((why for why, group in groups.items() if own in group), None):
            return f"{told}: {reason}"
    return None


def as_written(told: str) -> str:
    """A message of Hydra's, with the words of a command line for those of a file. Pure."""
    return re.sub(r"To override a value use 'override (\S+): (.*)'", r"write \1=\2, without a +", told)


def flag(words: Sequence[str], index: int, names: Sequence[str]) -> str:
    """What to say of the word at `index`, an option that is not known. Pure."""
    word, sign, value = words[index].partition("=")
    if not sign and index + 1 < len(words) and not words[index + 1].startswith("-"):
        value = words[index + 1]
    group = word.lstrip("-")
    told = other_name(word, names, value)
    if told is None and any(name.startswith(f"{group}.") for name in names):
        is_path = group == "model" and "/" in value  # of a model that is none of ours
        told = f"write model.path={value}" if is_path else f"write {group}={value or 'OPTION'}"
    if told is None:
        tails = {name.rpartition(".")[2]: name for name in reversed(names)}
        near = difflib.get_close_matches(word.lstrip("-").replace("-", "_"), tails, 1, 0.75)
        told = f"did you mean {tails[near[0]]}={value or 'VALUE'}?" if near else "--help lists all keys"
    return f"no option {word:.100}; settings are written key=value; {told}"


def unreadable(word: str, problem: str, names: Collection[str] = ()) -> str:
    """What to say of a word that Hydra's grammar does not read, whatever the library says about it. `names`: the keys
    that the command has. Pure."""
    key, sign, value = word.partition("=")
    first = f"cannot read the override {word}{problem}\n"
    if not sign and Path(word).suffix in (".jsonl", ".txt", ".json", ".csv"):
        return first + f"write prompts={word:.200}; rows with columns: fengine eval task=jsonl task.data={word:.200}"
    if not sign:
        asked = shlex.quote(f"prompts={json.dumps([word[:100]], ensure_ascii=False)}")
        asked = f"a prompt is fengine {asked}, or typed in fengine chat"  # which has the same keys
        kinds = {"task": f"a task is task={word:.100}", "prompts": asked}
        told = [text for name, text in kinds.items() if name in names]
        return first + f"write key=value: {'; '.join([*told, f'a model is model={word:.100} or model.path=DIR'])}"
    if not value or re.search(r"[\"']", key):
        return first + """write key=value, and quote a value with spaces or commas: prompts='["Hello, you"]'"""
    single = value.replace("'", "'\\''")
    if re.fullmatch(r"\[[^\[\]\"]+\]", single):
        items = ", ".join(f'"{item.strip()}"' for item in single[1:-1].split(","))
        return first + f"write key=value, and quote the texts of a list: {key}='[{items:.200}]'"
    return first + f"write key=value, quoted twice, for the shell and for fengine: {key}='\"{single:.200}\"'"
