"""Mixed precision as a job asks for it: the types it may name, and autocast around a plain run of its step."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch

from launcher.job import Job, LossScaling
from planner.spec.errors import BadInput

__all__ = ["autocasting", "half_type", "scaling_of"]

_NAMES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16, "half": torch.float16}


def half_type(value: torch.dtype | str | None, field: str) -> torch.dtype | None:
    """The 16-bit type that ``Job(field=value)`` names, or None for none.

    Raises:
        BadInput: it names no such type.
    """
    if value is None:
        return None
    found = _NAMES.get(value) if isinstance(value, str) else value if value in _NAMES.values() else None
    if found is None:
        raise BadInput(f"{field} is {value!r}, which is no 16-bit floating-point type",
                       hint=f'give Job({field}=...) "bf16", "fp16" or None')
    return found


def autocasting(job: Job, device: torch.device) -> AbstractContextManager[object]:
    """``torch.autocast`` as the job asks for it, around a forward on ``device``.

    Without torch's cache of cast weights: it would cast a weight that several operations use once, and so sum
    its gradients in 16 bits, where a pipeline may have these operations on different devices.
    """
    dtype = half_type(job.autocast, "autocast")
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype, cache_enabled=False)


def scaling_of(job: Job) -> LossScaling | None:
    """How the job's loss is scaled, or None for not at all: what small gradients need only in 16 bits with a short exponent."""
    if job.loss_scaling is None and half_type(job.autocast, "autocast") == torch.float16:
        return LossScaling()
    return job.loss_scaling
