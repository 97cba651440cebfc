"""What can be told of a chat template from its source: whether it does no more with messages' contents than put them out.

Then what it renders for a message is the same text around any content, and need not be rendered again for each.
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import Environment, TemplateError, nodes

_SAME_FOR_TEXTS = frozenset({"string", "defined", "undefined", "none", "mapping", "iterable", "sequence"})
"""Tests whose outcome is the same for every text."""


def puts_contents_out(template: str) -> bool:
    """Whether a template puts out the content of each message as it is, or trimmed, and decides nothing by it.

    It may ask whether a content is empty, so this holds among contents that are not, trimmed or not. False also where it can't be
    told, as for templates that hand contents to a macro or to a variable. O(length of the template).
    """
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except (TemplateError, RecursionError):
        return False
    parents = {child: node for node in _walk(tree) for child in node.iter_child_nodes()}
    loaded = [node for node in parents if isinstance(node, nodes.Name) and node.ctx == "load"]
    messages: list[nodes.Node] = []
    loop_variables = set()
    for name in loaded:
        if name.name != "messages":
            continue
        used, holder = _past_slices(name, parents)
        if isinstance(holder, nodes.For) and holder.iter is used and isinstance(holder.target, nodes.Name):
            loop_variables.add(holder.target.name)
        elif isinstance(holder, nodes.Getitem) and holder.node is used:
            messages.append(holder)
        elif not (isinstance(holder, nodes.Filter) and holder.name in ("length", "count")):
            return False
    messages += [name for name in loaded if name.name in loop_variables]
    loops = [name for name in loaded if name.name == "loop"]
    return all(_is_harmless(message, parents) for message in messages) and all(
        _field(loop, parents) not in (None, "previtem", "nextitem") for loop in loops
    )


def _walk(node: nodes.Node) -> Iterator[nodes.Node]:
    # Without recursion, unlike jinja's `find_all`: a long sum is as deep as it is long.
    pending = [node]
    while pending:
        yield pending[-1]
        pending += pending.pop().iter_child_nodes()


def _past_slices(node: nodes.Node, parents: dict[nodes.Node, nodes.Node]) -> tuple[nodes.Node, nodes.Node]:
    """Return the outermost of `messages[1:][...]` that is still a list of messages, and what holds it."""
    holder = parents[node]
    while isinstance(holder, nodes.Getitem) and isinstance(holder.arg, nodes.Slice):
        node, holder = holder, parents[holder]
    return node, holder


def _field(thing: nodes.Node, parents: dict[nodes.Node, nodes.Node]) -> object:
    """Return the name of the field that an expression is asked for; None if something else is done with it."""
    access = parents[thing]
    if isinstance(access, nodes.Getattr):
        return access.attr
    if isinstance(access, nodes.Getitem) and access.node is thing and isinstance(access.arg, nodes.Const):
        return access.arg.value
    return None


def _is_harmless(message: nodes.Node, parents: dict[nodes.Node, nodes.Node]) -> bool:
    """Whether an expression that is a message is only asked for fields, and its content only put out."""
    field = _field(message, parents)
    access = parents[message]
    holder = parents[access]
    if field is None or (isinstance(holder, nodes.Call) and holder.node is access):
        return False  # a method may read anything
    return field != "content" or _is_put_out(access, parents)


def _is_put_out(content: nodes.Node, parents: dict[nodes.Node, nodes.Node]) -> bool:
    node, holder = content, parents[content]
    if isinstance(holder, nodes.Filter) and holder.name == "trim" and not (holder.args or holder.kwargs):
        node, holder = holder, parents[holder]
    if isinstance(holder, nodes.Test) and holder.name in _SAME_FOR_TEXTS:
        return True
    if _decides_by_emptiness(node, parents):
        return True
    while isinstance(holder, (nodes.Add, nodes.Concat, nodes.CondExpr, nodes.Output, nodes.For, nodes.If)):
        if node is getattr(holder, "test", None) or node is getattr(holder, "iter", None):
            return False
        node, holder = holder, parents[holder]
    return isinstance(holder, nodes.Template)


def _decides_by_emptiness(node: nodes.Node, parents: dict[nodes.Node, nodes.Node]) -> bool:
    while isinstance(parents[node], (nodes.Not, nodes.And, nodes.Or)):
        node = parents[node]
    holder = parents[node]
    return isinstance(holder, nodes.If) and holder.test is node
