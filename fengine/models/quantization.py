"""What a `config.json` says about weights in few bits: the method, and of each module how it is stored. No torch. A
module that is not listed as kept may still be stored whole; the checkpoint's tensors tell."""

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from fengine.errors import ConfigError, UnsupportedFormatError
from fengine.models.reader import ConfigReader
from fengine.models.spec import Config, Quantization, Scheme

logger = logging.getLogger("fengine")
KEYS = ("quantization_config", "compression_config")  # the second is compressed-tensors' older name
TOOLS = {  # what tools write beside it: how scales were found, and which kernels they would take
    "quant_method", "method", "version", "meta", "tokenizer", "dataset", "damp_percent", "damp_auto_increment",
    "true_sequential", "static_groups", "model_name_or_path", "model_file_base_name", "model_seqlen",
    "block_name_to_quantize", "backend", "module_name_preceding_first_block", "modules_in_block_to_quantize",
    "batch_size", "pad_token_id", "use_exllama", "disable_exllama", "exllama_config", "max_input_length",
    "cache_block_outputs", "act_group_aware", "use_cuda_fp16", "pack_dtype", "quant_type", "mse", "do_fuse",
    "fuse_max_seq_len", "modules_to_fuse", "module_name", "exllama_kwargs", "quantization_status",
    "global_compression_ratio", "run_compressed", "dequantize", "fmt", "hyb_act", "provider",
    "use_optimized_inference", "observer", "observer_kwargs", "input_activations", "output_activations", "format",
    "modules_to_convert", "autoround_version", "iters", "seqlen", "nsamples", "low_gpu_mem_usage",
    "weight_block_size", "amp", "enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input",
    "gradient_accumulate_steps", "lr", "minmax_lr", "scale_dtype", "to_quant_block_names", "act_data_type",
    "act_dynamic", "act_group_size", "act_sym", "low_cpu_mem_usage",
}  # fmt: skip


def read_quantization(config: Config) -> Quantization | None:
    """None: weights are stored whole. Pure. Errors: UnsupportedFormatError for what is not built, ModelLoadError."""
    told = next((config[key] for key in KEYS if config.get(key)), None)
    if told is None:
        return None
    method = told.get("quant_method") if isinstance(told, dict) else told
    if not isinstance(told, dict) or not isinstance(method, str) or method not in READERS:
        raise _unbuilt(f"quant_method {method!r:.80}")
    read = ConfigReader(told)
    _one_of(read, "method", (method,), method)  # GPTQModel's newer name
    found = READERS[method](read)
    read.done("quantized model")
    return found


def chosen(stored: Quantization | None, asked: str | None) -> Quantization | None:
    """What is in force where `asked`, one of config.QUANTIZATIONS, is the engine's argument. Pure. Errors:
    ConfigError."""
    if asked is None:
        return stored
    if stored is None and asked in AT_LOAD:
        return Quantization(asked, ((KEPT_AT_LOAD, None), (".*", Scheme("load", AT_LOAD[asked], (1, 0)))))
    if stored is not None and asked == "w8a8_fp8":
        return _with_activations(stored)
    if stored is None or stored.method != asked:
        found = "is not quantized" if stored is None else f"is quantized by {stored.method!r}"
        raise ConfigError(f"quantization={asked!r}, but the checkpoint {found}; leave the argument out.")
    return stored


AT_LOAD: dict[str, Literal["fp8", "w8a8"]] = {"fp8": "fp8", "w8a8_fp8": "w8a8"}


def _with_activations(stored: Quantization) -> Quantization:
    """The same weights in FP8, multiplied with activations in FP8. Pure. Errors: ConfigError where there are none."""
    rules = tuple(
        (pattern, replace(scheme, code="w8a8") if scheme is not None and scheme.layout == "float" else scheme)
        for pattern, scheme in stored.rules
    )
    if rules == stored.rules:
        raise ConfigError(
            f"quantization='w8a8_fp8', but the checkpoint is quantized by {stored.method!r} without weights in FP8; "
            "leave the argument out."
        )
    return Quantization("w8a8_fp8", rules)


FLOATS = ("float-quantized", "naive-quantized")  # the second where activations are not quantized
MAX_REPEATS = 6  # of a pattern: each multiplies the time of matching a name
KEPT_AT_LOAD = r"lm_head|score|.*\.(gate|router|router\.layer|shared_expert_gate)"  # small, or what the rest hangs on


def _unbuilt(what: str) -> UnsupportedFormatError:
    return UnsupportedFormatError(
        f"config.json: quantization with {what} is not built; built are AWQ (gemm, 4 bits), GPTQ (4 and 8 bits), "
        "compressed-tensors (pack-quantized, float-quantized, FP8 of naive-quantized, mxfp4-pack-quantized), FP8 and "
        "MXFP4."
    )


def _refuse_rest(read: ConfigReader, known: set[str]) -> None:
    """A key that may change the result is refused by name. Errors: UnsupportedFormatError."""
    for key, value in read.config.items():
        if value and key not in known | TOOLS:
            raise _unbuilt(f"{key} = {value!r:.80}")


def _one_of(read: ConfigReader, name: str, built: tuple, default: object) -> object:
    """A key's value. Errors: UnsupportedFormatError for one that is not built."""
    value = read.config.get(name)
    value = default if value is None else value
    if value not in built or type(value) is not type(built[built.index(value)]):
        raise _unbuilt(f"{name} {value!r:.80}")
    return value


def _group(read: ConfigReader, name: str = "group_size", default: int | None = None) -> int:
    """Columns that share a scale; 0: all of them, which tools call -1."""
    value = read.config.get(name, default)
    return 0 if type(value) is int and value == -1 else read.size(name, 1 << 20, default)


def _names(read: ConfigReader, *keys: str) -> list[str]:
    """A list of names or regular expressions under the first of the keys that is there."""
    value = next((read.config[key] for key in keys if read.config.get(key)), [])
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        read.problems.append(f"{keys[0]} must be a list of names, got {value!r}"[:200])
        return []
    return value


def _rule(read: ConfigReader, pattern: str, scheme: Scheme | None) -> tuple[str, Scheme | None]:
    """A rule whose pattern is known to be a regular expression that takes little time."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        read.problems.append(f"{pattern!r:.80} is no regular expression: {error}")
        return "", scheme
    if not _is_quick(pattern):
        read.problems.append(f"{pattern!r:.80} may take years: at most {MAX_REPEATS} repeats, none in another")
        return "", scheme
    return pattern, scheme


def _is_quick(pattern: str) -> bool:
    """Whether `re` can tell soon that a module's name does not match: what is repeated has no choices in it. Pure."""
    left, repeats = re.sub(r"\\.|\[\^?\]?(?:\\.|[^]\\])*\]", "x", pattern), r"[*+{]"  # escapes and classes: a letter
    left = f"({left})"
    while found := re.search(r"\((?:\?[:=!<]+)?([^()]*)\)([*+{]?)", left):
        if found[2] and re.search(r"[*+?{|]", found[1]):
            return False
        ways = found[1].split("|")  # one after another
        kept = "*" * max(len(re.findall(repeats, way)) for way in ways)
        kept += "?" * (max(way.count("?") for way in ways) + (len(ways) > 1))
        left = f"{left[: found.start()]}x{kept}{left[found.start(2) :]}"
    return len(re.findall(repeats, left)) <= MAX_REPEATS and left.count("?") <= 2 * MAX_REPEATS


def _kept(read: ConfigReader, names: list[str]) -> list[tuple[str, Scheme | None]]:
    """transformers' reading of modules_to_not_convert: whole parts of a name from its beginning, or its end. Pure."""
    return [_rule(read, rf"(?:{name})(?:(?<=\.)|(?=\.|$)).*|.*{re.escape(name)}", None) for name in names]


def _awq(read: ConfigReader) -> Quantization:
    _refuse_rest(read, {"bits", "w_bit", "group_size", "q_group_size", "zero_point", "modules_to_not_convert", "sym",
                        "desc_act", "checkpoint_format", "lm_head", "data_type", "act_bits"})  # fmt: skip
    _one_of(read, "data_type", ("int",), "int")
    _one_of(read, "act_bits", (16,), 16)
    layout = read.config.get("version") or read.config.get("format") or "gemm"
    if str(layout).lower() != "gemm":
        raise _unbuilt(f"AWQ's version {layout!r:.80}")
    _one_of(read, "w_bit" if "w_bit" in read.config else "bits", (4,), 4)
    _one_of(read, "zero_point", (True,), True)
    group = _group(read, "q_group_size" if "q_group_size" in read.config else "group_size", 128)
    rules = _kept(read, _names(read, "modules_to_not_convert"))
    return Quantization("awq", (*rules, (".*", Scheme("awq", "int4", (1, group), zeros=True))))


OFFSETS = {"gptq": 1, "gptq_v2": 0, None: None}  # of zero points, by the format that tools write since there are two


def _gptq(read: ConfigReader) -> Quantization:
    def scheme(told: ConfigReader) -> Scheme:
        _refuse_rest(told, {"bits", "group_size", "sym", "desc_act", "checkpoint_format", "lm_head", "dynamic",
                            "modules_to_not_convert", "data_type", "act_bits"})  # fmt: skip
        _one_of(told, "data_type", ("int",), "int")
        _one_of(told, "act_bits", (16,), 16)
        forms = [told.config[key] for key in ("checkpoint_format", "format") if told.config.get(key)] or [None]
        if forms[0] not in tuple(OFFSETS) or forms[-1] != forms[0]:
            raise _unbuilt(f"GPTQ's checkpoint_format {' and '.join(map(repr, forms)):.80}")
        code: Literal["int4", "int8"] = "int4" if _one_of(told, "bits", (4, 8), None) == 4 else "int8"
        ordered, offset = told.flag("desc_act"), OFFSETS[forms[0]]
        if offset is None and not told.flag("sym", default=True):
            logger.warning("config.json: quantization_config has no checkpoint_format: read as gptq, not gptq_v2")
            offset = 1
        return Scheme("gptq", code, (1, _group(told)), zeros=True, offset=offset, ordered=ordered)

    rules = _kept(read, _names(read, "modules_to_not_convert"))
    dynamic = read.config.get("dynamic") or {}
    if not isinstance(dynamic, dict) or not all(isinstance(value, dict) for value in dynamic.values()):
        read.problems.append(f"dynamic must be an object of objects, got {dynamic!r}"[:200])
        dynamic = {}
    for name, changes in dynamic.items():
        told = ConfigReader({**read.config, **changes})
        pattern = name.removeprefix("+:").removeprefix("-:")
        rules.append(_rule(read, f"(?:{pattern}).*", None if name.startswith("-:") else scheme(told)))
        read.problems += told.problems
    return Quantization("gptq", (*rules, (".*", scheme(read))))


def _fp8(read: ConfigReader) -> Quantization:
    """DeepSeek's and transformers' blocks, and one scale a tensor or channel, as older tools write them."""
    _refuse_rest(read, {"activation_scheme", "modules_to_not_convert", "ignored_layers", "scale_fmt", "kv_cache_scheme",
                        "weight_per_tensor", "expert_dtype"})  # fmt: skip
    _one_of(read, "fmt", ("e4m3",), "e4m3")
    _one_of(read, "expert_dtype", ("fp8",), "fp8")
    _one_of(read, "activation_scheme", ("dynamic", "static"), "dynamic")
    _refuse_cache(read)
    rules = _kept(read, _names(read, "modules_to_not_convert", "ignored_layers"))
    return Quantization("fp8", (*rules, (".*", Scheme("float", "fp8", _block(read, "weight_block_size")))))


def _block(read: ConfigReader, name: str) -> tuple[int, int] | None:
    """Rows and columns that share a scale; None: as many as the file's scales say."""
    block = read.config.get(name)
    if block is None:
        return None
    if isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block):
        return block[0], block[1]
    read.problems.append(f"{name} must be two whole numbers, got {block!r}"[:200])
    return None


def _refuse_cache(read: ConfigReader) -> None:
    if scheme := read.config.get("kv_cache_scheme"):
        raise _unbuilt(f"kv_cache_scheme {scheme!r:.80}")


def _mxfp4(read: ConfigReader) -> Quantization:
    _refuse_rest(read, {"modules_to_not_convert"})
    rules = _kept(read, _names(read, "modules_to_not_convert"))
    return Quantization("mxfp4", (*rules, (".*", Scheme("mxfp4", "fp4", (1, 32)))))


def _refuse_other_forms(read: ConfigReader) -> None:
    """What compressed-tensors may do beside rounding."""
    sparsity, transform = (read.config.get(name) for name in ("sparsity_config", "transform_config"))
    if transform or (sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense")):
        raise _unbuilt(f"sparsity_config {sparsity!r:.80} with transform_config {transform!r:.80}")


def _compressed(read: ConfigReader) -> Quantization:
    _refuse_rest(read, {"config_groups", "ignore", "format", "kv_cache_scheme", "sparsity_config", "transform_config"})
    _refuse_cache(read)
    _refuse_other_forms(read)
    groups = read.config.get("config_groups")
    each = [*groups.values()] if isinstance(groups, dict) else []
    told = all(isinstance(group, dict) and isinstance(group.get("weights") or {}, dict) for group in each)
    if not isinstance(groups, dict) or not told:
        read.problems.append(f"config_groups must be an object of objects, got {groups!r}"[:200])
        groups = {}
    rules = [_rule(read, _target(name), None) for name in _names(read, "ignore")]
    found: dict[str, Scheme] = {}
    for group in groups.values():
        form = group.get("format") or read.config.get("format")
        part = ConfigReader(group, read.problems)
        _refuse_rest(part, {"targets", "weights"})
        scheme = _packed(ConfigReader(group.get("weights") or {}, read.problems), form)
        found |= dict.fromkeys(_names(part, "targets"), scheme)
    order = sorted(found, key=lambda name: (name == "Linear", name.startswith("re:"), name))  # a module's name is first
    return Quantization("compressed-tensors", (*rules, *(_rule(read, _target(name), found[name]) for name in order)))


def _target(name: str) -> str:
    """The pattern of a target: "re:" and an expression, the class of all matrices here, or a module's name. Pure."""
    return f"(?:{name[3:]}).*" if name.startswith("re:") else ".*" if name == "Linear" else re.escape(name)


PACKED: dict[tuple[object, object, object], Literal["int4", "int8"]] = {
    ("pack-quantized", "int", 4): "int4",
    ("pack-quantized", "int", 8): "int8",
}


def _packed(weights: ConfigReader, form: object) -> Scheme:
    """How one group of compressed-tensors is stored."""
    _refuse_rest(weights, {"num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic",
                           "actorder", "scale_dtype", "zp_dtype"})  # fmt: skip
    if weights.config.get("dynamic"):
        raise _unbuilt("weights whose scales are dynamic")
    bits, kind = _one_of(weights, "num_bits", (4, 8), None), _one_of(weights, "type", ("int", "float"), "int")
    _one_of(weights, "actorder", ("group", "weight", "static", "dynamic", True, False), False)
    strategy = weights.config.get("strategy") or ("group" if weights.config.get("group_size") else "tensor")
    zeros = not weights.flag("symmetric", True)
    ordered = weights.config.get("actorder") in ("group", "dynamic", True)
    columns = _group(weights) if strategy == "group" else 0
    found = (str(form), kind, bits)
    if found in PACKED and strategy in ("group", "channel"):
        return Scheme("packed", PACKED[found], (1, columns), zeros=zeros, ordered=ordered)
    if form in FLOATS and (kind, bits) == ("float", 8) and strategy in ("tensor", "channel", "block") and not zeros:
        return Scheme("float", "fp8", _block(weights, "block_structure") if strategy == "block" else None)
    if found == ("mxfp4-pack-quantized", "float", 4) and columns == 32 and not zeros:
        return Scheme("micro", "fp4", (1, 32))
    raise _unbuilt(f"format {form!r:.80} ({bits} bits, type {kind!r:.20}, strategy {strategy!r:.20})")


READERS: dict[str, Callable[[ConfigReader], Quantization]] = {
    "awq": _awq, "gptq": _gptq, "fp8": _fp8, "mxfp4": _mxfp4, "compressed-tensors": _compressed,
}  # fmt: skip
