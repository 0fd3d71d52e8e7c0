"""Every weight policy, simulated on the plain uncut model: the oracle that the runtime is held against.

Nothing of the runtime, the schedule generator, the policies or the stage programs is used. Which version a
stage uses for a microbatch is a closed form: replica i of stage k (of r_k) runs microbatches i, i + r_k, ...
It runs the forward of its j-th microbatch after the backward of its (j - d)-th, where d is how many it
admits, so ``j - d + 1`` backwards are done by then, and an update follows each ``A / r_k`` of them::

    newest_k(m) = max(0, m // r_k - d_k + 1) // (A / r_k)

``stash`` uses that, ``vertical`` that of stage 0, ``2bw`` ``max(m // A - 1, 0)``, ``flush`` ``m // A``. With
A = 1 and no replicas, d_k = n - k: newest_k(m) = max(0, m - (n - 1 - k)), which is the rule
``W_k(t+1) = W_k(t) - lr * g(W_0(t-n+1), ..., W_{n-1}(t))``. ``latest`` runs its forward with the newest too;
its backward of microbatch m finds all earlier batches' updates done and no later one: version ``m // A``,
written over the weights that the forward left in autograd's graph.

A tied parameter is one master with several names: each stage that uses one of them takes its own version of that
master, and the gradients of all stages are summed before the master's one step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

OptimizerFactory = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


@dataclass(frozen=True)
class Setup:
    """``stages`` lists each stage's parameter names; ``in_flight`` what each stage's replicas admit.

    ``tied`` maps further names of a parameter to its first.
    """

    stages: tuple[tuple[str, ...], ...]
    replicas: tuple[int, ...]
    in_flight: tuple[int, ...]
    batch_microbatches: int
    policy: str = "stash"
    tied: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Scaling:
    """A loss scale as ``torch.amp.GradScaler``'s; ``seen`` gets each batch's scale, and whether its gradient was finite."""

    initial: float
    growth: float
    backoff: float
    interval: int
    seen: list[tuple[float, bool]] = field(default_factory=list)


def version(setup: Setup, stage: int, microbatch: int) -> int:
    """How many updates the weights of ``stage`` have had when the forward of ``microbatch`` uses them."""
    batch = microbatch // setup.batch_microbatches
    if setup.policy == "2bw":
        return max(batch - 1, 0)
    if setup.policy == "flush":
        return batch
    stage = 0 if setup.policy == "vertical" else stage
    r, depth = setup.replicas[stage], setup.in_flight[stage]
    return max(0, microbatch // r - depth + 1) // (setup.batch_microbatches // r)


def simulate(
    parameters: Mapping[str, torch.Tensor], loss: Callable[[Mapping[str, torch.Tensor], int], torch.Tensor], setup: Setup,
    optimizer: OptimizerFactory, updates: int, scheduler: SchedulerFactory | None = None, clip_norm: float | None = None,
    scaling: Scaling | None = None,
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Parameters after ``updates`` updates, and each batch's mean loss. ``parameters`` are by their first names.

    ``loss(parameters, m)`` is the loss of the whole model on microbatch m with these parameters.
    Gradients are summed replica by replica as the pipeline does, so that results can agree to the last bit.
    """
    masters = {name: nn.Parameter(value.detach().clone()) for name, value in parameters.items()}
    owned = [[name for name in names if name in masters] for names in setup.stages]
    optimizers = [optimizer([masters[name] for name in names]) if names else None for names in owned]
    schedulers = [scheduler(one) for one in optimizers if one is not None] if scheduler is not None else []
    history = [{name: value.detach().clone() for name, value in masters.items()}]
    losses = []
    scale, finite = (1.0 if scaling is None else scaling.initial), 0
    for batch in range(updates):
        first = batch * setup.batch_microbatches
        sums: dict[tuple[str, int, int], torch.Tensor] = {}  # by name, stage and replica
        batch_loss = 0.0
        for microbatch in range(first, first + setup.batch_microbatches):
            mixed, leaves = {}, {}
            for stage, names in enumerate(setup.stages):
                weights = history[version(setup, stage, microbatch)]
                for name in names:
                    first_name = setup.tied.get(name, name)
                    if (first_name, stage) not in leaves:
                        leaves[first_name, stage] = weights[first_name].clone().requires_grad_()
                    mixed[name] = leaves[first_name, stage]
            value = loss(mixed, microbatch)
            if setup.policy == "latest":
                for (name, _), weight in leaves.items():
                    weight.data.copy_(history[batch][name])
            seed = torch.full_like(value, scale / setup.batch_microbatches)
            gradients = torch.autograd.grad(value, list(leaves.values()), grad_outputs=seed, allow_unused=True)
            batch_loss += value.item()
            for (name, stage), gradient in zip(leaves, gradients, strict=True):
                if gradient is not None:
                    key = (name, stage, microbatch % setup.replicas[stage])
                    sums[key] = gradient if key not in sums else sums[key] + gradient
        for name, master in masters.items():
            parts = [sums[key] for key in sorted(sums) if key[0] == name]
            master.grad = sum(parts[1:], start=parts[0]) if parts else None
        gradients_found = [master.grad for master in masters.values() if master.grad is not None]
        steps = all(bool(gradient.isfinite().all()) for gradient in gradients_found) or scaling is None
        for gradient in gradients_found if scaling is not None else ():
            gradient /= scale
        if clip_norm is not None and steps:
            nn.utils.clip_grad_norm_(masters.values(), clip_norm)
        for step in (*(one for one in optimizers if one is not None and steps), *schedulers):
            step.step()
        if scaling is not None:
            scaling.seen.append((scale, steps))
            finite = finite + 1 if steps else 0
            grows = finite == scaling.interval and scale * scaling.growth < 2.0**128  # never to infinity
            scale *= scaling.backoff if not steps else scaling.growth if grows else 1.0
            finite %= scaling.interval
        history.append({name: value.detach().clone() for name, value in masters.items()})
        losses.append(batch_loss / setup.batch_microbatches)
    return {name: value.detach() for name, value in masters.items()}, losses
