"""Tensors sent in 16 bits: what crosses a cut is rounded there, forward and back, and nothing else is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from launcher.data.microbatches import MicrobatchSource
from launcher.graph.capture import capture_training
from launcher.graph.split import split
from tests.launcher.stages import run_stages
from tests.launcher.zoo import ZOO, vector_job


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_a_model_that_rounds_at_the_cuts(dtype: torch.dtype) -> None:
    """The plain model with casts where the cuts are; autograd casts the gradients at the same places."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    job = vector_job(model, loss=lambda outputs, targets: nn.functional.mse_loss(outputs, targets.to(dtype)))
    inputs, targets = MicrobatchSource(job.train_data, 4, shuffle=False).read(0)
    data = (inputs.to(dtype), targets)
    job = vector_job(nn.Sequential(_To(dtype), *model), loss=job.loss)
    captured = capture_training(job)
    names = list(captured.layers)
    cuts = [names.index("3"), names.index("4")]
    programs = split(captured, [names[:cuts[0]], names[cuts[0]:cuts[1]], names[cuts[1]:]], torch.bfloat16)
    assert {value.dtype for program in programs for value in (*program.received, *program.sent)} == {torch.bfloat16}
    state = {name: value.detach() for name, value in job.model.named_parameters()}
    results, gradients = run_stages(programs, state, (inputs, targets))

    h = data[0]
    for index, module in enumerate(model):
        h = module(h.to(torch.bfloat16).to(dtype) if index in (2, 3) else h)
    loss = nn.functional.mse_loss(h, targets.to(dtype))
    loss.backward()
    assert torch.equal(results[0], loss.detach())
    for index, module in enumerate(model):
        for name, parameter in module.named_parameters():
            assert torch.equal(gradients[f"{index + 1}.{name}"], parameter.grad), name


class _To(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype)


@pytest.mark.parametrize("name", ["skips", "gpt", "integers", "seq2seq"])
def test_relayed_tensors_are_rounded_once_and_integers_never(name: str) -> None:
    captured = capture_training(ZOO[name]())
    stages = [[layer] for layer in captured.layers]
    exact, rounded = split(captured, stages), split(captured, stages, torch.bfloat16)
    for one, other in zip(exact, rounded, strict=True):
        for value, sent in zip(one.sent, other.sent, strict=True):
            assert sent.dtype == (torch.bfloat16 if value.dtype == torch.float32 else value.dtype)
            assert (sent.name, sent.shape, sent.requires_grad) == (value.name, value.shape, value.requires_grad)
        relayed = {value.name for value in other.received} & {value.name for value in other.sent}
        placeholders = {node.name: node for node in other.module.graph.nodes if node.op == "placeholder"}
        outputs = dict(zip((value.name for value in other.sent), other.module.graph.output_node().args[0], strict=False))
        assert all(outputs[value] is placeholders[value] for value in relayed)
