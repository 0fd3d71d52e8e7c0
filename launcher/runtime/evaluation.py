"""Evaluation between two updates: forward only, while the microbatches in training stay in flight.

After the update of an evaluated batch each worker runs its evaluation microbatches with the newest
weights and with buffers averaged over the stage's replicas. Training's own buffers, versions and
messages are not touched, so a run with evaluation trains exactly like one without.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from launcher.graph.program import StageProgram
from launcher.runtime.channel import Reducer
from launcher.runtime.replicas import averaged_buffers, sum_over_replicas
from launcher.runtime.source import Source
from launcher.runtime.stage import owned, storages

__all__ = ["Evaluation"]


class Evaluation:
    """One worker's share of every evaluation.

    ``programs`` has one program for each size of microbatch, ``sizes`` the samples of each
    evaluation microbatch, ``indices`` those that this replica runs. Values are means over samples.
    """

    def __init__(
        self, programs: Mapping[int, StageProgram], sizes: Sequence[int], indices: Sequence[int], source: Source, reducer: Reducer,
        parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor], trained_buffers: Sequence[str], device: torch.device,
    ) -> None:
        self._programs, self._sizes, self._indices = programs, tuple(sizes), tuple(indices)
        self._source, self._reducer, self._device = source, reducer, device
        self._parameters, self._buffers, self._trained_buffers = dict(parameters), dict(buffers), tuple(trained_buffers)
        self._remaining = 0
        self._current: dict[str, torch.Tensor] = {}
        self._changing: frozenset[int] = frozenset()
        self._inputs: Iterator[tuple[torch.Tensor, ...]] = iter(())
        self._sums: dict[str, float] = {}

    def begin(self) -> None:
        """Start one evaluation; every replica of the stage must, for they average their buffers."""
        averages = averaged_buffers([self._buffers[name] for name in self._trained_buffers], self._reducer)
        self._current = self._buffers | dict(zip(self._trained_buffers, averages, strict=True))
        positions = next(iter(self._programs.values())).inputs
        self._inputs = self._source.iterate(self._indices, positions)
        self._remaining = len(self._indices)
        self._changing = storages(self._parameters.values())
        self._sums = {name: 0.0 for program in self._programs.values() for name in program.results}

    @property
    def finished(self) -> bool:
        """Whether this replica has run all its microbatches of the evaluation begun."""
        return self._remaining == 0

    def next_inputs(self) -> tuple[torch.Tensor, ...]:
        """The data tensors of this replica's next microbatch."""
        return tuple(tensor.to(self._device) for tensor in next(self._inputs))

    def run(self, index: int, received: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Forward of evaluation microbatch ``index``; at the last stage its values are summed up here."""
        size = self._sizes[index]
        program = self._programs[size]
        with torch.no_grad():
            outputs: tuple[torch.Tensor, ...] = program.module(
                *(self._parameters[name] for name in program.parameters), *(self._current[name] for name in program.buffers),
                *received, *inputs,
            )
        self._remaining -= 1
        for name, value in zip(program.results, outputs if program.results else (), strict=True):
            self._sums[name] += float(value) * size
        return tuple(owned(output, self._changing) for output in outputs)

    def finish(self) -> dict[str, float]:
        """Sample-weighted means over all replicas' microbatches; empty before the last stage."""
        self._current = {}
        if not self._sums:
            return {}
        totals = sum_over_replicas(list(self._sums.values()), self._reducer, self._device)
        return {name: total / sum(self._sizes) for name, total in zip(self._sums, totals, strict=True)}
