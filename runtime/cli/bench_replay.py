"""`phloem bench replay`: a published tree search as requests, through the scheduler alone."""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from phloem.radix import BlockPool, Namespace, RadixCache
from phloem.runtime.cli.bench_common import verdict, write_json
from phloem.runtime.models.resolve import resolve_model
from phloem.runtime.path import Path as TokenPath
from phloem.runtime.path_cache import PathCache
from phloem.runtime.request import Request
from phloem.runtime.sampling_params import SamplingParams
from phloem.runtime.scheduler import Scheduler
from phloem.runtime.tokenizer import Tokenizer

VALUE_LEN = 8
"""Tokens of an evaluation's answer, whose text the log does not keep."""

POOL_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Visit:
    """One request of the search: a prompt, and what the model answered."""

    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """How much of the prompts was there already."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    reused: float
    seconds: float


def run_bench_replay(
    log: Path, prompts: Path, model: str, console: Console, *, block_size: int, json_path: Path | None
) -> None:
    """Replay and print."""
    tokenizer = Tokenizer.from_directory(resolve_model(model).path)
    visits = list(visits_of(json.loads(log.read_text()), json.loads(prompts.read_text())))
    result = _replay(visits, tokenizer, block_size, console)
    table = Table(title=f"A tree search replayed, blocks of {block_size} tokens", title_justify="left")
    for heading in ("requests", "prompt tokens", "reused", "aim", "scheduler, µs per request"):
        table.add_column(heading, justify="right")
    table.add_row(
        f"{result.requests:,}",
        f"{result.prompt_tokens:,}",
        f"{result.reused:.2%}",
        verdict("99.0 %", met=result.reused >= 0.99),
        f"{result.seconds / result.requests * 1e6:,.0f}",
    )
    console.print(table)
    write_json(json_path, asdict(result))


def visits_of(log: list[dict[str, object]], prompts: dict[str, str]) -> Iterator[Visit]:
    """Yield the requests of the Game of 24 searches of tree-of-thought-llm (Yao et al., 2023), in their order.

    Each step proposes from every text that is left, and evaluates every new text.
    """
    for problem in log:
        for step in problem["steps"]:  # type: ignore[attr-defined]
            new = step["new_ys"]
            for text in step["ys"]:
                answer = "".join(each[len(text) :] for each in new if each.startswith(text))
                yield Visit(_propose_prompt(step["x"], text, prompts), answer)
            for text in new:
                yield Visit(_value_prompt(step["x"], text, prompts), "")


def _propose_prompt(numbers: str, text: str, prompts: dict[str, str]) -> str:
    left = _numbers_left(numbers, text)
    if left == "24":
        return prompts["cot_prompt"].format(input=numbers) + "Steps:" + text
    return prompts["propose_prompt"].format(input=left)


def _value_prompt(numbers: str, text: str, prompts: dict[str, str]) -> str:
    last = text.strip().split("\n")[-1]
    if "left: " not in last:
        answer = last.lower().replace("answer: ", "")
        return prompts["value_last_step_prompt"].format(input=numbers, answer=answer)
    return prompts["value_prompt"].format(input=_numbers_left(numbers, text))


def _numbers_left(numbers: str, text: str) -> str:
    last = text.strip().split("\n")[-1]
    return last.split("left: ")[-1].split(")")[0] if text else numbers


def _replay(visits: list[Visit], tokenizer: Tokenizer, block_size: int, console: Console) -> ReplayResult:
    pool = BlockPool(POOL_TOKENS // block_size)
    scheduler = Scheduler(
        PathCache(RadixCache(pool, block_size=block_size)), max_running=64, max_step_tokens=4096
    )
    requests, seconds = [], 0.0
    for number, visit in enumerate(track(visits, "Replaying", console=console, transient=True)):
        prompt = array("i", tokenizer.encode(visit.prompt))
        answer = tokenizer.encode(visit.answer, add_special_tokens=False) if visit.answer else [0] * VALUE_LEN
        request = Request(
            id=str(number),
            path=TokenPath(Namespace(), prompt),
            params=SamplingParams(),
            seed=0,
            max_len=len(prompt) + len(answer),
        )
        requests.append(request)
        started = time.perf_counter()
        scheduler.add(request)
        _run(scheduler, request, answer)
        seconds += time.perf_counter() - started
    prompt_tokens = sum(request.num_prompt_tokens for request in requests)
    cached_tokens = sum(request.cached_tokens or 0 for request in requests)
    return ReplayResult(len(requests), prompt_tokens, cached_tokens, cached_tokens / prompt_tokens, seconds)


def _run(scheduler: Scheduler, request: Request, answer: list[int]) -> None:
    """Run a request to its end, with the answer's tokens in place of the model's."""
    following = iter(answer)
    while scheduler.has_work:
        batch = scheduler.schedule()
        scheduler.commit(batch.rows)
        for row in batch.rows:
            if row.samples:
                request.tokens.append(next(following))
                if len(request.tokens) >= request.max_len:
                    scheduler.finish(request)
