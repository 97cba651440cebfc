"""Growing a tree: families of children under way, each valued and attached when it is whole, without waiting for others."""

from __future__ import annotations

import dataclasses
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from phloem.runtime.errors import CacheFull, InvalidRequest
from phloem.runtime.expand import Born
from phloem.runtime.frontend.search.node import Node
from phloem.runtime.frontend.search.steps import Propose, Sample, Step
from phloem.runtime.frontend.search.tree import SearchTree
from phloem.runtime.frontend.search.values import Value, as_value, values_of


@dataclass(slots=True, eq=False)
class Family:
    """Children of one node that are to come, or under way."""

    parent: Node
    count: int
    """0 where a function decides."""

    tokens: int = 0
    """Set aside for them."""

    blocks: int = 0
    """Set aside while they are under way."""

    number: int = -1
    """The expansion's; later ones have larger numbers."""

    arrived: list[Born] = field(default_factory=list)


class Growth:
    """Nodes that grow by one step and one value. Add nodes, and iterate over families of new nodes as they are whole.

    More can be added between two of them. What a family is does not depend on which came first. Leaving the `with` block
    aborts what is under way; the tree is as if it had not begun.
    """

    def __init__(self, tree: SearchTree, step: Step, value: Value | Callable[[Node], float]) -> None:
        if not isinstance(step, (Sample, Propose)):
            raise InvalidRequest(f"step must be Sample or Propose, not {type(step).__name__}", field="step")
        tree.check_open()
        self._tree = tree
        self._step = step
        self._value = as_value(value)
        self._waiting: deque[Family] = deque()
        self._under_way: dict[int, Family] = {}
        self._whole: dict[int, Family] = {}
        """All of them have arrived, and wait for their turn."""

        self._expansion = tree.expansion()

    def __enter__(self) -> Growth:
        return self

    def __exit__(self, *error: object) -> None:
        self._expansion.close()
        for family in (*self._under_way.values(), *self._whole.values()):
            for born in family.arrived:
                born.branch.release()
            self._tree.holdings.finish(family.parent, family.blocks)
        for family in (*self._waiting, *self._under_way.values(), *self._whole.values()):
            self._tree.ledger.free(tokens=family.tokens, nodes=family.count)
        self._waiting.clear()
        self._under_way.clear()
        self._whole.clear()

    def add(self, node: Node) -> bool:
        """Let a node grow the children that it lacks. False when the budget does not hold that; nothing changes then."""
        if isinstance(self._step, Sample):
            lacking = self._step.n - len(node.children)
            return lacking <= 0 or self._add(node, lacking)
        nodes_left = self._tree.ledger.nodes_left
        return (nodes_left is None or nodes_left > 0) and self._add(node, 0)

    def add_affordable(self, node: Node) -> bool:
        """Let a node grow as many of the children that it lacks as the budget holds. False when that is less than all."""
        if not isinstance(self._step, Sample):
            return self.add(node)
        lacking, ledger = self._step.n - len(node.children), self._tree.ledger
        count = min(
            lacking,
            lacking if ledger.tokens_left is None else ledger.tokens_left // self._max_new(node),
            lacking if ledger.nodes_left is None else ledger.nodes_left,
        )
        return count <= 0 or (self._add(node, count) and count == lacking)

    def __iter__(self) -> Iterator[list[Node]]:
        """Yield families, each once it is whole, valued and in the tree.

        Raises:
            CacheFull: The budget's blocks do not hold one family.
            InvalidRequest: The value is not finite numbers.
            PhloemError: A child failed.
        """
        while self._waiting or self._under_way:
            if isinstance(self._step, Propose):
                yield from self._propose(self._step)
            else:
                yield self._sampled(self._next_whole(self._step))

    def next_in_order(self) -> None:
        """Wait for the family that was added first of those that are not in the tree yet (with a proposing function, for all).

        Others that are whole meanwhile wait for their turn, so that nothing depends on timing. Don't mix it with iterating.
        """
        if isinstance(self._step, Propose):
            self._propose(self._step)
            return
        while not self._whole or min(self._whole) > min(self._under_way, default=min(self._whole)):
            family = self._next_whole(self._step)
            self._whole[family.number] = family
        self._sampled(self._whole.pop(min(self._whole)))

    def run(self) -> None:
        """Wait for all families."""
        for _ in self:
            pass

    # Parts of the above

    def _add(self, node: Node, count: int) -> bool:
        tokens = count * self._max_new(node) if count else 0
        if not self._tree.ledger.reserve(tokens=tokens, nodes=count):
            return False
        self._waiting.append(Family(node, count, tokens))
        return True

    def _max_new(self, node: Node) -> int:
        """Return how many tokens a child can have."""
        room = self._tree.engine.max_model_len - node.end
        asked = self._step.params.max_tokens if isinstance(self._step, Sample) else None
        return room if asked is None else min(room, asked)

    def _next_whole(self, step: Sample) -> Family:
        """Wait until a family is whole."""
        while True:
            self._start_waiting(step)
            self._tree.check_open()  # before, since what begins after an interrupt is not aborted by it
            born = next(iter(self._expansion))
            family = self._under_way[born.family]
            family.arrived.append(born)
            self._tree.check_open()  # after, since it may be what an interrupt left of it
            if len(family.arrived) == family.count:
                return self._under_way.pop(born.family)

    def _start_waiting(self, step: Sample) -> None:
        """Start families in their order, as far as the budget's blocks go."""
        holdings = self._tree.holdings
        while self._waiting:
            family = self._waiting[0]
            node = family.parent
            family.blocks = family.count * holdings.blocks_beyond(node, self._max_new(node))
            needed = family.blocks + holdings.blocks_to_open(node)
            if not holdings.make_room(needed, keep=node):
                if self._under_way:
                    return
                raise CacheFull(
                    f"{family.count} children of node {node.name}, which has {node.end} tokens, can take {needed} blocks besides "
                    f"{holdings.num_blocks} that are held; max_blocks of the budget is {holdings.max_blocks}: raise it"
                )
            self._start(step, family)

    def _start(self, step: Sample, family: Family) -> None:
        node = family.parent
        branch = self._tree.holdings.start(node, family.blocks)
        params = dataclasses.replace(step.params, seed=self._tree.seed_of(node.name))
        try:
            family.number = self._expansion.add(branch, family.count, params, first=len(node.children))
        except BaseException:
            self._tree.holdings.finish(node, family.blocks)
            raise
        self._under_way[family.number] = self._waiting.popleft()

    def _sampled(self, family: Family) -> list[Node]:
        """Make nodes of a family that has arrived."""
        self._tree.ledger.free(tokens=family.tokens, nodes=family.count)
        self._tree.holdings.finish(family.parent, family.blocks)
        family.arrived.sort(key=lambda born: born.index)
        children = [self._sampled_child(family.parent, born) for born in family.arrived]
        for child, born in zip(children, family.arrived, strict=True):
            self._tree.holdings.put(child, born.branch)
        self._attach([children])
        return children

    def _sampled_child(self, parent: Node, born: Born) -> Node:
        done = born.branch.completion
        assert done is not None
        self._tree.count(done.usage)
        child = _child(parent, born.index, done.token_ids)
        if done.logprobs is not None:
            child.logprob = sum(entry.logprob for entry in done.logprobs)
        child.is_done = bool(done.token_ids) and done.token_ids[-1] in born.branch.eos_token_ids
        born.branch.completion = None  # the node has what is needed of it
        return child

    def _propose(self, step: Propose) -> list[list[Node]]:
        """Grow all that wait, at once: the function and the value can ask the model about all of them together."""
        parents = [family.parent for family in self._waiting]
        texts = step.function(parents)
        if len(texts) != len(parents):
            raise InvalidRequest(
                f"the function of Propose gave {len(texts)} lists for {len(parents)} nodes", field="step"
            )
        families = [
            [self._proposed_child(parent, index, text) for index, text in enumerate(of_parent)]
            for parent, of_parent in zip(parents, texts, strict=True)
        ]
        self._waiting.clear()
        self._attach([family for family in families if family])
        for parent, family in zip(parents, families, strict=True):
            if not family:
                self._tree.prune(parent)
        return families

    def _proposed_child(self, parent: Node, index: int, text: str) -> Node:
        ids = self._tree.engine.tokenizer.encode_continuation(text)
        if not ids:
            raise InvalidRequest(f"the function of Propose gave {text!r} for node {parent.name}", field="step")  # fmt: skip
        return _child(parent, index, ids)

    def _attach(self, families: Sequence[list[Node]]) -> None:
        """Value new nodes and put them into the tree; if that fails, there never were any."""
        tree = self._tree
        try:
            self._mark_done(families)
            found = values_of(self._value, tree, families)
            tree.check_open()
        except BaseException:
            for child in (child for family in families for child in family):
                tree.holdings.park(child)
            raise
        for family, values in zip(families, found, strict=True):
            parent = family[0].parent
            assert parent is not None
            for child, value in zip(family, values, strict=True):
                child.value = value
            parent.children += family
            tree.ledger.nodes += len(family)
            # Its children hold all of its KV but the last, partly filled block.
            tree.holdings.park(parent)
            for child in family:
                if child.is_done:
                    tree.holdings.park(child)

    def _mark_done(self, families: Sequence[list[Node]]) -> None:
        full = self._tree.engine.max_model_len
        for child in (child for family in families for child in family):
            ends = self._step.is_done is not None and self._step.is_done(child)
            child.is_done = child.is_done or bool(ends) or child.end >= full


def _child(parent: Node, index: int, token_ids: Sequence[int]) -> Node:
    return Node(parent, index, parent.depth + 1, parent.end, array("i", token_ids), parent.decode)
