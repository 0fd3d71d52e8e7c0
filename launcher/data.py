"""Microbatches of a data set as flat tuples of tensors, addressed by their place in one continuous stream.

A sample (``(inputs, targets)``, nested tuples and dicts allowed) is flattened to its tensors in a fixed
order, each with a name such as ``inputs`` or ``inputs.attention_mask``. A stage reads only the
*positions* its layers use, so targets never travel through the pipeline::

    stage 0 reads positions (0,)  -> (inputs,)         of microbatch 17
    stage 3 reads positions (1,)  -> (targets,)        of microbatch 17

Microbatch m of the stream belongs to epoch ``m // per_epoch``, whose order is a permutation drawn from
(seed, epoch): any worker can read any microbatch at any time.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, default_collate

from launcher.graph.randomness import data_randomness, stable_hash
from launcher.job import MapDataset
from planner.spec.errors import BadInput

__all__ = ["EvaluationSource", "MicrobatchSource", "SampleLayout", "flatten_sample", "sample_layout"]


@dataclass(frozen=True)
class SampleLayout:
    """The fixed order of a sample's tensors: their ``names``, and how to put them together again."""

    names: tuple[str, ...]
    spec: pytree.TreeSpec

    def unflatten(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The sample's own nesting: lists for tuples, dicts for mappings."""
        return pytree.tree_unflatten(list(tensors), self.spec)


def flatten_sample(sample: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """A sample's leaves in order, and its nesting."""
    return pytree.tree_flatten(_plain(sample))


def sample_layout(sample: Any, *, pair: bool) -> SampleLayout:
    """The layout of ``sample``; ``pair`` names its two parts ``inputs`` and ``targets``."""
    paths, spec = pytree.tree_flatten_with_path(_plain(sample))
    names = []
    for path, _ in paths:
        keys = [str(getattr(key, "key", getattr(key, "idx", key))) for key in path]
        if pair:
            keys[0] = ("inputs", "targets")[int(keys[0])]
        names.append(".".join(keys) or "input")
    return SampleLayout(tuple(names), spec)


def _plain(sample: Any) -> Any:
    """Tuples as lists and mappings as dicts with sorted keys, so that the order never depends on the sample."""
    if isinstance(sample, Mapping):
        return {key: _plain(sample[key]) for key in sorted(sample, key=str)}
    if isinstance(sample, tuple | list):
        return [_plain(item) for item in sample]
    return sample


def _collate(samples: Sequence[Any], positions: Sequence[int] | None) -> tuple[torch.Tensor, ...]:
    """Stack the samples' leaves at ``positions`` (None: all)."""
    flat = [flatten_sample(sample) for sample in samples]
    leaves, spec = flat[0]
    for other, other_spec in flat[1:]:
        if other_spec != spec:
            raise BadInput(f"two samples of the data differ in structure: {len(leaves)} and {len(other)} values",
                           hint="return the same tuple or dict of tensors for every index")
    chosen = range(len(leaves)) if positions is None else positions
    return tuple(_stack([values[position] for values, _ in flat], position) for position in chosen)


def _stack(values: list[Any], position: int) -> torch.Tensor:
    try:
        stacked = default_collate(values)
    except (TypeError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadInput(f"value {position} of the samples cannot be stacked to a microbatch: {reason}",
                       hint="return tensors of equal shape for every index") from error
    if not isinstance(stacked, torch.Tensor):
        raise BadInput(f"value {position} of a sample is a {type(values[0]).__name__}, not a tensor",
                       hint="return tensors, arrays or numbers only")
    return stacked


class _Microbatches(Dataset[tuple[torch.Tensor, ...]]):
    """The data set as torch's DataLoader sees it: an index is a whole microbatch."""

    def __init__(self, source: MicrobatchSource | EvaluationSource, positions: Sequence[int] | None) -> None:
        self.source, self.positions = source, positions

    def __getitem__(self, microbatch: int) -> tuple[torch.Tensor, ...]:
        if self.positions is not None and not self.positions:
            return ()  # a stage in the middle reads no data
        with data_randomness(*self.source.key, microbatch):
            samples = [self.source.dataset[index] for index in self.source.samples(microbatch)]
        return _collate(samples, self.positions)


def _load(source: MicrobatchSource | EvaluationSource, indices: Iterable[int], positions: Sequence[int] | None,
          processes: int) -> Iterator[tuple[torch.Tensor, ...]]:
    loader = DataLoader(_Microbatches(source, positions), batch_size=None, sampler=indices,
                        num_workers=processes if positions is None or positions else 0, collate_fn=_unchanged,
                        worker_init_fn=functools.partial(_follow, os.getpid()),
                        generator=torch.Generator())  # one of its own, so that the process's is left alone
    return iter(loader)


def _follow(worker: int, index: int) -> None:
    """In a loader process: let the kernel end it with its worker, however that ends.

    torch itself looks every 5 seconds whether its parent is another one than at first, which is too late to see one that was gone by then.
    """
    if platform.system() == "Linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != worker:
        os._exit(1)


def _unchanged(value: Any) -> Any:
    return value


class MicrobatchSource:
    """Training data as an endless stream of full microbatches."""

    def __init__(self, dataset: MapDataset, microbatch_size: int, shuffle: bool = True, seed: int = 0, processes: int = 0) -> None:
        self.dataset, self.microbatch_size, self.shuffle, self.seed, self.processes = dataset, microbatch_size, shuffle, seed, processes
        self.key = ("training", seed)
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

    def read(self, microbatch: int, positions: Sequence[int] | None = None) -> tuple[torch.Tensor, ...]:
        """One microbatch's tensors at ``positions`` (None: all), in that order."""
        return _Microbatches(self, positions)[microbatch]

    def iterate(self, indices: Iterable[int], positions: Sequence[int] | None = None) -> Iterator[tuple[torch.Tensor, ...]]:
        """The microbatches ``indices`` in order, read ahead by ``processes`` loader processes."""
        return _load(self, indices, positions, self.processes)


class EvaluationSource:
    """Held-out data, in order; the last microbatch may be smaller. ``sizes`` counts each one's samples."""

    def __init__(self, dataset: MapDataset, microbatch_size: int, processes: int = 0) -> None:
        self.dataset, self.microbatch_size, self.processes = dataset, microbatch_size, processes
        self.key = ("evaluation",)
        full, rest = divmod(len(dataset), microbatch_size)
        self.sizes: tuple[int, ...] = (microbatch_size,) * full + ((rest,) if rest else ())

    def samples(self, microbatch: int) -> range:
        """Indices of the samples that make up ``microbatch``."""
        first = microbatch * self.microbatch_size
        return range(first, first + self.sizes[microbatch])

    def read(self, microbatch: int, positions: Sequence[int] | None = None) -> tuple[torch.Tensor, ...]:
        """One microbatch's tensors at ``positions`` (None: all), in that order."""
        return _Microbatches(self, positions)[microbatch]

    def iterate(self, indices: Iterable[int], positions: Sequence[int] | None = None) -> Iterator[tuple[torch.Tensor, ...]]:
        """The microbatches ``indices`` in order."""
        return _load(self, indices, positions, self.processes)
