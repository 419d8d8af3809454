"""Tokenizer files that break the tokenizers library, or would hang it: one typed error each."""

import base64
import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from tokenizer_cases import byte_level
from tokenizers import Tokenizer as Backend

from fengine.errors import FengineError, InvalidRequestError, ModelLoadError
from fengine.tokenizer import pipeline, trial
from fengine.tokenizer.pipeline import KNOWN_SPLITS, exercise, may_hang
from fengine.tokenizer.tokenizer import Tokenizer
from fengine.tokenizer.trial import Limits
from fengine.worker.hub import BOX

BASE = json.loads(byte_level().to_str())


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def growing(times: int) -> dict[str, Any]:
    one = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
    return {"type": "Sequence", "normalizers": [one] * times}


def template(name: str) -> dict[str, Any]:
    single = [{"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {}}


def precompiled(data: bytes) -> dict[str, Any]:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


WORDPIECE = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##"}
BROKEN: dict[str, dict[str, Any]] = {
    "WordLevel without unk": {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"}},
    "WordPiece without unk": {"model": WORDPIECE | {"vocab": {"a": 0}, "max_input_chars_per_word": 100}},
    "Unigram without unk": {"model": {"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": None}},
    "template of an unknown token": {"post_processor": template("[CLS]")},
    "empty map": {"normalizer": precompiled(b"")},
    "truncated map": {"normalizer": precompiled(b"\0\0\0")},
    "map that points outside": {"normalizer": precompiled(b"\x08\0\0\0\xff\xff\xff\xff\0\0\0\0")},
    "no regular expression": {"pre_tokenizer": split("(")},
    "chunks of length 0": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "catastrophic pattern": {"pre_tokenizer": split("(a+)+$")},
    "catastrophic overlap": {"pre_tokenizer": split("(x+x+)+y")},
    "catastrophic replacement": {"normalizer": {"type": "Replace", "pattern": {"Regex": "(q*)*$"}, "content": "q"}},
    "a hundred million from one": {"normalizer": growing(8)},
    "growth in the decoder": {"decoder": {"type": "Sequence", "decoders": growing(8)["normalizers"]}},
    "prefix of 10 MB": {"normalizer": {"type": "Prepend", "prepend": "xy" * 5_000_000}},
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_files_are_refused(tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "LIMITS", Limits(0.12, 1 << 29))
    (tmp_path / "tokenizer.json").write_text(json.dumps(BASE | BROKEN[fault]))
    with pytest.raises(ModelLoadError, match="tokenizer.json (is not a valid tokenizer|cannot be used)"):
        Tokenizer.from_directory(tmp_path)


def test_mutations_end_in_typed_errors_or_work(tmp_path: Path) -> None:
    rng, refused = random.Random(0), 0
    parts = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding", "added_tokens")
    values = (None, 0, -1, 1e9, "", "x", [], {}, True, {"type": "Sequence"}, {"type": "ByteLevel"}, [1])
    for _ in range(150):
        changed = BASE | {rng.choice(parts): rng.choice(values)}
        changed["model"] = BASE["model"] | ({rng.choice(list(BASE["model"])): rng.choice(values)} if _ % 2 else {})
        (tmp_path / "tokenizer.json").write_text(json.dumps(changed))
        try:
            Tokenizer.from_directory(tmp_path).encode("Hello")
        except FengineError:
            refused += 1
    assert 30 < refused < 150


def test_a_text_that_the_library_fails_on_is_that_requests_error(tmp_path: Path) -> None:
    known = {c: i for i, c in enumerate("Helo,wrd!It's1234.5x=naïve字🙂\x00\ue000")}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps(
            BASE
            | {
                "model": {"type": "WordLevel", "vocab": known, "unk_token": "<unk>"},
                "added_tokens": [],
                "decoder": None,
            }
            | {
                "pre_tokenizer": {
                    "type": "Sequence",
                    "pretokenizers": [{"type": "Whitespace"}, {"type": "FixedLength", "length": 1}],
                }
            }
        )
    )
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.encode("Hello") == [known[c] for c in "Hello"]
    with pytest.raises(InvalidRequestError, match="fails on this text"):
        tokenizer.encode("z")


def test_patterns_in_use_need_no_trial() -> None:
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    llama3 = words + r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    assert {llama3, llama3.replace("{1,3}", "")} < KNOWN_SPLITS
    assert not may_hang(Backend.from_file(str(BOX / "tokenizer.json")))
    for pattern in KNOWN_SPLITS:  # 20,000 characters alike do not stop them
        backend = Backend.from_str(json.dumps(BASE | {"pre_tokenizer": split(pattern)}))
        exercise(backend, [c * 20_000 + "!" for c in "aA0 \n.é字'"])


def test_threads_that_ask_first_at_once_share_children(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Barrier(2, timeout=30)

    class Slow(trial.Trials):
        def __init__(self, *given: Any) -> None:
            both.wait()
            super().__init__(*given)

    monkeypatch.setattr(trial, "Trials", Slow)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(trial.shared, ["test_at_once"] * 2, [1] * 2)
    assert first is second is trial.shared("test_at_once", 1)
