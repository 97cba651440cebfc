"""The tree of a search: its nodes, their branches, and what it has spent. The searches are functions over it."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from phloem.radix import Namespace
from phloem.runtime.branch import Branch
from phloem.runtime.engine import Engine
from phloem.runtime.errors import BranchReleased, Cancelled
from phloem.runtime.expand import Expansion
from phloem.runtime.frontend.search.budget import Budget, Ledger
from phloem.runtime.frontend.search.drawing import html_of, mermaid_of
from phloem.runtime.frontend.search.holdings import Holdings
from phloem.runtime.frontend.search.node import Node, ranked
from phloem.runtime.frontend.search.saving import fill_tree, nodes_to_list, read_header
from phloem.runtime.outputs import Completion, Usage
from phloem.runtime.prompts import Prompt
from phloem.runtime.sampling_params import SamplingParams


class SearchTree:
    r"""A prompt and what a search has grown from it.

    ::

        with SearchTree(engine, prompt, seed=7) as tree:
            best = breadth_first(tree, Sample(4, SamplingParams(max_tokens=24, stop="\n")), value, keep=3, depth=4)
            print(best[0].path_text, tree.usage)

    Every path's KV is computed once and shared by all that grows from it. Leaves that a search may go on from keep a live branch,
    other nodes only their tokens. The same seed, model and arguments give the same tree, whatever is cached. For one
    thread at a time. Leaving the `with` block releases all branches; nodes and drawings stay.

    Args:
        engine: What to run on.
        prompt: Text, token ids, chat messages, or a branch, of which the tree takes a fork.
        seed: What all draws come from. None: a random one, kept in `seed`.
        budget: What the search may spend.
        namespace: Keeps the cache of these paths apart; a branch has its own already.

    Raises:
        InvalidRequest: The prompt or the namespace is wrong.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: Prompt | Branch,
        *,
        seed: int | None = None,
        budget: Budget | None = None,
        namespace: Namespace | None = None,
    ) -> None:
        branch = (
            prompt.fork()[0] if isinstance(prompt, Branch) else engine.branch(prompt, namespace=namespace)
        )
        described = branch.to_dict()
        self.engine = engine
        self.seed = secrets.randbits(63) if seed is None else seed
        SamplingParams(seed=self.seed)  # refuses what is no seed
        self.namespace = Namespace(salt=described["salt"], adapter=described["adapter"])
        self.root = Node(None, 0, 0, 0, array("i", described["token_ids"]), engine.tokenizer.decode)
        self.ledger = Ledger(budget or Budget())
        self.usage = Usage(0, 0, 0)
        """Of all that the search asked the model for. Scores count the continuations' last tokens as prompt, though they need not
        be computed."""

        self.holdings = Holdings(
            self._reopen, block_size=engine.config.block_size, max_blocks=self.ledger.budget.max_blocks
        )
        self.holdings.put(self.root, branch)
        self._is_closed = False
        self._is_interrupted = False
        self._expansion: Expansion | None = None

    def __enter__(self) -> SearchTree:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release all branches. A second call does nothing."""
        self._is_closed = True
        self.holdings.close()

    # Reading

    def nodes(self) -> Iterator[Node]:
        """Yield all nodes, pruned ones included, parents before children."""
        return self.root.walk()

    def leaves(self) -> list[Node]:
        """Return the nodes without children, but for pruned ones and the root."""
        return [
            node for node in self.nodes() if not node.children and not node.is_pruned and node.parent is not None
        ]  # fmt: skip

    def ranked(self) -> list[Node]:
        """Return the leaves, best first: those that are done before the others, then by value."""
        return ranked(self.leaves())

    def to_html(self, *, max_nodes: int = 2000) -> str:
        """Return the tree as a page of its own: fold out a node to see its children."""
        return html_of(self.root, max_nodes=max_nodes)

    def to_mermaid(self, *, max_nodes: int = 200) -> str:
        """Return the tree as a Mermaid flowchart."""
        return mermaid_of(self.root, max_nodes=max_nodes)

    # Working on it

    def branch(self, node: Node) -> Branch:
        """Return the node's live branch, which stays the tree's; fork it to go on from it yourself.

        Raises:
            BranchReleased: The tree was closed.
        """
        self.check_open()
        return self.holdings.branch(node)

    def open(self, prompt: Prompt) -> Branch:
        """Return a branch of another prompt in the tree's namespace; it is the caller's."""
        self.check_open()
        return self.engine.branch(prompt, namespace=self.namespace)

    def ask(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[list[Completion]]:
        """Let the model answer prompts, all at once; return `params.n` completions of each. Counts for usage and budget.

        Draws come from the tree's seed and the prompt alone: the same question gets the same answer.
        """
        self.check_open()
        if not prompts:
            return []
        each = [replace(params, seed=self.seed_of(f"ask {prompt!r}")) for prompt in prompts]
        done = self.engine.generate(list(prompts), each, namespace=self.namespace)
        for completion in done:
            self.count(completion.usage)
        return [done[start : start + params.n] for start in range(0, len(done), params.n)]

    def prune(self, node: Node) -> None:
        """Give up a node and all under it: their blocks can be evicted at once. They stay in drawings."""
        for each in node.walk():
            each.is_pruned = True
            self.holdings.park(each)

    def count(self, usage: Usage) -> None:
        """Add what a request has used."""
        self.usage = Usage(
            self.usage.prompt_tokens + usage.prompt_tokens,
            self.usage.cached_tokens + usage.cached_tokens,
            self.usage.completion_tokens + usage.completion_tokens,
        )
        self.ledger.tokens += usage.completion_tokens

    def seed_of(self, place: str) -> int:
        """Return the seed of the draws at a place of the search: a function of the tree's seed and the place."""
        digest = blake2b(f"{self.seed} {place}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1

    def expansion(self) -> Expansion:
        """Return an empty expansion for a search, which `interrupt` aborts."""
        self._expansion = self.engine.expansion()
        return self._expansion

    def interrupt(self) -> None:
        """Let the search that another thread runs on the tree end with `Cancelled`; what it has under way is aborted, what is whole stays.

        It lasts until `end_interrupt`.
        """
        self._is_interrupted = True
        if self._expansion is not None:
            self._expansion.abort()

    def end_interrupt(self) -> None:
        """Let searches run again."""
        self._is_interrupted = False

    # Saving

    def to_dict(self) -> dict[str, Any]:
        """Return the tree as plain data, for JSON. KV is not part of it: it comes back when it is needed."""
        return {
            "version": 1,
            "seed": self.seed,
            "salt": self.namespace.salt,
            "adapter": self.namespace.adapter,
            "spent_tokens": self.ledger.tokens,
            "nodes": nodes_to_list(self.root),
        }

    @staticmethod
    def from_dict(engine: Engine, state: Mapping[str, Any], *, budget: Budget | None = None) -> SearchTree:
        """Return the tree that `to_dict` described; a search that is called on it goes on where it was.

        Raises:
            InvalidRequest: The description is not one of these; the message names the part.
        """
        header = read_header(state)
        tree = SearchTree(
            engine, header.prompt, seed=header.seed, budget=budget,
            namespace=Namespace(salt=header.salt, adapter=header.adapter),
        )  # fmt: skip
        try:
            fill_tree(tree.root, state["nodes"], vocab_size=engine.model.vocab_size)
        except BaseException:
            tree.close()
            raise
        tree.ledger.tokens = header.spent_tokens
        tree.ledger.nodes = len(state["nodes"])
        return tree

    def _reopen(self, node: Node) -> Branch:
        return self.engine.branch(node.path_token_ids, namespace=self.namespace)

    def check_open(self) -> None:
        """Check that the tree can be worked on.

        Raises:
            BranchReleased: It was closed.
            Cancelled: Its search was interrupted.
        """
        if self._is_interrupted:
            raise Cancelled(
                "the search was interrupted; called again on the same tree, it goes on where it was"
            )
        if self._is_closed:
            raise BranchReleased("the search tree was closed; use it inside of its with block, or save it with to_dict")  # fmt: skip
