"""Gradients summed over replicas: the right sums whatever came to whom, and on their way while the backward runs."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from launcher.data.microbatches import MicrobatchSource
from launcher.graph.capture import capture_training
from launcher.graph.split import split
from launcher.runtime.assignment import Assignment
from launcher.runtime.channel import Reducer, Worker
from launcher.runtime.local import LocalTransport
from launcher.runtime.reduction import GradientReduction, arrival_order
from launcher.runtime.remote import RemoteTransport
from launcher.runtime.worker import StageWorker
from planner.spec.schedule import Pipeline
from tests.launcher import zoo
from tests.launcher.simulation import simulate
from tests.launcher.toy import LAYERS, OPTIMIZERS, Data, initial, programs, setup_of, whole_loss

MODELS: list[Callable[[], Any]] = [
    zoo.convolutional, zoo.gpt, zoo.gpt_tied, zoo.seq2seq, zoo.skips, zoo.branches, zoo.no_grad, zoo.inception,
]


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_gradients_become_final_in_the_order_of_the_graph(make: Callable[[], Any]) -> None:
    """Autograd itself is the oracle: when each parameter's gradient has come in a backward of the whole model."""
    job = make()
    captured = capture_training(job)
    (program,) = split(captured, [tuple(captured.layers)])
    state = {**dict(job.model.named_parameters(remove_duplicate=False)), **dict(job.model.named_buffers(remove_duplicate=False))}
    leaves = [nn.Parameter(state[name].detach().clone(), state[name].requires_grad) for name in program.parameters]
    came: list[int] = []
    for position, leaf in enumerate(leaves):
        if leaf.requires_grad:
            leaf.register_post_accumulate_grad_hook(lambda _, position=position: came.append(position))
    inputs = next(MicrobatchSource(job.train_data, job.microbatch_size, False, 0).iterate([0], program.inputs))
    outputs = program.module(*leaves, *(state[name].detach().clone() for name in program.buffers), *inputs)
    outputs[0].backward()
    assert len(came) >= 4
    nodes = list(program.module.graph.nodes)
    # the same for two that one operation uses, whose order is of no interest
    first_use = [min(map(nodes.index, node.users), default=-1) for node in nodes if node.op == "placeholder"]
    expected = [position for position in arrival_order(program) if position in came]
    assert [first_use[position] for position in came] == [first_use[position] for position in expected]


SIZES = [((3, 2), torch.float64), ((4,), torch.float64), ((2, 2), torch.float32), ((), torch.float64), ((5,), torch.float32)]


@given(replicas=st.integers(2, 3), backwards=st.integers(1, 3), bucket_bytes=st.sampled_from([1, 40, 70, 10**6]), data=st.data())
@settings(max_examples=150, deadline=None)
def test_sums_what_came_to_any_replica(replicas: int, backwards: int, bucket_bytes: int, data: st.DataObject) -> None:
    """Each backward of each replica reaches parameters of its own choice, two batches long; no thread, so nothing may wait for another."""
    masters = [[nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=index != 3) for index, (shape, dtype) in enumerate(SIZES)]
               for _ in range(replicas)]
    transport = LocalTransport((replicas,), timeout_s=1)
    order = data.draw(st.permutations(range(len(SIZES))))
    reductions = [GradientReduction(transport.of(Worker(0, replica)).reducer(0), masters[replica], order, bucket_bytes)
                  for replica in range(replicas)]
    for batch in range(2):
        expected: dict[int, torch.Tensor] = {}
        for replica, reduction in enumerate(reductions):
            for number in range(backwards):
                leaves = [nn.Parameter(master.data.clone(), master.requires_grad) for master in masters[replica]]
                for leaf, master in zip(leaves, masters[replica], strict=True):
                    leaf.grad = master.grad
                reached = [index for index in data.draw(st.sets(st.integers(0, len(SIZES) - 1))) if leaves[index].requires_grad]
                with reduction.gathering(leaves, final=number == backwards - 1):
                    for index in reached:
                        factor = 1 + index + 10 * replica + 100 * number + 1000 * batch
                        (leaves[index] * factor).sum().backward()
                        gradient = torch.full_like(leaves[index].detach(), factor)
                        expected[index] = expected[index] + gradient if index in expected else gradient
                for leaf, master in zip(leaves, masters[replica], strict=True):
                    master.grad = leaf.grad
            reduction.begin_rest()
        for own, reduction in zip(masters, reductions, strict=True):
            reduction.finish()
            for index, master in enumerate(own):
                assert (master.grad is None) == (index not in expected)
                if master.grad is not None:
                    assert torch.equal(master.grad, expected[index])
                master.grad = None


class Watched:
    """A reducer that notes which gradients had come whenever a sum began."""

    def __init__(self, reducer: Reducer, come: list[str], begun: list[tuple[int, tuple[str, ...]]]) -> None:
        self.size, self._reducer, self._come, self._begun = reducer.size, reducer, come, begun

    def begin_sum_(self, tensor: torch.Tensor) -> Any:
        if tensor.numel() > 1:  # not the loss
            self._begun.append((tensor.numel(), tuple(self._come)))
        return self._reducer.begin_sum_(tensor)

    def sum_(self, tensor: torch.Tensor) -> None:
        self.begin_sum_(tensor).wait()


def check_overlap(transport: Any, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Train the toy as one stage; each sum must begin when its gradients are final and earlier layers' are still to come."""
    come: list[str] = []
    begun: list[tuple[int, tuple[str, ...]]] = []
    monkeypatch.setattr(transport, "reducer", lambda stage, made=transport.reducer: Watched(made(stage), come, begun), raising=False)
    monkeypatch.setattr("launcher.runtime.reduction.LEAST_BYTES", 1)
    monkeypatch.setattr("launcher.runtime.reduction.MOST_BYTES", 1)
    (program,) = programs([range(LAYERS)], torch.float64)
    start = initial(torch.float64)
    own = {name: nn.Parameter(start[name].clone()) for name in program.parameters}
    pipeline = Pipeline((2,), (1,), 4, 3)
    stage = StageWorker(Assignment(pipeline, worker, "stash", program, Data(torch.float64)), own, {}, OPTIMIZERS["momentum"], transport)
    arrived = GradientReduction._arrived

    def noted(self: GradientReduction, position: int, final: bool, leaf: torch.Tensor) -> None:
        come.append(program.parameters[position] + ("!" if final else ""))
        arrived(self, position, final, leaf)

    monkeypatch.setattr(GradientReduction, "_arrived", noted)
    stage.run()
    assert len(begun) == 3 * 2 * LAYERS, "a bucket for each parameter and batch"
    for batch in range(3):
        for place, (_, before) in enumerate(begun[2 * LAYERS * batch:2 * LAYERS * (batch + 1)]):
            final = [name for name in before if name.endswith("!")][2 * LAYERS * batch:]
            assert {int(name[0]) for name in final} == set(range(LAYERS - 1 - place // 2, LAYERS)), "no earlier layer's has come"
            assert len(before) - 2 * LAYERS * batch - len(final) == 2 * LAYERS * (batch + 1), "the batch's first backward is over"
    return {name: parameter.detach() for name, parameter in own.items()}


def assert_simulated(trained: dict[str, torch.Tensor]) -> None:
    pipeline = Pipeline((2,), (1,), 4, 3)
    expected, _ = simulate(initial(torch.float64), whole_loss(torch.float64), setup_of(pipeline, "stash"), OPTIMIZERS["momentum"], 3)
    for name, value in expected.items():
        torch.testing.assert_close(trained[name], value, rtol=1e-12, atol=1e-14)


def _train(rank: int, folder: str) -> None:
    try:
        os.environ.update(GLOO_SOCKET_IFNAME="lo", RANK=str(rank), WORLD_SIZE="2")
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
        transport = RemoteTransport(Pipeline((2,), (1,), 4, 3), torch.device("cpu"), 30.0)
        with pytest.MonkeyPatch.context() as monkeypatch:
            assert_simulated(check_overlap(transport, Worker(0, rank), monkeypatch))
        dist.barrier()
        Path(folder, f"good{rank}").touch()
        os._exit(0)
    except BaseException:
        Path(folder, f"error{rank}").write_text(traceback.format_exc())
        os._exit(1)


def test_real_processes_sum_while_the_backward_runs(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_train, args=(rank, str(tmp_path))) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(90)
        process.kill()
    assert {path.name for path in tmp_path.iterdir()} - {"meet"} == {"good0", "good1"}, [
        path.read_text() for path in tmp_path.glob("error*")]


@pytest.mark.parametrize(("bucket_bytes", "buckets"), [(1, [[3], [2], [1], [0]]), (16, [[3, 2], [1, 0]]), (10**6, [[3, 2, 1, 0]])])
def test_a_bucket_is_full_when_it_has_its_bytes(bucket_bytes: int, buckets: Sequence[Sequence[int]]) -> None:
    masters = [nn.Parameter(torch.zeros(2)) for _ in range(4)]
    numels: list[int] = []

    class Noting:
        size = 2

        def begin_sum_(self, tensor: torch.Tensor) -> Any:
            numels.append(tensor.numel())

        def sum_(self, tensor: torch.Tensor) -> None:
            raise NotImplementedError

    GradientReduction(Noting(), masters, (3, 2, 1, 0), bucket_bytes).begin_rest()
    assert numels == [3 * len(bucket) for bucket in buckets]  # two numbers and a flag
