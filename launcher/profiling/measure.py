"""Times: each layer's forward and backward, its share of the optimizer's step, and the whole step uncut.

On a shared machine speed drifts by more than the differences we look for, so the layered step and the
whole step alternate, and what counts is the median::

    repeat 1: layers, whole | repeat 2: whole, layers | repeat 3: layers, whole | ...
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from launcher import devices
from launcher.capture import Captured
from launcher.job import Job
from launcher.profiling.layered import LayeredStep
from launcher.randomness import keyed
from launcher.split import split
from planner.spec.profile import Measured

__all__ = ["LayerTimes", "Times", "measure_times"]

WARM_UP = 2
_CALLS = 50


@dataclass(frozen=True)
class LayerTimes:
    """Medians over the repeats, in microseconds; ``*_spread_us`` is the interquartile range."""

    forward_us: float
    backward_us: float
    forward_spread_us: float
    backward_spread_us: float
    update_us: float
    copy_us: float


@dataclass(frozen=True)
class Times:
    layers: tuple[LayerTimes, ...]
    whole: Measured
    optimizer: torch.optim.Optimizer  # after real steps, for the size of its state


def measure_times(job: Job, captured: Captured, state: Mapping[str, torch.Tensor], data: Sequence[torch.Tensor], *,
                  repeats: int, seed: int, on_repeat: Callable[[int, int], None]) -> Times:
    """Measure ``repeats`` steps after a warm-up, on real data with the job's real optimizer.

    Args:
        job: For its optimizer, which sees the parameters of ``captured``.
        captured: The training step.
        state: The model's own tensors by name; parameters and buffers change as in training.
        data: One microbatch.
        repeats: Measured repetitions; two more warm up.
        seed: For dropout masks.
        on_repeat: Called with (done, total).
    """
    layered = LayeredStep(captured, state, data)
    parameters = {name: state[name] for name in captured.parameters}
    optimizer = job.optimizer(parameters.values())  # type: ignore[arg-type]
    whole = _WholeStep(captured, state, data)
    owned = [[parameters[name] for name in layer.owned if name in parameters] for layer in layered.layers]
    copies = {name: torch.empty_like(parameter) for name, parameter in parameters.items()}
    spare = [[copies[name] for name in layer.owned if name in parameters] for layer in layered.layers]
    layer_laps: list[tuple[list[float], list[float]]] = []
    update_laps: list[list[float]] = []
    copy_laps: list[list[float]] = []
    whole_laps: list[list[float]] = []
    total = WARM_UP + repeats
    call_us = _call_us(next(iter(parameters.values())).device)
    gc.collect()
    for repeat in range(total):
        turns = [lambda: layer_laps.append(_layered_laps(layered)), lambda: whole_laps.append(whole.laps(optimizer))]
        for turn in turns if repeat % 2 == 0 else turns[::-1]:
            with keyed(seed, repeat):
                turn()
            if turn is turns[0]:
                update_laps.append(_update_laps(optimizer, owned))
                copy_laps.append(_copy_laps(owned, spare))
            optimizer.zero_grad(set_to_none=True)
        on_repeat(repeat + 1, total)
    steps = [statistics.median(column) for column in zip(*whole_laps[WARM_UP:], strict=True)]
    forward = _typical([_less(forward, call_us[0]) for forward, _ in layer_laps[WARM_UP:]])
    backward = _typical([_less(backward, call_us[1]) for _, backward in layer_laps[WARM_UP:]])
    # one step over all parameters costs less than a step per layer: keep the shares, and the whole's sum
    update = _typical(update_laps[WARM_UP:], total_us=steps[2])
    copy = _typical(copy_laps[WARM_UP:])
    layers = [LayerTimes(f, b, f_spread, b_spread, u, c)
              for (f, f_spread), (b, b_spread), (u, _), (c, _) in zip(forward, backward, update, copy, strict=True)]
    return Times(tuple(layers), Measured(*steps), optimizer)


def _typical(laps: Sequence[Sequence[float]], total_us: float | None = None) -> list[tuple[float, float]]:
    """(median, interquartile range) of each layer over the repeats, which ``laps`` has one row for each.

    Medians do not add up: where a busy machine makes some of the times longer, the sum of the layers'
    medians is not the median of their sums. All are scaled alike, so that it is (or is ``total_us``).
    """
    columns = list(zip(*laps, strict=True))
    medians = [statistics.median(column) for column in columns]
    wanted_us = statistics.median(map(sum, laps)) if total_us is None else total_us
    scale = wanted_us / sum(medians) if sum(medians) > 0 else 0.0
    return [(scale * middle, scale * _spread(column)) for middle, column in zip(medians, columns, strict=True)]


class _WholeStep:
    """The captured step as one program, and its laps: forward, backward, update."""

    def __init__(self, captured: Captured, state: Mapping[str, torch.Tensor], data: Sequence[torch.Tensor]) -> None:
        (program,) = split(captured, [list(captured.layers)])
        self._module = program.module
        self._arguments = (*(state[name] for name in (*program.parameters, *program.buffers)), *(data[i] for i in program.inputs))

    def laps(self, optimizer: torch.optim.Optimizer) -> list[float]:
        laps = devices.Laps()
        laps.mark()
        loss = self._module(*self._arguments)[0]
        laps.mark()
        loss.backward()
        laps.mark()
        optimizer.step()
        laps.mark()
        return laps.read_us()


def _call_us(device: torch.device) -> tuple[float, float]:
    """What it costs to call a program and its backward, whatever they do: a stage of many layers pays it once."""
    graph = torch.fx.Graph()
    graph.output((graph.call_method("view_as", (graph.placeholder("x"),) * 2),))
    module = torch.fx.GraphModule({}, graph)
    leaf = torch.zeros(1, device=device, requires_grad=True)
    laps = devices.Laps()
    for _ in range(_CALLS):
        laps.mark()
        (output,) = module(leaf)
        laps.mark()
        torch.autograd.grad([output], [leaf], [leaf.detach()])
    times = laps.read_us()
    return statistics.median(times[::2]), statistics.median(times[1::2])


def _less(times: Sequence[float], call_us: float) -> list[float]:
    """Without the call; never less than a tenth, since some of a small layer's time is its own."""
    return [max(time_us - call_us, 0.1 * time_us) for time_us in times]


def _layered_laps(layered: LayeredStep) -> tuple[list[float], list[float]]:
    """Forward and backward of each layer, in the layers' order."""
    laps = devices.Laps()
    layered.forward(laps.mark)
    layered.backward(laps.mark)
    times = laps.read_us()[::2]  # what lies between two layers is ours, not theirs
    count = len(layered.layers)
    return times[:count], times[count:][::-1]


def _update_laps(optimizer: torch.optim.Optimizer, owned: Sequence[Sequence[torch.Tensor]]) -> list[float]:
    """The optimizer's step for one layer at a time: it skips parameters without a gradient."""
    gradients = [[parameter.grad for parameter in group] for group in owned]
    optimizer.zero_grad(set_to_none=True)
    laps = devices.Laps()
    for group, held in zip(owned, gradients, strict=True):
        for parameter, gradient in zip(group, held, strict=True):
            parameter.grad = gradient
        laps.mark()
        if group:
            optimizer.step()
        laps.mark()
        for parameter in group:
            parameter.grad = None
    return laps.read_us()[::2]


def _copy_laps(owned: Sequence[Sequence[torch.Tensor]], spare: Sequence[Sequence[torch.Tensor]]) -> list[float]:
    laps = devices.Laps()
    with torch.no_grad():
        for group, copies in zip(owned, spare, strict=True):
            laps.mark()
            for parameter, copy in zip(group, copies, strict=True):
                copy.copy_(parameter)
            laps.mark()
    return laps.read_us()[::2]


def _spread(times: Sequence[float]) -> float:
    if len(times) < 2:
        return 0.0
    first, _, third = statistics.quantiles(times, n=4, method="inclusive")
    return third - first
