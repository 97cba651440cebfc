"""What `explain` must say, from the list of all paths ever cached and what of them is left."""

from __future__ import annotations

from cache_mirror import Mirror
from naive_cache import NaiveCache, Tokens

from phloem.radix import Explanation, Miss, MissReason, Namespace

MUTE = {MissReason.NEVER_SEEN, MissReason.LAST_TOKEN}


def common(a: Tokens, b: Tokens) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def resident(naive: NaiveCache, namespace: Namespace) -> list[Tokens]:
    tree = naive.trees.get(namespace)
    return [prefix for owner, prefix in naive.records if owner == tree]


def longest(paths: list[Tokens], tokens: Tokens) -> int:
    return max((common(path, tokens) for path in paths), default=0)


def spans(told: Explanation) -> list[tuple[int, int, MissReason]]:
    return [(miss.start, miss.end, miss.reason) for miss in told.misses]


def compare(
    mirror: Mirror, namespace: Namespace, tokens: Tokens, *, limit: int, across_namespaces: bool
) -> list[MissReason]:
    """Asks a real cache whose ghost forgets nothing, and compares every field; returns the reasons."""
    naive = mirror.naive
    told = mirror.real.explain(namespace, tokens, limit=limit, across_namespaces=across_namespaces)
    ever = naive.ever.get(namespace, {})
    cached, known = longest(resident(naive, namespace), tokens), longest(list(ever), tokens)
    limit, end = min(limit, len(tokens)), len(tokens)
    expected = [
        (cached, min(known, limit), MissReason.EVICTED),
        (limit, known, MissReason.LAST_TOKEN),
    ]
    paths = ever
    if across_namespaces:
        others = [name for name in naive.trees if name != namespace]
        best = max((longest(resident(naive, name), tokens) for name in others), default=0)
        if best > known:
            expected.append((known, best, MissReason.NAMESPACE))
            names = [name for name in others if longest(resident(naive, name), tokens) == best]
            assert told.misses[-1 if best == end else -2].namespace in names
            (name,) = names  # there are two namespaces in all
            paths = {path: naive.ever[name][path] for path in resident(naive, name)}
            known = best
    nexts = [path for path in paths if common(path, tokens) == known < len(path)]
    parted = 0 < known < end and bool(nexts)
    expected.append((known, end, MissReason.DIVERGED if parted else MissReason.NEVER_SEEN))
    assert told.num_tokens == end
    assert told.cached_tokens == min(cached, limit)
    assert spans(told) == [span for span in expected if span[0] < span[1]]
    if parted:
        check_divergence(told.misses[-1], tokens, paths, naive.block_size)
    for miss in told.misses:
        if miss.reason is MissReason.EVICTED:
            reach = max(cached, known if not across_namespaces else longest(list(ever), tokens))
            assert miss.label in labels(ever, tokens[:reach])
        assert miss.reason not in MUTE or (miss.label, miss.token, miss.other_token) == (None, None, None)
    return [miss.reason for miss in told.misses]


def check_divergence(miss: Miss, tokens: Tokens, paths, block_size: int) -> None:
    """The other path is one that was there, and its label one under which it came."""
    assert miss.token == tokens[miss.start]
    other = (*tokens[: miss.start], miss.other_token)
    assert miss.other_token != miss.token
    assert miss.label in labels(paths, other)


def labels(paths: dict[Tokens, set[str | None]], prefix: Tokens) -> set[str | None]:
    """All labels of the paths that go on from `prefix`."""
    return {label for path, given in paths.items() if path[: len(prefix)] == prefix for label in given}


def check_sound(mirror: Mirror, namespace: Namespace, tokens: Tokens) -> None:
    """What is said with a ghost that forgets: never more evicted than was, and all of what is cached."""
    naive = mirror.naive
    told = mirror.real.explain(namespace, tokens)
    known = longest(list(naive.ever.get(namespace, {})), tokens)
    assert told.cached_tokens == longest(resident(naive, namespace), tokens)
    assert told.cached_tokens + told.tokens(MissReason.EVICTED) <= known
    edges = [told.cached_tokens, *(miss.end for miss in told.misses)]
    assert [miss.start for miss in told.misses] == edges[:-1]
    assert edges[-1] == len(tokens)
