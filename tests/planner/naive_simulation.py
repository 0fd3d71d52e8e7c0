"""The simulation written again, slowly and plainly: at every instant everything is worked out from scratch.

No event queue, no bookkeeping of links: a list of messages under way, their fair rates by repeated
water-filling over all of them, and a step to the next instant at which something ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from planner.simulation.workload import StageWorkload
from planner.spec.cluster import Cluster, Link, Node
from planner.spec.plan import Plan
from planner.spec.schedule import Op, Pipeline, operations

End = dict[tuple[Op, int], float]  # (operation, replica) -> when it was done
Segment = tuple[str, str]  # node below the link, "up" or "down"


@dataclass
class Message:
    connection: tuple[object, ...]
    segments: tuple[Segment, ...]
    latency_us: float
    left_bytes: float
    target: object
    rate: float = 0.0


@dataclass
class Worker:
    ops: list[Op]
    busy_until_us: float | None = None
    place: int = 0
    inputs: set[Op] = field(default_factory=set)


def all_links(nodes: tuple[Node, ...], prefix: str = "") -> dict[str, Link]:
    found: dict[str, Link] = {}
    for node in nodes:
        for index in range(node.count):
            found[f"{prefix}{node.name}{index}"] = node.link
            found |= all_links(node.children, f"{prefix}{node.name}{index}/")
    return found


def segments_between(sender: str, receiver: str) -> list[Segment]:
    def above(device: str) -> list[str]:
        parts = device.split("/")
        return ["/".join(parts[:n]) for n in range(1, len(parts) + 1)]

    one, other = above(sender), above(receiver)
    return [(node, "up") for node in one if node not in other] + [(node, "down") for node in other if node not in one]


def fair_rates(messages: list[Message], capacity: dict[Segment, float]) -> None:
    """Raise all rates together; freeze those on a link that is full."""
    frozen: set[int] = set()
    level = 0.0
    while len(frozen) < len(messages):
        room = {}
        for segment, most in capacity.items():
            used = sum(message.rate for n, message in enumerate(messages) if n in frozen and segment in message.segments)
            rising = sum(1 for n, message in enumerate(messages) if n not in frozen and segment in message.segments)
            if rising:
                room[segment] = (most - used) / rising
        level = min(room.values())
        full = {segment for segment, value in room.items() if value <= level * (1 + 1e-12)}
        for n, message in enumerate(messages):
            if n not in frozen and full.intersection(message.segments):
                message.rate = level
                frozen.add(n)


def naive(plan: Plan, pipeline: Pipeline, workload: tuple[StageWorkload, ...]) -> End:
    """When every operation ends."""
    cluster: Cluster = plan.cluster
    links = all_links(cluster.nodes)
    capacity = {(node, way): link.bandwidth_bytes_per_s / 1e6 for node, link in links.items() for way in ("up", "down")}
    last = len(plan.stages) - 1
    workers = {(k, i): Worker(list(operations(pipeline, k, i))) for k, r in enumerate(pipeline.replicas) for i in range(r)}
    queued: list[Message] = []
    travelling: list[tuple[float, object]] = []  # left, arrives after the latency
    ends: End = {}
    met: dict[tuple[int, int], float] = {}  # (stage, batch) -> when its gradients were summed
    asked: set[tuple[int, int]] = set()
    now = 0.0

    def device(worker: tuple[int, int]) -> str:
        return plan.stages[worker[0]].devices[worker[1]]

    def send(kind: str, sender: tuple[int, int], receiver: tuple[int, int], size: float, op: Op) -> None:
        path = tuple(segments_between(device(sender), device(receiver)))
        latency = sum(links[node].latency_us for node, _ in path)
        target = (receiver, op)
        if size > 0:
            queued.append(Message((kind, sender, receiver), path, latency, size, target))
        else:
            travelling.append((now + latency, target))

    def reduce(stage: int, batch: int) -> None:
        order = [name for name, _ in cluster.devices() if name in plan.stages[stage].devices]
        pairs = list(zip(order, order[1:] + order[:1], strict=True))
        path = tuple({segment for pair in pairs for segment in segments_between(*pair)})
        longest = max(sum(links[node].latency_us for node, _ in segments_between(*pair)) for pair in pairs)
        latency = 2 * (len(order) - 1) * longest
        if workload[stage].ring_bytes > 0:
            queued.append(Message(("ring", stage), path, latency, workload[stage].ring_bytes, (stage, batch)))
        else:
            travelling.append((now + latency, (stage, batch)))

    def step_workers() -> bool:
        """End and begin what can end and begin now; whether anything did."""
        moved = False
        for (k, i), worker in workers.items():
            if worker.place == len(worker.ops):
                continue
            op = worker.ops[worker.place]
            if worker.busy_until_us is not None:
                if worker.busy_until_us > now:
                    continue
                ends[op, i] = now
                worker.busy_until_us, moved = None, True
                worker.place += 1
                if op.kind == "F" and k < last:
                    after = (k + 1, op.index % pipeline.replicas[k + 1])
                    send("F", (k, i), after, workload[k].activation_bytes, Op(k + 1, "F", op.index))
                if op.kind == "B" and k > 0:
                    before = (k - 1, op.index % pipeline.replicas[k - 1])
                    send("B", (k, i), before, workload[k - 1].gradient_bytes, Op(k - 1, "B", op.index))
                continue
            times = {"F": workload[k].forward_us, "B": workload[k].backward_us, "U": workload[k].update_us}
            if op.kind == "U":
                together = all(w.place < len(w.ops) and w.ops[w.place] == op and w.busy_until_us is None
                               for (stage, _), w in workers.items() if stage == k)
                if (k, op.index) not in asked and together:
                    asked.add((k, op.index))
                    moved = True
                    if pipeline.replicas[k] == 1:
                        met[k, op.index] = now
                    else:
                        reduce(k, op.index)
                ready = (k, op.index) in met
            else:
                ready = (op.kind == "F" and k == 0) or (op.kind == "B" and k == last) or op in worker.inputs
            if ready:
                worker.busy_until_us, moved = now + times[op.kind][i], True
        return moved

    while True:
        for when, target in [entry for entry in travelling if entry[0] <= now]:
            travelling.remove((when, target))
            where, what = target  # type: ignore[misc]
            if isinstance(where, tuple):
                workers[where].inputs.add(what)
            else:
                met[where, what] = now
        if step_workers():
            continue
        heads: dict[tuple[object, ...], Message] = {}
        for message in queued:
            heads.setdefault(message.connection, message)
        under_way = list(heads.values())
        fair_rates(under_way, capacity)
        times = [w.busy_until_us for w in workers.values() if w.busy_until_us is not None] + [when for when, _ in travelling]
        ending = {id(message): now + message.left_bytes / message.rate for message in under_way}
        then = min([*times, *ending.values()], default=math.inf)
        if then == math.inf:
            return ends
        for message in under_way:
            message.left_bytes -= message.rate * (then - now)
            if ending[id(message)] <= then:
                queued.remove(message)
                travelling.append((then + message.latency_us, message.target))
        now = then
