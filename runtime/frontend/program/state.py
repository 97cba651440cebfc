"""The state of a program: a token path that grows by text and generations, and what was captured on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from phloem.radix import Explanation
from phloem.runtime.branch import Score
from phloem.runtime.errors import InvalidRequest, ProgramError, UnknownCapture
from phloem.runtime.frontend.program.calls import AWAITING, BLOCKING, Calls, OnText, finish
from phloem.runtime.frontend.program.choose import Rule, rate
from phloem.runtime.frontend.program.fork import Fork
from phloem.runtime.frontend.program.generate import Wanted, check, generate
from phloem.runtime.frontend.program.scope import Piece, Scope
from phloem.runtime.frontend.program.tokens import TokenPath
from phloem.runtime.frontend.program.trace import Recording
from phloem.runtime.frontend.program.where import located
from phloem.runtime.grammar import Grammar
from phloem.runtime.outputs import Completion


@dataclass(frozen=True, slots=True)
class Selection:
    """What `State.select` chose."""

    value: str
    scores: dict[str, float]
    """Of every option, by the rule that was asked for; log-probabilities, so the largest is the likeliest."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A place to go back to."""

    length: int
    """In tokens."""

    fingerprint: int
    """Of the tokens before the seam."""

    seam: tuple[int, ...]
    """The text's tokens before `length` which the next generation may have tokenised anew."""

    captures: Mapping[str, Any]
    completions: Mapping[str, list[Completion]]


class Turn:
    """A turn of the assistant. If it is open, leaving its `with` block closes it."""

    def __init__(self, state: State, *, is_open: bool) -> None:
        self._state = state
        self._is_open = is_open

    def __enter__(self) -> State:
        return self._state

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._is_open:
            self._state._close_turn()


class State:
    """What a program works on. Made by `Program.run` and its siblings, and by `fork`.

    Its text is a list of tokens: what is appended is tokenised alone, and what was generated is never encoded again. Where appended
    text ends inside a word and `gen` follows, its last tokens are left to the model, which must begin with that text (token
    healing); `select`, `score` and chat turns take the text as it is. Nothing is added that the program did not ask for, but for
    the token that the model wants in front of all text (BOS), if it has one.
    Operations take effect in order. A state is used by one thread or task at a time; forks run side by side.
    """

    def __init__(
        self,
        scope: Scope,
        path: TokenPath,
        *,
        label: str = "0",
        captures: Mapping[str, Any] | None = None,
        completions: Mapping[str, list[Completion]] | None = None,
    ) -> None:
        self._scope = scope
        self._path = path
        self._label = label
        self._captures = dict(captures or {})
        self._completions = dict(completions or {})
        self._num_forks = 0
        scope.add(path)

    # Text

    def __iadd__(self, text: str) -> State:
        """Append text. Special tokens' spellings in it are those tokens.

        Raises:
            InvalidRequest: It is no text.
            PromptTooLong: The path would be too long.
        """
        with self._step("text") as step:
            if not isinstance(text, str):
                raise InvalidRequest(f"text must be a string, not {type(text).__name__}", field="text")
            before = len(self)
            self._path.append_text(text)
            step.tokens_in = len(self) - before
        return self

    def system(self, text: str) -> None:
        """Append a system message under the model's chat template. Special tokens' spellings in it stay text."""
        self._message("system", text)

    def user(self, text: str) -> None:
        """Append a user's message; see `system`."""
        self._message("user", text)

    def assistant(self, text: str | None = None) -> Turn:
        """Append an assistant's message; or, without text, open the turn, for `with s.assistant(): s.gen(...)`."""
        if text is not None:
            self._message("assistant", text)
            return Turn(self, is_open=False)
        with self._step("text", "assistant") as step:
            opening = self._scope.roles.opening(is_first=not self._path.ids)
            self._path.append(opening, is_text=False)
            step.tokens_in = len(opening)
        return Turn(self, is_open=True)

    def render(self) -> str:
        """Return the exact prompt so far, special tokens included."""
        with located:
            self._path.check()
        return self._path.engine.tokenizer.decode(self._path.ids, skip_special_tokens=False)

    @property
    def token_ids(self) -> list[int]:
        """The exact prompt so far."""
        return self._path.ids.tolist()

    def __len__(self) -> int:
        return len(self._path.ids)

    # Generating

    def gen(
        self,
        name: str | None = None,
        *,
        n: int = 1,
        regex: str | None = None,
        json: Any = None,
        grammar: Grammar | None = None,
        heal: bool = True,
        **sampling: Any,
    ) -> Any:
        """Generate, and capture it under a name.

        The path then holds the text without the stop string or the end-of-sequence token that ended it.

        Args:
            name: Of the capture. None: it is only returned.
            n: How many to draw; above 1, the value is a list, and the state goes on from the first.
            regex: A pattern that the text matches as a whole.
            json: A JSON schema, or a class with `model_json_schema` (pydantic): the value is the parsed JSON, or an instance.
            grammar: Any other grammar.
            heal: Whether the end of appended text may be tokenised anew together with what follows, so that text that ends inside a
                word ("http:" before "//") goes on as if it had been encoded with it. The output then begins with those few tokens
                again, which `max_tokens` does not count.
            sampling: Fields of `SamplingParams`: max_tokens, temperature, stop, seed and so on.

        Returns:
            What is captured: the text, or what `json` makes of it.

        Raises:
            InvalidRequest: An option is unknown or out of range.
            IncompleteOutput: `max_tokens` cut the text off before it fit its grammar; `partial` is the text.
            BranchReleased: The state was released.
        """
        return finish(self._gen(BLOCKING, name, Wanted(n, regex, json, grammar, heal, sampling)))

    async def agen(
        self,
        name: str | None = None,
        *,
        n: int = 1,
        regex: str | None = None,
        json: Any = None,
        grammar: Grammar | None = None,
        heal: bool = True,
        **sampling: Any,
    ) -> Any:
        """Do as `gen`, for an event loop."""
        return await self._gen(AWAITING, name, Wanted(n, regex, json, grammar, heal, sampling))

    def select(self, name: str | None, options: Sequence[str], by: Rule = "sum") -> Selection:
        """Append the option that the model favours, and capture it.

        Each option is tokenised alone and scored on its own tokens; the KV of the winner is kept.

        Args:
            name: Of the capture. None: it is only returned.
            options: Different texts; white space counts.
            by: "sum": the log-probability of the whole option. "mean": per token, which does not favour short options. "greedy": the
                likeliest token decides where options differ. "pmi": how much likelier it is here than at the start of a text.

        Raises:
            InvalidRequest: There are no options, or two are equal.
        """
        return finish(self._select(BLOCKING, name, options, by))

    async def aselect(self, name: str | None, options: Sequence[str], by: Rule = "sum") -> Selection:
        """Do as `select`, for an event loop."""
        return await self._select(AWAITING, name, options, by)

    def score(self, texts: Sequence[str]) -> list[Score]:
        """Return the log-probabilities of continuations; the state does not change."""
        return finish(self._score(BLOCKING, texts))

    async def ascore(self, texts: Sequence[str]) -> list[Score]:
        """Do as `score`, for an event loop."""
        return await self._score(AWAITING, texts)

    # Captures

    def __getitem__(self, name: str) -> Any:
        """Return what was captured.

        Raises:
            UnknownCapture: Nothing was, under this name.
        """
        with located:
            return captured(self._captures, name)

    def __setitem__(self, name: str, value: Any) -> None:
        self._captures[name] = value

    def __contains__(self, name: str) -> bool:
        return name in self._captures

    @property
    def captures(self) -> dict[str, Any]:
        """A copy of all captures."""
        return dict(self._captures)

    def completions(self, name: str) -> list[Completion]:
        """Return the completions behind a capture of `gen`: finish reason, usage, log-probabilities.

        Raises:
            UnknownCapture: `gen` captured nothing under this name.
        """
        with located:
            found: list[Completion] = captured(self._completions, name)
        return found

    # Branching, going back, keeping

    def fork(self, children: int | Sequence[str]) -> Fork:
        """Fork the state: `with s.fork(3) as kids`, or with a list of texts, which are appended to a child each.

        The children share all KV and start with the captures so far. They are cancelled and released when the block is left.
        """
        return Fork(self, children)

    def adopt(self, child: State) -> None:
        """Go on from where a child is: its path, with its KV, and its captures become this state's. The child ends.

        Raises:
            ProgramError: It is no child of this state.
            BranchReleased: One of the two was released.
        """
        with self._step("adopt", child._label):
            if not child._label.startswith(f"{self._label}."):
                raise ProgramError(f"state {child._label} is no fork of state {self._label}")
            self._path.check()
            child._path.check()
            old, self._path, child._path = self._path, child._path, child._path.handed_over()
            self._captures, self._completions = dict(child._captures), dict(child._completions)
            self._scope.release(old)

    def mark(self) -> Mark:
        """Return this place, for `rewind`."""
        with located:
            self._path.check()
        seam = tuple(self._path.seam())
        fingerprint = self._path.fingerprint(len(self) - len(seam))
        return Mark(len(self), fingerprint, seam, dict(self._captures), dict(self._completions))

    def rewind(self, mark: Mark) -> None:
        """Go back to a mark: what was appended, generated and captured since is forgotten. Its KV stays cached.

        The mark may be the parent's, from before the fork.

        Raises:
            ProgramError: The path does not begin with the marked tokens, or not any more since an earlier `rewind`.
        """
        with self._step("rewind"):
            self._path.check()
            kept = mark.length - len(mark.seam)
            if kept > len(self) or self._path.fingerprint(kept) != mark.fingerprint:
                raise ProgramError(
                    f"the state's path does not begin with the {mark.length} tokens that were marked: it went back further "
                    "since, or the mark is another state's; mark again"
                )
            self._path.cut(kept)
            self._path.append(mark.seam, is_text=True)
            self._captures, self._completions = dict(mark.captures), dict(mark.completions)

    def pin(self, ttl: float = 60.0) -> int:
        """Keep the path's whole blocks in the cache for `ttl` seconds after their last use; return how many tokens.

        Raises:
            CacheFull: The budget for pins does not hold it.
        """
        return finish(self._pin(BLOCKING, ttl))

    async def apin(self, ttl: float = 60.0) -> int:
        """Do as `pin`, for an event loop."""
        return await self._pin(AWAITING, ttl)

    def explain(self) -> Explanation:
        """Tell how much of the path needs no computing for the next token, and why the rest does."""
        with self._step("explain"):
            return finish(self._path.settle(BLOCKING)).explain()

    # Parts of the above

    def _step(self, operation: str, name: str | None = None) -> Recording:
        return self._scope.trace.step(operation, name or "", self._label)

    def _message(self, role: str, text: str) -> None:
        with self._step("text", role) as step:
            ids = self._scope.roles.message(role, text, is_first=not self._path.ids)
            self._path.append(ids, is_text=False)
            step.tokens_in = len(ids)

    def _close_turn(self) -> None:
        with self._step("text", "end of turn") as step:
            closing = self._scope.roles.closing()
            self._path.append(closing, is_text=False)
            step.tokens_in = len(closing)

    async def _gen(self, calls: Calls, name: str | None, want: Wanted) -> Any:
        with self._step("gen", name) as step:
            spec = check(want)
            completions = await generate(self._path, calls, spec, self._on_text(name))
            for completion in completions:
                step.add(completion.usage)
            values = [spec.value(completion) for completion in completions]
            value = values if want.n != 1 else values[0]
            if name is not None:
                self._captures[name] = value
                self._completions[name] = completions
            return value

    def _on_text(self, name: str | None) -> OnText | None:
        emit = self._scope.on_piece
        return None if emit is None else lambda text: emit(Piece(text, name, self._label))

    async def _select(self, calls: Calls, name: str | None, options: Sequence[str], by: Rule) -> Selection:
        with self._step("select", name) as step:
            known = self._scope.options.of(options, by)
            branch = await self._path.settle(calls)
            scores = await calls.score(branch, known.ids)
            alone = await self._scored_alone(calls, known.ids) if by == "pmi" else []
            for score in (*scores, *alone):
                step.add(score.usage)
            rating = rate(scores, by, alone)
            self._path.append_scored(known.ids[rating.winner])
            value = known.texts[rating.winner]
            if name is not None:
                self._captures[name] = value
            return Selection(value, dict(zip(known.texts, rating.values, strict=True)))

    async def _scored_alone(self, calls: Calls, encoded: Sequence[Sequence[int]]) -> list[Score]:
        tokenizer = self._path.engine.tokenizer
        start = tokenizer.bos_token_id
        if start is None:
            start = tokenizer.eos_token_ids[0]
        with self._path.engine.branch([start], namespace=self._path.namespace) as branch:
            return await calls.score(branch, encoded)

    async def _score(self, calls: Calls, texts: Sequence[str]) -> list[Score]:
        with self._step("score") as step:
            if isinstance(texts, str) or not isinstance(texts, Sequence) or not texts:
                raise InvalidRequest(
                    f"texts must be a list of at least one string, not {texts!r}", field="texts"
                )
            encoded = [self._encode(text) for text in texts]
            scores = await calls.score(await self._path.settle(calls), encoded)
            for score in scores:
                step.add(score.usage)
            return scores

    def _encode(self, text: str) -> list[int]:
        return self._path.engine.tokenizer.encode_continuation(text)

    async def _pin(self, calls: Calls, ttl: float) -> int:
        with self._step("pin"):
            branch = await self._path.settle(calls)
            return await calls.pin(branch, ttl=ttl, owner=self._scope.trace.program)

    async def _fork_paths(self, calls: Calls, n: int) -> list[State]:
        with self._step("fork", str(n)) as step:
            if n > 1 and self._path.ids:
                # Otherwise each child would compute what lies behind the last whole block.
                step.add(await self._path.compute(calls))
            paths = await self._path.fork(calls, n)
            first = self._num_forks
            self._num_forks += n
            return [
                State(
                    self._scope,
                    path,
                    label=f"{self._label}.{first + index}",
                    captures=self._captures,
                    completions=self._completions,
                )
                for index, path in enumerate(paths)
            ]

    def _release(self) -> None:
        self._scope.release(self._path)


def captured(captures: Mapping[str, Any], name: str) -> Any:
    """Return a capture.

    Raises:
        UnknownCapture: There is none of this name.
    """
    if name not in captures:
        known = ", ".join(repr(each) for each in captures) or "none yet"
        raise UnknownCapture(f"nothing was captured as {name!r}; there is {known}")
    return captures[name]
