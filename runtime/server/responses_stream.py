"""The events of a streamed response, in OpenAI's order: each item opens, grows and closes, and the response ends with all of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from phloem.runtime.errors import PhloemError
from phloem.runtime.outputs import Chunk, Completion
from phloem.runtime.server.connection import event
from phloem.runtime.server.errors import failure_of
from phloem.runtime.server.openai_fields import new_id
from phloem.runtime.server.responses_answer import ResponseAnswer
from phloem.runtime.server.responses_items import message_item, text_part
from phloem.runtime.server.service import IndexedChunk
from phloem.runtime.server.tool_calls import AnswerReader


class ResponseEvents:
    """Writes the events of one response."""

    def __init__(self, answer: ResponseAnswer) -> None:
        self._answer = answer
        self._reader = AnswerReader(answer.tool_names)
        self._item_id = new_id("msg_")
        self._text = ""
        self._logprobs: list[dict[str, Any]] = []
        self._is_open = False
        self._number = 0

    async def events(self, first: IndexedChunk, rest: AsyncIterator[IndexedChunk]) -> AsyncIterator[str]:
        """Yield all events."""
        begun = self._answer.response("in_progress", [], None)
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        try:
            for each in self._grow(first.chunk):
                yield each
            async for item in rest:
                for each in self._grow(item.chunk):
                    yield each
        except PhloemError as error:
            yield self._failed(error)

    def _grow(self, chunk: Chunk) -> Iterator[str]:
        logprobs = self._answer.logprobs_of(chunk.logprobs)
        self._logprobs += logprobs
        yield from self._add(self._reader.push(chunk.text), logprobs)
        if chunk.completion is not None:
            yield from self._end(chunk.completion)

    def _add(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[str]:
        if not text:
            return
        yield from self._open()
        self._text += text
        yield self._event("response.output_text.delta", **self._place, delta=text, logprobs=logprobs)

    def _open(self) -> Iterator[str]:
        """Open the message, unless it is open."""
        if self._is_open:
            return
        self._is_open = True
        item = message_item(self._item_id, "in_progress", [])
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._event("response.content_part.added", **self._place, part=text_part(""))

    def _end(self, done: Completion) -> Iterator[str]:
        rest = self._reader.end()
        yield from self._add(rest.content, [])
        if not rest.calls:
            yield from self._open()
        output = []
        if self._is_open:
            status = self._answer.status_of(done)
            part = text_part(self._text, self._logprobs)
            item = message_item(self._item_id, status, [part])
            yield self._event(
                "response.output_text.done", **self._place, text=self._text, logprobs=self._logprobs
            )
            yield self._event("response.content_part.done", **self._place, part=part)
            yield self._event("response.output_item.done", output_index=0, item=item)
            output.append(item)
        for call in self._answer.call_items(rest.calls):
            yield from self._call(call, len(output))
            output.append(call)
        response = self._answer.finish(done, self._text, rest.calls, output)
        yield self._event(f"response.{response['status']}", response=response)

    def _call(self, item: dict[str, Any], index: int) -> Iterator[str]:
        place = {"item_id": item["id"], "output_index": index}
        begun = {**item, "status": "in_progress", "arguments": ""}
        yield self._event("response.output_item.added", output_index=index, item=begun)
        yield self._event("response.function_call_arguments.delta", **place, delta=item["arguments"])
        yield self._event(
            "response.function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"]
        )
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _failed(self, error: PhloemError) -> str:
        failure = failure_of(error)
        response = self._answer.response("failed", [], None)
        response["error"] = {"code": failure.code or "server_error", "message": failure.message}
        return self._event("response.failed", response=response)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **data: Any) -> str:
        number = self._number
        self._number += 1
        return event({"type": kind, "sequence_number": number, **data}, name=kind)
