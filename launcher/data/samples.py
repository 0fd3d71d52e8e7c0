"""Samples as flat tuples of tensors.

A sample (``(inputs, targets)``, nested tuples and dicts allowed) is flattened to its tensors in a fixed
order, each with a name such as ``inputs`` or ``inputs.attention_mask``. A stage reads only the
*positions* its layers use, so targets never travel through the pipeline::

    stage 0 reads positions (0,)  -> (inputs,)         of microbatch 17
    stage 3 reads positions (1,)  -> (targets,)        of microbatch 17
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from planner.spec.errors import BadInput

__all__ = ["SampleLayout", "collate", "flatten_sample", "microbatch_sizes", "sample_layout"]


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


def collate(samples: Sequence[Any], positions: Sequence[int] | None) -> tuple[torch.Tensor, ...]:
    """A microbatch: the samples' leaves at ``positions`` (None: all), stacked.

    Raises:
        BadInput: the samples differ in structure or shape, or hold something else than tensors and numbers.
    """
    flat = [flatten_sample(sample) for sample in samples]
    leaves, spec = flat[0]
    for other, other_spec in flat[1:]:
        if other_spec != spec:
            raise BadInput(f"two samples of the data differ in structure: {len(leaves)} and {len(other)} values",
                           hint="return the same tuple or dict of tensors for every sample")
    chosen = range(len(leaves)) if positions is None else positions
    return tuple(_stack([values[position] for values, _ in flat], position) for position in chosen)


def _stack(values: list[Any], position: int) -> torch.Tensor:
    try:
        stacked = default_collate(values)
    except (TypeError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadInput(f"value {position} of the samples cannot be stacked to a microbatch: {reason}",
                       hint="return tensors of equal shape for every sample") from error
    if not isinstance(stacked, torch.Tensor):
        raise BadInput(f"value {position} of a sample is a {type(values[0]).__name__}, not a tensor",
                       hint="return tensors, arrays or numbers only")
    return stacked


def microbatch_sizes(samples: int, microbatch_size: int) -> tuple[int, ...]:
    """How many samples each microbatch has; the last one may be smaller.

    >>> microbatch_sizes(10, 4)
    (4, 4, 2)
    """
    full, rest = divmod(samples, microbatch_size)
    return (microbatch_size,) * full + ((rest,) if rest else ())
