"""One turn, as a generator of what has to be waited for. The streams drive it, in a thread or in an event loop.

::

    prepare ──Ask──▶ the model answers ──▶ no calls? ──▶ commit ──▶ Turn
       ▲                                      │ calls
       └──── append the results ◀──ToolCall───┘ (each is made)

A turn runs on a branch of its own. Until it is committed, the session is what it was: a turn that fails or is abandoned has not been.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from threading import Event
from typing import TYPE_CHECKING, Literal

from phloem.runtime.branch import Branch
from phloem.runtime.errors import InvalidRequest
from phloem.runtime.frontend.session.messages import Message, ToolCall, ToolResult, Turn
from phloem.runtime.frontend.session.tools import Toolbox
from phloem.runtime.outputs import Completion
from phloem.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from phloem.runtime.engine import Engine

ToolChoice = Literal["auto", "required", "none"]


@dataclass(frozen=True, slots=True)
class Ask:
    """Generate on a branch; the answer to it is a `Completion`."""

    branch: Branch
    params: SamplingParams


Steps = Generator[Ask | ToolCall, "Completion | ToolResult", Turn]


@dataclass(slots=True)
class Draft:
    """A turn that is under way. Owned by its steps."""

    messages: list[Message]
    params: SamplingParams
    tool_choice: ToolChoice
    num_dropped: int
    aborted: Event
    """Set when the caller wants no more of it: what there is by then is the turn."""

    rewritten_tokens: int = 0
    completions: list[Completion] = field(default_factory=list)
    results: list[ToolResult] = field(default_factory=list)
    branch: Branch | None = None

    def release(self) -> None:
        """Give up its branch; a generation on it is aborted."""
        if self.branch is not None:
            self.branch.release()

    def turn(self, pinned_tokens: int) -> Turn:
        """Return what it came to."""
        return Turn(
            messages=tuple(self.messages),
            completions=tuple(self.completions),
            tool_results=tuple(self.results),
            num_dropped=self.num_dropped,
            rewritten_tokens=self.rewritten_tokens,
            pinned_tokens=pinned_tokens,
        )


def run_rounds(
    draft: Draft, engine: Engine, toolbox: Toolbox, prepare: Callable[[Draft], Branch]
) -> Generator[Ask | ToolCall, Completion | ToolResult, None]:
    """Let the model answer, and make the calls that it asks for, until it asks for none or has had its rounds.

    The draft gains the answers and results; `prepare` returns a branch that ends where the next answer begins.
    """
    for round_index in range(toolbox.max_rounds + 1):
        forced = draft.tool_choice == "required" and round_index == 0
        params = replace(draft.params, grammar=toolbox.grammar()) if forced else draft.params
        draft.branch = prepare(draft)
        completion = yield Ask(draft.branch, params)
        assert isinstance(completion, Completion)
        answer = answer_of(completion, params, engine)
        if draft.tool_choice != "none":
            written = engine.tokenizer.decode(answer.token_ids or (), skip_special_tokens=False)
            answer = replace(answer, tool_calls=toolbox.parse(written))
        draft.completions.append(completion)
        draft.messages.append(answer)
        if not answer.tool_calls or draft.aborted.is_set() or round_index == toolbox.max_rounds:
            return
        for call in answer.tool_calls:
            result = yield call
            assert isinstance(result, ToolResult)
            draft.results.append(result)
            draft.messages.append(Message("tool", result.content, name=call.name))


def answer_of(completion: Completion, params: SamplingParams, engine: Engine) -> Message:
    """Return the message of a completion: its ids without the token that ended it, and without a stop string."""
    ids = completion.token_ids
    stopped = completion.finish_reason == "stop"
    if stopped and ids[-1:] and ids[-1] in {*engine.tokenizer.eos_token_ids, *params.stop_token_ids}:
        ids = ids[:-1]
    elif stopped and params.stop:
        ids = _before_stop(ids, completion.text, engine)
    return Message("assistant", completion.text, token_ids=tuple(ids))


def _before_stop(ids: list[int], text: str, engine: Engine) -> list[int]:
    """Return the ids before a stop string; where it began inside of a token, the token's part before it is encoded alone."""
    for count in range(len(ids), 0, -1):
        # The very first space may be missing where there is no context: the text has it, the ids alone do not.
        begin = engine.tokenizer.decode(ids[:count]).lstrip()
        if text.lstrip().startswith(begin):
            rest = text.lstrip()[len(begin) :]
            return [*ids[:count], *_plain_ids(rest, engine)]
    return _plain_ids(text, engine)


def _plain_ids(text: str, engine: Engine) -> list[int]:
    return engine.tokenizer.encode_continuation(text, parse_special_tokens=False)


def check_ask(text: object, params: object, tool_choice: object, toolbox: Toolbox) -> None:
    """Check what a turn is asked with.

    Raises:
        InvalidRequest: Something is wrong.
    """
    if not isinstance(text, str):
        raise InvalidRequest(f"text must be a string, not {type(text).__name__}", field="text")
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(f"params must be SamplingParams, not {type(params).__name__}", field="params")
    if tool_choice not in ("auto", "required", "none"):
        raise InvalidRequest(
            f"tool_choice must be auto, required or none, not {tool_choice!r}", field="tool_choice"
        )
    if tool_choice == "required" and not len(toolbox):
        raise InvalidRequest("tool_choice is 'required', and the session has no tools", field="tool_choice")
    if tool_choice == "required" and params.grammar is not None:
        raise InvalidRequest(
            "tool_choice 'required' is a grammar of its own; leave params.grammar out", field="tool_choice"
        )
    if params.n != 1:
        raise InvalidRequest("a turn has one answer; fork the session for several", field="n")
