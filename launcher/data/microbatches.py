"""Microbatches of a data set, addressed by their place in one continuous stream.

Microbatch m of a map-style data set belongs to epoch ``m // per_epoch``, whose order is a permutation drawn from
(seed, epoch): any worker can read any microbatch at any time. For an iterable one see :mod:`launcher.data.stream`; what
a sample is, :mod:`launcher.data.samples`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset

from launcher.data.loading import Microbatch, load
from launcher.data.samples import collate, microbatch_sizes
from launcher.data.stream import EvaluationStream, StreamSource, count_samples
from launcher.graph.randomness import data_randomness, stable_hash
from launcher.job import MapDataset
from planner.spec.errors import BadInput

__all__ = ["EvaluationSource", "MicrobatchSource", "evaluation_samples", "evaluation_source", "is_map_style", "length_of",
           "training_source"]


def is_map_style(data: Any) -> bool:
    """Whether samples are read by index, rather than by going through the data (a torch ``IterableDataset`` is not)."""
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, IterableDataset)


def length_of(data: Any) -> int | None:
    """How many samples the data say they have; None when they do not say."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def training_source(
    data: MapDataset | Iterable[Any], microbatch_size: int, shuffle: bool | None = None, seed: int = 0, processes: int = 0
) -> MicrobatchSource | StreamSource:
    """The endless stream of training microbatches of ``data``; ``shuffle`` is for map-style data.

    Raises:
        BadInput: the data have fewer samples than a microbatch.
    """
    if is_map_style(data):
        return MicrobatchSource(data, microbatch_size, shuffle is not False, seed, processes)  # type: ignore[arg-type]
    return StreamSource(data, microbatch_size, length_of(data), seed, processes)  # type: ignore[arg-type]


def evaluation_source(
    data: MapDataset | Iterable[Any], microbatch_size: int, samples: int, processes: int = 0
) -> EvaluationSource | EvaluationStream:
    """The microbatches of held-out data of :func:`evaluation_samples` samples."""
    if is_map_style(data):
        return EvaluationSource(data, microbatch_size, processes)  # type: ignore[arg-type]
    return EvaluationStream(data, microbatch_size, samples, processes)  # type: ignore[arg-type]


def evaluation_samples(data: MapDataset | Iterable[Any] | None, on_count: Callable[[int], None] = lambda samples: None) -> int:
    """How many samples held-out data have (None: 0); an iterable that does not say it is read through.

    ``on_count`` is told how many have been counted, so that who waits for data that never end sees it.

    Raises:
        BadInput: there are none.
    """
    if data is None:
        return 0
    known = length_of(data)
    samples = count_samples(data, on_count) if known is None else known  # type: ignore[arg-type]
    if samples < 1:
        raise BadInput("evaluation_data is empty: 0 samples", hint="check what the data set reads")
    return samples


class MicrobatchSource:
    """Training data as an endless stream of full microbatches."""

    def __init__(self, dataset: MapDataset, microbatch_size: int, shuffle: bool | None = True, seed: int = 0, processes: int = 0) -> None:
        self.dataset, self.microbatch_size, self.seed, self.processes = dataset, microbatch_size, seed, processes
        self.shuffle = shuffle is not False
        self.per_epoch = len(dataset) // microbatch_size
        """Full microbatches of one epoch; samples that do not fill one are left out."""
        if self.per_epoch < 1:
            raise BadInput(f"a microbatch of {microbatch_size} samples is larger than the data, which has {len(dataset)}",
                           hint="choose a smaller microbatch")
        self._order = functools.lru_cache(maxsize=2)(self._permutation)

    def __getstate__(self) -> dict[str, Any]:  # a cache does not travel to a loader process
        return {key: value for key, value in self.__dict__.items() if key != "_order"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._order = functools.lru_cache(maxsize=2)(self._permutation)

    def _permutation(self, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(stable_hash("shuffle", self.seed, epoch))
        return torch.randperm(len(self.dataset), generator=generator)

    def samples(self, microbatch: int) -> list[int]:
        """Indices of the samples that make up ``microbatch`` of the stream."""
        epoch, place = divmod(microbatch, self.per_epoch)
        first, last = place * self.microbatch_size, (place + 1) * self.microbatch_size
        if not self.shuffle:
            return list(range(first, last))
        return [int(index) for index in self._order(epoch)[first:last]]

    def first(self) -> list[Any]:
        """The first samples of the data, as many as a microbatch has."""
        return _samples(self.dataset, range(self.microbatch_size), "training", self.seed, 0)

    def read(self, microbatch: int, positions: Sequence[int] | None = None) -> Microbatch:
        """One microbatch's tensors at ``positions`` (None: all), in that order."""
        return collate(_samples(self.dataset, self.samples(microbatch), "training", self.seed, microbatch), positions)

    def iterate(self, indices: Iterable[int], positions: Sequence[int] | None = None) -> Iterator[Microbatch]:
        """The microbatches ``indices`` in order, read ahead by ``processes`` loader processes."""
        if positions is not None and not positions:
            return (() for _ in indices)  # a stage in the middle reads no data
        return load(functools.partial(self.read, positions=positions), indices, self.processes)


class EvaluationSource:
    """Held-out data, in order; the last microbatch may be smaller. ``sizes`` counts each one's samples."""

    def __init__(self, dataset: MapDataset, microbatch_size: int, processes: int = 0) -> None:
        self.dataset, self.microbatch_size, self.processes = dataset, microbatch_size, processes
        self.sizes = microbatch_sizes(len(dataset), microbatch_size)

    def samples(self, microbatch: int) -> range:
        """Indices of the samples that make up ``microbatch``."""
        first = microbatch * self.microbatch_size
        return range(first, first + self.sizes[microbatch])

    def first(self) -> list[Any]:
        """The samples of the first microbatch."""
        return _samples(self.dataset, self.samples(0), "evaluation", 0)

    def read(self, microbatch: int, positions: Sequence[int] | None = None) -> Microbatch:
        """One microbatch's tensors at ``positions`` (None: all), in that order."""
        return collate(_samples(self.dataset, self.samples(microbatch), "evaluation", microbatch), positions)

    def iterate(self, indices: Iterable[int], positions: Sequence[int] | None = None) -> Iterator[Microbatch]:
        """The microbatches ``indices`` in order."""
        if positions is not None and not positions:
            return (() for _ in indices)
        return load(functools.partial(self.read, positions=positions), indices, self.processes)


def _samples(dataset: MapDataset, indices: Iterable[int], *key: str | int) -> list[Any]:
    with data_randomness(*key):
        return [dataset[index] for index in indices]
