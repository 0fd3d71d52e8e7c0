"""A simulated run in the Chrome trace format, with the names of a real run's trace so that both can be compared.

A process a stage, a thread a replica; messages are asynchronous events of the stage that sends them, memory
is a counter of each replica.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from planner.simulation.simulate import Simulation
from planner.spec.schedule import parse_op
from planner.spec.trace import Span, chrome_trace

__all__ = ["simulated_trace", "spans", "worker_spans"]

_CATEGORIES = {"F": "forward", "B": "backward", "U": "update", "E": "evaluate"}


def spans(simulation: Simulation) -> Iterator[Span]:
    """What each worker did when; waits and all-reduces are spans of their own."""
    for worker in simulation.workers:
        yield from worker_spans(simulation, worker.stage, worker.replica)


def worker_spans(simulation: Simulation, stage: int, replica: int, start_us: float = 0.0, end_us: float = math.inf) -> Iterator[Span]:
    """What one worker did; only operations that touch [``start_us``, ``end_us``]."""
    for op, ready_us, begin_us, running_us, done_us in simulation.record.workers[stage][replica]:
        if done_us < start_us:
            continue
        if ready_us > end_us:
            break
        if begin_us > ready_us:
            yield Span(stage, replica, f"wait {op}", "wait", ready_us, begin_us - ready_us)
        if running_us > begin_us:
            yield Span(stage, replica, f"allreduce {op}", "allreduce", begin_us, running_us - begin_us)
        yield Span(stage, replica, str(op), _CATEGORIES[op.kind], running_us, done_us - running_us)


def simulated_trace(simulation: Simulation) -> dict[str, Any]:
    """The trace as a JSON object."""
    trace = chrome_trace(spans(simulation))
    events: list[dict[str, Any]] = trace["traceEvents"]
    for number, transfer in enumerate(simulation.record.transfers):
        op = parse_op(transfer.name)
        if op.kind != "U":  # an all-reduce is a span already
            common = {"name": f"transfer {transfer.name}", "cat": "transfer", "pid": op.stage, "id": number}
            events.append({"ph": "b", **common, "ts": round(transfer.start_us, 3), "args": {"bytes": transfer.bytes}})
            events.append({"ph": "e", **common, "ts": round(transfer.arrival_us, 3)})
    for worker in simulation.workers:
        name = f"memory of replica {worker.replica}"
        events += [{"ph": "C", "name": name, "pid": worker.stage, "ts": round(step.time_us, 3), "args": {"bytes": round(step.total_bytes)}}
                   for step in worker.memory]
    return trace
