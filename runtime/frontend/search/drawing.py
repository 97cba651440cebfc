"""A search tree as a picture: a Mermaid flowchart, or a page of HTML that needs nothing else."""

from __future__ import annotations

from html import escape

from phloem.runtime.frontend.search.node import Node

MAX_LABEL = 60

STYLE = (
    "body{font:14px/1.5 system-ui,sans-serif;margin:2em}details,p{margin:0 0 0 1.5em}summary{cursor:pointer}p{padding-left:1em}"
    ".pruned{opacity:.45}.done{font-weight:600}b{font:12px ui-monospace,monospace;background:#eef;padding:0 .4em;border-radius:3px}"
)


def mermaid_of(root: Node, *, max_nodes: int) -> str:
    """Draw at most `max_nodes` nodes, the upper ones first; a node says how many under it are left out."""
    drawn = _upper(root, max_nodes)
    names = {node: f"n{place}" for place, node in enumerate(drawn)}
    lines = ["flowchart TD"]
    for node, name in names.items():
        hidden = _hidden(node, names)
        kind = ":::pruned" if node.is_pruned else ":::done" if node.is_done else ""
        lines.append(f'  {name}["{_mermaid_text(_label(node, hidden))}"]{kind}')
        if node.parent is not None:
            lines.append(f"  {names[node.parent]} {'-.->' if node.is_pruned else '-->'} {name}")
    lines += ["  classDef pruned opacity:0.45,stroke-dasharray:4", "  classDef done stroke-width:3px"]
    return "\n".join(lines) + "\n"


def html_of(root: Node, *, max_nodes: int) -> str:
    """Draw at most `max_nodes` nodes, the upper ones first, as nested foldable lists."""
    drawn = set(_upper(root, max_nodes))
    parts = [f"<!doctype html><meta charset=utf-8><title>Search tree</title><style>{STYLE}</style>"]
    # Opening and closing tags on one stack, since a tree may be deeper than Python's recursion goes.
    stack: list[Node | str] = [root]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            parts.append(item)
            continue
        shown = [child for child in item.children if child in drawn]
        line = _html_line(item, hidden=len(item.children) - len(shown))
        css = "pruned" if item.is_pruned else "done" if item.is_done else ""
        if shown:
            fold = "" if item.is_pruned else " open"
            parts.append(f'<details class="{css}"{fold}><summary>{line}</summary>')
            stack.append("</details>")
            stack += reversed(shown)
        else:
            parts.append(f'<p class="{css}">{line}</p>')
    return "\n".join(parts) + "\n"


def _upper(root: Node, count: int) -> list[Node]:
    """Return the first nodes level by level."""
    found = [root]
    for node in found:
        found += node.children[: max(0, count - len(found))]
        if len(found) >= count:
            break
    return found


def _hidden(node: Node, shown: dict[Node, str]) -> int:
    return sum(child not in shown for child in node.children)


def _label(node: Node, hidden: int) -> str:
    return " | ".join([*_facts(node), _short(node.text), *([f"{hidden} more"] if hidden else [])])


def _html_line(node: Node, *, hidden: int) -> str:
    facts = "".join(f"<b>{escape(fact)}</b> " for fact in _facts(node))
    more = f" <i>{hidden} more</i>" if hidden else ""
    return f'{facts}<span title="{escape(node.text)}">{escape(_short(node.text))}</span>{more}'


def _facts(node: Node) -> list[str]:
    facts = [node.name]
    if node.value is not None:
        facts.append(f"{node.value:.3g}")
    if node.visits:
        facts.append(f"{node.visits} visits, mean {node.total / node.visits:.3g}")
    return facts


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_LABEL else line[: MAX_LABEL - 1] + "…"


def _mermaid_text(text: str) -> str:
    """Write a text so that nothing in it is syntax: Mermaid knows entities by number."""
    return "".join(char if char.isalnum() or char in " .,:+-*/=()…|" else f"#{ord(char)};" for char in text)
