"""Stop patterns: the automaton against `re`, in the detokenizer against decoding every prefix, and its limits."""

import itertools
import random
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizer_cases import TEXTS, Made

from fengine.api.engine import Engine
from fengine.core.request import SamplingParams
from fengine.errors import InvalidRequestError
from fengine.tokenizer.detokenizer import Detokenizer
from fengine.tokenizer.stop_regex import MAX_MEMO, MAX_STATES, StopRegex, StopRegexSearch, compile_patterns

PATTERNS = [
    r"ab", r"a+b", r"\d{3}", r"(foo|bar)+x", r"^ab", r"ab$", r"a$\n", r"\bfoo\b", r"o\Bo", r"(?i)AB[c-e]", r"(?m)^x$",
    r"[^a-z\s]{2,3}?b", r"a{2,}b", r"x{0,2}yz", r"(?s)a.b", r"a.b", r"\Aa", r"a\Z", r"[\]x-]o", r"(?i:f)oo",
    r"(?a)\w\W", r"é+", r"(?:a|b|cd)*ef", r"(?x) a b  # c", r"o\n$", r"(?m)$\nx", r"a|$\nb", r"(?P<n>a)b|\x41",
    r"(?:a??b){2}", r"[\w.]+@", r"(?i)é", r"\S\s\S", r"\n{2}", r"(?-i:a)B(?i:c)", r"(?a:\w)x", r"a(?ai:\W)B",
    r"(?a)\b(?i:é\b)x",
]  # fmt: skip
texts = st.text(st.sampled_from("abcdefoxyzAB\n12_é]-@. "), max_size=14)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_growing_text_matches_when_re_finds_a_match(pattern: str) -> None:
    compiled = StopRegex(pattern)

    @settings(max_examples=25, deadline=None)
    @given(pieces=st.lists(texts, min_size=1, max_size=4))
    def check(pieces: list[str]) -> None:
        search, seen = StopRegexSearch([compiled]), ""
        for piece in pieces:
            seen += piece
            hit = search.feed(piece)
            assert (hit == pattern) == (re.search(pattern, seen) is not None), seen
            if hit:
                return

    check()


ANCHORED = [
    r"a$\n", r"a\n$", r"\ba\b", r"a\Ba", r"\B a", r"(?m)^a$", r"(?m)$\na", r"\Aa", r"a\Z", r"a$", r"a\b", r" \b",
    r"\n\Z", r"(?m)^\n", r"^\n$", r"$\n$\n", r"a$\n{1,2}", r"(?:a$\n| a)",
]  # fmt: skip


@pytest.mark.parametrize("pattern", ANCHORED)
def test_anchors_on_every_short_text(pattern: str) -> None:
    compiled = StopRegex(pattern)
    for letters in itertools.chain.from_iterable(itertools.product("a \n", repeat=n) for n in range(6)):
        text = "".join(letters)
        for cut in range(len(text) + 1):
            search = StopRegexSearch([compiled])
            first = re.search(pattern, text[:cut]) is not None
            assert (search.feed(text[:cut]) is not None) == first, (text, cut)
            if not first:
                assert (search.feed(text[cut:]) is not None) == (re.search(pattern, text) is not None), (text, cut)


ITEMS = ["[a]", "[b]", "[^a]", "[^b]", *"abx.", *(f"({a}|{b})" for a in ("a", "b", "ab") for b in "xa"), r"\d", r"\w"]
TIMES = ["", *"*+?", *(f"{{{least},{most}}}" for least in range(3) for most in range(2, 5))]


@settings(max_examples=120, deadline=None)
@given(st.builds(str.__add__, st.sampled_from(ITEMS), st.sampled_from(TIMES)), texts)
def test_small_patterns_agree_with_re(pattern: str, text: str) -> None:
    if re.search(pattern, ""):
        with pytest.raises(InvalidRequestError, match="matches the empty text"):
            StopRegex(pattern)
    else:
        assert (StopRegexSearch([StopRegex(pattern)]).feed(text) is not None) == (re.search(pattern, text) is not None)


def test_a_peek_is_looked_at_and_not_kept() -> None:
    search = StopRegexSearch([StopRegex("ab")])
    assert search.feed("a", peek="c") is None and search.feed("x", peek="ab") == "ab"
    search = StopRegexSearch([StopRegex("ab")])
    assert search.feed("a", peek="b") == "ab"
    search = StopRegexSearch([StopRegex("ab")])
    assert search.feed("a", peek="a") is None and search.feed("b") == "ab"


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (r"(?a:\ba)", "give the flag"), (r"(?a)(?u:a(?i:\B))", "give the flag"),
        (r"(a)\1", "back-reference"), (r"(?P<n>a)(?P=n)", "back-reference"), (r"a(?=b)", "look-around"),
        (r"(?!a)b", "look-around"), (r"(?<=a)b", "look-around"), (r"(?<!a)b", "look-around"),
        (r"(?>ab)c", "atomic group"), (r"a++b", "possessive"), (r"(a)?(?(1)b|c)", "conditional"),
        ("(", "not a regular expression"), ("[b-a]", "not a regular expression"), ("*", "not a regular expression"),
        ("", "matches the empty text"), ("a*", "matches the empty text"), ("$", "matches the empty text"),
        ("é" * 129, "258 bytes, over the 256-byte limit"), ("a{2001}", "more than 2000 states"),
        ("(?:(?:){1000}){1000}", "more than 2000 states"), ("(?:(?:a{50}){50}){50}", "more than 2000 states"),
    ],
)  # fmt: skip
def test_what_is_refused(pattern: str, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        StopRegex(pattern)


def test_all_patterns_of_a_request_share_the_limits() -> None:
    assert len(compile_patterns(["a{60}"] * 2)) == 2
    with pytest.raises(InvalidRequestError, match="at most 32"):
        compile_patterns(["a"] * 33)
    with pytest.raises(InvalidRequestError, match=f"together need more than {MAX_STATES} states"):
        compile_patterns(["a{400}"] * 32)


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|aa)+$x|q", "(.*a){12}b", "(x+x+)+y", "(a|a)*c"])
def test_patterns_that_make_re_explode_cost_no_more_than_others(pattern: str) -> None:
    """Work is counted, not timed: every character is one step, whose states are at most the pattern's."""
    compiled, steps = StopRegex(pattern), []
    step = compiled._step
    compiled._step = lambda spot, char: steps.append(len(spot.states)) or step(spot, char)  # type: ignore[method-assign]
    assert StopRegexSearch([compiled]).feed("a" * 3000 + "x" * 3000) is None
    assert len(steps) <= 6000 and max(steps) <= compiled.size <= 150


# -- in the detokenizer ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory):  # noqa: ANN001, ANN201
    return Made(tmp_path_factory)


def first_match(tokenizer, ids, stops, patterns, trim):  # noqa: ANN001, ANN201
    """Oracle: (text, what matched, tokens used), by decoding every prefix."""
    for used in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:used])
        whole = text.rstrip("�") if text.endswith("�") else text
        found = [(at + len(stop), at, stop) for stop in stops if (at := whole.find(stop)) >= 0]
        if found:
            end, at, stop = min(found)
            return text[: at if trim else end], stop, used
        for pattern in patterns:
            if re.search(pattern, whole):
                return text, pattern, used
    return tokenizer.decode(ids), None, None


@pytest.mark.parametrize("name", ["byte_level", "llama2"])
def test_stops_equal_decoding_every_prefix(made, name) -> None:  # noqa: ANN001
    tokenizer = made(name)[1]
    encoded = [ids for text in TEXTS if "�" not in text and (ids := tokenizer.encode(text, add_special_tokens=False))]
    pieces = [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in "eA7 é".encode()]
    pieces = [id for id in pieces if id is not None] or encoded[0]  # of which a run may still turn out to be no text

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        ids=st.builds(list.__add__, st.sampled_from(encoded), st.lists(st.sampled_from(pieces), max_size=4)),
        cuts=st.lists(st.integers(0, 40), max_size=5), trim=st.booleans(),
        patterns=st.lists(st.sampled_from([r"\be\w", r"[A-Z]", r"\d", r"o .", "q"]), min_size=1, max_size=2),
        stops=st.lists(st.sampled_from(["l", "e", " w", "o", "zz"]), max_size=2),
    )  # fmt: skip
    def check(ids, cuts, trim, patterns, stops) -> None:  # noqa: ANN001
        params = SamplingParams.of({"stop": stops, "stop_regex": patterns, "no_stop_trim": not trim})
        detokenizer, text = Detokenizer(tokenizer, params), ""
        edges = [0, *sorted(min(c, len(ids)) for c in cuts), len(ids)]
        for a, b in zip(edges, edges[1:], strict=False):
            text += detokenizer.push(ids[a:b])
        text += detokenizer.finish()
        assert (text, detokenizer.matched, detokenizer.matched_tokens) == first_match(
            tokenizer, ids, stops, patterns, trim
        )

    check()
    run = [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in "ée".encode()]
    once: Any = check  # a run that is looked at before it has ended is read once
    once.hypothesis.inner_test([id for id in run if id is not None], [1, 2], True, ["é{2}"], [])


def test_the_stop_token_is_kept_in_the_text_only_without_trimming(made) -> None:  # noqa: ANN001
    tokenizer = made("byte_level")[1]
    ids = tokenizer.encode("one two", add_special_tokens=False)
    for trim in (True, False):
        detokenizer = Detokenizer(tokenizer, SamplingParams.of({"no_stop_trim": not trim}))
        text = detokenizer.push(ids, trim_last=True) + detokenizer.finish()
        assert text == tokenizer.decode(ids[:-1] if trim else ids)
    regex = Detokenizer(tokenizer, SamplingParams.of({"stop_regex": r"two|wo|o$"}))
    text = regex.push(ids[:1]) + regex.push(ids[1:], trim_last=True) + regex.finish()
    assert regex.matched is not None and text == tokenizer.decode(ids[: regex.matched_tokens])
    half, end = (tokenizer.backend.token_to_id(piece) for piece in "Ãx")  # the first of two bytes of a character
    regex = Detokenizer(tokenizer, SamplingParams.of({"stop_regex": "^\ufffd$"}))
    assert regex.push([half, end], trim_last=True) + regex.finish() == "\ufffd" and regex.matched == "^\ufffd$"


def test_memory_of_transitions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fengine.tokenizer.stop_regex.MAX_MEMO", 8)
    compiled, text = StopRegex(r"[a-y]z{3}"), "".join(map(chr, range(ord("a"), ord("y")))) * 3
    assert StopRegexSearch([compiled]).feed(text) is None and len(compiled._memo) <= 8
    assert StopRegexSearch([compiled]).feed(text + "zzz") is not None


def test_memory_of_large_sets_of_states_is_bounded() -> None:
    """A pattern that stands in hundreds of states at once may not remember thousands of such sets."""
    (compiled,) = compile_patterns(["(a|b)*a(a|b){150}"])
    assert StopRegexSearch([compiled]).feed("".join(random.Random(0).choices("ab", k=400))) is not None
    assert sum(1 + len(spot.states) for spot, _ in compiled._memo.values()) <= MAX_MEMO


def test_requests_share_compiled_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call compiles a pattern for its check and for its search, however many samples it has."""
    compiled = []
    make = StopRegex.__init__

    def count(self: StopRegex, pattern: str) -> None:
        compiled.append(pattern)
        make(self, pattern)

    monkeypatch.setattr(StopRegex, "__init__", count)
    with Engine(model_path="box", device="cpu", enable_torch_compile=False, max_total_tokens=2048) as engine:
        sampling = {"n": 5, "stop_regex": "z{3}", "max_new_tokens": 2}
        assert len(engine.generate(["a", "b"], sampling)) == 10 and len(compiled) == 2
