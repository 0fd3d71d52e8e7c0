"""The schedules of ``torch.distributed.pipelining`` on the sleeping model: one process a stage, gloo, one result.

    python benchmarks/torch_schedules.py SCHEDULE STAGES MICROBATCHES STEPS FORWARD_MS BACKWARD_MS

prints the milliseconds per microbatch, the median over the steps after the first two.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent))

SCHEDULES = ("1F1B", "GPipe", "interleaved 1F1B", "zero-bubble V")
SIZE = 4  # samples in a microbatch


def stages_of(schedule: str, rank: int, world: int) -> list[int]:
    """Which stages a rank has: schedules with two stages a rank go there and back (V), or round again."""
    if schedule == "zero-bubble V":
        return [rank, 2 * world - 1 - rank]
    return [rank, rank + world] if schedule == "interleaved 1F1B" else [rank]


def schedule_of(name: str, stages: list[Any], microbatches: int, loss: Callable[..., Any]) -> Any:
    """The schedule over a rank's own stages."""
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
    from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

    kinds: dict[str, Any] = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B, "interleaved 1F1B": ScheduleInterleaved1F1B,
                             "zero-bubble V": ScheduleZBVZeroBubble}
    return kinds[name](stages if len(stages) > 1 else stages[0], microbatches, loss_fn=loss)


def run(rank: int, schedule: str, world: int, microbatches: int, steps: int, forward_ms: float, backward_ms: float, port: int) -> None:
    """One rank: build its stages, train ``steps`` steps, print the time per microbatch on the last rank."""
    import napping
    from torch.distributed.pipelining import PipelineStage

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    mine = stages_of(schedule, rank, world)
    share = len(mine)
    modules = [nn.Sequential(napping.Napper(forward_ms / share, backward_ms / share)) for _ in mine]
    sample, between = torch.randn(SIZE, napping.WIDTH), torch.randn(SIZE, napping.WIDTH, requires_grad=True)
    stages = [PipelineStage(module, index, share * world, torch.device("cpu"), input_args=(between if index else sample,),
                            output_args=(between,))
              for module, index in zip(modules, mine, strict=True)]
    plan = schedule_of(schedule, stages, microbatches, napping.loss)
    optimizer = torch.optim.SGD([parameter for module in modules for parameter in module.parameters()], lr=1e-3)
    whole = torch.randn(SIZE * microbatches, napping.WIDTH)
    first, last = 0 in mine, share * world - 1 in mine
    laps = []
    for _ in range(steps):
        dist.barrier()
        start = time.perf_counter()
        targets = {"target": torch.zeros_like(whole), "losses": []} if last else {}
        plan.step(*([whole] if first else []), **targets)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        laps.append((time.perf_counter() - start) * 1000 / microbatches)
    if rank == 0:
        print(f"{statistics.median(laps[2:]):.4f}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    schedule, world, microbatches, steps = sys.argv[1], *map(int, sys.argv[2:5])
    forward_ms, backward_ms = map(float, sys.argv[5:7])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(run, (schedule, world, microbatches, steps, forward_ms, backward_ms, port), nprocs=world)


if __name__ == "__main__":
    main()
