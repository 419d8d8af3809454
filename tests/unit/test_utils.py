"""fengine.utils and the modules that SGLang's documentation imports."""

import asyncio
import importlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fengine.errors import ConfigError
from fengine.utils import async_stream_and_merge, execute_shell_command, is_in_ci, stream_and_merge, trim_overlap


def overlap_oracle(existing, new):
    """Tries every cut; the longest overlap wins."""
    sizes = [n for n in range(len(new) + 1) if n <= len(existing) and existing[len(existing) - n :] == new[:n]]
    return new[max(sizes) :]


@given(st.text("ab", max_size=8), st.text("ab", max_size=8))
def test_trim_overlap(existing, new):
    assert trim_overlap(existing, new) == overlap_oracle(existing, new)


class FakeEngine:
    """Streams the given pieces as one request of one token a piece, as the Engine's chunks do."""

    def __init__(self, pieces, mode):
        self.pieces, self.mode = pieces, mode

    def chunks(self):
        for n in range(1, len(self.pieces) + 1):
            start = {"cumulative": 0, "incremental": n - 1, "bare": n - 1}[self.mode]
            chunk = {"text": "".join(self.pieces[start:n])}
            if self.mode != "bare":
                chunk |= {"output_ids": list(range(start, n)), "meta_info": {"completion_tokens": n}}
            yield chunk

    def generate(self, prompt, sampling_params, *, stream):
        assert (prompt, sampling_params, stream) == ("p", {"temperature": 0}, True)
        return self.chunks()

    async def async_generate(self, prompt, sampling_params, *, stream):
        async def chunks():
            for chunk in self.generate(prompt, sampling_params, stream=stream):
                yield chunk

        return chunks()


async def collect(engine):
    return [piece async for piece in async_stream_and_merge(engine, "p", {"temperature": 0})]


@pytest.mark.parametrize("mode", ["cumulative", "incremental"])
@given(pieces=st.lists(st.text("ha🙂", max_size=3), max_size=6))
def test_streams_merge_to_the_text(mode, pieces):
    engine = FakeEngine(pieces, mode)
    assert stream_and_merge(engine, "p", {"temperature": 0}) == "".join(pieces)
    deltas = asyncio.run(collect(engine))
    assert deltas == pieces


def test_chunks_without_figures_are_trimmed():
    assert stream_and_merge(FakeEngine(["one two", "two three"], "bare"), "p", {"temperature": 0}) == "one two three"


@pytest.mark.parametrize("name", ["FENGINE_IS_IN_CI", "SGLANG_IS_IN_CI"])
def test_is_in_ci(monkeypatch, name):
    for other in ("FENGINE_IS_IN_CI", "SGLANG_IS_IN_CI"):
        monkeypatch.delenv(other, raising=False)
    assert not is_in_ci()
    for value, expected in [("true", True), ("True", True), ("1", True), ("0", False), ("", False), ("no", False)]:
        monkeypatch.setenv(name, value)
        assert is_in_ci() is expected


@pytest.mark.parametrize("command", ["", "python 'x"])
def test_commands_that_are_none(command):
    with pytest.raises(ConfigError, match="the command"):
        execute_shell_command(command)


def test_doc_patch_is_harmless():
    before = asyncio.run
    importlib.import_module("fengine.test.doc_patch")
    assert asyncio.run is before
