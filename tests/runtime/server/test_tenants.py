"""What one tenant learns of another's cache: nothing, neither from what it is told nor from how long it takes."""

import random
import time

import httpx
import pytest
from live_server import live_server

from phloem.runtime import Engine

ALICE, BOB = "key-of-alice", "key-of-bob"
PROMPT_TOKENS = 1000
NUM_PROBES = 200
ROUNDS = 3
"""By chance alone an area lies beyond the limit in 8 of 100 rounds; what is there to be seen is seen in all."""


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


def probe(sender: Tenant, prober: Tenant, draw: random.Random, num_probes: int) -> float:
    """How well the prober's times tell prompts that the sender has just sent from new ones."""
    times: dict[bool, list[float]] = {True: [], False: []}
    cases = [True, False] * num_probes
    draw.shuffle(cases)
    for is_cached in cases:
        sent, other = ("".join(draw.choices("abcdefgh ", k=PROMPT_TOKENS)) for _ in range(2))
        sender.ask(sent)
        times[is_cached].append(prober.ask(sent if is_cached else other))
    return area(times[True], times[False])


@pytest.mark.slow
def test_the_time_to_the_first_token_does_not_tell_what_another_key_has_cached(engine: Engine) -> None:
    with live_server(engine, api_keys=(ALICE, BOB)) as server, server.client() as client:
        alice, bob = Tenant(client, ALICE), Tenant(client, BOB)
        draw = random.Random(7)
        assert probe(alice, alice, draw, 20) > 0.9, "her own hits are to be seen, or the probe is blind"
        areas: list[float] = []
        while len(areas) < ROUNDS and not any(each <= 0.55 for each in areas):
            areas.append(probe(alice, bob, draw, NUM_PROBES))
        assert min(areas) <= 0.55, areas
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
