"""One process of torch's data parallelism on the sleeping model; RANK and MASTER_ADDR are in the environment.

    python -m benchmarks.pair.parallel LAYERS FORWARD_MS BACKWARD_MS WEIGHTS_BYTES STEPS

prints, with a comma between, the median milliseconds of an all-reduce of all gradients alone, and of a step.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.napping import WIDTH, Napper, loss


def median_ms(step: Callable[[], object], steps: int) -> float:
    """Of ``steps`` steps after the first two."""
    laps = []
    for _ in range(steps):
        dist.barrier()
        start = time.perf_counter()
        step()
        laps.append((time.perf_counter() - start) * 1000)
    return statistics.median(laps[2:])


def main() -> None:
    """Time both."""
    layers, steps, weights_bytes = int(sys.argv[1]), int(sys.argv[5]), int(sys.argv[4])
    forward_ms, backward_ms = map(float, sys.argv[2:4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.Sequential(*(Napper(forward_ms, backward_ms, weights_bytes // layers) for _ in range(layers)))
    flat = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
    alone_ms = median_ms(lambda: dist.all_reduce(flat), 8)
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-3)
    inputs = torch.randn(4, WIDTH)

    def step() -> None:
        loss(parallel(inputs), torch.zeros_like(inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()

    print(f"{alone_ms},{median_ms(step, steps)}", flush=True)
    os._exit(0)  # gloo may wait for a peer that has left


if __name__ == "__main__":
    main()
