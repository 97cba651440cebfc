"""How much is under way, and when to say no: at once, before the engine hears of a request."""

from __future__ import annotations

from phloem.runtime.server.errors import ApiError, Failure, invalid


class Ticket:
    """Places that a request has taken. Give them back once its answer is out."""

    def __init__(self, gate: Gate, num_places: int) -> None:
        self._gate = gate
        self._num_places = num_places

    def release(self) -> None:
        """Give the places back. A second call does nothing."""
        self._gate.active -= self._num_places
        self._num_places = 0


class Gate:
    """Counts generations under way and waiting. Used by the event loop only."""

    def __init__(self, limit: int, *, retry_after_s: int) -> None:
        self.active = 0
        """Generations whose answer is not out yet."""

        self.draining = False
        """Whether no more requests are taken."""

        self.inside = 0
        """Requests under way that generate, from their first byte on: also those whose prompt is still being encoded."""

        self.refused = 0
        self._limit = limit
        self._retry_after_s = retry_after_s

    def admit(self, count: int) -> Ticket:
        """Take places for so many generations.

        Raises:
            ApiError: As `check`.
        """
        self.check(count)
        self.active += count
        return Ticket(self, count)

    def enter(self) -> None:
        """Take a place among the requests under way, of which each will have a generation at least.

        Raises:
            ApiError: As `check`, or 429 because so many are there already, be it without a generation yet.
        """
        self.check(1)
        if self.inside >= self._limit:
            raise self._overloaded(f"{self.inside} requests are under way")
        self.inside += 1

    def leave(self) -> None:
        """Give back what `enter` took."""
        self.inside -= 1

    def check(self, count: int) -> None:
        """Check that there are places for so many generations; before any work is done for them, such as encoding.

        Raises:
            ApiError: 400, there can never be so many; 429, there are not so many left; 503, none are given any more.
        """
        self.check_open()
        if count > self._limit:
            raise invalid(
                f"the request asks for {count} generations; the server takes {self._limit}: send fewer prompts, or a lower n"
            )
        if self.active + count > self._limit:
            raise self._overloaded(f"{self.active} generations are under way or waiting")

    def _overloaded(self, what: str) -> ApiError:
        self.refused += 1
        message = f"{what}, of {self._limit} that the server takes; try again"
        return ApiError(
            Failure(429, "rate_limit", message, code="overloaded", retry_after_s=self._retry_after_s)
        )

    def check_open(self) -> None:
        """Check that requests are taken.

        Raises:
            ApiError: 503, they are not.
        """
        if self.draining:
            message = "the server is shutting down and takes no more requests"
            raise ApiError(
                Failure(503, "unavailable", message, code="draining", retry_after_s=self._retry_after_s)
            )
