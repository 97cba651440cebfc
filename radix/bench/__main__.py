"""Prints the benchmark as a plain table; fails if a target is missed."""

from __future__ import annotations

import argparse
import sys

from phloem.radix.bench import Row, run


def main() -> int:
    """Runs the benchmark as the command line asks; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m phloem.radix.bench", description="Measure the prefix cache."
    )
    parser.add_argument("--quick", action="store_true", help="smaller and under ten seconds")
    arguments = parser.parse_args()
    rows = run(quick=arguments.quick, progress=lambda message: print(f"... {message}", file=sys.stderr))
    group = None
    for row in rows:
        if row.group != group:
            group = row.group
            print(f"\n{group}")
        print(_line(row))
    return 1 if any(row.met is False for row in rows) else 0


def _line(row: Row) -> str:
    target = "" if row.target is None else f"{'ok' if row.met else 'MISSED'}, at most {row.target:,.1f}"
    return f"  {row.name:<34}{row.value:>12,.1f} {row.unit:<6} {target:<26} {row.note}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
