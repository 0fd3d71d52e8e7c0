"""Bytes each layer keeps for its backward, and bytes it needs only while it runs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from launcher import devices
from launcher.profiling.layered import LayeredStep

__all__ = ["LayerMemory", "measure_memory", "storage_bytes"]

_MARK = "pipedream layer"
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the meter says on stderr that it started and stopped


@dataclass(frozen=True)
class LayerMemory:
    """``workspace_bytes``: the peak beyond inputs, outputs, saved tensors and parameter gradients."""

    saved_bytes: int
    workspace_bytes: int


def measure_memory(step: LayeredStep, parameters: Iterable[torch.Tensor]) -> list[LayerMemory]:
    """One step with autograd's saved tensors watched, and one under the allocator's meter, for each layer."""
    parameters = list(parameters)
    saved = _saved_bytes(step)
    for parameter in parameters:
        parameter.grad = None
    workspace = _workspace_bytes(step)
    for parameter in parameters:
        parameter.grad = None
    return [LayerMemory(*pair) for pair in zip(saved, workspace, strict=True)]


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind ``tensors``, each counted once."""
    return sum({_pointer(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def _saved_bytes(step: LayeredStep) -> list[int]:
    """What autograd saves, each storage counted once and at the layer that made it.

    Parameters, buffers, constants and the data are left out: they exist anyway.
    """
    ignored = {_pointer(tensor) for layer in step.layers for tensor in (*layer.state, *layer.program.module.buffers())}
    ignored |= {_pointer(tensor) for tensor in step.data}
    saved: list[list[torch.Tensor]] = [[]]  # by layer; kept alive, so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[-1].append(tensor.detach())
        return saved[-1][-1]  # not `tensor`: an output that saves itself would never be freed

    calls = iter(range(2 * len(step.layers)))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step.forward(lambda: saved.append([]) if next(calls) % 2 == 0 else None)
    maker: dict[int, int] = {}
    for index, (kept, outputs) in enumerate(zip(saved[1:], step.outputs(), strict=True)):
        for tensor in (*kept, *outputs):
            maker.setdefault(_pointer(tensor), index)
    totals = [0] * len(step.layers)
    everything = {_pointer(tensor): tensor.untyped_storage().nbytes() for kept in saved for tensor in kept}
    for pointer, size in everything.items():
        if pointer not in ignored:
            totals[maker[pointer]] += size
    step.clear()
    return totals


def _pointer(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _workspace_bytes(step: LayeredStep) -> list[int]:
    """From the allocator's own events, so that what kernels allocate inside is counted too.

    Forward: what was allocated and given back before the layer ended. Backward: the peak above what was
    there before, less the parameters' gradients, which are counted apart, plus the gradient it was given.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as session:
        step.forward(_mark)
        step.backward(_mark)
    intervals = _allocations(session)
    count = len(step.layers)
    workspace = []
    for index, layer in enumerate(step.layers):
        peak, end = intervals[2 * index]
        forward = peak - max(end, 0)
        peak, _ = intervals[2 * (2 * count - 1 - index)]
        own = sum(tensor.numel() * tensor.element_size() for tensor in layer.state if tensor.requires_grad)
        given = sum(step.gradient_bytes(node) for node in layer.outputs)
        workspace.append(max(forward, peak - own + given if peak > own else given, 0))
    return workspace


def _mark() -> None:
    with record_function(_MARK):
        pass


def _allocations(session: profile) -> list[tuple[int, int]]:
    """(peak, end) of the bytes allocated since each mark, up to the next."""
    wanted = torch.device(devices.device_kind()).type.upper()
    events = []
    profiler: Any = session.profiler
    for event in profiler.kineto_results.events():
        if event.name() == _MARK:
            events.append((event.start_ns(), 0, True))
        elif event.name() == "[memory]" and wanted in str(event.device_type()).upper():
            events.append((event.start_ns(), event.nbytes(), False))
    intervals: list[tuple[int, int]] = []
    for _, size, is_mark in sorted(events, key=lambda event: event[0]):
        if is_mark:
            intervals.append((0, 0))
        elif intervals:
            peak, total = intervals[-1]
            intervals[-1] = (max(peak, total + size), total + size)
    return intervals
