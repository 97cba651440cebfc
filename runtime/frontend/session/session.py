"""Chat sessions: a conversation whose next turn computes its new words only.

What a session is made of are its turns; the branch that it holds is there to reuse. Each turn's prompt is rendered from the messages,
with the model's own tokens in them, and the branch goes on from the last token that both have in common. Under a prefix-stable
template that is the branch's end.

Invariants:
    * A turn happens as a whole or not at all.
    * The token ids of an answer are those that the model generated, in every later prompt that shows the answer unchanged.
"""

from __future__ import annotations

import json
import logging
import threading
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from phloem.runtime.branch import Branch
from phloem.runtime.errors import BranchReleased, CacheFull, InvalidRequest, PromptTooLong
from phloem.runtime.explain import describe
from phloem.runtime.frontend.session.config import SessionConfig
from phloem.runtime.frontend.session.messages import Message, Turn, messages_of
from phloem.runtime.frontend.session.saved import session_from_dict, session_to_dict
from phloem.runtime.frontend.session.steps import Draft, Steps, ToolChoice, check_ask, run_rounds
from phloem.runtime.frontend.session.stream import AsyncTurnStream, TurnStream
from phloem.runtime.frontend.session.template import ChatTemplate, TemplateReport
from phloem.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from phloem.runtime.engine import Engine

MAX_ANSWER_ROOM = 4
"""At most 1 / this of the context is kept free for an answer, when the oldest turns are dropped to make room."""

KEPT_SHARE = 0.5
"""How full the context is after the oldest turns were dropped, at most. What is kept is computed again, so dropping turn by turn
would compute nearly all of the context again in each turn; with a half, it is one token for each new one."""

logger = logging.getLogger(__name__)


class Session:
    """A conversation with a model. Made by `Engine.session`.

    ::

        with engine.session(system="Be brief.") as session:
            print(session.say("What is the capital of France?").text)
            other = session.fork()  # both go on from the same cached conversation
            session.rewind(-1)  # as if it had not been asked

    It may be used from any thread, with one turn at a time. `close`, or leaving the `with` block, frees its blocks for eviction.
    """

    def __init__(
        self,
        engine: Engine,
        config: SessionConfig | None = None,
        *,
        turns: Sequence[Turn] = (),
        template: ChatTemplate | None = None,
    ) -> None:
        """Open a session; nothing is computed before the first turn.

        Args:
            engine: What it runs on.
            config: Its settings.
            turns: What was said before.
            template: That of a session with the same settings, to save the probe.

        Raises:
            InvalidRequest: The model has no chat template, or it refuses the system message.
        """
        self._engine = engine
        self.config = config or SessionConfig()
        self._template = template or ChatTemplate(
            engine,
            system=self.config.system,
            toolbox=self.config.toolbox,
            options=self.config.template_options,
        )
        self._turns = tuple(turns)
        self._branch: Branch | None = None
        self._guard = threading.Lock()
        self._is_closed = False

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All turns, those too that an overflow left out of the prompt."""
        return self._turns

    @property
    def messages(self) -> list[dict[str, Any]]:
        """What the model sees, in the form that chat APIs use: the system message, and all turns that were not left out."""
        beginning = [] if self.config.system is None else [Message("system", self.config.system)]
        return [message.to_dict() for message in (*beginning, *messages_of(_in_prompt(self._turns)))]

    @property
    def template(self) -> TemplateReport:
        """What the model's chat template does to a conversation."""
        return self._template.report

    @property
    def token_ids(self) -> list[int]:
        """The path that the session holds in the cache; empty before the first turn."""
        branch = self._branch
        return [] if branch is None else branch.token_ids

    # Turns

    @overload
    def say(
        self,
        text: str,
        *,
        params: SamplingParams | None = None,
        tool_choice: ToolChoice = "auto",
        stream: Literal[False] = False,
    ) -> Turn: ...

    @overload
    def say(
        self,
        text: str,
        *,
        params: SamplingParams | None = None,
        tool_choice: ToolChoice = "auto",
        stream: Literal[True],
    ) -> TurnStream: ...

    def say(
        self,
        text: str,
        *,
        params: SamplingParams | None = None,
        tool_choice: ToolChoice = "auto",
        stream: bool = False,
    ) -> Turn | TurnStream:
        """Say something, and return the turn with the model's answer.

        Args:
            text: The user's message; special tokens' spellings in it stay text.
            params: How to generate; None: the session's.
            tool_choice: `required`: the first answer is a call of some tool; `none`: nothing in an answer is a call.
            stream: Return the text piece by piece, as a :class:`TurnStream`.

        Raises:
            InvalidRequest: An argument is wrong, the template refuses the message, or another turn is under way.
            PromptTooLong: The conversation does not fit the context.
            ToolFailed: A tool raised.
            PhloemError: The generation failed. After any error the session is what it was.
        """
        aborted = threading.Event()
        under_way = TurnStream(self._steps(text, params, tool_choice, aborted), self.config.toolbox, aborted)
        return under_way if stream else under_way.result()

    def asay(
        self, text: str, *, params: SamplingParams | None = None, tool_choice: ToolChoice = "auto"
    ) -> AsyncTurnStream:
        """Do as `say`, for an event loop: `await session.asay(text)` is the turn, `async for` gives the text."""
        aborted = threading.Event()
        return AsyncTurnStream(self._steps(text, params, tool_choice, aborted), self.config.toolbox, aborted)

    # Going back and aside

    def fork(self, turn: int | None = None) -> Session:
        """Return another session that has the first `turn` turns of this one, counted as a slice does. None: all.

        They share the cached conversation. Works also while a turn is under way, which the fork does not have.

        Raises:
            InvalidRequest: There are not so many turns.
        """
        self._check_open()
        branch, turns = self._branch, self._turns[: self._checked(turn)]
        other = Session(self._engine, self.config, turns=turns, template=self._template)
        if branch is not None:
            other._adopt(self._cut(branch, turns), pins=False)
        return other

    def rewind(self, turn: int) -> None:
        """Forget all but the first `turn` turns, counted as a slice does: -1 takes back the last one, 0 is a new beginning.

        Raises:
            InvalidRequest: There are not so many turns, or one is under way.
        """
        with self._exclusive():
            turns = self._turns[: self._checked(turn)]
            if self._branch is not None and turns != self._turns:
                self._adopt(self._cut(self._branch, turns))
            self._turns = turns

    def explain(self, turn: int = -1) -> str:
        """Tell in words what of a turn's prompts was reused, and why the rest was computed: a paragraph for each answer.

        Raises:
            InvalidRequest: There is no such turn.
        """
        if not -len(self._turns) <= turn < len(self._turns):
            raise InvalidRequest(f"there is no turn {turn!r}; there are {len(self._turns)}", field="turn")
        explanations = [completion.explanation for completion in self._turns[turn].completions]
        return "\n\n".join(
            describe(each, self._engine.tokenizer.decode) for each in explanations if each is not None
        )

    def close(self) -> None:
        """End the session; its lease ends too. A second call does nothing."""
        self._is_closed = True
        self._adopt(None)

    # Keeping

    def to_dict(self) -> dict[str, Any]:
        """Return the session as plain data: messages and token ids, not the tools and other settings."""
        return session_to_dict(self.config.system, self._turns)

    def save(self, path: str | Path) -> None:
        """Write `to_dict` to a file, as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), ensure_ascii=False), encoding="utf-8")

    @classmethod
    def from_dict(cls, engine: Engine, state: object, **options: Any) -> Session:
        """Return the session that `to_dict` described; `options` are fields of :class:`SessionConfig` but `system`.

        Its KV comes from the cache as far as it is still there, and the rest is computed with the next turn.

        Raises:
            InvalidRequest: It is no such description, or its tokens are not this model's.
        """
        system, turns = session_from_dict(state, engine)
        return cls(engine, SessionConfig(system=system, **options), turns=turns)

    @classmethod
    def load(cls, engine: Engine, path: str | Path, **options: Any) -> Session:
        """Do as `from_dict`, from a file that `save` wrote.

        Raises:
            InvalidRequest: It is no such file.
            OSError: It can't be read.
        """
        try:
            state = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise InvalidRequest(f"{path} is no JSON: {error}", field="path") from error
        return cls.from_dict(engine, state, **options)

    # Parts of the above

    def _steps(
        self, text: str, params: SamplingParams | None, tool_choice: ToolChoice, aborted: threading.Event
    ) -> Steps:
        params = self.config.params if params is None else params
        check_ask(text, params, tool_choice, self.config.toolbox)
        return self._turn_steps(Draft([Message("user", text)], params, tool_choice, 0, aborted))

    def _turn_steps(self, draft: Draft) -> Steps:
        with self._exclusive():
            draft.num_dropped = _num_dropped(self._turns)
            try:
                yield from run_rounds(draft, self._engine, self.config.toolbox, self._prepare)
                self._check_open()
                pinned = self._adopt(draft.branch)
            except BaseException:
                draft.release()
                raise
            turn = draft.turn(pinned)
            self._turns = (*self._turns, turn)
            return turn

    def _prepare(self, draft: Draft) -> Branch:
        """Return a branch that holds the prompt of the draft's next answer, and release the draft's last one."""
        target = self._fitting_prompt(draft)
        before = draft.branch or self._branch
        common = 0 if before is None else _common(before.token_ids, target)
        if before is not None and common < len(before) - 1:
            past = self._template.encode(messages_of(self._turns[draft.num_dropped :]), opens_answer=False)
            draft.rewritten_tokens += max(0, len(past) - common)
        try:
            branch = self._continued(before, common, target)
        except PromptTooLong as error:
            raise PromptTooLong(
                f"{error}; or rewind, or open the session with overflow='drop_oldest'", field="text"
            ) from error
        draft.release()
        return branch

    def _continued(self, before: Branch | None, common: int, target: list[int]) -> Branch:
        if before is None or common == 0:
            return self._engine.branch(target, namespace=self.config.namespace)
        branch = before.at(common)
        try:
            return branch.append(target[common:]) if common < len(target) else branch
        except BaseException:
            branch.release()
            raise

    def _fitting_prompt(self, draft: Draft) -> list[int]:
        """Return the prompt of the draft's next answer; by policy, drop the oldest turns when it leaves no room for one."""
        target = self._prompt(draft, draft.num_dropped)
        limit = self._engine.max_model_len
        room = min(draft.params.max_tokens or limit, limit // MAX_ANSWER_ROOM)
        if self.config.overflow == "error" or len(target) + room <= limit:
            return target
        first, last = draft.num_dropped, len(self._turns)
        draft.num_dropped = bisect_left(
            range(last),
            True,
            lo=first,
            key=lambda number: len(self._prompt(draft, number)) <= limit * KEPT_SHARE,
        )
        if draft.num_dropped > first:
            logger.info(
                "the context of %d tokens is full: turns %d to %d left the prompt",
                limit,
                first,
                draft.num_dropped,
            )
        return self._prompt(draft, draft.num_dropped)

    def _prompt(self, draft: Draft, num_dropped: int) -> list[int]:
        return self._template.encode([*messages_of(self._turns[num_dropped:]), *draft.messages])

    def _cut(self, branch: Branch, turns: Sequence[Turn]) -> Branch | None:
        """Return a branch of what `branch` has in common with a conversation of these turns; None when that is nothing."""
        if not turns:
            return None
        kept = self._template.encode(messages_of(_in_prompt(turns)), opens_answer=False)
        common = _common(branch.token_ids, kept)
        return branch.at(common) if common else None

    def _adopt(self, branch: Branch | None, *, pins: bool = True) -> int:
        """Hold this branch in place of the last one; return how many tokens of it a lease keeps."""
        pinned = self._pin(branch) if branch is not None and pins else 0
        before, self._branch = self._branch, branch
        if before is not None:
            before.unpin()
            before.release()
        return pinned

    def _pin(self, branch: Branch) -> int:
        ttl = self.config.pin_ttl
        if ttl is None or len(branch) < self._engine.config.block_size:
            return 0
        try:
            return branch.pin(ttl=ttl, owner="session")
        except (CacheFull, InvalidRequest) as error:
            # The turn is there, only its lease is not: nothing is lost but time, should it be evicted.
            logger.warning("a session goes on without a lease: %s", error)
            return 0

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._guard.acquire(blocking=False):
            raise InvalidRequest("a turn is under way in this session; wait for it, or fork", field="session")
        try:
            self._check_open()
            yield
        finally:
            self._guard.release()

    def _check_open(self) -> None:
        if self._is_closed:
            raise BranchReleased("the session was closed; open another one, or load what was saved")

    def _checked(self, turn: int | None) -> int:
        """Return how many turns a slice to `turn` has."""
        count = len(self._turns)
        if turn is None:
            return count
        if not isinstance(turn, int) or isinstance(turn, bool) or not -count <= turn <= count:
            raise InvalidRequest(
                f"turn must be a whole number from {-count} to {count}, the number of turns, not {turn!r}",
                field="turn",
            )
        return turn if turn >= 0 else count + turn


def _num_dropped(turns: Sequence[Turn]) -> int:
    return turns[-1].num_dropped if turns else 0


def _in_prompt(turns: Sequence[Turn]) -> Sequence[Turn]:
    return turns[_num_dropped(turns) :]


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many of the first ids are the same."""
    limit = min(len(one), len(other))
    return next((place for place in range(limit) if one[place] != other[place]), limit)
