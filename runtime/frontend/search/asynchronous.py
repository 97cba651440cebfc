"""Searches in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Concatenate, ParamSpec, TypeVar

from phloem.runtime.frontend.search.tree import SearchTree

Rest = ParamSpec("Rest")
Result = TypeVar("Result")


async def arun(
    search: Callable[Concatenate[SearchTree, Rest], Result],
    tree: SearchTree,
    *args: Rest.args,
    **kwargs: Rest.kwargs,
) -> Result:
    """Run a search, one of these or of your own, without holding up the event loop.

    ::

        best, *_ = await arun(breadth_first, tree, step, value, keep=3, depth=4)

    It runs in a thread of its own, its step's and value's functions too; leave the tree alone meanwhile. Cancelling it aborts what is
    under way, and waits for the search's end; the tree keeps the families that were whole, and a search called on it goes on from there.

    Raises:
        Exception: As the search.
    """

    def run() -> Result:
        try:
            return search(tree, *args, **kwargs)
        finally:
            tree.end_interrupt()

    pool = ThreadPoolExecutor(1, thread_name_prefix="phloem-search")
    ended = asyncio.get_running_loop().run_in_executor(pool, run)
    try:
        return await asyncio.shield(ended)
    except asyncio.CancelledError:
        tree.interrupt()
        # Nor does it leave sooner when it is cancelled again: the tree is still in use.
        while not ended.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([ended])
        tree.end_interrupt()  # should the search have ended just before it
        raise
    finally:
        pool.shutdown(wait=False)
