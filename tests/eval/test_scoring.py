"""Scores and figures against cases worked out by hand, closed forms, and Python's `re`."""

import functools
import itertools
import json
import math
import operator
import re
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fengine.core.json_text import parse_json
from fengine.errors import InputFileError, InvalidRequestError
from fengine.eval.tasks import scoring, statistics
from fengine.eval.tasks.scoring import (
    Extractor,
    choice_scores,
    count_words,
    json_scores,
    loglikelihood,
    matches,
    normal,
    perplexity_scores,
)
from fengine.eval.tasks.task import Answer, Metric

# -- text --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forms", "text", "result"),
    [
        ((), " A b ", " A b "),
        (("strip",), "\t A  b\n", "A  b"),
        (("blanks",), " A \n\t b\u00a0c ", "A b c"),
        (("case",), "Straße", "strasse"),
        (("punctuation",), "“D.C.”, (no)!", "DC no"),
        (("articles", "blanks"), "the cat and a dog, another", "cat and dog, another"),
        (("case", "articles", "blanks"), "The cat", "cat"),
        (("articles", "case", "blanks"), "The cat", "the cat"),  # in the order given
        (("nfkc",), "ﬁ①", "fi1"),
    ],
)
def test_normal_forms(forms: tuple[str, ...], text: str, result: str) -> None:
    assert normal(text, forms) == result


def test_exact_and_prefix() -> None:
    assert matches("exact", " Paris\n", ["Rome", "Paris"]) and not matches("exact", "Paris.", ["Paris"])
    assert not matches("exact", "paris", ["Paris"]) and matches("exact", "paris!", ["Paris"], ("case", "punctuation"))
    assert not matches("exact", "", ["Paris"]) and not matches("exact", "Paris", [])
    assert matches("exact", " Paris", [" Paris"], ()) and not matches("exact", "Paris", [" Paris"], ())
    assert matches("prefix", " Male. It lies in Asia.", ["Male"]) and matches("prefix", "Male", ["Male"])
    assert not matches("prefix", "Maled", ["Male"]) and not matches("prefix", "Male2", ["Male"])
    assert not matches("prefix", "The Male", ["Male"]) and matches("prefix", "Washington, D.C.", ["Washington, D.C."])


# -- extraction --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "text", "first", "last"),
    [
        (r"-?\d+", "12 and -7, or 3", "12", "3"),
        (r"#### (-?[\d,.]+)", "so #### 1,234 and #### 5", "1,234", "5"),
        (r"(?i)answer:\s*([a-d])\b", "Answer: B\nANSWER: c", "B", "c"),
        (r"(a)|(b)", "b a", "b", "a"),
        (r"x*", "ax", "", ""),
        (r"^.*$", "one\ntwo", None, None),
        (r"(?m)^.*$", "one\ntwo", "one", "two"),
        (r"(?s)<a>(.*?)</a>", "<a>1\n2</a><a>3</a>", "1\n2", "3"),
        (r"(?s)<a>(.*)</a>", "<a>1</a><a>3</a>", "1</a><a>3", "1</a><a>3"),
        (r"z", "", None, None),
        (r"b$", "ab\n", "b", "b"),
        (r"b\Z", "ab\n", None, None),
        (r"", "", "", ""),
        (r"\bé+\b", "à éé", "éé", "éé"),
    ],
)
def test_extract(pattern: str, text: str, first: str | None, last: str | None) -> None:
    extractor = Extractor(pattern)
    assert (extractor.find(text), extractor.find(text, last=True)) == (first, last)


PIECES = st.sampled_from(["a", "b", "[ab]", "[^a]", ".", r"\d", r"\w", r"\b", "^", "$", "c", r"\n", r"\s", "(?i:A)"])
PATTERNS = st.recursive(
    PIECES,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        inner.map("({})".format),
        st.tuples(inner, inner).map("(?:{0[0]}|{0[1]})".format),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "*?", "+?", "??", "{2}", "{1,3}", "{0,2}?"])).map(
            "(?:{0[0]}){0[1]}".format
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=600, deadline=None)
@given(PATTERNS, st.lists(st.text("aabbcA1\n ", max_size=8), min_size=4, max_size=4))
def test_extract_finds_what_re_finds(pattern: str, texts: list[str]) -> None:
    extractor = Extractor(pattern)
    for text in texts:
        matches = list(re.finditer(pattern, text))
        wanted = [next((g for g in m.groups() if g is not None), m.group()) for m in matches] or [None]
        assert (extractor.find(text), extractor.find(text, last=True)) == (wanted[0], wanted[-1])


@pytest.mark.parametrize(
    ("pattern", "word"),
    [
        ("(", "not a regular expression"),
        ("a" * 1025, "1024-byte"),
        ("(?:" * 200 + "a" + ")" * 200 + "*" * 3, "not a regular expression"),
        (r"\p{L}", "not a regular expression"),
        ("(?R)", "not a regular expression"),
        ("a{e<=1}", "brace"),
        ("(?:abc){i}", "brace"),
    ],
)
def test_extract_refuses(pattern: str, word: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(word)):
        Extractor(pattern)


@pytest.mark.parametrize(
    "pattern", ["(a+)+b", "(a|aa)+b", "(a|a)*b", "(.*)(.*)(.*)(.*)[z]", "(a|aa)+$", "a?" * 25 + "a" * 25 + "b"]
)
def test_patterns_that_make_backtracking_explode(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`re` would need longer than the universe has; here nothing is found, or the search is given up by name."""
    monkeypatch.setattr(scoring, "MAX_SECONDS", 0.05)
    try:
        assert Extractor(pattern).find("a" * 300 + "c") is None
    except InputFileError as error:
        assert "took more than 0.05 seconds" in str(error)


def test_all_matches_of_an_answer_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 3.0])
    monkeypatch.setattr(scoring.time, "monotonic", lambda: next(times))
    with pytest.raises(InputFileError, match="more than 2 seconds"):
        Extractor("a").find("aaa", last=True)


def test_braces_are_what_they_are_to_re() -> None:
    assert Extractor(r"\\boxed{(.*?)}").find(r"so \boxed{42}.") == "42"
    assert Extractor(r'{"id": (\d+)}').find('{"id": 7}') == "7" and Extractor("a{2}").find("aaa") == "aa"


@pytest.mark.parametrize(
    ("value", "stderr", "n", "low", "high"),
    [
        (1.0, 0.0, 150, 0.9750, 1.0),
        (0.0, 0.0, 10, 0.0, 0.2775),
        (0.5, math.sqrt(0.25 / 9), 10, 0.2366, 0.7634),
        (0.5, 0.1, 10, 0.3040, 0.6960),
        (7.0, 0.0, 10, 7.0, 7.0),
    ],
)
def test_intervals(value: float, stderr: float, n: int, low: float, high: float) -> None:
    """Wilson's by tables for shares; of other means 1.96 standard errors on either side."""
    assert [round(edge, 4) for edge in statistics.interval(value, stderr, n)] == [low, high]


# -- JSON --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["", "{", "{} {}", "{'a': 1}", '{"a": 1,}', "NaN", "[Infinity]", "1e999", '{"a": 1, "a": 2}', "[" * 10**5]
    + ['{"a": ' * 50_000, "01", "1" * 5000, '"\t"', "\ufeff{}", "{}\u00a0"],
)
def test_what_is_no_json(text: str) -> None:
    with pytest.raises(ValueError):
        parse_json(text)
    assert json_scores(text, {"a": 1}) == {"valid_json": False, "fields": 0.0, "json_match": False}


def test_json_fields() -> None:
    def scores(text: str, reference: object) -> tuple[object, ...]:
        return tuple(json_scores(text, reference).values())

    wanted = {"name": "Ada", "age": 36, "tags": ["x", {"y": None}], "none": {}}
    assert scores(" " + json.dumps(wanted) + "\n", wanted) == (True, 1.0, True)
    assert scores('{"none": {}, "tags": ["x", {"y": null}], "age": 36.0, "name": "Ada"}', wanted) == (True, 1.0, True)
    assert scores('{"name": "Ada", "age": "36"}', wanted) == (True, 1 / 5, False)
    assert scores('{"name": "Ada", "age": 36, "tags": ["x", {"y": 0}], "none": [], "more": 1}', wanted) == (
        True,
        3 / 5,
        False,
    )
    assert scores('{"a": 1, "b": 2}', {"a": 1}) == (True, 1.0, False)  # all fields, and one too many
    assert scores("1", True) == (True, 0.0, False) and scores("true", 1) == (True, 0.0, False)
    assert scores("1.0", 1) == (True, 1.0, True) and scores("[]", {}) == (True, 0.0, False)
    assert scores('{"0": 1}', [1]) == (True, 0.0, False)


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text("ab", max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    )
)
def test_every_value_matches_itself(value: object) -> None:
    assert json_scores(json.dumps(value), value) == {"valid_json": True, "fields": 1.0, "json_match": True}


# -- likelihoods -------------------------------------------------------------------------------------------------------


def test_choices_worked_out_by_hand() -> None:
    sums = [-6.0, -4.0, -9.0]  # per character -2, -4, -1
    choices = ["abc", "d", "efghijklm"]
    assert choice_scores(sums, choices, 1) == {"acc": True, "acc_norm": False, "picked": "d"}
    assert choice_scores(sums, choices, 2) == {"acc": False, "acc_norm": True, "picked": "d"}
    assert choice_scores([-2.0, -2.0], ["a", "b"], 0) == {"acc": True, "acc_norm": True, "picked": "a"}  # a tie
    assert choice_scores([-math.inf, -2.0], ["a", "b"], 1)["acc"]
    assert choice_scores([-4.0, -7.0], ["éé", "abcd"], 1) == {"acc": False, "acc_norm": True, "picked": "éé"}


def test_a_loglikelihood_is_rounded_once() -> None:
    logprobs = [-0.1] * 10
    assert loglikelihood(Answer("", [0] * 10, logprobs, {})) == -1.0 != functools.reduce(operator.add, logprobs)
    assert loglikelihood(Answer("", [], [], {})) == 0.0
    assert loglikelihood(Answer("", [0, 0], [-math.inf, -1.0], {})) == -math.inf


def test_perplexity_worked_out_by_hand() -> None:
    """Two texts of 2 and 1 words, 4 and 4 bytes, whose loglikelihoods are -ln 2 · 5 and -ln 2 · 1."""
    assert perplexity_scores(-5 * math.log(2), "é b") == {"loglikelihood": -5 * math.log(2), "words": 2, "bytes": 4}
    scores = [perplexity_scores(-5 * math.log(2), "é b"), perplexity_scores(-math.log(2), "abcd")]
    found = statistics.perplexities(scores)
    assert {name: metric.value for name, metric in found.items()} == pytest.approx(
        {"word_perplexity": 4.0, "byte_perplexity": 2 ** (6 / 8), "bits_per_byte": 6 / 8}, rel=1e-15
    )
    assert all(metric.n == 2 and metric.stderr > 0 for metric in found.values())


def test_words_as_the_harness_counts_them() -> None:
    assert [count_words(text) for text in ("a", "a b", " a\n\tb ", "a\u00a0b", "")] == [1, 2, 4, 2, 1]


# -- statistics --------------------------------------------------------------------------------------------------------


def test_means_against_closed_forms() -> None:
    hits = [True] * 30 + [False] * 70
    metric = statistics.mean(hits)
    assert metric == Metric(0.3, pytest.approx(math.sqrt(0.3 * 0.7 / 99), rel=1e-14), 100)
    metric = statistics.mean(float(i) for i in range(10))  # s² = 55/6
    assert metric == Metric(4.5, pytest.approx(math.sqrt(55 / 60), rel=1e-14), 10)
    assert statistics.mean([0.1] * 10) == Metric(0.1, 0.0, 10)
    assert statistics.mean([1e16, 1.0, -1e16]).value == 1 / 3  # nothing is lost on the way
    one, none = statistics.mean([True]), statistics.mean([])
    assert (one.value, one.n, none.n) == (1.0, 1, 0) and math.isnan(one.stderr) and math.isnan(none.value)
    assert one.as_dict() == {"value": 1.0, "stderr": None, "n": 1}
    json.dumps(none.as_dict(), allow_nan=False)


def test_means_do_not_depend_on_the_order() -> None:
    values = [Random(5).gauss(0, 1) * 10**i for i in range(-8, 8)]
    found = {statistics.mean(order) for order in itertools.islice(itertools.permutations(values), 0, 10**6, 9973)}
    assert len({metric.value for metric in found}) == 1


def test_texts_are_no_figures() -> None:
    found = statistics.means([{"acc": True, "picked": "A", "half": 0.5}, {"acc": False, "picked": "B"}])
    assert found == {"acc": Metric(0.5, 0.5, 2), "half": statistics.mean([0.5])} or math.isnan(found["half"].stderr)
    assert set(found) == {"acc", "half"} and found["acc"] == Metric(0.5, 0.5, 2) and found["half"].n == 1


def _rows(count: int, seed: int = 0) -> list[dict]:
    rng = Random(seed)
    sizes = [rng.randint(20, 200) for _ in range(count)]
    return [{"loglikelihood": -size * rng.gauss(1.0, 0.2), "words": size // 5, "bytes": size} for size in sizes]


@pytest.mark.parametrize("count", [400, 7001])  # single rows, and blocks of four with a rest
def test_the_bootstrap_against_the_delta_method(count: int) -> None:
    """Var(Σa/Σb) ≈ Σ(a - R b)² / (Σb)²; the bootstrap's own error is some 1/√(2·1000) of it."""
    rows = _rows(count)
    found = statistics.perplexities(rows)["bits_per_byte"]
    total, size = sum(-r["loglikelihood"] for r in rows), sum(r["bytes"] for r in rows)
    ratio = total / size
    spread = math.sqrt(sum((-r["loglikelihood"] - ratio * r["bytes"]) ** 2 for r in rows)) / size
    assert found.value == pytest.approx(ratio / math.log(2), rel=1e-12) and found.n == count
    assert found.stderr == pytest.approx(spread / math.log(2), rel=0.1)


def test_the_bootstrap_is_seeded() -> None:
    rows = _rows(50)
    assert statistics.perplexities(rows) == statistics.perplexities(iter(rows))
    blocks = statistics.Blocks(1)
    for row in rows:
        blocks.add([row["bytes"]])
    assert statistics.bootstrap(blocks, list) == statistics.bootstrap(blocks, list)
    assert statistics.bootstrap(blocks, list) != statistics.bootstrap(blocks, list, seed=1)


def test_blocks_hold_everything_in_little() -> None:
    blocks, count = statistics.Blocks(2), 5 * statistics.MAX_BLOCKS + 3
    for i in range(count):
        blocks.add([1.0, float(i)])
    assert blocks.n == count and blocks.totals() == [count, count * (count - 1) / 2]
    assert statistics.MAX_BLOCKS / 2 <= len(blocks.sums[0]) <= statistics.MAX_BLOCKS
    assert set(blocks.sums[0][:-1]) == {8.0} and 0 < blocks.sums[0][-1] <= 8.0


def test_perplexities_of_next_to_nothing() -> None:
    assert {m.n for m in statistics.perplexities([]).values()} == {0}
    one = statistics.perplexities(_rows(1))["byte_perplexity"]
    assert one.n == 1 and math.isnan(one.stderr) and one.value > 1
    beyond = statistics.perplexities(
        [{"loglikelihood": -x, "words": 1, "bytes": 1} for x in (400.0, 700.0, 709.0, 2000.0)]
    )
    assert beyond["word_perplexity"].value == math.inf and not math.isfinite(beyond["word_perplexity"].stderr)
    huge = statistics.paired([({"a": -1e308}, {"a": x}) for x in (1e308, 1e300, 0.0)])["a"].as_dict()
    assert huge["value"] is None and huge["n"] == huge["up"] == 3
    impossible = statistics.perplexities([{"loglikelihood": -math.inf, "words": 1, "bytes": 1}])
    assert impossible["word_perplexity"].value == math.inf and impossible["word_perplexity"].as_dict()["value"] is None


def test_paired_differences_drop_what_is_shared() -> None:
    rng = Random(2)
    hard = [rng.gauss(0, 5) for _ in range(200)]
    gains = [rng.gauss(0.5, 0.1) for _ in hard]
    pairs = [({"score": h, "text": "x"}, {"score": h + g, "text": "y"}) for h, g in zip(hard, gains, strict=True)]
    delta = statistics.paired(pairs)["score"]
    alone = statistics.mean(gains)
    assert (delta.value, delta.stderr) == pytest.approx((alone.value, alone.stderr), rel=1e-9)
    assert delta.high - delta.low == pytest.approx(2 * 1.96 * delta.stderr, rel=1e-3) and delta.low > 0
    assert (delta.n, delta.up, delta.down) == (200, 200, 0)
    assert statistics.mean(hard).stderr > 10 * delta.stderr


def test_paired_hits() -> None:
    pairs = [(True, True)] * 4 + [(False, True)] * 3 + [(True, False)] + [(False, False)] * 2
    delta = statistics.paired([({"acc": a}, {"acc": b}) for a, b in pairs])["acc"]
    assert (delta.value, delta.n, delta.up, delta.down) == (0.2, 10, 3, 1)
    assert delta.stderr == pytest.approx(math.sqrt((4 / 10 - 0.04) / 9), rel=1e-12)
    assert statistics.paired([({"acc": True}, {}), ({}, {"acc": True}), ({"acc": "a"}, {"acc": "b"})]) == {}


def test_paired_perplexities() -> None:
    a, b = _rows(300), _rows(300)
    better = [{**row, "loglikelihood": row["loglikelihood"] + 0.1 * row["bytes"]} for row in b]
    same, up = statistics.paired(zip(a, b, strict=True)), statistics.paired(zip(a, better, strict=True))
    assert set(same) == {"word_perplexity", "byte_perplexity", "bits_per_byte"}
    assert same["bits_per_byte"].value == same["bits_per_byte"].stderr == 0.0
    assert up["bits_per_byte"].value == pytest.approx(-0.1 / math.log(2), rel=1e-9)
    assert up["bits_per_byte"].stderr < 1e-6 < statistics.perplexities(a)["bits_per_byte"].stderr
    assert (up["bits_per_byte"].n, up["bits_per_byte"].up) == (300, None)
    json.dumps(up["bits_per_byte"].as_dict(), allow_nan=False)
