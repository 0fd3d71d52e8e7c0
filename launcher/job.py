"""The job: what a user writes. Ordinary torch objects; no base class to inherit.

A job file has a factory that returns a :class:`Job`::

    def job(width: int = 256) -> Job:
        return Job(
            model=Net(width),
            loss=nn.functional.cross_entropy,
            train_data=dataset,                     # (inputs, targets)
            evaluation_data=held_out,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4),
            microbatch_size=8,
        )
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from planner.spec.errors import BadInput

if TYPE_CHECKING:  # so that ``from launcher import Job`` costs nothing before torch is needed
    import torch

__all__ = ["Job", "LossScaling", "MapDataset"]


class MapDataset(Protocol):
    """A map-style dataset: ``len()`` and integer indexing, as ``torch.utils.data.Dataset``.

    A sample is ``(inputs, targets)``, where each may itself be a tuple or dict of tensors, or one
    dict (a Hugging Face batch). Samples are stacked with ``torch.utils.data.default_collate``. A tuple
    of inputs is passed to the model as positional and a dict as keyword arguments if its ``forward``
    takes them so, and whole if not.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class LossScaling:
    """How the loss is scaled, as in ``torch.amp.GradScaler``; the scale is counted in updates.

    It grows by ``growth`` after ``growth_interval`` updates without an infinite gradient, and shrinks by
    ``backoff`` after one with, which changes no weights.
    """

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        for field_name, value, least, most in (("initial", self.initial, 0.0, 2.0**128), ("growth", self.growth, 1.0, math.inf),
                                               ("backoff", self.backoff, 0.0, 1.0), ("growth_interval", self.growth_interval, 0, math.inf)):
            if not least < value < most:
                raise BadInput(f"LossScaling({field_name}={value}) is not between {least:g} and {most:g}",
                               hint="leave it out for torch's own value")


@dataclass(frozen=True)
class Job:
    """A model and how it is trained.

    ``loss(outputs, targets)`` must return the mean over the microbatch. Without ``loss`` a sample is
    what the model takes, and the model returns its loss: a scalar, or an object with ``.loss``.
    Data are map-style, or an iterable (a torch ``IterableDataset``, or any object whose every ``iter()`` gives the samples
    from the start), which is read in its own order: see :mod:`launcher.data.stream`. ``shuffle`` None draws a new order
    for each epoch of map-style data; what an iterable does is its own matter, and True is refused for one.
    ``loader_processes`` read ahead for each worker that needs data; one of them, if there are any, reads an iterable.
    ``optimizer`` is called once per worker with that stage's parameters, or, if its argument is called
    ``named_parameters``, with pairs of name and parameter. ``metrics`` are computed in
    evaluation, ``metric(outputs, targets)`` being a mean over the microbatch too.
    ``scheduler`` makes a learning-rate schedule for such an optimizer; it is stepped after every update.
    ``clip_norm`` bounds the norm of the whole model's gradient at each update, over all stages.
    ``autocast`` runs model, loss and metrics in ``torch.autocast`` of that type, ``"bf16"`` or ``"fp16"``; weights stay as they are.
    With ``"fp16"`` the loss is scaled, by ``loss_scaling`` or as torch does by default; another job may ask for it as well.
    ``transfer_dtype``, ``"bf16"`` for example, sends floating-point tensors and their gradients between stages in that type.
    """

    model: torch.nn.Module
    train_data: MapDataset | Iterable[Any]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    microbatch_size: int
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    evaluation_data: MapDataset | Iterable[Any] | None = None
    metrics: Mapping[str, Callable[[Any, Any], torch.Tensor]] = field(default_factory=dict)
    shuffle: bool | None = None
    loader_processes: int = 0
    scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None
    clip_norm: float | None = None
    autocast: torch.dtype | str | None = None
    loss_scaling: LossScaling | None = None
    transfer_dtype: torch.dtype | str | None = None
