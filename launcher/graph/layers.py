"""From operations to layers: consecutive runs in execution order, named as the model's own modules.

A layer begins where a leaf module is called (or where a module uses a parameter of its own). Glue
between such calls (views, residual additions, attention products) joins the layer before it::

    embedding | layer_norm linear view sdpa reshape linear add | layer_norm linear gelu linear add
    emb         ln1        qkv              ..      proj   ..    ln2        mlp.0  mlp.1 mlp.2 ..

Execution order is a topological order, so layers are always acyclic. Layers that cannot be separated
(what crosses would not be a plain tensor, or a write in place joins them) are merged into the first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from torch.fx import Node

__all__ = ["LOSS", "group", "module_call"]

LOSS = "loss"


def module_call(node: Node, is_leaf: Callable[[str], bool]) -> tuple[str, str, bool]:
    """(which call, module path relative to the user's model, whether the module is a leaf) of a node.

    The wrapper's own operations and the loss module's are the path ``loss``.
    """
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return "", "", False
    call, (path, _) = list(stack.items())[-1]
    root, _, rest = path.partition(".")
    if root != "model":
        return LOSS, LOSS, True
    return call, rest, is_leaf(path)


def group(
    nodes: Sequence[Node],
    owns: Callable[[Node], str],
    is_leaf: Callable[[str], bool],
    together: Iterable[frozenset[Node]],
) -> dict[str, tuple[Node, ...]]:
    """Layers by name, in execution order.

    Args:
        nodes: The operations to group, in execution order (free ones left out).
        owns: The name of a parameter, or of a buffer that is written to, that an operation uses; "" for none.
        is_leaf: Whether the module at a path of the wrapper has no modules in it.
        together: Groups of operations that must stay in one layer.
    """
    runs = _runs(nodes, owns, is_leaf)
    place = {node: index for index, (_, members) in enumerate(runs) for node in members}
    runs = _merge(runs, [{place[node] for node in nodes if node in place} for nodes in together])
    layers: dict[str, tuple[Node, ...]] = {}
    counts: dict[str, int] = {}
    for path, members in runs:
        name = path or "model"
        counts[name] = counts.get(name, 0) + 1
        unique = name if counts[name] == 1 else f"{name}#{counts[name]}"
        while unique in layers:  # a module that is really called "x#2"
            counts[name] += 1
            unique = f"{name}#{counts[name]}"
        layers[unique] = tuple(members)
    return layers


def _runs(nodes: Sequence[Node], owns: Callable[[Node], str], is_leaf: Callable[[str], bool]) -> list[tuple[str, list[Node]]]:
    runs: list[tuple[str, list[Node]]] = []
    place: dict[Node, int] = {}
    current, glue, glue_calls = "", list[Node](), list[str]()

    def settle(keep: int) -> None:
        """The first ``keep`` glue operations join the run before; the rest wait for the run that begins."""
        for node in glue[:keep]:
            place[node] = len(runs) - 1
            runs[-1][1].append(node)
        del glue[:keep], glue_calls[:keep]

    for node in nodes:
        call, path, leaf = module_call(node, is_leaf)
        producer = node.args[0] if "getitem" in str(node.target) and node.args else None
        if isinstance(producer, Node) and producer in place:  # one part of a result belongs where it was made
            place[node] = place[producer]
            runs[place[producer]][1].append(node)
            continue
        if not (leaf or owns(node)):
            glue.append(node)
            glue_calls.append(call)
            continue
        if call == current and runs:
            settle(len(glue))
        else:
            # what the same call did just before its first parameter (attention's transposes) is a part of it
            keep = len(glue)
            while keep > 0 and glue_calls[keep - 1] == call:
                keep -= 1
            settle(keep if runs else 0)
            runs.append((path or _owner(owns(node)), list(glue)))
            place.update(dict.fromkeys(glue, len(runs) - 1))
            glue.clear()
            glue_calls.clear()
            current = call
        place[node] = len(runs) - 1
        runs[-1][1].append(node)
    if glue and not runs:
        runs.append(("", []))
    settle(len(glue))
    return runs


def _owner(name: str) -> str:
    """What the model itself does with ``head.weight`` is called ``head``, with its own ``position`` ``position``."""
    return name.rpartition(".")[0] or name


def _merge(runs: list[tuple[str, list[Node]]], groups: Iterable[Collection[int]]) -> list[tuple[str, list[Node]]]:
    """Join the whole range that each group spans."""
    joined = [False] * len(runs)  # whether run i continues run i - 1
    for indices in groups:
        if indices:
            for index in range(min(indices) + 1, max(indices) + 1):
                joined[index] = True
    merged: list[tuple[str, list[Node]]] = []
    for (path, members), continues in zip(runs, joined, strict=True):
        if continues:
            merged[-1][1].extend(members)
        else:
            merged.append((path, list(members)))
    return merged


def align(layers: Mapping[str, tuple[Node, ...]], known: Mapping[str, tuple[Node, ...]],
          home: Callable[[Node], str | None]) -> dict[str, tuple[Node, ...]]:
    """Evaluation's operations put into training's layers.

    An operation goes where training uses its parameter (``home``), else to the training layer of the
    same name, else it stays with the operation before it; never before an operation it needs. Training
    may be cut between branches, so no layer may come to need another that it does not need in training:
    an operation that would do that goes to the last of the layers it needs.

    Args:
        layers: Evaluation's own layers.
        known: Training's layers, in order.
        home: The training layer that uses a node's parameters, if it uses any.
    """
    names = list(known)
    index = {name: position for position, name in enumerate(names)}
    before = _before(known)
    homes = {node: index[wanted] for members in layers.values() for node in members if (wanted := home(node)) is not None}
    users = _homes_after(layers, homes)
    place: dict[Node, int] = {}
    current = 0
    for name, members in layers.items():
        current = index.get(name, current)
        for node in members:
            sources = {place[source] for source in node.all_input_nodes if source in place}
            last = max([homes.get(node, current), *sources])
            possible = [homes[node]] if node in homes else [current, max(sources, default=current)]
            place[node] = next((there for there in possible if all(before[there] >> source & 1 for source in sources)
                                and all(before[user] >> there & 1 for user in users[node])), last)
    aligned: dict[str, tuple[Node, ...]] = {}
    for name in known:
        members = tuple(node for node in place if place[node] == index[name])
        if members:
            aligned[name] = members
    return aligned


def _before(layers: Mapping[str, tuple[Node, ...]]) -> list[int]:
    """For each layer a bit mask of those it needs, directly or not, and itself; the last, the loss, may need all."""
    place = {node: position for position, members in enumerate(layers.values()) for node in members}
    before = [1 << position for position in range(len(layers))]
    for position, members in enumerate(layers.values()):  # in topological order
        for source in {place[source] for node in members for source in node.all_input_nodes if source in place}:
            before[position] |= before[source]
    before[-1] = (1 << len(layers)) - 1
    return before


def _homes_after(layers: Mapping[str, tuple[Node, ...]], homes: Mapping[Node, int]) -> dict[Node, set[int]]:
    """The homes of each node's users, through users that have none."""
    found: dict[Node, set[int]] = {}
    for node in reversed([node for members in layers.values() for node in members]):
        found[node] = set()
        for user in node.users:
            found[node] |= {homes[user]} if user in homes else found.get(user, set())
    return found
