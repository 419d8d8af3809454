"""The detokenizer against decoding everything at once, and stop strings against decoding every prefix."""

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizer_cases import TEXTS, Made
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models

from fengine.core.request import SamplingParams
from fengine.tokenizer.decoding import Decoding, clean_cut, clean_up
from fengine.tokenizer.detokenizer import Detokenizer, Text


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return Made(tmp_path_factory)


STREAMED = ["byte_level", "new_tokens", "unigram", "llama2", "llama2_no_prefix", "no_decoder", "wordpiece"]
slow_ok = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def pushes(draw, vocab, interesting):
    """Ids in groups: anything in the vocabulary and a little beyond, often encodings of real text or byte tokens."""
    some = st.one_of(
        st.sampled_from(interesting),
        st.lists(st.integers(0, vocab + 3), max_size=6),
        st.lists(st.integers(3, min(vocab - 1, 258)), min_size=1, max_size=8),
    )
    ids = [i for part in draw(st.lists(some, max_size=6)) for i in part]
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def interesting_ids(tokenizer):
    return [ids for text in TEXTS if (ids := tokenizer.encode(text, add_special_tokens=False))]


def stream(tokenizer, groups, **params):
    detokenizer = Detokenizer(tokenizer, SamplingParams.of(params))
    deltas = [detokenizer.push(group) for group in groups]
    return "".join([*deltas, detokenizer.finish()]), detokenizer


@pytest.mark.parametrize("name", STREAMED)
def test_stream_equals_decode(made, name):
    tokenizer = made(name)[1]

    @slow_ok
    @given(groups=pushes(tokenizer.vocab_size, interesting_ids(tokenizer)), skip=st.booleans())
    def check(groups, skip):
        ids = [i for group in groups for i in group]
        text, detokenizer = stream(tokenizer, groups, skip_special_tokens=skip)
        assert text == tokenizer.decode(ids, skip)
        assert (detokenizer.num_tokens, detokenizer.matched) == (len(ids), None)
        assert detokenizer.finish() == ""

    check()


def first_stop(tokenizer, ids, stops, skip):
    """Oracle: (text, stop, tokens used), by decoding every prefix."""
    for used in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:used], skip)
        found = [(at + len(stop), at, stop) for stop in stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, stop = min(found)
            return text[:at], stop, used
        token = tokenizer.backend.id_to_token(ids[used - 1])
        if token in stops and not tokenizer.decode([ids[used - 1]], skip):  # a special token, which is not shown
            return text, token, used
    return tokenizer.decode(ids, skip), None, None


@pytest.mark.parametrize("name", STREAMED)
def test_stop_strings_equal_oracle(made, name):
    tokenizer = made(name)[1]

    @slow_ok
    @given(groups=pushes(tokenizer.vocab_size, interesting_ids(tokenizer)), skip=st.booleans(), data=st.data())
    def check(groups, skip, data):
        ids = [i for group in groups for i in group]
        text = tokenizer.decode(ids, skip)
        places = st.tuples(st.integers(0, max(0, len(text) - 1)), st.integers(1, 9)).map(lambda p: text[p[0] :][: p[1]])
        special = st.sampled_from(sorted(tokenizer.special_tokens.values()) or ["."])
        stop = st.one_of(places, special, st.text("aeinst 🙂.'", min_size=1, max_size=3))
        stops = data.draw(st.lists(stop.filter(lambda s: s and "\ufffd" not in s), max_size=4))
        expected = first_stop(tokenizer, ids, stops, skip)
        got, detokenizer = stream(tokenizer, groups, skip_special_tokens=skip, stop=stops)
        assert (got, detokenizer.matched, detokenizer.matched_tokens) == expected
        if expected[1] is not None:
            assert detokenizer.push(ids) == detokenizer.finish() == ""

    check()


def spelled(tokenizer, *pieces):
    """One id per piece of ASCII text."""
    ids = [tokenizer.backend.token_to_id(piece) for piece in pieces]
    assert None not in ids
    return ids


def test_text_that_may_begin_a_stop_string_waits(made):
    tokenizer = made("byte_level")[1]
    detokenizer = Detokenizer(tokenizer, SamplingParams.of({"stop": ["abcd", "bcx"]}))
    deltas = [detokenizer.push([i]) for i in spelled(tokenizer, *"zabcabce")]
    assert deltas == ["z", "", "", "", "abc", "", "", "abce"]
    assert detokenizer.matched is None
    detokenizer = Detokenizer(tokenizer, SamplingParams.of({"stop": ["abcd", "bcx"]}))
    assert detokenizer.push(spelled(tokenizer, *"zabcx!!")) == "za"
    assert (detokenizer.matched, detokenizer.matched_tokens, detokenizer.num_tokens) == ("bcx", 5, 5)


def test_of_stops_that_end_together_the_longest_wins(made):
    tokenizer = made("byte_level")[1]
    for stops in (["c", "abc", "bc"], ["abc", "bc", "c"]):
        text, detokenizer = stream(tokenizer, [spelled(tokenizer, *"xabcy")], stop=stops)
        assert (text, detokenizer.matched) == ("x", "abc")


@pytest.mark.parametrize("skip", [True, False])
def test_a_special_token_that_is_a_stop_string_matches_shown_or_not(made, skip):
    tokenizer = made("byte_level")[1]
    end = tokenizer.special_tokens["eos_token"]
    ids = spelled(tokenizer, *"abc", end, *"d")
    for stops, shown in (([end], "abc"), (["c" + end, end], "abc" if skip else "ab"), (["cx", end], "abc")):
        for groups in ([ids], [[i] for i in ids]):
            text, detokenizer = stream(tokenizer, groups, skip_special_tokens=skip, stop=stops)
            assert (text, detokenizer.matched_tokens) == (shown, 4) and end in detokenizer.matched


def test_incomplete_characters_wait(made):
    tokenizer = made("byte_level")[1]
    detokenizer = Detokenizer(tokenizer, SamplingParams())
    table = {v: k for k, v in tokenizer.decoding._bytes.items()}
    ids = [tokenizer.backend.token_to_id(chr(table[b])) for b in "🙂a".encode()]
    assert [detokenizer.push([i]) for i in ids] == ["", "", "", "🙂", "a"]
    assert detokenizer.push(ids[:2]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_stop_token_is_trimmed_from_text(made):
    tokenizer = made("byte_level")[1]
    a, b, c = spelled(tokenizer, *"abc")
    cases = [((), "ab", None, None), (("x",), "ab", None, None), (("abz",), "ab", None, None), (("bc",), "a", "bc", 3)]
    for stop, text, matched, count in cases:
        detokenizer = Detokenizer(tokenizer, SamplingParams.of({"stop": list(stop)}))
        assert detokenizer.push([a]) + detokenizer.push([b, c], trim_last=True) + detokenizer.finish() == text
        assert (detokenizer.matched, detokenizer.matched_tokens, detokenizer.num_tokens) == (matched, count, 3)


def test_a_space_that_is_not_shown_ends_nothing(made):
    """The first of a text, as a byte token, which may yet be part of a character."""
    tokenizer = made("llama2")[1]
    ids = spelled(tokenizer, "<0x20>", "<0x61>", "<0x20>", "<0x62>")
    for stops in ([" "], [" a"], ["a b"], [" b"], ["b"]):
        text, detokenizer = stream(tokenizer, [[id] for id in ids], stop=stops)
        assert (text, detokenizer.matched, detokenizer.matched_tokens) == first_stop(tokenizer, ids, stops, True)


@settings(max_examples=200, deadline=None)
@example(["x n", " ' ", "t"])
@given(st.lists(st.text(" .,?!'ntmvresx", max_size=7), max_size=8))
def test_clean_up_in_pieces_equals_clean_up_at_once(pieces):
    out, kept = [], ""
    for piece in pieces:
        kept += piece
        cut = clean_cut(kept)
        out.append(clean_up(kept[:cut]))
        kept = kept[cut:]
    assert "".join([*out, clean_up(kept)]) == clean_up("".join(pieces))


PIECES = ["▁a", "aa", "b", "▁", "x", "<0xC3>", "<0xA9>", " ", "a▁b", "▁▁", ".", "##b", " do not"]
BEHIND = [decoders.ByteFallback(), decoders.Fuse()]
DECODERS = {
    "none": None,
    "prefixed": decoders.Metaspace(),
    "bare": decoders.Metaspace(prepend_scheme="never"),
    "words": decoders.WordPiece(),
    "words as they are": decoders.WordPiece(cleanup=False),
    "two spaces go": decoders.Sequence([decoders.Replace("▁", " "), *BEHIND, decoders.Strip(" ", 2, 0)]),
    "no byte is one": decoders.Sequence([decoders.Replace("x", ""), *BEHIND]),
    "pattern": decoders.Sequence([decoders.Replace(Regex("a+"), "q"), decoders.Fuse()]),
}


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=40, deadline=None)
@given(ids=st.lists(st.integers(0, len(PIECES) - 1), max_size=8))
def test_every_decoder_that_is_built_streams_what_the_library_decodes(name, ids):
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(PIECES)}, merges=[]))
    backend.add_special_tokens(["b"])
    backend.add_tokens([AddedToken("b", special=False)])  # as another file says; the library skips it all the same
    if DECODERS[name] is not None:
        backend.decoder = DECODERS[name]
    decoding = Decoding(backend, False)
    text = Text(decoding, decoding.tables[True], first=True, strip=decoding.strip)
    assert "".join(text.feed_all([i]) for i in ids) + text.flush() == backend.decode(ids)
