"""One process of a contestant that is not ours; RANK and MASTER_ADDR are in the environment.

    python -m benchmarks.pair.peers CONTESTANT SHAPE OPTIMIZER MICROBATCHES STEPS CUTS

prints the median milliseconds per microbatch of its steps after the first two. ``CUTS`` are the first pieces of the
later stages, ``6`` or ``3,6,8``. ``ideal`` is a loop of its own in each process, without the other.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.pair import decoder
from benchmarks.torch_schedules import SCHEDULES, schedule_of, stages_of

WORLD = 2


class Batches:
    """The microbatches of a step, one after the other through the data."""

    def __init__(self, shape: str) -> None:
        self.tokens, self.targets = decoder.data(shape).tensors
        self.at = 0

    def read(self, samples: int) -> tuple[Tensor, Tensor]:
        """The next samples; from the start again after the last."""
        indices = torch.arange(self.at, self.at + samples) % len(self.tokens)
        self.at += samples
        return self.tokens[indices], self.targets[indices]


def loop(shape: str, name: str, microbatches: int, model: nn.Module, quiet: Callable[[], Any] | None = None) -> Callable[[], None]:
    """A step of an ordinary loop that gathers gradients over its microbatches; ``quiet``: no exchange in this context."""
    batches, optimizer = Batches(shape), decoder.optimizer(name, model.parameters())

    def step() -> None:
        for index in range(microbatches):
            tokens, targets = batches.read(decoder.SIZE)
            if quiet is not None and index < microbatches - 1:
                with quiet():
                    (decoder.loss(model(tokens), targets) / microbatches).backward()
            else:
                (decoder.loss(model(tokens), targets) / microbatches).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def pipeline(contestant: str, shape: str, name: str, microbatches: int, cuts: list[int]) -> Callable[[], None]:
    """A step of one of torch's schedules."""
    from torch.distributed.pipelining import PipelineStage

    rank, count = dist.get_rank(), len(cuts) + 1
    mine = stages_of(contestant, rank, WORLD)
    whole, ends = decoder.pieces(shape), [0, *cuts, len(decoder.pieces(shape))]
    _, width, tokens, vocabulary = decoder.SHAPES[shape]
    inside = torch.zeros(decoder.SIZE, tokens, width, requires_grad=True)
    modules, stages = [], []
    for index in mine:
        module = whole[ends[index]:ends[index + 1]]
        first, last = index == 0, index == count - 1
        takes = torch.zeros(decoder.SIZE, tokens, dtype=torch.long) if first else inside
        gives = torch.zeros(decoder.SIZE, tokens, vocabulary, requires_grad=True) if last else inside
        stages.append(PipelineStage(module, index, count, torch.device("cpu"), input_args=(takes,), output_args=(gives,)))
        modules.append(module)
    schedule = schedule_of(contestant, stages, microbatches, decoder.loss)
    optimizer = decoder.optimizer(name, [parameter for module in modules for parameter in module.parameters()])
    batches, first, last = Batches(shape), 0 in mine, count - 1 in mine

    def step() -> None:
        tokens, targets = batches.read(decoder.SIZE * microbatches)
        schedule.step(*([tokens] if first else []), **({"target": targets, "losses": []} if last else {}))
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    """Run the contestant's step and time it."""
    contestant, shape, name, microbatches, steps = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])
    cuts = [int(cut) for cut in sys.argv[6].split(",")]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    alone = contestant == "ideal"
    if not alone:
        dist.init_process_group("gloo")
    if contestant in SCHEDULES:
        step = pipeline(contestant, shape, name, microbatches, cuts)
    elif alone:
        step = loop(shape, name, microbatches, decoder.pieces(shape))
    else:
        model = nn.parallel.DistributedDataParallel(decoder.pieces(shape))
        step = loop(shape, name, microbatches // WORLD, model, model.no_sync)
    laps = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        laps.append((time.perf_counter() - start) * 1000 / microbatches)
    share = WORLD if alone else 1  # two loops do twice the microbatches in their time
    print(statistics.median(laps[2:]) / share, flush=True)
    os._exit(0)  # gloo may wait for a peer that has left


if __name__ == "__main__":
    main()
