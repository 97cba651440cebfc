"""The events of a streamed message, in Anthropic's order: the message opens, each block opens, grows and closes, the message ends.

A call comes in one piece, once it is complete: before that it is not known to be one.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from phloem.runtime.errors import PhloemError
from phloem.runtime.outputs import Chunk, Completion
from phloem.runtime.server.anthropic_answer import MessageAnswer, text_block, tool_block
from phloem.runtime.server.anthropic_cache import usage_dict
from phloem.runtime.server.anthropic_errors import anthropic_error
from phloem.runtime.server.chat_prompt import Call
from phloem.runtime.server.connection import event
from phloem.runtime.server.errors import failure_of
from phloem.runtime.server.prompt_leases import Mark
from phloem.runtime.server.service import IndexedChunk
from phloem.runtime.server.tool_calls import AnswerReader


class MessageEvents:
    """Writes the events of one message."""

    def __init__(self, answer: MessageAnswer, held: Sequence[Mark]) -> None:
        self._answer = answer
        self._held = held
        self._reader = AnswerReader(answer.tool_names)
        self._num_blocks = 0
        self._is_open = False
        """Whether the block of text is."""

    async def events(self, first: IndexedChunk, rest: AsyncIterator[IndexedChunk]) -> AsyncIterator[str]:
        """Yield all events."""
        usage = first.chunk.usage
        assert usage is not None
        yield _event("message_start", message=self._answer.message([], usage, self._held))
        yield _event("ping")
        try:
            for each in self._grow(first.chunk):
                yield each
            async for item in rest:
                for each in self._grow(item.chunk):
                    yield each
        except PhloemError as error:
            yield event(anthropic_error(failure_of(error)), name="error")

    def _grow(self, chunk: Chunk) -> Iterator[str]:
        yield from self._add(self._reader.push(chunk.text))
        if chunk.completion is not None:
            yield from self._end(chunk.completion)

    def _add(self, text: str) -> Iterator[str]:
        if not text:
            return
        if not self._is_open:
            self._is_open = True
            yield self._start(text_block(""))
        yield self._delta({"type": "text_delta", "text": text})

    def _end(self, done: Completion) -> Iterator[str]:
        yield from self._add(self._reader.end().content)
        if self._is_open:
            yield self._stop()
        calls = self._answer.finish(done).calls
        for call in calls:
            yield from self._call(call)
        usage = usage_dict(done.usage, self._held)
        yield _event("message_delta", delta=self._answer.ending(done, calls), usage=usage)
        yield _event("message_stop")

    def _call(self, call: Call) -> Iterator[str]:
        yield self._start(tool_block(call) | {"input": {}})
        yield self._delta({"type": "input_json_delta", "partial_json": json.dumps(call.arguments)})
        yield self._stop()

    def _start(self, block: dict[str, Any]) -> str:
        return _event("content_block_start", index=self._num_blocks, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> str:
        return _event("content_block_delta", index=self._num_blocks, delta=delta)

    def _stop(self) -> str:
        index = self._num_blocks
        self._num_blocks += 1
        return _event("content_block_stop", index=index)


def _event(kind: str, **data: Any) -> str:
    return event({"type": kind, **data}, name=kind)
