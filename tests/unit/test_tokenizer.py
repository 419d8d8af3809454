"""Tokenizer against transformers' AutoTokenizer, and its errors."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizer_cases import CASES, FAST, TEXTS, Made, byte_level, fuzzed, save
from tokenizers import decoders
from transformers import AutoTokenizer

import fengine
from fengine.errors import ContextLengthError, InvalidRequestError, ModelLoadError, UnsupportedFeatureError
from fengine.tokenizer.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return Made(tmp_path_factory)


@pytest.mark.parametrize("name", CASES)
def test_encode_and_decode_equal_transformers(made, name):
    _, ours, theirs = made(name)
    if name == "llama3" and type(theirs).__name__ == "LlamaTokenizer":
        pytest.skip("this transformers takes a byte-level tokenizer.json for a SentencePiece one; later ones do not")
    assert ours.vocab_size == len(theirs)
    for key, value in theirs.special_tokens_map.items():
        assert ours.special_tokens[key] == value
    for text in [*TEXTS, *fuzzed(1, 40)]:
        expected = theirs(text).input_ids
        assert ours.encode(text) == expected, text
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False).input_ids, text
        for skip in (False, True):
            assert ours.decode(expected, skip) == theirs.decode(expected, skip_special_tokens=skip), text
    assert ours.encode_batch(TEXTS) == [theirs(text).input_ids for text in TEXTS]


def test_the_model_in_the_box():
    folder = Path(fengine.__file__).parent / "models" / "box"
    ours, theirs = Tokenizer.from_directory(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.vocab_size == len(theirs) and theirs.eos_token_id in ours.eos_ids
    for text in TEXTS:
        assert ours.encode(text) == theirs(text).input_ids
    chat = [{"role": "user", "content": "Hello!"}]
    expected = theirs.apply_chat_template(chat, tokenize=True, return_dict=False, add_generation_prompt=True)
    assert ours.encode_chat(chat) == expected


def test_ids_of_special_tokens(made):
    _, tokenizer, theirs = made("byte_level_bos")
    assert tokenizer.bos_id == theirs.bos_token_id == 0
    assert tokenizer.eos_ids == {theirs.eos_token_id, 2}
    folder, _, _ = made("byte_level")
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert Tokenizer.from_directory(folder).eos_ids == {2, 7, 9}
    (folder / "generation_config.json").unlink()


def test_the_end_of_a_message_ends_a_text_as_in_sglang(made, tmp_path):
    backend = byte_level()
    backend.add_special_tokens(["<|eom_id|>"])
    folder = save(tmp_path, backend)
    assert Tokenizer.from_directory(folder).eos_ids >= {backend.token_to_id("<|eom_id|>")}


def test_imports_neither_torch_nor_transformers():
    code = "import sys, fengine.tokenizer.tokenizer; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


@pytest.mark.parametrize("more", [{}, {"added_tokens_decoder": {}}])
def test_which_of_two_files_names_a_token(tmp_path, more):
    folder = save(tmp_path, byte_level(), {**FAST, **more})
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|im_start|>"}')
    theirs = AutoTokenizer.from_pretrained(folder)
    assert Tokenizer.from_directory(folder).special_tokens["eos_token"] == theirs.eos_token


# -- bad directories and texts ---------------------------------------------------------------------------------------


def test_bad_directories(tmp_path):
    with pytest.raises(ModelLoadError, match="does not exist"):
        Tokenizer.from_directory(tmp_path / "no")
    with pytest.raises(ModelLoadError, match="no tokenizer.json: the file is missing.*save_pretrained"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a")
    with pytest.raises(ModelLoadError, match="only tokenizer.model"):
        Tokenizer.from_directory(tmp_path)
    text = byte_level().to_str()
    for broken in ("", "{", text[: len(text) // 2], "[]", '{"model": 3}'):
        (tmp_path / "tokenizer.json").write_text(broken)
        with pytest.raises(ModelLoadError, match="not a valid tokenizer"):
            Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ModelLoadError, match="not UTF-8"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text(text)
    for broken, reason in [("{", "not valid JSON"), ("[]", "JSON object"), ('{"eos_token": {}}', "eos_token"),
                           ('{"chat_template": 3}', "chat_template"), ('{"extra_special_tokens": 3}', "must be a list"),
                           ('{"added_tokens_decoder": {"x": {}}}', "added_tokens_decoder"),
                           ('{"eos_token": "a", "eos_token": "b"}', "key 'eos_token' occurs twice"),
                           ('{"a": NaN}', "NaN"),
                           ('{"a": ' * 100_000, "nested too deeply"),
                           ('{"add_bos_token": "yes"}', "add_bos_token must be true, false or null, got 'yes'"),
                           ('{"split_special_tokens": 1}', "split_special_tokens must be true"),
                           ('{"add_bos_token": true}', "add_bos_token is true, but there is no bos_token"),
                           ('{"add_eos_token": true, "eos_token": null}', "there is no eos_token"),
                           ('{"chat_template": [{"name": "a", "template": "x"}, {"name": "a", "template": "y"}]}',
                            "two chat templates are named 'a'")]:  # fmt: skip
        (tmp_path / "tokenizer_config.json").write_text(broken)
        with pytest.raises(ModelLoadError, match=reason):
            Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    Tokenizer.from_directory(tmp_path)


ODD_FILES = {
    "pipe": os.mkfifo, "folder": Path.mkdir, "link to nothing": lambda path: path.symlink_to("nowhere"),
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "digits": lambda path: path.write_text('{"a": ' + "1" * 5000 + "}"),
}  # fmt: skip


@pytest.mark.parametrize("name", [
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
    "chat_template.jinja",
])  # fmt: skip
@pytest.mark.parametrize("make", ODD_FILES.values(), ids=ODD_FILES)
def test_what_is_no_file_is_not_as_good_as_absent(tmp_path, name, make):
    (tmp_path / "tokenizer.json").write_text(byte_level().to_str())
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    if name == "chat_template.jinja" and (tmp_path / name).is_file():
        return  # a text, whatever it says
    with pytest.raises(ModelLoadError, match=name):
        Tokenizer.from_directory(tmp_path)


def test_unknown_decoder_is_refused_by_name(tmp_path):
    backend = byte_level()
    mixed = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("a", "b")])
    for decoder, name in [(decoders.CTC(), "CTC"), (mixed, "Replace")]:
        backend.decoder = decoder
        with pytest.raises(UnsupportedFeatureError, match=name):
            Tokenizer.from_directory(save(tmp_path, backend))


def test_bad_texts(made):
    tokenizer = made("byte_level")[1]
    for bad, reason in [(b"x", "decode it first"), (None, "NoneType"), (3, "int"), (["x"], "list")]:
        with pytest.raises(InvalidRequestError, match=reason):
            tokenizer.encode(bad)
    with pytest.raises(InvalidRequestError, match="U\\+D800 at character 2"):
        tokenizer.encode("ab\ud800c")
    with pytest.raises(InvalidRequestError, match="prompt\\[1\\] is bytes[\\s\\S]*prompt\\[3\\] holds a lone"):
        tokenizer.encode_batch(["a", b"b", "c", "\udfff"])
    with pytest.raises(InvalidRequestError, match="integers"):
        tokenizer.decode([-1])


def test_length_cap(made):
    folder = made("byte_level")[0]
    tokenizer = Tokenizer.from_directory(folder, context_length=100)
    assert tokenizer.max_chars == 800 + 4096
    small = replace(tokenizer, max_chars=10)
    assert len(small.encode("x" * 10)) == 10
    with pytest.raises(ContextLengthError, match="11 characters, more than the limit of 10"):
        small.encode("x" * 11)
    assert len(small.encode("x" * 11, max_length=4)) == 4
