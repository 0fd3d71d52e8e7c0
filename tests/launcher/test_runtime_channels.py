"""Channels: every message has one sender and one receiver, in one order, and real gloo carries every kind of tensor."""

from __future__ import annotations

import math
import os
import traceback
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.graph.program import StageProgram, Value
from launcher.runtime.channel import Edge, PeerLost, Worker, edges, rank_of, workers
from launcher.runtime.links import Links
from launcher.runtime.remote import RemoteTransport
from launcher.supervision.recorder import steady_batches
from planner.spec.schedule import Pipeline, default_in_flight, operations


class Sender:
    def __init__(self, log: list[int], window: int | None) -> None:
        self.log, self.window = log, window

    def send(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self.log.append(int(tensors[0]))

    def flush(self) -> None:
        pass


class Receiver:
    def __init__(self, expected: int) -> None:
        self.expected, self.received = expected, 0

    def receive(self) -> tuple[torch.Tensor, ...]:
        self.received += 1
        return ()


class Paper:
    """A transport that only writes down what would be sent, and how many messages each receiver was promised."""

    def __init__(self) -> None:
        self.sent: dict[Edge, list[int]] = defaultdict(list)
        self.windows: dict[Edge, int | None] = {}
        self.receivers: dict[Edge, Receiver] = {}

    def sender(self, edge: Edge, window: int | None) -> Sender:
        self.windows[edge] = window
        return Sender(self.sent[edge], window)

    def receiver(self, edge: Edge, messages: object) -> Receiver:
        self.receivers[edge] = Receiver(len(list(messages)))  # type: ignore[call-overload]
        return self.receivers[edge]

    def reducer(self, stage: int) -> None:
        return None


@given(replicas=st.lists(st.integers(1, 4), min_size=2, max_size=4), batches=st.integers(1, 5), every=st.integers(0, 2),
       evaluation=st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_what_is_sent_is_what_is_expected(replicas: list[int], batches: int, every: int, evaluation: int) -> None:
    pipeline = Pipeline(tuple(replicas), default_in_flight(tuple(replicas)), math.lcm(*replicas), batches, every, True, evaluation)
    value = Value("x", (), torch.int64, True)
    paper = Paper()
    for worker in workers(replicas):
        last = worker.stage == len(replicas) - 1
        program = StageProgram(None, (), (), () if worker.stage == 0 else (value,), (), () if last else (value,), ())  # type: ignore[arg-type]
        links = Links(pipeline, worker, program, {1: program}, [1] * evaluation, paper)  # type: ignore[arg-type]
        for op in operations(pipeline, *worker):
            message = (torch.tensor(op.index),)
            if op.kind == "F":
                links.receive_activations(op.index)
                if not last:
                    links.send_activations(op.index, message)
            elif op.kind == "B":
                links.receive_gradients(op.index)
                links.send_gradients(op.index, message)
            elif op.kind == "E":
                links.receive_evaluation(op.index)
                if not last:
                    links.send_evaluation(op.index, message)
    assert set(paper.sent) == set(paper.receivers) == set(edges(pipeline))
    for edge, receiver in paper.receivers.items():
        assert len(paper.sent[edge]) == receiver.received == receiver.expected
        if edge.kind != "E":  # each microbatch of both workers once, in order
            source, destination = edge.source, edge.destination
            own = [m for m in range(pipeline.microbatches)
                   if m % replicas[source.stage] == source.replica and m % replicas[destination.stage] == destination.replica]
            assert paper.sent[edge] == own


@given(replicas=st.lists(st.integers(1, 3), min_size=2, max_size=4), extra=st.integers(0, 2))
@settings(max_examples=60, deadline=None)
def test_a_send_never_has_to_wait_for_its_receiver(replicas: list[int], extra: int) -> None:
    """When message i is sent, message i - window has been received already: the schedule bounds what is under way."""
    pipeline = Pipeline(tuple(replicas), default_in_flight(tuple(replicas), extra), math.lcm(*replicas), 6)
    for stage, r in enumerate(replicas[:-1]):
        for replica in range(r):
            sequence: dict[int, list[int]] = defaultdict(list)  # peer -> microbatches sent and not yet answered
            for op in operations(pipeline, stage, replica):
                peer = op.index % replicas[stage + 1]
                if op.kind == "F":
                    sequence[peer].append(op.index)
                    assert len(sequence[peer]) <= pipeline.in_flight[stage]
                elif op.kind == "B":  # its gradient has come, so its activations had
                    sequence[peer].remove(op.index)


KINDS = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


def _talk(rank: int, folder: str) -> None:
    try:
        os.environ.update(GLOO_SOCKET_IFNAME="lo", RANK=str(rank), WORLD_SIZE="3")
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=3)
        pipeline = Pipeline((1, 2), (3, 1), 2, 1)
        transport = RemoteTransport(pipeline, torch.device("cpu"), 5.0)
        me = workers(pipeline.replicas)[rank]
        values = [*(Value(str(kind), (2, 3), kind, False) for kind in KINDS), Value("scalar", (), torch.float32, False),
                  Value("none", (0, 4), torch.float32, False)]
        if rank == 0:
            senders = [transport.sender(Edge("F", me, Worker(1, i)), 2) for i in (0, 1)]
            for number in range(6):
                for sender in senders:
                    sender.send([torch.full(value.shape, number, dtype=value.dtype) for value in values])
            for sender in senders:
                sender.flush()
            dist.barrier()
            os._exit(0)  # gone without a word
        receiver = transport.receiver(Edge("F", Worker(0, 0), me), [values] * 7)
        for number in range(6):
            for value, tensor in zip(values, receiver.receive(), strict=True):
                assert torch.equal(tensor, torch.full(value.shape, number, dtype=value.dtype)), (value, tensor)
        total = torch.tensor([float(rank), 1.0])
        transport.reducer(1).sum_(total)
        assert total.tolist() == [3.0, 2.0]
        dist.barrier()
        with pytest.raises(PeerLost, match="stage 0 replica 0"):
            receiver.receive()
        Path(folder, f"good{rank}").touch()
        os._exit(0)
    except BaseException:
        Path(folder, f"error{rank}").write_text(traceback.format_exc())
        os._exit(1)


def test_gloo_carries_every_kind_in_order_and_notices_a_lost_peer(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_talk, args=(rank, str(tmp_path))) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(90)
        process.kill()
    assert {path.name for path in tmp_path.iterdir()} - {"meet"} == {"good1", "good2"}, [
        path.read_text() for path in tmp_path.glob("error*")]


def test_ranks_follow_stages() -> None:
    replicas = (2, 3, 1)
    assert [rank_of(replicas, worker) for worker in workers(replicas)] == list(range(6))


@given(replicas=st.lists(st.integers(1, 3), min_size=1, max_size=4), batches=st.integers(1, 60), multiple=st.integers(1, 3))
def test_the_steady_part_is_full(replicas: list[int], batches: int, multiple: int) -> None:
    """In a steady batch every stage has all the microbatches in flight that it admits; a short run counts whole."""
    pipeline = Pipeline(tuple(replicas), default_in_flight(tuple(replicas)), multiple * math.lcm(*replicas), batches)
    steady = steady_batches(pipeline)
    assert len(steady) >= 1 and steady.start >= 0 and steady.stop <= batches
    if steady.stop == batches:
        return  # too short a run to have a steady part
    admitted = max(r * depth for r, depth in zip(replicas, pipeline.in_flight, strict=True))
    assert steady.start * pipeline.batch_microbatches >= admitted
    assert (batches - steady.stop) * pipeline.batch_microbatches >= admitted
