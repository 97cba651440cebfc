"""Prints what a test run on a GPU needs and this Python lacks, a requirement a line. Imports nothing but pip's own parts.

The roots are phloem's dependencies, pytest and hypothesis, and requirements-flashinfer.txt; what those need is looked up in
turn, except for what FlashInfer asks for (a CUDA installation) and what torch brings. Needs of a package that is missing
itself can't be known, so a second run may print more.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import distributions
from pathlib import Path

import tomllib
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
TEST_TOOLS = ("pytest", "hypothesis")
OPAQUE = ("flashinfer-python", "torch")
"""Packages whose own needs are not looked up."""


def roots() -> list[str]:
    """Return the requirements of the project for a run on a GPU."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    tests = [
        each for each in project["optional-dependencies"]["test"] if Requirement(each).name in TEST_TOOLS
    ]
    lines = (ROOT / "requirements-flashinfer.txt").read_text(encoding="utf-8").splitlines()
    return [*project["dependencies"], *tests, *(line for line in lines if line and not line.startswith("#"))]


def missing(requirements: Iterable[str], path: list[str] | None = None) -> list[str]:
    """Return those that are not met, or not in that version, by the packages on a path (None: this Python's)."""
    options = {} if path is None else {"path": path}
    installed = {
        canonicalize_name(each.metadata["Name"]): each for each in reversed([*distributions(**options)])
    }
    found, queue, seen = [], [*requirements], set()
    while queue:
        requirement = Requirement(queue.pop(0))
        name = canonicalize_name(requirement.name)
        if str(requirement) in seen or not (
            requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ):
            continue
        seen.add(str(requirement))
        package = installed.get(name)
        if package is None or not requirement.specifier.contains(package.version, prereleases=True):
            found.append(f"{name}{requirement.specifier}")
        elif name not in OPAQUE:
            queue += package.requires or []
    return sorted(set(found))


if __name__ == "__main__":
    print(*missing(roots()), sep="\n", end="")
