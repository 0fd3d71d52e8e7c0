"""What a model returns, as tensors by name: what ``pipedream eval --outputs`` writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from launcher.graph.program import Value
from planner.spec.errors import BadInput

__all__ = ["check_batched", "named_outputs"]


def named_outputs(output: Any) -> dict[str, torch.Tensor]:
    """The tensors of a model's result: ``output`` for one tensor, else by place or key, such as ``0`` or ``hidden.1``.

    The loss that a model computes itself, other numbers, and what is no tensor are left out.
    """
    if isinstance(output, torch.Tensor):
        return {"output": output} if output.ndim else {}
    return {name: tensor for name, tensor in _leaves(output, "") if tensor.ndim and name != "loss"}


def _leaves(value: Any, path: str) -> list[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        return [(path, value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type | Mapping):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        return []
    return [leaf for key, item in value.items() for leaf in _leaves(item, f"{path}.{key}".lstrip("."))]


def check_batched(outputs: tuple[Value, ...], size: int) -> None:
    """Check that each output of a microbatch of ``size`` samples has one row a sample.

    Raises:
        BadInput: there is no output, or one has another first dimension.
    """
    if not outputs:
        raise BadInput("the model returns no tensor but its loss, so there are no outputs to write",
                       hint="return the outputs too, or leave out --outputs")
    for output in outputs:
        if output.shape[0] != size:
            raise BadInput(f"the model's {output.name!r} has shape {output.shape} for {size} samples: its first dimension is another",
                           hint="return outputs with the samples in the first dimension, or leave out --outputs")
