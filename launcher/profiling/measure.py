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
from launcher.graph.capture import Captured
from launcher.graph.randomness import keyed
from launcher.graph.split import split
from launcher.job import Job
from launcher.optimizer import make_optimizer
from launcher.profiling.layered import LayeredStep
from planner.spec.profile import Measured

__all__ = ["LayerTimes", "Times", "measure_times"]

WARM_UP = 2


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
    optimizer = make_optimizer(job.optimizer, parameters)  # type: ignore[arg-type]
    whole = _WholeStep(captured, state, data)
    owned = [[parameters[name] for name in layer.owned if name in parameters] for layer in layered.layers]
    copies = {name: torch.empty_like(parameter) for name, parameter in parameters.items()}
    spare = [[copies[name] for name in layer.owned if name in parameters] for layer in layered.layers]
    layer_laps: list[tuple[list[float], list[float]]] = []
    update_laps: list[list[float]] = []
    copy_laps: list[list[float]] = []
    whole_laps: list[list[float]] = []
    total = WARM_UP + repeats
    call = _Call(next(iter(parameters.values())).device)
    gc.collect()
    for repeat in range(total):
        turns = [lambda: layer_laps.append(_layered_laps(layered, call)), lambda: whole_laps.append(whole.laps(optimizer))]
        for turn in turns if repeat % 2 == 0 else turns[::-1]:
            with keyed(seed, repeat):
                turn()
            if turn is turns[0]:
                update_laps.append(_update_laps(optimizer, owned))
                copy_laps.append(_copy_laps(owned, spare))
            optimizer.zero_grad(set_to_none=True)
        on_repeat(repeat + 1, total)
    steps = [statistics.median(column) for column in zip(*whole_laps[WARM_UP:], strict=True)]
    forward = _typical([forward for forward, _ in layer_laps[WARM_UP:]])
    backward = _typical([backward for _, backward in layer_laps[WARM_UP:]])
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


class _Call:
    """A program that does nothing, and its backward.

    Calling a program costs something whatever it does, and a stage of many layers pays it once. It costs
    more after a large layer, which leaves the caches full of other things, than in a loop of its own: so
    it is measured where it happens, after every layer.
    """

    def __init__(self, device: torch.device) -> None:
        graph = torch.fx.Graph()
        graph.output((graph.call_method("view_as", (graph.placeholder("x"),) * 2),))
        self._module = torch.fx.GraphModule({}, graph)
        self._leaf = torch.zeros(1, device=device, requires_grad=True)
        self._output = self._gradient = self._leaf.detach()

    def forward(self) -> None:
        (self._output,) = self._module(self._leaf)

    def backward(self) -> None:
        torch.autograd.grad([self._output], [self._leaf], [self._gradient])


def _layered_laps(layered: LayeredStep, call: _Call) -> tuple[list[float], list[float]]:
    """Forward and backward of each layer, in the layers' order, without what a call costs by itself.

    ::

        forward    | layer | call | ... | layer | call |                          | is a mark
        backward   | layer | forward of a call | its backward | ... | layer | ...
    """
    laps = devices.Laps()

    def after_forward() -> None:
        call.forward()
        laps.mark()

    def after_backward() -> None:
        call.forward()
        laps.mark()
        call.backward()
        laps.mark()

    layered.forward(laps.mark, after_forward)
    layered.backward(laps.mark, after_backward)
    times = laps.read_us()
    count = 3 * len(layered.layers)
    forward, backward = times[:count - 1], times[count:]
    return _less(forward[::3], forward[1::3]), _less(backward[::4], backward[2::4])[::-1]


def _less(times: Sequence[float], calls: Sequence[float]) -> list[float]:
    """Without the call; never less than a tenth, since some of a small layer's time is its own."""
    call_us = statistics.median(calls)
    return [max(time_us - call_us, 0.1 * time_us) for time_us in times]


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
