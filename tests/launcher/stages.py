"""A plain single-process runner of stage programs: every stage on detached tensors, backward stage by stage."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from launcher.graph.program import StageProgram


def run_stages(
    programs: Sequence[StageProgram],
    state: dict[str, torch.Tensor],
    data: Sequence[torch.Tensor],
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Results of the last stage, and the gradient of each parameter (summed over stages)."""
    gradients: dict[str, torch.Tensor] = {}
    passed: tuple[torch.Tensor, ...] = ()
    kept = []
    for program in programs:
        weights = [state[name].detach().clone().requires_grad_() for name in program.parameters]
        assert len(passed) == len(program.received)
        received = []
        for tensor, value in zip(passed, program.received, strict=True):
            assert tuple(tensor.shape) == value.shape and tensor.dtype == value.dtype, value
            received.append(tensor.detach().contiguous().clone().requires_grad_(value.requires_grad))
        inputs = [data[i].clone() for i in program.inputs]  # a stage reads its own copy
        outputs = program.module(*weights, *(state[name] for name in program.buffers), *received, *inputs)
        kept.append((program, weights, received, outputs))
        passed = outputs
    incoming: list[torch.Tensor | None] = [torch.ones(())] + [None] * (len(passed) - 1)
    incoming[0] = torch.ones_like(passed[0])
    for program, weights, received, outputs in reversed(kept):
        pairs = [(o, g) for o, g in zip(outputs, incoming, strict=True) if g is not None and o.requires_grad]
        if pairs:
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        for name, weight in zip(program.parameters, weights, strict=True):
            if weight.grad is not None:
                gradients[name] = gradients[name] + weight.grad if name in gradients else weight.grad
        incoming = [
            None if not value.requires_grad else torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for leaf, value in zip(received, program.received, strict=True)
        ]
    return list(passed), gradients
