"""The benchmark of the tree: `run` measures, `as_json` makes plain data of it.

``python -m phloem.radix.bench [--quick]`` prints a table. It imports numpy; nothing of `phloem.radix` imports it.
"""

from phloem.radix.bench.suite import OTHERS, run
from phloem.radix.bench.timing import Row, as_json

__all__ = ["OTHERS", "Row", "as_json", "run"]
