"""Microbatches of an iterable data set: every reader goes through the same stream and takes its own.

Nothing but the stream itself says what sample 1000 is. So each stage and replica that needs inputs reads all of
it, in order, and stacks the microbatches it runs; the others are passed by. Two replicas, microbatches of 4::

    stream      s0 s1 s2 s3   s4 s5 s6 s7   s8 s9     s0 s1 s2 s3   ...       an epoch has 10 samples
    microbatch  0             1             left out  2
    replica     0             1                       0

At its end the stream begins again, after ``set_epoch(epoch)`` where the data set has that. A microbatch never
holds samples of two epochs. torch, ``random`` and numpy are seeded by (seed, epoch, microbatch) while the data set
runs, so that all readers see one stream even where it shuffles or draws random numbers.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from launcher.data.loading import Microbatch, load_stream
from launcher.data.samples import collate, microbatch_sizes
from launcher.graph.randomness import data_randomness
from planner.spec.errors import BadInput

__all__ = ["EvaluationStream", "StreamSource", "count_samples"]


class _Stream:
    """What reads microbatches of a stream has in common: :meth:`_microbatches` gives their numbers and samples, in order."""

    processes: int

    def _microbatches(self) -> Iterator[tuple[int, list[Any]]]:
        raise NotImplementedError

    def first(self) -> list[Any]:
        """The samples of the first microbatch."""
        return next(self._microbatches())[1]

    def read(self, microbatch: int, positions: Sequence[int] | None = None) -> Microbatch:
        """One microbatch's tensors at ``positions`` (None: all); reads everything before it."""
        return next(self._chosen([microbatch], positions))

    def iterate(self, indices: Iterable[int], positions: Sequence[int] | None = None) -> Iterator[Microbatch]:
        """The microbatches ``indices``, which ascend, read ahead by a loader process if ``processes`` is not 0."""
        if positions is not None and not positions:
            return (() for _ in indices)  # a stage in the middle reads no data
        return load_stream(functools.partial(self._chosen, indices, positions), self.processes)

    def _chosen(self, indices: Iterable[int], positions: Sequence[int] | None) -> Iterator[Microbatch]:
        return _choose(self._microbatches(), indices, positions)


class StreamSource(_Stream):
    """Training data: an endless stream of full microbatches. ``per_epoch`` of them, where ``samples`` of an epoch are known."""

    def __init__(self, dataset: Iterable[Any], microbatch_size: int, samples: int | None, seed: int = 0, processes: int = 0) -> None:
        self.dataset, self.microbatch_size, self.processes = dataset, microbatch_size, processes
        self.per_epoch = None if samples is None else samples // microbatch_size
        self._key = ("training", seed)

    def _microbatches(self) -> Iterator[tuple[int, list[Any]]]:
        number = 0
        for epoch in itertools.count():
            first = number
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(epoch)
            for samples in _cut(self.dataset, self.microbatch_size, (*self._key, epoch)):
                if len(samples) == self.microbatch_size:
                    yield number, samples
                    number += 1
            if number == first:
                raise BadInput(f"train_data gave {len(samples)} samples in epoch {epoch}, a microbatch needs {self.microbatch_size}",
                               hint="check what the data set reads, and that each iter() of it begins anew")


class EvaluationStream(_Stream):
    """Held-out data of ``samples`` samples, in order; the last microbatch may be smaller."""

    def __init__(self, dataset: Iterable[Any], microbatch_size: int, samples: int, processes: int = 0) -> None:
        self.dataset, self.microbatch_size, self.samples, self.processes = dataset, microbatch_size, samples, processes
        self.sizes = microbatch_sizes(samples, microbatch_size)

    def _microbatches(self) -> Iterator[tuple[int, list[Any]]]:
        seen = 0
        parts = _cut(self.dataset, self.microbatch_size, ("evaluation",))
        for (number, size), samples in zip(enumerate(self.sizes), parts, strict=False):
            seen += len(samples)
            if len(samples) < size:
                break
            yield number, samples[:size]
        if seen < self.samples:
            raise BadInput(f"evaluation_data gave {seen} samples, and {self.samples} when they were counted",
                           hint="let each iter() of the data set give the same samples, as many as its len() says if it has one")


def count_samples(dataset: Iterable[Any], on_count: Callable[[int], None]) -> int:
    """How many samples one pass over a finite iterable gives, by reading all of them; ``on_count`` is told how many there are so far."""
    total = 0
    for samples in _cut(dataset, 256, ("evaluation",)):
        total += len(samples)
        on_count(total)
    return total


def _cut(dataset: Iterable[Any], size: int, key: tuple[str | int, ...]) -> Iterator[list[Any]]:
    """One pass in parts of ``size`` samples; the last part is smaller, perhaps empty."""
    with data_randomness(*key, "start"):
        stream = iter(dataset)
    for number in itertools.count():
        with data_randomness(*key, number):
            samples = list(itertools.islice(stream, size))
        yield samples
        if len(samples) < size:
            return


def _choose(stream: Iterator[tuple[int, list[Any]]], indices: Iterable[int], positions: Sequence[int] | None) -> Iterator[Microbatch]:
    for index in indices:
        for number, samples in stream:
            if number == index:
                yield collate(samples, positions)
                break
