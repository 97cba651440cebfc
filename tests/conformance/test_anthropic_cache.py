"""Breakpoints, usage and diagnostics of `/v1/messages`, by Anthropic's own client."""

from array import array
from typing import Any

import pytest
from anthropic import (
    Anthropic,
    BadRequestError,
)
from anthropic_client import ASKED, GREEDY, LONG, TIME, WEATHER, client_of, create, total
from live_server import LiveServer, live_server

from phloem.runtime import Engine
from phloem.runtime.server.anthropic_diagnostics import Fingerprint, FingerprintStore
from phloem.runtime.server.auth import KeyRing
from phloem.runtime.server.chat_prompt import Prompter


def cached(text: str, ttl: str | None = None) -> dict[str, Any]:
    control = {"type": "ephemeral"} if ttl is None else {"type": "ephemeral", "ttl": ttl}
    return {"type": "text", "text": text, "cache_control": control}


# Breakpoints


@pytest.mark.parametrize("stream", [False, True])
def test_breakpoints_take_leases_and_usage_tells_of_them(engine: Engine, stream: bool) -> None:
    engine.clear_cache()
    system, asked = (
        [cached(LONG, "1h")],
        [{"role": "user", "content": [cached("Name a colour. " * 9), {"type": "text", "text": "Quick!"}]}],
    )

    with live_server(engine) as server, client_of(server) as client:

        def ask() -> Any:
            if not stream:
                return create(client, asked, system=system).usage
            with client.messages.stream(model="tiny", messages=asked, system=system, **GREEDY) as events:
                return events.get_final_message().usage

        first, second = ask(), ask()
        assert first.cache_read_input_tokens == 0
        assert first.cache_creation.ephemeral_1h_input_tokens >= len(LONG)
        assert first.cache_creation.ephemeral_5m_input_tokens >= len("Name a colour. " * 9)
        # What is not kept is what comes after the last breakpoint, in the prompt's own tokens.
        assert first.input_tokens == len("Quick!<\n<assistant\n") - len("<<") + 2
        assert total(first) == total(second) == second.cache_read_input_tokens + 1
        stats = engine.stats().cache
        assert stats.pinned == first.cache_creation_input_tokens // 16
        server.wait_until_idle()
    engine.clear_cache()


def test_what_has_a_breakpoint_stays_whatever_comes(tiny_path: Any) -> None:
    with (
        Engine(tiny_path, dtype="float32", num_blocks=64) as engine,
        live_server(engine) as server,
        client_of(server) as client,
    ):
        create(client, system=[cached(LONG)])
        for number in range(6):
            create(client, [{"role": "user", "content": f"{number}" * 500}], max_tokens=1)
        kept = create(client, system=[cached(LONG)]).usage
        assert kept.cache_read_input_tokens >= len(LONG) - 16
        assert engine.stats().cache.evictions > 0
        # What the budget for leases does not hold is computed and answered all the same.
        large = create(client, [{"role": "user", "content": [cached("y" * 700)]}], max_tokens=1).usage
        assert (large.cache_creation_input_tokens, total(large)) == (
            0,
            large.input_tokens + large.cache_read_input_tokens,
        )
        server.wait_until_idle()


def test_a_breakpoint_may_be_anywhere(anthropic: Anthropic, server: LiveServer) -> None:
    control = {"type": "ephemeral"}
    result = {
        "type": "tool_result",
        "tool_use_id": "toolu_1",
        "content": "sunny " * 20,
        "cache_control": control,
    }
    call = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Rome"}}
    messages = [
        *ASKED,
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "Let me see. " * 20}, {**call, "cache_control": control}],
        },
        {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]},
    ]
    tools = [TIME, {**WEATHER, "cache_control": control}]
    server.engine.clear_cache()
    first = create(anthropic, messages, tools=tools, system=LONG).usage
    assert first.input_tokens == len("Well?") + len("<\n<assistant\n")
    second = create(
        anthropic, messages, tools=tools, system=[{"type": "text", "text": LONG}], cache_control=control
    ).usage
    assert total(first) == total(second) == second.cache_read_input_tokens + 1
    # The last one at the end of the prompt leaves nothing that is not kept.
    third = create(anthropic, tools=tools, system="Be kind.", cache_control=control).usage
    assert third.input_tokens == 0
    assert total(third) == third.cache_creation_input_tokens + third.cache_read_input_tokens


def test_tools_stand_behind_the_system_text(anthropic: Anthropic, server: LiveServer) -> None:
    server.engine.clear_cache()
    tools = [{**WEATHER, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    usage = create(
        anthropic, tools=tools, system=[cached(LONG, "5m"), {"type": "text", "text": "Quick!"}]
    ).usage
    by_ttl = usage.cache_creation
    assert by_ttl.ephemeral_5m_input_tokens == len("<<system\n") + len(LONG) + len("\n")
    assert by_ttl.ephemeral_1h_input_tokens > len("Quick!") + len(WEATHER["description"])


def test_what_an_answer_begins_with_may_have_a_breakpoint(anthropic: Anthropic, server: LiveServer) -> None:
    server.engine.clear_cache()
    begun = {"role": "assistant", "content": [cached("The colour is")]}
    usage = create(anthropic, [*ASKED, begun]).usage
    assert usage.cache_creation.ephemeral_5m_input_tokens == total(usage)


def test_breakpoints_of_system_texts_are_found_once(
    anthropic: Anthropic, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    encode = Prompter.encode

    def counted(prompter: Prompter, messages: Any, *rest: Any, **more: Any) -> Any:
        lengths.append(len(messages))
        return encode(prompter, messages, *rest, **more)

    monkeypatch.setattr(Prompter, "encode", counted)
    said = [*ASKED, {"role": "assistant", "content": [cached("Red")]}, *ASKED]
    usages = [create(anthropic, said, system=[cached("Once. " + LONG)], max_tokens=1).usage for _ in range(2)]
    # The prompt, then what goes on otherwise behind the system text and behind the answer, which may become another one.
    assert lengths == [4, 2, 4, 4, 4]
    assert usages[1].cache_read_input_tokens == total(usages[0]) - 1


def test_each_salt_has_leases_of_its_own(anthropic: Anthropic, server: LiveServer) -> None:
    server.engine.clear_cache()
    for number, salt in enumerate(("a", "b", "a"), 1):
        body = {**GREEDY["extra_body"], "cache_salt": salt}
        usage = create(anthropic, system=[cached(LONG)], extra_body=body).usage
        assert (usage.cache_read_input_tokens > 0) == (number == 3)
        assert server.engine.stats().cache.leases == min(number, 2)


def test_leases_are_taken_once_and_again_after_the_cache_was_cleared(
    anthropic: Anthropic, server: LiveServer
) -> None:
    def leases() -> tuple[int, int]:
        create(anthropic, system=[cached(LONG, "1h")])
        return server.engine.stats().cache.leases, server.engine.stats().cache.pinned

    server.engine.clear_cache()
    assert leases() == leases() == (1, (len(LONG) + 9) // 16)
    server.engine.clear_cache()
    assert server.engine.stats().cache.pinned == 0
    assert leases()[0] == 1


@pytest.mark.parametrize(
    ("system", "messages", "match"),
    [
        ([cached("a")] * 4, [{"role": "user", "content": [cached("b")]}], "5 blocks"),
        (
            [cached("a", "5m")],
            [{"role": "user", "content": [cached("b", "1h")]}],
            "longer ones must come first",
        ),
        ([cached("a", "2h")], ASKED, r"system\[0\]\.cache_control\.ttl"),
        ([{**cached("a"), "cache_control": {"type": "lasting"}}], ASKED, r"system\[0\]\.cache_control\.type"),
    ],
)
def test_breakpoints_that_can_not_be_are_refused(
    anthropic: Anthropic, system: Any, messages: Any, match: str
) -> None:
    with pytest.raises(BadRequestError, match=match):
        create(anthropic, messages, system=system)


def test_without_a_prefix_cache_nothing_is_computed_for_breakpoints(tiny_path: Any) -> None:
    with (
        Engine(tiny_path, dtype="float32", num_blocks=64, prefix_cache=False) as engine,
        live_server(engine) as server,
    ):
        with client_of(server) as client:
            usage = create(client, system=[cached(LONG)], max_tokens=1).usage
        assert engine.stats().computed_tokens == usage.input_tokens == total(usage)


# Diagnostics


def test_diagnostics_tell_what_has_changed(anthropic: Anthropic, server: LiveServer) -> None:
    server.engine.clear_cache()

    def ask(before: str | None, messages: Any = ASKED, system: str = LONG, **more: Any) -> Any:
        return create(anthropic, messages, system=system, diagnostics={"previous_message_id": before}, **more)

    first = ask(None)
    assert first.diagnostics is None
    said = {"role": "assistant", "content": first.content[0].text}
    grown = [*ASKED, said, {"role": "user", "content": "Another?"}]
    second = ask(first.id, grown)
    assert second.diagnostics is None, "messages were added only"
    assert ask(first.id).diagnostics is None
    other = [{"role": "user", "content": "Name a town."}, *grown[1:]]
    for changed, kind, at in (
        (ask(second.id, other), "messages", len("<<system\n") + len(LONG)),
        (ask(second.id, grown, "Be kind. " + LONG), "system", len("<<system\n")),
        (ask(second.id, grown, tools=[TIME]), "tools", len("<<system\n") + len(LONG)),
    ):
        reason = changed.diagnostics.cache_miss_reason
        assert reason.type == f"{kind}_changed"
        assert 0 < reason.cache_missed_input_tokens <= total(second.usage) - at
        # What the cache itself tells: contiguous, from what was found to the end.
        misses = changed.diagnostics.misses
        assert misses[0]["start"] == changed.usage.cache_read_input_tokens
        assert misses[-1]["end"] == total(changed.usage)
        assert misses[0]["reason"] == "diverged"
    assert ask("msg_unknown").diagnostics.cache_miss_reason.type == "previous_message_not_found"
    with anthropic.messages.stream(
        model="tiny", messages=other, system=LONG, diagnostics={"previous_message_id": second.id}, **GREEDY
    ) as events:
        assert events.get_final_message().diagnostics.cache_miss_reason.type == "messages_changed"


def test_what_is_remembered_for_diagnostics_is_bounded() -> None:
    tenant = KeyRing((), None, b"secret").tenant_of(None)
    found = Fingerprint(b"", b"", (), array("i", range(1000)))
    store = FingerprintStore(3 * found.num_bytes)
    for number in range(9):
        store.keep(tenant, f"msg_{number}", found)
        store.get(tenant, "msg_0")
    # The ones used longest ago have made room.
    assert [number for number in range(9) if store.get(tenant, f"msg_{number}")] == [0, 7, 8]


def test_a_message_is_not_known_to_other_keys(engine: Engine) -> None:
    keys = ("key-of-alice", "key-of-bob")
    with live_server(engine, api_keys=keys) as server:
        alice, bob = (client_of(server, api_key=key) for key in keys)
        with alice, bob:
            made = create(alice, system=[cached(LONG)], diagnostics={"previous_message_id": None})
            told = create(bob, system=[cached(LONG)], diagnostics={"previous_message_id": made.id})
        assert told.diagnostics.cache_miss_reason.type == "previous_message_not_found"
        assert told.diagnostics.misses == [{"start": 0, "end": total(told.usage), "reason": "never_seen"}]
        assert told.usage.cache_read_input_tokens == 0
        server.wait_until_idle()


def test_a_key_has_a_limit_of_its_own_in_which_what_grows_counts_once(engine: Engine) -> None:
    keys = ("key-of-alice", "key-of-bob")
    with live_server(engine, api_keys=keys, max_pinned_tokens_per_key=600) as server:
        alice, bob = (client_of(server, api_key=key) for key in keys)
        with alice, bob:
            control = {"type": "ephemeral"}
            messages, used = [{"role": "user", "content": "x" * 400}], 0
            for _ in range(6):
                usage = create(alice, messages, cache_control=control, max_tokens=1).usage
                assert usage.input_tokens == 0, "it grows, and is one conversation"
                used = total(usage)
                messages += [{"role": "assistant", "content": "y"}, {"role": "user", "content": "z"}]
            assert 500 < used < 600
            other = create(alice, [{"role": "user", "content": "other " * 30}], cache_control=control).usage
            assert other.cache_creation_input_tokens == 0
            # An hour is longer than the five minutes that hold it until now, and counts anew.
            leases = engine.stats().cache.leases
            create(alice, messages[:1], cache_control={**control, "ttl": "1h"})
            assert engine.stats().cache.leases == leases
            theirs = create(bob, [{"role": "user", "content": "other " * 30}], cache_control=control).usage
            assert theirs.input_tokens == 0
        server.wait_until_idle()
    engine.clear_cache()
