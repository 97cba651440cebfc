"""`phloem bench chat`, `fewshot`, `tree`, `bestof` and `serve`: what they ask, count and write. No times: those are for quiet machines."""

import asyncio
import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from live_server import live_server
from rich.console import Console
from typer.testing import CliRunner

from phloem.runtime import Engine, InvalidRequest
from phloem.runtime.cli import bench_workloads
from phloem.runtime.cli.bench_common import Outputs
from phloem.runtime.cli.bench_workloads import WORKLOADS, Servers, run_bench_workloads
from phloem.runtime.cli.machine_limits import LimitSizes
from phloem.runtime.cli.main import app
from phloem.runtime.cli.workloads.best_of import BestOf
from phloem.runtime.cli.workloads.chat import Chat
from phloem.runtime.cli.workloads.client import Answer, Ask, EngineClient
from phloem.runtime.cli.workloads.fewshot import FewShot
from phloem.runtime.cli.workloads.http_client import find_server
from phloem.runtime.cli.workloads.tally import exact_hits, num_distinct
from phloem.runtime.cli.workloads.tree import TreeOfThoughts
from phloem.runtime.cli.workloads.words import Words
from phloem.runtime.cli.workloads.workload import Workload

SMALL: dict[str, Workload] = {
    "chat": Chat(conversations=3, turns=2, at_once=2, system_tokens=20, user_tokens=9, output_tokens=5),
    "fewshot": FewShot(requests=6, at_once=3, shared_tokens=40, own_tokens=7, output_tokens=3),
    "tree": TreeOfThoughts(problems=2, depth=3, branch=(3, 2), keep=2, output_tokens=4),
    "bestof": BestOf(samples=4, prompt_tokens=37, output_tokens=6),
}
REQUESTS = {"chat": 6, "fewshot": 6, "tree": 2 * (3 + 2 * 2 + 2 * 3), "bestof": 4}
TINY_LIMITS = LimitSizes(read_bytes=1 << 16, rows=(4,), repeats=1)


def measured(
    workloads: Sequence[str],
    model: Path,
    tmp_path: Path,
    *,
    plot: bool = False,
    profile: bool = False,
    **options: Any,
) -> dict[str, Any]:
    outputs = Outputs(
        tmp_path / "found.json",
        tmp_path / "found.png" if plot else None,
        tmp_path / "trace.json" if profile else None,
    )
    run_bench_workloads(
        [SMALL[name] for name in workloads], str(model), Console(quiet=True), outputs, rounds=2,
        limit_sizes=TINY_LIMITS, **options,
    )  # fmt: skip
    return json.loads((tmp_path / "found.json").read_text())


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="the extra `bench` is not here")
def test_the_engine_finds_what_an_exact_tree_would(tiny_path: Path, tmp_path: Path) -> None:
    found = measured(list(SMALL), tiny_path, tmp_path, plot=True, profile=True)
    assert [each["title"].split(":")[0] for each in found["results"]] == [
        "chat", "few-shot", "tree of thoughts", "best of 4",
    ]  # fmt: skip
    for name, each in zip(SMALL, found["results"], strict=True):
        assert len(each["rounds"]) == 2, name
        for one in each["rounds"]:
            assert one["requests"] == REQUESTS[name]
            assert one["prompt_tokens"] == one["sent_tokens"]
            # Of what two compute at the same time, one waits for the other's whole blocks, not for the rest.
            assert 0.9 * one["exact_tokens"] <= one["cached_tokens"] <= one["exact_tokens"], name
            assert one["floor_s"] > 0
        assert each["tokens_per_s"] > 0
        assert 0.4 < each["cached_share"] <= each["exact_share"] < 1
    assert {limit["what"] for limit in found["limits"]} == {"read", "bfloat16", "float32"}
    assert (tmp_path / "found.png").stat().st_size > 0
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_servers_take_part_in_turns_and_the_same_is_cached(
    tiny_path: Path, tiny_engine: Engine, tmp_path: Path
) -> None:
    with live_server(tiny_engine) as server:
        found = measured(
            ["chat", "bestof"],
            tiny_path,
            tmp_path,
            servers=Servers([f"here={server.url}", f"{server.url}/v1#tiny"]),
        )
        server.wait_until_idle()
    assert [each["target"] for each in found["results"]] == 2 * [
        bench_workloads.ENGINE, "here", server.url.removeprefix("http://") + "/v1",
    ]  # fmt: skip
    for name, each in zip(3 * ["chat"] + 3 * ["bestof"], found["results"], strict=True):
        for one in each["rounds"]:
            assert one["requests"] == REQUESTS[name]
            # Two of them share an engine, so that one finds what the other asked for.
            assert (
                0.9 * one["exact_tokens"] <= one["cached_tokens"] < one["prompt_tokens"] == one["sent_tokens"]
            )


def test_a_server_that_takes_text_only_is_sent_text(
    tiny_path: Path, tiny_engine: Engine, tmp_path: Path
) -> None:
    with live_server(tiny_engine) as server:
        found = measured(
            ["fewshot"], tiny_path, tmp_path, servers=Servers([server.url], plain=True), in_process=False
        )
    [result] = found["results"]
    assert all(one["requests"] == 6 for one in result["rounds"])
    assert result["cached_share"] > 0.5


def test_a_stream_of_ids_is_the_engines_answer(tiny_path: Path, tiny_engine: Engine) -> None:
    words = Words(tiny_engine.tokenizer)
    asks = [Ask([1, 2, 3, 4, 5], 7), Ask([9, 8, 7], 5, seed=3), Ask([9, 8, 7], 5, seed=4)]

    async def over_http() -> list[Answer]:
        async with where.open() as client:
            return await client.complete(asks)

    with live_server(tiny_engine) as server:
        where = find_server(server.url, words.tokenizer, api_key=None, plain=False)
        assert where.model == "tiny"
        remote = asyncio.run(over_http())
    local = asyncio.run(EngineClient(tiny_engine).complete(asks))
    assert [each.token_ids for each in remote] == [each.token_ids for each in local]
    assert [len(each.token_ids) for each in remote] == [7, 5, 5]
    assert remote[1].token_ids != remote[2].token_ids
    for each in remote:
        assert each.completion_tokens == each.ask.max_tokens
        assert each.prompt_tokens == len(each.ask.prompt)
        assert 0 < each.first_token_s <= each.total_s


def test_a_server_that_is_not_there_or_refuses_is_named(
    tiny_path: Path, tiny_engine: Engine, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest, match=r"http://127\.0\.0\.1:1/v1 can't be used: ConnectError"):
        measured(["chat"], tiny_path, tmp_path, servers=Servers(["http://127.0.0.1:1"]))
    with pytest.raises(InvalidRequest, match="no server was named"):
        measured(["chat"], tiny_path, tmp_path, in_process=False)
    with live_server(tiny_engine) as server:
        with pytest.raises(InvalidRequest, match="two servers have one name"):
            measured(["chat"], tiny_path, tmp_path, servers=Servers([server.url, server.url]))
        with pytest.raises(InvalidRequest, match=r"x answered 404: .*other"):
            measured(
                ["chat"], tiny_path, tmp_path, servers=Servers([f"x={server.url}#other"]), in_process=False
            )
        server.wait_until_idle()


def test_the_sizes_are_those_that_other_engines_were_measured_at() -> None:
    assert [workload.title for workload in WORKLOADS.values()] == [
        "chat: 8 conversations x 6 turns, 4 at once, 60 in / 64 out, 64 of a system prompt",
        "few-shot: 64 requests, 1,000 shared + 50 own tokens, 16 out, 16 at once",
        "tree of thoughts: 6 problems, depth 4, branch 3-4, keep 3, 24 out",
        "best of 16: 512 in (computed before), 64 out",
    ]


def test_decode_steps_are_counted_at_the_batches_that_a_workload_allows(tiny_engine: Engine) -> None:
    words = Words(tiny_engine.tokenizer)
    [few] = WORKLOADS["fewshot"].decode_stages(words)
    assert (few.steps, few.rows, few.kv_tokens) == (4 * 15, 16, 1000 + 16 * 58)
    chat = WORKLOADS["chat"].decode_stages(words)
    assert [(stage.steps, stage.rows) for stage in chat] == 6 * [(2 * 63, 4)]
    assert chat[1].kv_tokens == 64 + 4 * (60 + 64 + 60 + 32)
    tree = WORKLOADS["tree"].decode_stages(words)
    assert [(stage.steps, stage.rows) for stage in tree] == [(23, 24), (23, 54), (23, 72), (23, 54)]
    [best] = WORKLOADS["bestof"].decode_stages(words)
    assert (best.steps, best.rows, best.kv_tokens) == (63, 16, 512 + 16 * 32)


def test_an_exact_tree_hits_the_longest_prefix_but_for_the_last_token() -> None:
    paths = [([1, 2, 3], [4, 5]), ([1, 2, 3], [9]), ([1, 2, 3, 4, 5, 6], [7]), ([2, 2], [1]), ([2, 2], [1])]
    assert exact_hits(paths) == [0, 2, 4, 0, 1]
    assert num_distinct(prompt for prompt, _ in paths) == 6 + 2


def test_rounds_share_no_prompt_and_a_round_is_always_the_same(tiny_path: Path, tiny_engine: Engine) -> None:
    words, client = Words(tiny_engine.tokenizer), EngineClient(tiny_engine)
    for workload in SMALL.values():
        first, again, other = (
            [answer.ask.prompt for answer in asyncio.run(workload.run(client, words, number))]
            for number in (1, 1, 2)
        )
        assert sorted(first) == sorted(again)
        assert not any(a[:8] == b[:8] for a in first for b in other)


@pytest.mark.parametrize("name", list(SMALL))
def test_each_is_a_command(
    name: str, tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_workloads, "WORKLOADS", SMALL)
    monkeypatch.setattr(bench_workloads, "LimitSizes", lambda: TINY_LIMITS)
    path = tmp_path / "found.json"
    result = CliRunner().invoke(
        app, ["bench", name, "--model", str(tiny_path), "--rounds", "1", "--json", str(path)]
    )
    assert result.exit_code == 0, result.output
    assert SMALL[name].title in " ".join(result.output.split())
    assert json.loads(path.read_text())["results"][0]["title"] == SMALL[name].title


def test_serve_runs_what_it_is_told_to(
    tiny_path: Path, tiny_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_workloads, "WORKLOADS", SMALL)
    monkeypatch.setattr(bench_workloads, "LimitSizes", lambda: TINY_LIMITS)
    path = tmp_path / "found.json"
    with live_server(tiny_engine) as server:
        command = ["bench", "serve", "--url", server.url, "--model", str(tiny_path), "--rounds", "1"]
        result = CliRunner().invoke(
            app, [*command, "--workload", "tree", "--workload", "bestof", "--json", str(path)]
        )
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())["results"]
    assert [each["title"] for each in found] == [SMALL["tree"].title, SMALL["bestof"].title]
