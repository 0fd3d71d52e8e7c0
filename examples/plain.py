"""Trains a job of this folder in an ordinary PyTorch loop, in one process: what the pipeline is compared with.

The initial weights and the order of the samples are those of ``pipedream train`` with the same seed, so
the same number of steps has seen the same samples. For a plan whose batch is A microbatches, give
``--batch-microbatches A``.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from launcher import Job
from launcher.data.microbatches import MicrobatchSource
from launcher.optimizer import make_optimizer

PRINT_EVERY = 50


def train(job: Job, steps: int, batch_microbatches: int, seed: int) -> float:
    """``steps`` updates; returns the mean training loss of the last tenth of them."""
    assert job.loss is not None
    optimizer = make_optimizer(job.optimizer, dict(job.model.named_parameters()))
    scheduler = job.scheduler(optimizer) if job.scheduler is not None else None
    order = MicrobatchSource(job.train_data, job.microbatch_size, job.shuffle, seed)
    indices = [order.samples(microbatch) for microbatch in range(steps * batch_microbatches)]
    microbatches = iter(DataLoader(job.train_data, batch_sampler=indices))  # type: ignore[arg-type, var-annotated]
    job.model.train()
    losses: list[float] = []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        total = 0.0
        for inputs, targets in itertools.islice(microbatches, batch_microbatches):
            loss = job.loss(job.model(inputs), targets) / batch_microbatches
            loss.backward()
            total += loss.item()
        if job.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(job.model.parameters(), job.clip_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(total)
        if step % PRINT_EVERY == 0:
            print(f"step {step}/{steps}  loss {sum(losses[-PRINT_EVERY:]) / PRINT_EVERY:.4f}", file=sys.stderr)
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
    parser.add_argument("--batch-microbatches", type=int, default=1, metavar="A", help="microbatches between two updates (default 1)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="argument of the job, a number; may be repeated")
    options = parser.parse_args()
    if not options.plain:
        parser.error("nothing to do without --plain; to train through the pipeline: pipedream profile " + sys.argv[0])
    torch.manual_seed(options.seed)
    job = factory(**{name: ast.literal_eval(value) for name, value in (pair.split("=", 1) for pair in options.set)})
    parameters = sum(parameter.numel() for parameter in job.model.parameters())
    print(f"{parameters} parameters, {len(job.train_data)} training samples", file=sys.stderr)
    start_s = time.perf_counter()
    train_loss = train(job, options.steps, options.batch_microbatches, options.seed)
    duration_s = time.perf_counter() - start_s
    samples = options.steps * options.batch_microbatches * job.microbatch_size
    result = {"updates": options.steps, "samples": samples, "final_train_loss": train_loss,
              "samples_per_s": samples / duration_s, "evaluation": evaluate(job)}
    print(json.dumps(result, indent=1))
