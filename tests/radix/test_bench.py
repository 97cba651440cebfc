"""What phloem.radix imports, and that its benchmark runs. The targets of speed are for `make bench`, not for tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from phloem.radix.bench import OTHERS, alternatives, as_json, suite
from phloem.radix.bench.suite import _Sizes
from phloem.radix.bench.workload import Shape, paths


def test_radix_imports_neither_torch_nor_numpy():
    code = (
        "import sys, phloem.radix; print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_benchmark_gives_rows_that_are_json(monkeypatch):
    tiny = _Sizes(long_tokens=2_048, long_nodes=8, small=50, large=200, samples=50)
    monkeypatch.setattr(suite, "QUICK", tiny)
    said: list[str] = []
    rows = suite.run(quick=True, progress=said.append)
    assert said
    assert all(row.value > 0 for row in rows if row.unit == "µs")
    plain = json.loads(json.dumps(as_json(rows)))
    assert {"group", "name", "value", "unit", "target", "met", "note"} == set(plain[0])
    assert {row.name for row in rows} >= {"1 node", "8 nodes", suite.MATCH, suite.EVICT}
    beside = {row.name: row for row in rows if row.group.endswith(OTHERS)}
    assert len(beside) == 9
    assert beside["match: this tree"].note == ""
    chain = beside["match: hash chain (SHA-256 per block)"]
    assert chain.note == f"{chain.value / beside['match: this tree'].value:.1f} x this tree"
    per_token = [row.value for row in rows if row.unit == "bytes" and "full ghost" in row.group]
    assert len(per_token) == 3
    assert all(2 < value < 10 for value in per_token)


def test_the_other_indices_find_what_they_were_given():
    known = list(paths(Shape(30)))
    chain, trie = alternatives.HashChain(64), alternatives.TokenTrie()
    for path in known:
        chain.insert(path)
        trie.insert(path)
    for path in known:
        assert len(chain.match(path + b"\1" * 64)) == len(path) // 64
        assert trie.match(path) == len(path) // 4
    assert chain.match(b"\1" * 640) == []
