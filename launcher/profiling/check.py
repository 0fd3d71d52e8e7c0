"""The captured step against the model itself, once, on real data: loss and every gradient.

A capture can be wrong without an error: a choice made in Python that changes from call to call, a
region that export loses. Training such a graph would be silently wrong, so a profile is only made of
one that computes what the model computes. Both run with the same random numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch

from launcher import devices
from launcher.data.microbatches import training_source
from launcher.graph.capture import Captured
from launcher.graph.split import split
from launcher.graph.step import Step, layout_of
from launcher.job import Job
from launcher.precision import autocasting
from planner.spec.errors import BadInput

__all__ = ["check_capture"]

LOSS_TOLERANCE = 1e-3  # relative; float32 and mixed precision differ by far less between two orders of the same operations
GRADIENT_TOLERANCE = 2e-2  # relative, of the whole tensor's norm


def check_capture(job: Job, captured: Captured, state: Mapping[str, torch.Tensor], data: Sequence[torch.Tensor], *, seed: int) -> None:
    """Compare one forward and backward; parameters and buffers are left as they were.

    Raises:
        BadInput: the loss or a gradient differs; the message has both numbers.
    """
    parameters = {name: state[name] for name in captured.parameters}
    step = Step(job, layout_of(job, training_source(job.train_data, 1, shuffle=False).first()[0]), evaluation=False)
    (program,) = split(captured, [list(captured.layers)])
    arguments = [state[name] for name in (*program.parameters, *program.buffers)] + [data[place].clone() for place in program.inputs]
    modes = {module: module.training for module in step.modules()}
    try:
        step.train()
        with _put_back(state):
            devices.seed_generators(seed)
            with autocasting(job, data[0].device):
                loss = step(*(tensor.clone() for tensor in data))[0]
            own = _loss_and_gradients(loss, parameters)
        with _put_back(state):
            devices.seed_generators(seed)
            graph = _loss_and_gradients(program.module(*arguments)[0], parameters)
    finally:
        for module, mode in modes.items():
            module.training = mode
    _compare(own, graph, parameters)


def _compare(own: tuple[float, list[torch.Tensor | None]], graph: tuple[float, list[torch.Tensor | None]],
             parameters: Mapping[str, torch.Tensor]) -> None:
    hint = ("the graph keeps one pass through the model's Python: look for choices that change from call to call, random numbers that are "
            "not torch's, or torch.no_grad() inside torch.autocast()")
    if abs(own[0] - graph[0]) > LOSS_TOLERANCE * max(abs(own[0]), 1e-6):
        raise BadInput(f"the captured graph computes the loss {graph[0]:.6g}, the model itself {own[0]:.6g} on the same data",
                       hint=hint, code="capture_differs")
    norm = sum(float(_exact(gradient).norm()) ** 2 for gradient in own[1]) ** 0.5
    for name, expected, got in zip(parameters, own[1], graph[1], strict=True):
        wanted, found = (float(_exact(gradient).norm()) for gradient in (expected, got))
        difference = float((_exact(got) - _exact(expected)).norm())
        if difference > GRADIENT_TOLERANCE * max(wanted, 1e-3 * norm):
            raise BadInput(f"the captured graph gives {name!r} a gradient of norm {found:.6g}, the model itself {wanted:.6g} "
                           f"(difference {difference:.3g})", hint=hint, code="capture_differs")


def _exact(gradient: torch.Tensor | None) -> torch.Tensor:
    """In double precision; zero for none."""
    if gradient is None:
        return torch.zeros((), dtype=torch.float64)
    return gradient.to_dense().to(torch.complex128 if gradient.is_complex() else torch.float64)


def _loss_and_gradients(loss: torch.Tensor, parameters: Mapping[str, torch.Tensor]) -> tuple[float, list[torch.Tensor | None]]:
    return float(loss.detach()), list(torch.autograd.grad(loss, list(parameters.values()), allow_unused=True))


@contextlib.contextmanager
def _put_back(state: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Restore buffers that a step updates."""
    saved = {name: tensor.detach().clone() for name, tensor in state.items() if not tensor.requires_grad}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, value in saved.items():
                state[name].copy_(value)
