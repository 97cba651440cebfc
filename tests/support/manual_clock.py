"""Time for tests of what ages."""


class ManualClock:
    """Time that moves when told."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now
