"""Small tokenizers of the kinds that checkpoints bring, trained here, each saved as a directory and loaded twice."""

import json
import random
from functools import partial
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from fengine.tokenizer.tokenizer import Tokenizer

CORPUS = [
    "Hello, my name is Ada and I am 27 years old.",
    "The capital of France is Paris, isn't it? It's 1234567890!",
    "naïve café — “quotes” … and 日本語のテキスト 中文字符 🙂🙃 👩‍👩‍👧 e\u0301",
    "system user assistant tool\n\nYou are a helpful assistant.\n",
    "def f(x):\n\treturn {'a': [1, 2, 3]}\n",
]
TEXTS = [
    *CORPUS,
    "",
    " ",
    "  two  spaces ",
    "\n\n\ttabs",
    "🙂",
    "a\u0301\u0301\u0301",
    "nul\x00byte",
    "𝔘𝔫𝔦 ﬁ ①",
    "x<|im_start|>y<|im_end|>",
    "<|im_end|>",
    " <|im_start|> user ",
    "<think>a</think>",
    "a</s>b <s> c",
    "name , is . are n't you ?",
    "1234 56,789.0",
    "\ufffd\ue000",
]
ODD = " \t\n\r\x00\x7f\xa0\u200b\u2028\ufeff\ufffd\ue000\U0001f642\U0010ffff.,!?'’\"<>|_-▁Ġ##éÉßİıſﬁ①字あ한ة0๓"


def fuzzed(seed: int, count: int) -> list[str]:
    """Texts of words, odd characters, special tokens and anything that UTF-8 can hold."""
    draw = random.Random(seed)
    parts = [
        lambda: draw.choice(CORPUS)[: draw.randint(0, 40)],
        lambda: draw.choice([*SPECIALS, "<s>", "</s>", "<think>", "[CLS]", "<0x41>", "<unk>", "n't", " 's", "  "]),
        lambda: "".join(draw.choices(ODD, k=draw.randint(1, 6))),
        lambda: "".join(chr(draw.choice([draw.randint(0, 0xD7FF), draw.randint(0xE000, 0x10FFFF)])) for _ in range(3)),
    ]
    return ["".join(draw.choice(parts)() for _ in range(draw.randint(0, 5))) for _ in range(count)]


SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level(digits: bool = True) -> Backend:
    backend = Backend(models.BPE())
    split = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([*split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS * 3,
        trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False),
    )
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return backend


def padded(token: str = "[PAD]") -> Backend:
    """Texts of a batch are filled up with a token that no config names."""
    backend = byte_level()
    backend.enable_padding(pad_token=token)
    return backend


def byte_level_bos() -> Backend:
    backend = byte_level()
    backend.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]),
        ]
    )
    return backend


def qwen2() -> Backend:
    backend = byte_level()
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    split = words + r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return backend


def unigram() -> Backend:
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", *SPECIALS], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    return backend


def llama2(legacy_normalizer: bool = True) -> Backend:
    """SentencePiece BPE with byte fallback, as Llama 2 ships it."""
    byte_tokens = [f"<0x{b:02X}>" for b in range(256)]
    backend = Backend(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=560, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens], show_progress=False,
        limit_alphabet=80,
    )  # fmt: skip
    backend.train_from_iterator(CORPUS[:2] + CORPUS[3:], trainer)
    state = json.loads(backend.to_str())
    state["added_tokens"] = state["added_tokens"][:3]  # byte tokens are ordinary vocabulary
    if legacy_normalizer:
        state["pre_tokenizer"] = None
    backend = Backend.from_str(json.dumps(state))
    if legacy_normalizer:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def wordpiece() -> Backend:
    """As BERT's."""
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    backend.train_from_iterator(
        CORPUS * 3, trainers.WordPieceTrainer(vocab_size=260, special_tokens=names, show_progress=False)
    )
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    backend.decoder = decoders.WordPiece()
    return backend


def no_decoder() -> Backend:
    words = sorted({w for text in CORPUS for w in text.split()})
    backend = Backend(models.WordLevel({w: i for i, w in enumerate(["<unk>", *words])}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend


def save(folder: Path, backend: Backend, config: dict | None = None, model: dict | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if model is not None:
        (folder / "config.json").write_text(json.dumps(model))
    return folder


EOS = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
FAST = {"tokenizer_class": "PreTrainedTokenizerFast", **EOS}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64, "eos_token_id": 2}
BOS = {**FAST, "bos_token": "<|endoftext|>"}
CASES = {
    "byte_level": (byte_level, FAST, LLAMA),
    "byte_level_bos": (byte_level_bos, {**FAST, "bos_token": "<|endoftext|>", "add_bos_token": False}, LLAMA),
    "asks_for_bos": (byte_level, {**BOS, "add_bos_token": True, "add_eos_token": True}, LLAMA),
    "llama3": (byte_level_bos, {**EOS, "bos_token": "<|endoftext|>", "tokenizer_class": "LlamaTokenizerFast"}, LLAMA),
    "dict_tokens": (
        byte_level,
        {**FAST, "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True}},
        LLAMA,
    ),
    "new_tokens": (
        byte_level,
        {**FAST, "unk_token": "<|new|>", "additional_special_tokens": ["<think>", "<|im_start|> user"]},
        LLAMA,
    ),
    "added_decoder": (
        byte_level,
        {**FAST, "added_tokens_decoder": {"2": {"content": "<|im_end|>", "lstrip": True, "rstrip": True,
         "normalized": False, "single_word": False, "special": True}, "422": {"content": "e", "special": False}}},
        LLAMA,
    ),
    "split_special": (byte_level, {**FAST, "split_special_tokens": True}, LLAMA),
    "named_but_ordinary": (byte_level, {**FAST, "bos_token": "<think>"}, LLAMA),
    "padded": (padded, {"tokenizer_class": "PreTrainedTokenizerFast"}, LLAMA),
    "padded_with_a_known_token": (partial(padded, "<|im_end|>"), {"tokenizer_class": "PreTrainedTokenizerFast"}, LLAMA),
    "fixed_regex": (byte_level, {**FAST, "fix_mistral_regex": True}, {"model_type": "mistral"}),
    "phi3": (llama2, {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"}, {"model_type": "phi3"}),
    "mistral": (llama2, {"tokenizer_class": "LlamaTokenizerFast", "legacy": False}, {"model_type": "mistral"}),
    "gemma2": (llama2, {"tokenizer_class": "GemmaTokenizer", "unk_token": "<unk>"}, {"model_type": "gemma2"}),
    "qwen2": (qwen2, {**EOS, "tokenizer_class": "Qwen2Tokenizer"}, {"model_type": "qwen2"}),
    "qwen2_other_file": (byte_level, {"tokenizer_class": "Qwen2Tokenizer"}, {"model_type": "qwen2"}),
    "qwen2_as_fast": (byte_level, FAST, {"model_type": "qwen2"}),
    "qwen3": (byte_level, FAST, {"model_type": "qwen3"}),
    "unigram": (unigram, {**FAST, "unk_token": "<unk>", "clean_up_tokenization_spaces": True}, LLAMA),
    "llama2": (llama2, {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "add_bos_token": False}, LLAMA),
    "llama2_legacy": (llama2, {"tokenizer_class": "LlamaTokenizerFast", "legacy": True}, LLAMA),
    "llama2_no_prefix": (llama2, {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}, LLAMA),
    "llama2_fast": (llama2, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}, LLAMA),
    "bare": (byte_level_bos, None, LLAMA),
    "wordpiece": (wordpiece, {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}, LLAMA),
    "bert": (wordpiece, {"tokenizer_class": "BertTokenizerFast"}, {"model_type": "bert"}),
    "no_decoder": (no_decoder, {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}, LLAMA),
}  # fmt: skip


class Made:
    """case name -> (directory, our tokenizer, transformers'), each made once."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self.factory, self.memo = factory, {}

    def __call__(self, name: str):
        if name not in self.memo:
            build, config, model = CASES[name]
            folder = save(self.factory.mktemp("tok") / name, build(), config, model)
            self.memo[name] = folder, Tokenizer.from_directory(folder), AutoTokenizer.from_pretrained(folder)
        return self.memo[name]
