"""`phloem bench gpu`: attention, decode, prefill and cascades, each beside what this card was measured to do."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from phloem.kernels.flashinfer_library import load_flashinfer, why_unavailable
from phloem.runtime import Engine, EngineConfig
from phloem.runtime.cli.bench_common import verdict, write_json
from phloem.runtime.cli.floors import Rates
from phloem.runtime.cli.gpu_measures import Measure, Rig, Sizes, measure_all, measure_card
from phloem.runtime.cli.random_model import LLAMA_1B, write_random_model
from phloem.runtime.models.config import read_model_config
from phloem.runtime.models.resolve import resolve_model
from phloem.runtime.placement import place

_WARM_UPS, _CALLS = 3, 20


def run_bench_gpu(model: str | None, console: Console, *, json_path: Path | None) -> bool:
    """Measure and print.

    Args:
        model: What decodes; None for random weights in the shape of Llama 3.2 1B.
        console: Where to print.
        json_path: Where to write the results too.

    Returns:
        Whether there is a GPU to measure.

    Raises:
        ModelError: The model can't be loaded.
        InvalidRequest: FlashInfer has no code for it.
    """
    reason = why_unavailable()
    if reason is not None:
        console.print(f"There is no GPU to measure here: {escape(reason)}. `phloem doctor` tells more.")
        return False
    with ExitStack() as stack, console.status("Writing a random model") as status:
        if model is None:
            path = write_random_model(Path(stack.enter_context(tempfile.TemporaryDirectory())), LLAMA_1B)
        else:
            path = resolve_model(model).path
        status.update("Measuring; the first time on a machine, FlashInfer compiles for minutes")
        rig = _rig(path)
        card = measure_card(rig)
        measures = list(measure_all(rig, card))
    name = torch.cuda.get_device_name()
    console.print(table_of(f"{name}, {escape(model or 'random weights, 1B')}", card, measures))
    results = [{**asdict(each), "met": each.met} for each in measures]
    write_json(json_path, {"device": name, "card": asdict(card), "measures": results})
    return True


def table_of(title: str, card: Rates, measures: list[Measure]) -> Table:
    """Return the results as a table."""
    table = Table(
        title=f"{title}: copies {card.bytes_per_s / 1e9:,.0f} GB/s, multiplies {card.flops_per_s / 1e12:,.0f} TFLOP/s",
        title_justify="left",
    )
    for heading in ("what", "time", "beside", "time", "ratio", "aim"):
        table.add_column(heading, justify="left" if heading in ("what", "beside") else "right")
    for each in measures:
        aim = "" if each.aim is None else verdict(f"{each.aim:g}", met=each.met)
        table.add_row(
            each.name,
            f"{each.seconds * 1e3:,.3f} ms",
            each.compared_to,
            f"{each.other_s * 1e3:,.3f} ms",
            f"{each.ratio:.2f}",
            aim,
        )
    return table


def _rig(path: Path) -> Rig:
    model = read_model_config(path)
    return Rig(
        model,
        place(EngineConfig(device="cuda"), model),
        load_flashinfer(),
        partial(Engine, path, device="cuda"),
        _seconds_on_device,
        Sizes().fitted(model.max_position),
    )


def _seconds_on_device(run: Callable[[], object]) -> float:
    """Mean time of a call between two events, after a few to warm up."""
    for _ in range(_WARM_UPS):
        run()
    begin, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(_CALLS):
        run()
    end.record()
    end.synchronize()
    total_ms: float = begin.elapsed_time(end)
    return total_ms / 1e3 / _CALLS
