"""A small model with a skip, uncut and cut by hand, and its training on threads over in-process channels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from launcher.graph.program import StageProgram, Value
from launcher.graph.split import tied_stages
from launcher.job import LossScaling
from launcher.runtime.assignment import Assignment
from launcher.runtime.channel import Worker, rank_of, workers
from launcher.runtime.local import LocalTransport
from launcher.runtime.observer import Observer
from launcher.runtime.worker import StageWorker
from planner.spec.plan import Policy
from planner.spec.schedule import Op, Pipeline, validate
from tests.launcher.simulation import OptimizerFactory, SchedulerFactory, Setup

WIDTH, SAMPLES, LAYERS = 6, 3, 5

OPTIMIZERS: dict[str, OptimizerFactory] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=False),
}


def data(microbatch: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + microbatch)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=dtype)
    return inputs, torch.randn(SAMPLES, WIDTH, generator=generator, dtype=dtype)


def initial(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    values = {}
    for layer in range(LAYERS):
        values[f"{layer}.weight"] = torch.randn(WIDTH, WIDTH, generator=generator, dtype=dtype) / WIDTH**0.5
        values[f"{layer}.bias"] = torch.randn(WIDTH, generator=generator, dtype=dtype) / 10
    return values


def whole_loss(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """The uncut model: every layer is tanh(Wx + b); layer 0's output is added again before the last layer."""

    def loss(parameters: Any, microbatch: int) -> torch.Tensor:
        x, target = data(microbatch, dtype)
        skip = x
        for layer in range(LAYERS):
            if layer == LAYERS - 1:
                x = x + skip
            x = torch.tanh(nn.functional.linear(x, parameters[f"{layer}.weight"], parameters[f"{layer}.bias"]))
            if layer == 0:
                skip = x
        return nn.functional.mse_loss(x, target)

    return loss


NOT_TIED: Mapping[str, str] = {}


def programs(layers: Sequence[range], dtype: torch.dtype, tied: Mapping[str, str] = NOT_TIED) -> list[StageProgram]:
    """The same model cut by hand: the skip tensor is relayed through the stages between. ``tied``: name -> first name."""
    result = []
    for stage, own in enumerate(layers):
        graph = torch.fx.Graph()
        used = {name: tied.get(name, name) for layer in own for name in (f"{layer}.weight", f"{layer}.bias")}
        names = tuple(dict.fromkeys(used.values()))
        takes = {name: graph.placeholder(f"p{name.replace('.', '_')}") for name in names}
        placeholders = {name: takes[first_name] for name, first_name in used.items()}
        first, last = stage == 0, stage == len(layers) - 1
        x = graph.placeholder("x") if not first else None
        skip = graph.placeholder("skip") if not first and own[0] > 1 else x
        inputs: tuple[int, ...] = ()
        if first:
            x, inputs = graph.placeholder("data"), (0,)
        if last:
            target, inputs = graph.placeholder("target"), (*inputs, 1)
        for layer in own:
            if layer == LAYERS - 1:
                x = graph.call_function(torch.add, (x, skip))
            x = graph.call_function(nn.functional.linear, (x, placeholders[f"{layer}.weight"], placeholders[f"{layer}.bias"]))
            x = graph.call_function(torch.tanh, (x,))
            if layer == 0:
                skip = x
        value = Value("x", (SAMPLES, WIDTH), dtype, True)
        received = () if first else (value,) if own[0] == 1 else (value, Value("skip", (SAMPLES, WIDTH), dtype, True))
        sent: tuple[Value, ...] = ()
        if last:
            graph.output((graph.call_function(nn.functional.mse_loss, (x, target)),))
        elif own[-1] == 0:
            graph.output((x,))
            sent = (value,)
        else:
            graph.output((x, skip))
            sent = (value, Value("skip", (SAMPLES, WIDTH), dtype, True))
        module = torch.fx.GraphModule(nn.Module(), graph)
        result.append(StageProgram(module, names, (), received, inputs, sent, ("loss",) if last else ()))
    return result


class Data:
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def iterate(self, indices: Sequence[int], positions: Sequence[int], /) -> Iterator[tuple[torch.Tensor, ...]]:
        for index in indices:
            tensors = data(index, self._dtype)
            yield tuple(tensors[position] for position in positions)


CUTS = {1: [5], 2: [3, 2], 3: [1, 2, 2], 4: [2, 1, 1, 1]}


def layers_of(stages: int) -> list[range]:
    sizes, start, result = CUTS[stages], 0, []
    for size in sizes:
        result.append(range(start, start + size))
        start += size
    return result


class Watch(Observer):
    def __init__(self, on_event: Callable[[StageWorker], None] | None) -> None:
        self._on_event = on_event
        self.stage: StageWorker | None = None

    def spent(self, op: Op, category: str, start_ns: int, end_ns: int) -> None:
        if self._on_event is not None and self.stage is not None:
            self._on_event(self.stage)


def run_made(made: Mapping[Worker, StageWorker], transport: LocalTransport, after: Callable[[Worker], None]) -> None:
    """Run each on a thread, and then ``after`` on the same; the first error is raised here."""
    errors: list[BaseException] = []

    def run(worker: Worker) -> None:
        try:
            made[worker].run()
            after(worker)
        except BaseException as error:
            errors.append(error)
            transport.abort()

    threads = [threading.Thread(target=run, args=(worker,), daemon=True) for worker in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a worker hangs"


def run_threads(pipeline: Pipeline, make: Callable[[Worker, LocalTransport], StageWorker]) -> dict[Worker, StageWorker]:
    """Run every worker of the pipeline on a thread; the first error is raised here."""
    transport = LocalTransport(pipeline.replicas, timeout_s=30)
    made = {worker: make(worker, transport) for worker in workers(pipeline.replicas)}
    run_made(made, transport, lambda worker: None)
    return made


def train_on_threads(
    pipeline: Pipeline, dtype: torch.dtype, optimizer: OptimizerFactory, policy: Policy = "stash", recompute: Sequence[bool] = (),
    on_event: Callable[[StageWorker], None] | None = None, scheduler: SchedulerFactory | None = None, clip_norm: float | None = None,
    tied: Mapping[str, str] = NOT_TIED, loss_scaling: LossScaling | None = None,
) -> dict[tuple[str, int], torch.Tensor]:
    """Parameters after the run, by (name, rank of the worker). ``recompute`` says which stages do, by default none.

    ``on_event`` is called with the worker after each part of an operation.
    """
    validate(pipeline)
    cut = programs(layers_of(len(pipeline.replicas)), dtype, tied)
    start = initial(dtype)

    def make(worker: Worker, transport: LocalTransport) -> StageWorker:
        program = cut[worker.stage]
        assignment = Assignment(pipeline, worker, policy, program, Data(dtype), recompute=bool(recompute) and recompute[worker.stage],
                                scheduler=scheduler, clip_norm=clip_norm, tied=tied_stages(cut),
                                loss_scaling=loss_scaling)
        own = {name: nn.Parameter(start[name].clone()) for name in program.parameters}
        watch = Watch(on_event)
        watch.stage = StageWorker(assignment, own, {}, optimizer, transport.of(worker), watch)
        return watch.stage

    made = run_threads(pipeline, make)
    return {
        (name, rank_of(pipeline.replicas, worker)): master.detach()
        for worker, stage in made.items()
        for name, master in zip(cut[worker.stage].parameters, stage.weights.masters, strict=True)
    }


def setup_of(pipeline: Pipeline, policy: Policy, tied: Mapping[str, str] = NOT_TIED) -> Setup:
    """The same for the simulation."""
    names = tuple(program.parameters for program in programs(layers_of(len(pipeline.replicas)), torch.float32))
    return Setup(names, pipeline.replicas, pipeline.in_flight, pipeline.batch_microbatches, policy, tied)
