"""What one tenant learns of another's cache: nothing, neither from what it is told nor from how long it takes."""

import random
import time

import httpx
import pytest
from live_server import live_server

from phloem.runtime import Engine

ALICE, BOB = "key-of-alice", "key-of-bob"
PROMPT_TOKENS = 1000
LIMIT = 0.55
NUM_PROBES = (600, 1200)
"""For each case; the second number are more of them, asked only where the area of the first ones lies beyond the limit.

Where there is nothing to be seen, the area of n probes a case spreads by sqrt(1 / 6n) around a half: 0.029 for 200 of them, of which 8 in 100 lie
beyond the limit on either side; 0.017 for 600, where it is 3 in 1,000; and 0.0096 for the 1,800 of both, which is five times nearer than the limit.
All probes are pooled, so that the second look does not choose the better of two.
"""


class Tenant:
    def __init__(self, client: httpx.Client, key: str) -> None:
        self._client = client
        self._headers = {"Authorization": f"Bearer {key}"}

    def ask(self, prompt: str) -> float:
        """Seconds to the first event."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "stream": True, "temperature": 0}
        started = time.perf_counter()
        with self._client.stream("POST", "/v1/completions", json=body, headers=self._headers) as answer:
            events = answer.iter_lines()
            first = next(events)
            elapsed = time.perf_counter() - started
            assert first.startswith("data: {")
            for _ in events:
                pass
        return elapsed


def area(positives: list[float], negatives: list[float]) -> float:
    """The area under the ROC curve of the best classifier by one threshold, whichever side it takes for which. 0.5 is a guess."""
    wins = sum((a < b) + (a == b) / 2 for a in positives for b in negatives)
    found = wins / (len(positives) * len(negatives))
    return max(found, 1 - found)


class Probes:
    """The prober's times for prompts that the sender has just sent, and for new ones."""

    def __init__(self, sender: Tenant, prober: Tenant) -> None:
        self._sender, self._prober = sender, prober
        self._times: dict[bool, list[float]] = {True: [], False: []}

    def add(self, num_pairs: int, draw: random.Random) -> None:
        """Ask pairs of both cases in random order: what slows the machine for a while slows both."""
        for _ in range(num_pairs):
            for is_cached in draw.sample((True, False), 2):
                sent, other = ("".join(draw.choices("abcdefgh ", k=PROMPT_TOKENS)) for _ in range(2))
                self._sender.ask(sent)
                self._times[is_cached].append(self._prober.ask(sent if is_cached else other))

    def area(self) -> float:
        """How well the times tell the cases apart."""
        return area(self._times[True], self._times[False])


@pytest.mark.slow
def test_the_time_to_the_first_token_does_not_tell_what_another_key_has_cached(engine: Engine) -> None:
    with live_server(engine, api_keys=(ALICE, BOB)) as server, server.client() as client:
        alice, bob = Tenant(client, ALICE), Tenant(client, BOB)
        draw = random.Random(7)
        own, others = Probes(alice, alice), Probes(alice, bob)
        own.add(20, draw)
        assert own.area() > 0.9, "her own hits are to be seen, or the probe is blind"
        areas: list[float] = []
        for num_pairs in NUM_PROBES:
            others.add(num_pairs, draw)
            areas.append(others.area())
            if areas[-1] <= LIMIT:
                break
        print(f"areas {areas}")
        assert areas[-1] <= LIMIT, areas
        server.wait_until_idle()


def test_the_area_of_times_that_differ_is_large_and_of_times_that_do_not_is_a_half() -> None:
    draw = random.Random(1)
    same = [[draw.gauss(1, 0.2) for _ in range(400)] for _ in range(2)]
    assert area(*same) < 0.55
    assert area(same[0], [each + 0.1 for each in same[1]]) > 0.6
    assert area([each + 0.1 for each in same[0]], same[1]) > 0.6


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_counts_no_tokens_that_another_key_or_salt_has_cached(engine: Engine, path: str) -> None:
    engine.clear_cache()
    text = "t" * 200
    body = {"model": "tiny", "max_tokens": 1}
    body |= (
        {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    )
    with live_server(engine, api_keys=(ALICE, BOB)) as server, server.client() as client:

        def cached(key: str, **more: str) -> int:
            answer = client.post(path, json={**body, **more}, headers={"x-api-key": key}).json()
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert (
            cached(ALICE) == cached(BOB) == cached(BOB, cache_salt="s") == cached(ALICE, cache_salt="s") == 0
        )
        assert min(cached(ALICE), cached(BOB), cached(BOB, cache_salt="s")) >= 200
        server.wait_until_idle()
