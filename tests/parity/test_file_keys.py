"""Every key of tokenizer_config.json, generation_config.json and sentence-transformers' files, set alone: what it says
holds, it is known to change nothing, or it is refused by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, GenerationConfig

from fengine.core.sampling_params import RECOMMENDED
from fengine.errors import FengineError, ModelLoadError, UnsupportedFeatureError
from fengine.tokenizer.tokenizer import Tokenizer
from fengine.worker.generation_config import HARMLESS, read_sampling_defaults
from fengine.worker.hub import BOX
from fengine.worker.pooling import Pooling, read_pooling

TEXTS = ("Hello, World!", " a  b\n\tc", "<|end|>x <|assistant|>", "ünï ✓ 漢字", "ab <|end_of_text|>  .  ,  n't 'm")
ADDED = {"content": "Hello", "lstrip": True, "__type": "AddedToken"}
TOKENIZER: dict[str, list[Any]] = {  # what public files hold, at values that would show
    "add_bos_token": [False, True], "add_eos_token": [True], "add_prefix_space": [True], "add_dummy_prefix": [True],
    "added_tokens_decoder": [{"1": {"content": "Hello", "special": True}},
                             {"4000": {"content": "zzz", "lstrip": True, "special": False}}],
    "additional_special_tokens": [["World"]], "extra_special_tokens": [["World"], {"image_token": "World"}],
    "auto_map": [{"AutoTokenizer": ["x.Y", None]}], "backend": ["tokenizers"], "bos_token": [None, "Hello", ADDED],
    "chat_template": ["{{ messages[0]['content'] }}", [{"name": "default", "template": "x"}]],
    "clean_up_tokenization_spaces": [True, None], "cls_token": ["Hello"], "do_lower_case": [True],
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": [True],
    "do_basic_tokenize": [False], "eos_token": [None, "World"], "errors": ["ignore"], "extra_ids": [5],
    "fix_mistral_regex": [True], "from_slow": [True], "image_token": ["World"], "is_local": [True],
    "keep_accents": [True], "legacy": [False, True], "local_files_only": [True], "mask_token": ["World"],
    "max_length": [2], "model_input_names": [["input_ids"]], "model_max_length": [3, 1e30], "name_or_path": ["x"],
    "never_split": [["Hello"]], "normalization": [True], "pad_to_multiple_of": [8], "pad_token": [None, "World"],
    "pad_token_type_id": [1], "padding_side": ["right"], "processor_class": ["X"], "remove_space": [False],
    "response_schema": [{}], "return_token_type_ids": [True], "sep_token": ["World"], "sp_model_kwargs": [{"a": 1}],
    "spaces_between_special_tokens": [True], "special_tokens_map_file": ["x"], "split_special_tokens": [True],
    "strip_accents": [True], "stride": [2], "tokenize_chinese_chars": [True], "tokenizer_file": ["tokenizer.json"],
    "tokenizer_class": ["LlamaTokenizerFast", "GPT2TokenizerFast", "Qwen2Tokenizer", None, "TokenizersBackend"],
    "trim_offsets": [False], "truncation": [True], "truncation_side": ["left"], "unk_token": [None, "World"],
    "truncation_strategy": ["longest_first"], "unk_id": [3], "use_default_system_prompt": [True], "use_fast": [False],
    "vocab_file": ["vocab.json"], "merges_file": ["merges.txt"], "bos_token_id": [7], "eos_token_id": [7],
}  # fmt: skip


def written(tokenizer: Any) -> Any:
    """Ids and texts of a tokenizer, ours or transformers'."""
    ids = [tokenizer.encode(text, add_special_tokens=special) for text in TEXTS for special in (True, False)]
    return ids, [[tokenizer.decode(row, skip_special_tokens=skip) for row in ids] for skip in (True, False)]


def test_no_key_of_a_tokenizer_changes_what_transformers_would_write(tmp_path: Path) -> None:
    shutil.copy(BOX / "tokenizer.json", tmp_path)
    base = json.loads((BOX / "tokenizer_config.json").read_text())
    changed = 0
    for key, values in TOKENIZER.items():
        for value in values:
            config = {name: item for name, item in (base | {key: value}).items() if item is not None}
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
            wanted = written(AutoTokenizer.from_pretrained(tmp_path))
            try:
                got = written(Tokenizer.from_directory(tmp_path))
            except FengineError:
                continue
            assert got == wanted, (key, value)
            changed += wanted != written(AutoTokenizer.from_pretrained(BOX))
    assert changed > 5  # or the texts would show nothing


def test_every_key_of_a_generation_config_is_taken_left_alone_or_refused(tmp_path: Path) -> None:
    def read(**config: Any) -> dict[str, Any]:
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
        return read_sampling_defaults(tmp_path)

    assert read_sampling_defaults(tmp_path) == {} == read(**json.loads((BOX / "generation_config.json").read_text()))
    for key in vars(GenerationConfig()):
        if key in RECOMMENDED:
            assert read(**{key: 1}) == {key: 1}
        elif key in HARMLESS:
            assert read(**{key: 3}) == {} and HARMLESS[key]
        else:
            with pytest.raises(UnsupportedFeatureError, match=f"{key} = 3"):
                read(**{key: 3})
            assert read(**{key: None}) == {}
    for key, value in {
        "forced_eos_token_id": 0,
        "guidance_scale": 0,
        "typical_p": 0.0,
    }.items():  # 0 is a value of these
        with pytest.raises(UnsupportedFeatureError, match=f"{key} = {value}"):
            read(**{key: value})
    assert read(no_repeat_ngram_size=0, epsilon_cutoff=0.0, token_healing=False, bad_words_ids=[]) == {}
    assert read(temperature=0.5, top_k=0, num_beams=1, typical_p=1.0) == {"temperature": 0.5, "top_k": -1}
    with pytest.raises(ModelLoadError, match=r"generation_config\.json: temperature"):
        read(temperature=-1)


POOL, LOWER, VERSIONS = "1_Pooling/config.json", "sentence_bert_config.json", "config_sentence_transformers.json"
TOKENS, LENGTH = "tokenizer_config.json", "2_Normalize/config.json"
TEXT = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
SENTENCES: list[tuple[str, str, Any, Pooling | None]] = [  # file, key, value, what comes of it (None: a refusal)
    (POOL, "pooling_mode_cls_token", True, Pooling("cls+last")), (POOL, "include_prompt", False, Pooling("last")),
    (POOL, "pooling_mode_max_tokens", True, Pooling("max+last")), (POOL, "token_weights", [1], None),
    (POOL, "pooling_mode_min_tokens", True, None),
    (POOL, "pooling_mode_mean_tokens", False, Pooling("last")), (POOL, "word_embedding_dimension", 9, None),
    (LOWER, "max_seq_length", 7, Pooling("last", max_length=7)), (LOWER, "do_lower_case", True, Pooling(lower=True)),
    (LOWER, "transformer_task", "feature-extraction", Pooling()), (LOWER, "transformer_task", "fill-mask", None),
    (LOWER, "modality_config", TEXT, Pooling()), (LOWER, "modality_config", {"image": {}}, None),
    (LOWER, "module_output_name", "token_embeddings", Pooling()), (LOWER, "module_output_name", "x", None),
    (LOWER, "model_args", {"attn_implementation": "eager"}, None), (LOWER, "tokenizer_args", {}, Pooling()),
    (VERSIONS, "__version__", {"transformers": "5"}, Pooling()), (VERSIONS, "similarity_fn_name", "dot", Pooling()),
    (VERSIONS, "model_type", "SentenceTransformer", Pooling()), (VERSIONS, "truncate_dim", 8, None),
    (VERSIONS, "prompts", {"query": "q: "}, Pooling()), (VERSIONS, "default_prompt_name", "query", None),
    (TOKENS, "model_max_length", 9, Pooling(max_length=9)), (TOKENS, "model_max_length", "9", None),
    (LENGTH, "module_input_name", "sentence_embedding", Pooling()), (LENGTH, "module_input_name", "x", None),
    (TOKENS, "model_max_length", 99, Pooling(max_length=64)),
    (TOKENS, "model_max_length", 1e30, Pooling(max_length=64)),
    ("modules.json", "kwargs", ["task"], None), ("modules.json", "name", "0", Pooling()),
]  # fmt: skip


@pytest.mark.parametrize(("file", "key", "value", "wanted"), SENTENCES)
def test_every_key_of_sentence_transformers(
    file: str, key: str, value: Any, wanted: Pooling | None, tmp_path: Path
) -> None:
    kinds = (("", "sentence_transformers.models.Transformer"), ("1_Pooling", "sentence_transformers.models.Pooling"),
             ("2_Normalize", "sentence_transformers.models.Normalize"))  # fmt: skip
    modules = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(kinds)]
    for folder in ("1_Pooling", "2_Normalize"):
        (tmp_path / folder).mkdir()
    files: dict[str, Any] = {POOL: {"word_embedding_dimension": 16, "pooling_mode_lasttoken": True}, LOWER: {},
                             VERSIONS: {}, TOKENS: {}, LENGTH: {}, "modules.json": modules}  # fmt: skip
    (modules[0] if file == "modules.json" else files[file])[key] = value
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    if wanted is None:
        with pytest.raises((UnsupportedFeatureError, ModelLoadError)):
            read_pooling(tmp_path, {"hidden_size": 16})
    else:
        places = {"max_position_embeddings": 64} if value in (99, 1e30) else {}
        assert read_pooling(tmp_path, {"hidden_size": 16} | places) == wanted
