"""Compiled grammars, and the one file that imports the matcher library, llguidance. No torch.

llguidance refuses the schema keywords that it does not hold, builds its automata as far as texts reach them, under
limits that are counts rather than seconds, and lets go of the GIL (Moskal et al., github.com/guidance-ai/llguidance).
What these limits do not cover ends a child process (`tokenizer/trial.py`) and its own request: a catastrophic pattern
neither stalls the loop, nor keeps other grammars waiting, nor eats the memory."""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np

from fengine.core.masks import Filled, MaskedDraft
from fengine.core.request import Request
from fengine.errors import EngineClosedError, FengineError, GrammarError, MissingExtraError, UnsupportedFeatureError
from fengine.structured_output import ebnf, masks, regex, schema, structural_tag
from fengine.structured_output.masks import Cursor, checked
from fengine.structured_output.schema import SURROGATE, Whitespace
from fengine.tokenizer.trial import Refused, shared

MAX_BYTES = {"json_schema": 1 << 17, "structural_tag": 1 << 17, "ebnf": 1 << 15, "regex": 1 << 14}
WORDS = {"json_schema": "json", "regex": "regex", "ebnf": "ebnf", "structural_tag": "structural tag"}  # as SGLang's
SECONDS = 30.0  # how long a caller waits, where others are compiled first
COMPILERS = 2  # grammars compiled at once
MAX_KEPT = 128  # compiled grammars; of those that are used least the memory is given back
LIMITS = {
    "initial_lexer_fuel": 1_000_000,  # some 20 ms
    "step_lexer_fuel": 200_000,  # of one mask: some 14 ms
    "step_max_items": 50_000,  # of one mask: some 3 ms
    "max_items_in_row": 2_000,
    "max_lexer_states": 50_000,  # of one grammar: at most 100 MB
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
MASK_THREADS = min(8, max(2, (os.cpu_count() or 2) // 2))  # a mask of a large vocabulary takes some 30 µs of one


class Source(NamedTuple):
    """A grammar as a request gives it: `kind` is the name of its sampling parameter."""

    kind: str
    text: str


class Vocabulary:
    """The tokens as the matcher sees them: `tokens[id]` is the id's text, None for one that has none of its own. Behind
    them stands one more, which no model draws: that the matcher allows it tells that the text may end here."""

    def __init__(self, tokens: Sequence[bytes | None], drops_space: bool) -> None:
        """`drops_space`: of a space at the beginning of a text nothing is shown. Errors: MissingExtraError,
        FengineError."""
        try:
            import llguidance
        except ModuleNotFoundError:
            raise MissingExtraError.of("a grammar", "llguidance", "grammar") from None
        except (ImportError, OSError) as error:  # the process may have no descriptor, or no memory left
            raise FengineError(f"llguidance, which grammars need, cannot be read now: {error}") from error
        self.size, self.drops_space = len(tokens), drops_space
        self.eos_token_id, self.bos_token_id = self.size, None
        self.tokens = [token or b"" for token in tokens] + [b""]
        self.special_token_ids = [i for i, token in enumerate(self.tokens) if not token]
        self.llguidance: Any = llguidance
        self.tokenizer: Any = llguidance.LLTokenizer(llguidance.TokenizerWrapper(self))
        self.limits: Any = llguidance.LLParserLimits(**LIMITS)
        self.executor: Any = llguidance.LLExecutor(MASK_THREADS)

    def __call__(self, text: bytes) -> list[int]:
        return []  # asked only where tokens are forced, which no grammar here does

    def matcher(self, lark: str) -> Any:
        """A new matcher, which may be in error."""
        text = f'%llguidance {{"no_forcing": true}}\n{lark}'
        matcher = self.llguidance.LLMatcher
        return matcher(self.tokenizer, matcher.grammar_from_lark(text), log_level=0, limits=self.limits)


class Grammar:
    """A compiled grammar. Requests share it, and what its automaton has learnt; none changes what another one gets."""

    def __init__(self, vocabulary: Vocabulary, source: Source, lark: str) -> None:
        """`lark` says what the rule `text` is. Errors: GrammarError."""
        self.vocabulary, self.source = vocabulary, source
        self._lark = f"start: text\n{lark}"
        self._first = self._made()
        if vocabulary.drops_space:  # a space that is not shown may stand in front, and must where the text begins so
            ids = np.flatnonzero(np.unpackbits(self._beginnings(), bitorder="little")).tolist()
            begins = any(vocabulary.tokens[id].startswith(b" ") for id in ids)
            self._lark = f"start: / /{'' if begins else '?'} text\n{lark}"
            self._first = self._made()
        if not self._beginnings().any():
            raise GrammarError("nothing satisfies it with this vocabulary: no token can begin a text")

    def matcher(self) -> Any:
        """At the beginning of a text."""
        return self._first.deep_copy()

    def anew(self) -> Any:
        """`matcher`, with an automaton that has learnt nothing: one that is shared may be full. Modifies: self."""
        self._first = self._made()
        return self.matcher()

    def cursor(self, request: Request, barred: Sequence[int]) -> Cursor:
        """Where the request's output stands, as far as it is known; `barred` ids are never drawn."""
        params = request.params
        cursor = Cursor(
            self, request.stop_ids, barred, request.early_ids, eager=not params.ignore_eos, least=params.min_new_tokens
        )
        cursor.take(request.output_ids)
        return cursor

    def masks(self, rows: Sequence[int], cursors: Sequence[Cursor], drafts: Sequence[MaskedDraft] = ()) -> Filled:
        """As `masks.fill`, of rows whose grammars share its vocabulary."""
        return masks.fill(rows, cursors, drafts)

    def _made(self) -> Any:
        return checked(self.vocabulary.matcher(self._lark))

    def _beginnings(self) -> np.ndarray:
        """The tokens that a text may begin with as bits, the one behind the vocabulary included."""
        matcher = self.matcher()
        allowed = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        checked(matcher)
        return allowed


def to_lark(source: Source, whitespace: Whitespace) -> str:
    """The grammar in the matcher's words, checked. Errors: GrammarError. Pure.

    `%json` converts schemas; `rewrites.py` says what it holds wrongly. The library's other converters are not used:
    - gbnf_to_lark reads neither '…' nor \\/, fails on \\u0000, and lets a lexer take the longest match, so that
      ("ab" | "abc") "c" never is abcc;
    - its patterns take \\w, \\d and (?i:k) as Unicode and \\s as others do: what one reader of the output refuses;
    - StructTag lets free text hold a trigger, and knows the old form alone."""
    kind, text = source
    if kind == "regex":
        return f"text: /{regex.explicit(text, 'regex')}/"
    if kind == "ebnf":
        return ebnf.to_lark(text)
    return (schema if kind == "json_schema" else structural_tag).to_lark(text, whitespace)


@cache
def _bytes_alone() -> Vocabulary:
    """The vocabulary of the child. Pure."""
    return Vocabulary([bytes([byte]) for byte in range(256)], False)


def attempt(question: tuple[str, str, str | None]) -> str:
    """In the child: the grammar in the matcher's words, which is compiled soon. Errors: Refused."""
    kind, text, whitespace = question
    source = Source(kind, text)
    try:
        lark = to_lark(source, Whitespace(whitespace))
        Grammar(_bytes_alone(), source, lark)
    except GrammarError as error:
        raise Refused(str(error)) from None
    except RecursionError:
        raise Refused("it is too complex: its parts stand too deep inside one another") from None
    return lark


class Grammars:
    """The grammars of one engine: compiled once each, in threads of their own. Thread-safe. The MAX_KEPT used last are
    kept, and those that cannot be compiled with them."""

    def __init__(
        self, tokens: Callable[[], tuple[Sequence[bytes | None], bool]], whitespace: Whitespace | None
    ) -> None:
        """`tokens` gives the arguments of `Vocabulary`, when the first grammar comes; `whitespace` None refuses all."""
        self._tokens, self._whitespace = tokens, whitespace
        self._lock = threading.Lock()
        self._known: OrderedDict[Source, Future[Grammar]] = OrderedDict()
        self._worker = ThreadPoolExecutor(COMPILERS, thread_name_prefix="fengine-grammars")
        self._trials = shared(__name__, COMPILERS)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Made at first use: some 3 µs for each token. Errors: MissingExtraError, UnsupportedFeatureError."""
        return Vocabulary(*self._tokens())

    def compile(self, source: Source) -> Grammar:
        """Waits until it is compiled. Errors: GrammarError, MissingExtraError, UnsupportedFeatureError."""
        if self._whitespace is None:
            raise GrammarError(f"{source.kind} was given, but grammars are off: the engine has grammar_backend='none'")
        try:
            size, most = len(source.text.encode()), MAX_BYTES[source.kind]
        except UnicodeEncodeError as error:
            raise GrammarError(f"{source.kind} holds {SURROGATE}, at character {error.start}") from None
        if size > most:
            raise GrammarError(f"{source.kind} has {size} bytes, more than the limit of {most}")
        failed = f"Failed to compile {WORDS[source.kind]} grammar: "
        try:
            return self._begun(source).result(SECONDS)
        except Late as late:
            raise GrammarError(f"{failed}it took more than {SECONDS:.0f} seconds; simplify it") from late
        except GrammarError as error:
            raise GrammarError(f"{failed}{error}") from None

    def prepare(self, sources: Iterable[Source]) -> None:
        """Compiles them, so that `compile` need not wait. Errors: GrammarError if one takes too long; others are kept
        for `compile` to tell."""
        for source in sources:
            try:
                self.compile(source)
            except FengineError as error:
                if isinstance(error.__cause__, Late):
                    raise

    def _begun(self, source: Source) -> "Future[Grammar]":
        with self._lock:
            future = self._known.get(source)
            if future is None:
                try:
                    future = self._known[source] = self._worker.submit(self._compile, source)
                except RuntimeError:
                    raise EngineClosedError("the engine was shut down; create a new Engine") from None
            self._known.move_to_end(source)
            while len(self._known) > MAX_KEPT:
                self._known.popitem(last=False)
            return future

    def _compile(self, source: Source) -> Grammar:
        try:
            with self._lock:
                vocabulary = self.vocabulary
            lark = self._trials.ask([*source, (self._whitespace or Whitespace()).pattern])
            return Grammar(vocabulary, source, lark)
        except Refused as error:
            raise GrammarError(str(error)) from None
        except (GrammarError, MissingExtraError, UnsupportedFeatureError):
            raise
        except BaseException:  # for want of memory, processes or files: it may succeed later
            with self._lock:
                self._known.pop(source, None)
            raise

    def close(self) -> None:
        """Waits for nothing; what is being compiled ends by itself."""
        self._worker.shutdown(wait=False, cancel_futures=True)
