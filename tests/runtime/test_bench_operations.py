"""`phloem bench programs` tells what every operation of a program costs beside the calls it is made of."""

import time

from phloem.runtime import Engine
from phloem.runtime.cli.bench_operations import measure_operations


def test_every_operation_is_measured_beside_what_it_is_made_of(tiny_engine: Engine) -> None:
    started = time.process_time()
    found = measure_operations(tiny_engine, rounds=2)
    assert [each.name for each in found] == [
        "s += text", "s.user(text)", "with s.assistant()", "gen", "healed gen", "score", "select", "fork of 4", "mark and rewind", "capture",
    ]  # fmt: skip
    assert all(each.overhead_s == each.program_s - each.base_s for each in found)
    assert 0 < sum(each.program_s + each.base_s for each in found) < time.process_time() - started
    by_name = {each.name: each for each in found}
    assert by_name["select"].base_s > by_name["s += text"].base_s
