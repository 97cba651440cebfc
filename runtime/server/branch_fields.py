"""What requests on branches hold."""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from phloem.runtime.grammar import Grammar
from phloem.runtime.sampling_params import SamplingParams
from phloem.runtime.server.errors import invalid
from phloem.runtime.server.openai_chat import ResponseFormat, format_grammar
from phloem.runtime.server.openai_fields import SamplingFields
from phloem.runtime.server.settings import ServerSettings


class BranchGeneration(SamplingFields):
    """How a branch is gone on from."""

    logprobs: int | None = Field(None, ge=0, description="So many likeliest tokens beside each one.")
    response_format: Annotated[ResponseFormat | None, Field(discriminator="type")] = None
    regex: str | None = Field(None, description="What the text is to be, as a regular expression.")

    def branch_params(self, settings: ServerSettings) -> SamplingParams:
        """Return the engine's parameters.

        Raises:
            ApiError: A value is beyond the server's limits, or there are two grammars.
            InvalidRequest: A value is out of range.
        """
        return self.sampling_params(
            settings, max_tokens=self.max_tokens, logprobs=self.logprobs, grammar=self._grammar(settings)
        )

    @property
    def grammar_field(self) -> str:
        """Which field the grammar comes from, if there is one."""
        return "response_format" if self.regex is None else "regex"

    def _grammar(self, settings: ServerSettings) -> Grammar | None:
        if self.regex is None:
            return format_grammar(self.response_format, max_bytes=settings.max_grammar_bytes)
        if self.response_format is not None:
            raise invalid("give regex or response_format, not both", "regex")
        num_bytes = len(json.dumps(self.regex))
        if num_bytes > settings.max_grammar_bytes:
            raise invalid(
                f"regex has {num_bytes:,} bytes; at most {settings.max_grammar_bytes:,} are compiled", "regex"
            )
        return Grammar.regex(self.regex)


class GenerateRequest(BranchGeneration):
    """A request of `/v1/branches/{branch_id}/generate`."""

    stream: bool | None = None


class ExpandRequest(BranchGeneration):
    """A request of `/v1/branches/{branch_id}/expand`."""

    n: int = Field(ge=1, description="How many children; child i draws from (seed, i).")


class ForkRequest(BaseModel):
    """A request of `/v1/branches/{branch_id}/fork`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    n: int = Field(1, ge=1)
    at: int | None = Field(None, ge=1, description="Fork after so many tokens of the path; null: at its end.")


class ScoreRequest(BaseModel):
    """A request of `/v1/branches/{branch_id}/score`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    continuations: list[str | list[int]] = Field(min_length=1, description="Each as text or token ids.")
