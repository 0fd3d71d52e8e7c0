"""Trains a job of this folder in an ordinary PyTorch loop, in one process: what the pipeline is compared with.

The initial weights and the order of the samples are those of ``pipedream train`` with the same seed, so
the same number of steps has seen the same samples. An update follows every microbatch.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from launcher import Job
from launcher.data import MicrobatchSource

PRINT_EVERY = 50


def train(job: Job, steps: int, seed: int) -> float:
    """``steps`` updates; returns the mean training loss of the last tenth."""
    assert job.loss is not None
    optimizer = job.optimizer(job.model.parameters())
    order = MicrobatchSource(job.train_data, job.microbatch_size, job.shuffle, seed)
    batches = DataLoader(job.train_data, batch_sampler=[order.samples(step) for step in range(steps)])  # type: ignore[arg-type, var-annotated]
    job.model.train()
    losses: list[float] = []
    for inputs, targets in batches:
        loss = job.loss(job.model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if len(losses) % PRINT_EVERY == 0:
            print(f"step {len(losses)}/{steps}  loss {sum(losses[-PRINT_EVERY:]) / PRINT_EVERY:.4f}", file=sys.stderr)
    tail = losses[-max(1, steps // 10) :]
    return sum(tail) / len(tail)


@torch.no_grad()
def evaluate(job: Job) -> dict[str, float]:
    """Means over the evaluation data: the loss and the job's metrics."""
    assert job.loss is not None and job.evaluation_data is not None
    functions: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"loss": job.loss, **job.metrics}
    sums = dict.fromkeys(functions, 0.0)
    job.model.eval()
    for inputs, targets in DataLoader(job.evaluation_data, batch_size=job.microbatch_size):  # type: ignore[arg-type, var-annotated]
        outputs = job.model(inputs)
        for name, function in functions.items():
            sums[name] += function(outputs, targets).item() * len(targets)
    return {name: total / len(job.evaluation_data) for name, total in sums.items()}


def main(factory: Callable[..., Job]) -> None:
    """The command line of an example run by itself."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--plain", action="store_true", help="train in a plain loop (the only thing to do here)")
    parser.add_argument("--steps", type=int, default=300, help="updates (default 300)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and order (default 0)")
    options = parser.parse_args()
    if not options.plain:
        parser.error("nothing to do without --plain; to train through the pipeline: pipedream profile " + sys.argv[0])
    torch.manual_seed(options.seed)
    job = factory()
    parameters = sum(parameter.numel() for parameter in job.model.parameters())
    print(f"{parameters} parameters, {len(job.train_data)} training samples", file=sys.stderr)
    start_s = time.perf_counter()
    train_loss = train(job, options.steps, options.seed)
    duration_s = time.perf_counter() - start_s
    result = {"updates": options.steps, "samples": options.steps * job.microbatch_size, "final_train_loss": train_loss,
              "samples_per_s": options.steps * job.microbatch_size / duration_s, "evaluation": evaluate(job)}
    print(json.dumps(result, indent=1))
