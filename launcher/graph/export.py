"""``torch.export`` of a step, quietly, and refusing what a graph of the forward would silently lose.

The graph's gradients are derived from its operations. A backward that the model defines itself (an
autograd function, a hook on a gradient) is not among them, so it is an error instead of a wrong number.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn
from unittest import mock

import torch

from launcher.explain import LostGradient, explain
from launcher.graph.step import Step
from planner.spec.errors import BadInput

__all__ = ["export"]

_REGISTERED = "GeneratedBackwardFor"  # the backward of a torch.library operation, which stays in the graph as one operation


def export(step: Step, tensors: Sequence[torch.Tensor], around: AbstractContextManager[object], *, training: bool,
           ) -> torch.export.ExportedProgram:
    """``step`` as a flat graph of ATen operations, in training or evaluation mode; ``step`` stays as it is.

    ``around`` is the job's autocast. Were it inside of the step, export would lose every ``torch.no_grad()`` within it.

    Raises:
        BadInput: it cannot be captured; the message has the user's own line and the reason.
    """
    _refuse_parameter_hooks(step.model)
    modes = {module: module.training for module in step.modules()}
    step.train(training)
    try:
        guard = _gradients_guarded() if training else contextlib.nullcontext()
        with explain("the model", step, tensors), _quiet(), guard, torch.random.fork_rng(devices=[]), torch.set_grad_enabled(
                training), around:
            return torch.export.export(step, tuple(tensors), strict=False)
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Export prints graphs and warnings, the model perhaps what it likes: none of it is a result."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _gradients_guarded() -> Iterator[None]:
    original = torch.autograd.Function.__dict__["apply"].__func__

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if cls.__name__.startswith(_REGISTERED):
            return original(cls, *args, **kwargs)
        raise LostGradient(f"it calls the autograd function {cls.__name__}, whose own backward would be lost",
                           "write it with ordinary operations (`x + (f(x) - x).detach()` passes a gradient straight through), "
                           "or as a torch.library.custom_op with register_autograd; for torch.utils.checkpoint use use_reentrant=False")

    def register_hook(self: torch.Tensor, hook: Any) -> NoReturn:
        raise LostGradient("it registers a hook on a gradient, which would be lost", "do it with operations of the forward instead")

    with mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)), mock.patch.object(
            torch.Tensor, "register_hook", register_hook):
        yield


def _refuse_parameter_hooks(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_backward_hooks", None) or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise BadInput(f"the parameter {name!r} has a hook on its gradient, which would be lost",
                           hint="do it in the optimizer instead, or with operations of the forward", code="cannot_capture")
