"""Constrained output: `Grammar` says what may come, `GrammarCompiler` readies it, `Constraint` follows it.

::

    Grammar ──GrammarCompiler.compile──▶ Constraint ──┬─ mask(), apply(logits)   before a token is drawn
    (text, hashable)  (cached, then copied)           ├─ advance(token)          after it
                                                      ├─ forced_ids()            tokens without a model step
                                                      └─ fork()                  one for each branch

The parser is llguidance. It reports errors as states of its matcher that still give masks; here each of them
becomes a `GrammarError`, at `compile` or at the token where it came up. This module knows no request and no
sampler.

Invariants:
    * A token is allowed by `mask` if and only if `advance` takes it.
    * An end-of-text id is allowed if and only if `may_end`, unless the grammar itself names that token.
    * Ids that no text uses (rows that pad the model's vocabulary) are never allowed.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import torch

from phloem.runtime.errors import GrammarError, QueueFull
from phloem.runtime.grammar_matcher import make_matcher, make_parser_tokenizer
from phloem.runtime.grammar_source import Grammar, GrammarKind

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from phloem.runtime.sandbox import Sandbox
    from phloem.runtime.tokenizer import Tokenizer

__all__ = ["Constraint", "Grammar", "GrammarCompiler", "GrammarKind"]

_MAX_THREADS = 2
"""Grammars that are compiled at the same time for event loops."""

_MAX_WAIT_S = 10.0
"""How long one may wait for its turn to be compiled."""


class GrammarCompiler:
    """Compiles grammars for one model, each of them once.

    Holds the vocabulary in the parser's form, built at the first use (about 0.3 s for 50,000 tokens), and the
    `max_cached` grammars used last. Threads may share it: compiling mostly takes from 1 ms to about a second and
    lets other threads run.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, *, max_cached: int = 64, sandbox: Sandbox | None = None
    ) -> None:
        """Prepare nothing yet.

        Args:
            tokenizer: The model's.
            vocab_size: The width of the model's logits, which may exceed the tokenizer's.
            max_cached: Compiled grammars that are kept, at least 1.
            sandbox: Where a new grammar is compiled first, within limits. None: here alone, however long it takes.
        """
        if vocab_size < 1 or max_cached < 1:
            raise ValueError(f"vocab_size ({vocab_size}) and max_cached ({max_cached}) must be at least 1")
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_cached = max_cached
        self._sandbox = sandbox
        self._vocabulary: _Vocabulary | None = None
        self._compiled: OrderedDict[tuple[Grammar | None, str], Constraint] = OrderedDict()
        self._vocabulary_lock = Lock()
        self._compiled_lock = Lock()
        # Not the event loop's own threads: slow grammars would keep all of them from other requests.
        self._threads = ThreadPoolExecutor(_MAX_THREADS, "phloem-grammar")

    async def prepare(self, grammar: Grammar | None, *, after: str = "") -> None:
        """Compile without holding up an event loop, so that `compile` has it at hand.

        Raises:
            GrammarError: As `compile`.
            QueueFull: Others before it took too long.
        """
        with self._compiled_lock:
            if (grammar, after) in self._compiled:
                return
        asked_at = time.monotonic()

        def in_turn() -> None:
            waited_s = time.monotonic() - asked_at
            if waited_s > _MAX_WAIT_S:
                raise QueueFull(f"other grammars took {waited_s:.0f} s to compile: try again later")
            self.compile(grammar, after=after)

        await asyncio.get_running_loop().run_in_executor(self._threads, in_turn)

    def compile(self, grammar: Grammar | None, *, after: str = "") -> Constraint:
        """Return a constraint that stands at the grammar's beginning; some microseconds when it is cached.

        Args:
            grammar: None: anything may come, after `after`.
            after: A text that comes before what the grammar describes, in tokens that may reach into it.

        Raises:
            GrammarError: The grammar is wrong, uses what is not supported, or no text can satisfy it. The
                message names the place (a JSON pointer, a position in the pattern, line and column) and a way
                out.
        """
        if not isinstance(grammar, Grammar) and not (grammar is None and after):
            raise GrammarError(
                f"a grammar must be a Grammar, not {type(grammar).__name__}; "
                "see Grammar.json_schema and its siblings",
                field="grammar",
            )
        with self._compiled_lock:
            if (known := self._compiled.get((grammar, after))) is not None:
                self._compiled.move_to_end((grammar, after))
                return known.fork()
        if grammar is not None and after:
            self.compile(grammar)  # finds what is wrong with it, and names the place in it
        compiled = self._build(grammar, after)
        with self._compiled_lock:
            self._compiled[grammar, after] = compiled
            while len(self._compiled) > self._max_cached:
                self._compiled.popitem(last=False)
            return compiled.fork()

    def _build(self, grammar: Grammar | None, after: str) -> Constraint:
        vocabulary = self._get_vocabulary()
        if self._sandbox is not None:
            self._sandbox.check_grammar(grammar, after)
        matcher = make_matcher(vocabulary.parser_tokenizer, grammar, after)
        bytes_to_free = len(after.encode()) if grammar is None else None
        constraint = Constraint(matcher, vocabulary, bytes_to_free=bytes_to_free)
        constraint.mask()  # finds what matches nothing, and is shared by all forks
        return constraint

    def _get_vocabulary(self) -> _Vocabulary:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = _Vocabulary.build(self._tokenizer, self._vocab_size)
            return self._vocabulary


class Constraint:
    """The state of one generation under a grammar. The branch that generates owns it.

    One thread at a time may use a constraint. `mask` lets other threads run while it computes, so the masks
    of many constraints can be computed in a thread pool while the model runs; forks of one grammar share
    caches that lock themselves.
    """

    __slots__ = ("_blocked", "_bytes_to_free", "_matcher", "_num_tokens", "_vocabulary")

    def __init__(
        self,
        matcher: LLMatcher,
        vocabulary: _Vocabulary,
        *,
        num_tokens: int = 0,
        blocked: torch.Tensor | None = None,
        bytes_to_free: int | None = None,
    ) -> None:
        """Take over a matcher; `GrammarCompiler.compile` and `fork` call this.

        With `bytes_to_free`, anything may follow once so many bytes have come. None: the grammar holds to the end.
        """
        self._bytes_to_free = bytes_to_free
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._num_tokens = num_tokens
        self._blocked = (
            blocked  # bool [vocab_size], never written to, shared by forks; None: not computed yet
        )

    @property
    def is_finished(self) -> bool:
        """Whether the text is complete and nothing may follow, so that the generation must stop.

        An end-of-text id is then the only one that `mask` allows, and need not be drawn.

        Raises:
            GrammarError: The parser has failed before.
        """
        self._check()
        return not self._is_free and self._matcher.is_stopped()

    @property
    def may_end(self) -> bool:
        """Whether the text is complete as it stands, though more may follow.

        Raises:
            GrammarError: The parser has failed before.
        """
        self._check()
        return self._is_free or self._matcher.is_accepting()

    def mask(self) -> torch.Tensor:
        """Return which tokens may come next: bool ``[vocab_size]``, the caller's own.

        Computed once for each state, then kept for `apply`.

        Raises:
            GrammarError: No token can follow, or the grammar got too complex for the parser.
        """
        return ~self._get_blocked()

    def apply(self, logits: torch.Tensor) -> None:
        """Set the logits of tokens that may not come next to minus infinity, in place.

        Args:
            logits: Float ``[vocab_size]``, or ``[num_rows, vocab_size]`` of rows in this state; any device.

        Raises:
            GrammarError: As `mask`.
        """
        if not self._is_free:
            logits.masked_fill_(self._get_blocked().to(logits.device), float("-inf"))

    def advance(self, token_id: int) -> None:
        """Move on by one token, drawn or forced. A finished constraint still takes end-of-text ids.

        Raises:
            GrammarError: The token may not come next, and nothing changed; or the parser gave up, for good.
        """
        self._check()
        if not self._allows(token_id):
            raise GrammarError(
                f"token {token_id} ({self._vocabulary.text(token_id)!r}) may not come next, "
                f"after {self._num_tokens} tokens of the grammar: draw from the tokens that mask() allows",
                field="grammar",
            )
        self._num_tokens += 1
        if self._is_free:
            return
        self._blocked = None
        self._matcher.consume_token(token_id)
        self._check()
        if self._bytes_to_free is not None:
            self._bytes_to_free -= len(self._vocabulary.parser_tokenizer.decode_bytes([token_id]))

    def forced_ids(self, *, max_tokens: int | None = None) -> list[int]:
        """Return the tokens that must come next, cut as the model's tokenizer cuts text; the state stays.

        Append them and `advance` over each; none needs a model step to be chosen. The list is empty where
        there is a choice, or where the tokenizer might join the forced text with what follows.

        Args:
            max_tokens: Return no more than that.

        Raises:
            GrammarError: The parser fails.
        """
        if self.is_finished or self._is_free:
            return []
        forced: list[int] = self._matcher.compute_ff_tokens()
        self._check()
        return forced[:max_tokens]

    def fork(self) -> Constraint:
        """Return an independent copy in the same state. A few microseconds."""
        return Constraint(
            self._matcher.deep_copy(),
            self._vocabulary,
            num_tokens=self._num_tokens,
            blocked=self._blocked,
            bytes_to_free=self._bytes_to_free,
        )

    @property
    def _is_free(self) -> bool:
        return self._bytes_to_free is not None and self._bytes_to_free <= 0

    def _allows(self, token_id: int) -> bool:
        # the parser fails for good at an id that it doesn't know, so ids are never just tried; and it doesn't
        # validate an end-of-text id that the grammar itself names
        if not 0 <= token_id < self._vocabulary.vocab_size:
            return False
        if self._is_free:
            return True
        if self._blocked is None and token_id not in self._vocabulary.eos_token_ids:
            return self._matcher.validate_tokens([token_id]) == 1
        return not self._get_blocked()[token_id]

    def _get_blocked(self) -> torch.Tensor:
        if self._is_free:
            return torch.zeros(self._vocabulary.vocab_size, dtype=torch.bool)
        if self._blocked is None:
            self._check()
            bits = np.zeros(self._vocabulary.num_mask_bytes, dtype=np.uint8)
            self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            self._check()
            blocked = np.unpackbits(~bits, bitorder="little", count=self._vocabulary.vocab_size)
            self._blocked = torch.from_numpy(blocked.view(np.bool_))
        return self._blocked

    def _check(self) -> None:
        """Raise the parser's error, with which it would go on to give masks that mean nothing."""
        if not self._matcher.is_error():
            return
        reason = self._matcher.get_error().partition("\n")[0]
        if reason.startswith("NoExtension"):
            if not self._num_tokens:
                text = "no text satisfies the grammar: look for parts that contradict each other"
            else:
                where = f"reached after {self._num_tokens} tokens"
                text = f"the grammar has a dead end, {where}: make that part optional"
        else:
            text = f"the parser gave up after {self._num_tokens} tokens ({reason}): make the grammar simpler"
        raise GrammarError(text, field="grammar")


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """A model's vocabulary in the parser's form."""

    tokenizer: Tokenizer
    parser_tokenizer: LLTokenizer

    vocab_size: int
    """The width of masks."""

    num_mask_bytes: int
    """Bytes of the parser's own masks, whose width is a multiple of 32 and may exceed `vocab_size`."""

    eos_token_ids: frozenset[int]

    @classmethod
    def build(cls, tokenizer: Tokenizer, vocab_size: int) -> _Vocabulary:
        """Raises `GrammarError` for a tokenizer that the parser can't use. About 0.3 s for 50,000 tokens."""
        width = max(vocab_size, tokenizer.vocab_size)
        parser_tokenizer = make_parser_tokenizer(tokenizer.backend.to_str(), width, tokenizer.eos_token_ids)
        eos_token_ids = frozenset(tokenizer.eos_token_ids)
        return cls(tokenizer, parser_tokenizer, vocab_size, (width + 31) // 32 * 4, eos_token_ids)

    def text(self, token_id: int) -> str:
        """Return a token's text for a message; empty for an id that doesn't exist."""
        known = 0 <= token_id < self.tokenizer.vocab_size
        return self.tokenizer.decode([token_id], skip_special_tokens=False) if known else ""
