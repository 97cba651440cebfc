"""A search tree as plain data, and back."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phloem.runtime.errors import InvalidRequest
from phloem.runtime.frontend.search.node import Node

FIELDS = ("parent", "token_ids", "value", "logprob", "is_done", "is_pruned", "visits", "total")
HEADER = ("version", "seed", "salt", "adapter", "spent_tokens", "nodes")


@dataclass(frozen=True, slots=True)
class Header:
    """What a description says besides its nodes."""

    prompt: list[int]
    seed: int
    salt: str | None
    adapter: str | None
    spent_tokens: int


def nodes_to_list(root: Node) -> list[dict[str, Any]]:
    """Describe the nodes, parents before children; `parent` is a place in the list, null for the root. O(nodes + tokens)."""
    described: list[dict[str, Any]] = []
    places: dict[Node, int] = {}
    for node in root.walk():
        places[node] = len(described)
        described.append(
            {
                "parent": None if node.parent is None else places[node.parent],
                "token_ids": node.tokens.tolist(),
                **{name: getattr(node, name) for name in FIELDS[2:]},
            }
        )
    return described


def read_header(state: Mapping[str, Any]) -> Header:
    """Return what a description says besides its nodes.

    Raises:
        InvalidRequest: It is not a description of a tree.
    """
    if not isinstance(state, Mapping) or set(state) != set(HEADER) or state["version"] != 1:
        raise InvalidRequest(f"a tree's description has version 1 and {', '.join(HEADER[1:])}", field="state")
    nodes = state["nodes"]
    if not isinstance(nodes, Sequence) or not nodes or not all(_is_node(node) for node in nodes):
        raise InvalidRequest(f"each of nodes has {', '.join(FIELDS)}, and nothing else", field="nodes")
    if not _is_whole(state["spent_tokens"]):
        raise InvalidRequest(
            f"spent_tokens must be a whole number, not {state['spent_tokens']!r}", field="spent_tokens"
        )
    return Header(
        nodes[0]["token_ids"], state["seed"], state["salt"], state["adapter"], state["spent_tokens"]
    )


def fill_tree(root: Node, described: Sequence[Mapping[str, Any]], *, vocab_size: int) -> None:
    """Make the described nodes under a root that has the first one's tokens.

    Raises:
        InvalidRequest: A node's parent does not come before it, its tokens are none of the model's, or a field has a wrong type.
    """
    made: list[Node] = []
    for place, each in enumerate(described):
        parent_place = each["parent"]
        if place == 0:
            node = root
        elif _is_whole(parent_place) and parent_place < place:
            node = _child(made[parent_place], each["token_ids"], place, vocab_size)
        else:
            raise InvalidRequest(
                f"nodes[{place}].parent must be a place before {place}, not {parent_place!r}",
                field="nodes.parent",
            )
        _set_fields(node, each, place)
        made.append(node)


def _child(parent: Node, token_ids: Any, place: int, vocab_size: int) -> Node:
    good = isinstance(token_ids, Sequence) and all(
        _is_whole(each) and each < vocab_size for each in token_ids
    )
    if not good or not token_ids:
        raise InvalidRequest(
            f"nodes[{place}].token_ids must be token ids, from 0 to {vocab_size - 1}", field="nodes.token_ids"
        )
    tokens = array("i", token_ids)
    child = Node(parent, len(parent.children), parent.depth + 1, parent.end, tokens, parent.decode)
    parent.children.append(child)
    return child


def _set_fields(node: Node, each: Mapping[str, Any], place: int) -> None:
    for name in FIELDS[2:]:
        value = each[name]
        if name in ("value", "logprob"):
            good = value is None or _is_number(value)
        elif name in ("is_done", "is_pruned"):
            good = isinstance(value, bool)
        else:
            good = _is_whole(value) if name == "visits" else _is_number(value)
        if not good:
            raise InvalidRequest(f"nodes[{place}].{name} can't be {value!r}", field=f"nodes.{name}")
        setattr(node, name, value)


def _is_node(node: object) -> bool:
    return isinstance(node, Mapping) and set(node) == set(FIELDS)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
