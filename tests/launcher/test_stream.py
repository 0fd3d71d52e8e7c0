"""Iterable data: the same stream for every reader, from one loader process or none, and errors that say what is wrong."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, get_worker_info

from launcher.blame import one_line, user_line
from launcher.data.microbatches import MicrobatchSource, evaluation_samples, evaluation_source, is_map_style, length_of, training_source
from launcher.data.stream import EvaluationStream, StreamSource
from planner.spec.errors import BadInput


class Counting(IterableDataset[Any]):
    """Samples (i, -i), 1000 more in each further epoch, which is one of ``counts`` long; takes torch's word for its share."""

    def __init__(self, *counts: int) -> None:
        self.counts, self.epoch = counts, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        every = range(self.counts[self.epoch % len(self.counts)])
        for index in every if info is None else every[info.id::info.num_workers]:
            yield 1000 * self.epoch + index, -index


class Plain:
    """No torch class, and it does not say how long it is."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return ((index, -index) for index in range(self.count))


@given(counts=st.lists(st.integers(3, 20), min_size=1, max_size=3), size=st.integers(1, 3), replicas=st.integers(1, 3))
def test_every_replica_takes_its_own_microbatches_of_one_stream(counts: list[int], size: int, replicas: int) -> None:
    """The oracle goes epoch by epoch and drops what does not fill a microbatch."""
    expected: list[list[int]] = []
    for epoch in range(4):
        samples = [1000 * epoch + index for index in range(counts[epoch % len(counts)])]
        expected += [samples[first:first + size] for first in range(0, len(samples) - size + 1, size)]
    for replica in range(replicas):
        own = range(replica, len(expected), replicas)
        read = training_source(Counting(*counts), size).iterate(own, (0,))
        assert [x.tolist() for (x,) in read] == [expected[microbatch] for microbatch in own]


@pytest.mark.parametrize("processes", [0, 1, 3])
def test_loader_processes_neither_repeat_nor_leave_out_samples(processes: int) -> None:
    source = training_source(Counting(10, 7), 4, processes=processes)
    read = [tuple(part.tolist() for part in microbatch) for microbatch in source.iterate(range(5), (1, 0))]
    firsts = (0, 4, 1000, 2000, 2004)
    assert [x for _, x in read] == [list(range(first, first + 4)) for first in firsts]
    assert all(target == [-(number % 1000) for number in x] for target, x in read)


def test_an_iterable_in_order_is_map_style_data_without_shuffling() -> None:
    samples = [(index, -index) for index in range(10)]
    indexed = MicrobatchSource(samples, 3, shuffle=False)
    streamed = training_source(Plain(10), 3)
    for ours, theirs in zip(streamed.iterate(range(9)), indexed.iterate(range(9)), strict=True):
        assert [part.tolist() for part in ours] == [part.tolist() for part in theirs]
    assert [part.tolist() for part in streamed.read(7, (0,))] == [part.tolist() for part in indexed.read(7, (0,))]


class Shuffled(Plain):
    """Shuffles through a buffer and adds noise, as streams do."""

    def __iter__(self) -> Iterator[Any]:
        buffer: list[int] = []
        for index in range(self.count):
            buffer.append(index)
            if len(buffer) == 5:
                yield buffer.pop(random.randrange(5)), torch.rand(1)
        random.shuffle(buffer)
        yield from ((index, torch.rand(1)) for index in buffer)


def test_random_streams_are_equal_for_all_readers_differ_by_epoch_and_seed_and_leave_generators_alone() -> None:
    def read(indices: Any, seed: int = 3, processes: int = 0) -> list[tuple[list[int], list[float]]]:
        stream = training_source(Shuffled(12), 3, seed=seed, processes=processes).iterate(indices)
        return [(x.tolist(), noise.flatten().tolist()) for x, noise in stream]

    everything = read(range(8))
    torch.manual_seed(1)
    assert read(range(1, 8, 2)) == everything[1::2]
    drawn = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(1))
    assert read(range(8), processes=2) == everything
    epochs = [[index for x, _ in everything[first:first + 4] for index in x] for first in (0, 4)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(12))] * 2 and epochs[0] != epochs[1]
    assert read(range(8), seed=4) != everything


@pytest.mark.parametrize("data", [Plain(11), Counting(11)])
def test_evaluation_counts_once_and_keeps_the_smaller_last_microbatch(data: Any) -> None:
    counted: list[int] = []
    samples = evaluation_samples(data, counted.append)
    assert counted[-1] == 11
    source = evaluation_source(data, 4, samples)
    assert samples == 11 and source.sizes == (4, 4, 3)
    assert [x.tolist() for (x,) in source.iterate(range(3), (0,))] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert [x.tolist() for (x,) in source.iterate(range(1, 3), (0,))] == [[4, 5, 6, 7], [8, 9, 10]]
    assert source.read(2, (1,))[0].tolist() == [-8, -9, -10]


def test_data_that_give_too_little_are_told_with_both_numbers() -> None:
    class Once(Plain):
        def __init__(self, count: int) -> None:
            super().__init__(count)
            self.stream = super().__iter__()

        def __iter__(self) -> Iterator[Any]:
            return self.stream

    for source, count, words in [
        (training_source(Plain(0), 4), 1, "train_data gave 0 samples in epoch 0, a microbatch needs 4"),
        (training_source(Plain(3), 4), 1, "train_data gave 3 samples in epoch 0, a microbatch needs 4"),
        (training_source(Once(8), 4), 3, "train_data gave 0 samples in epoch 1, a microbatch needs 4"),
        (EvaluationStream(Plain(9), 4, 12), 3, "evaluation_data gave 9 samples, and 12 when they were counted"),
        (EvaluationStream(Plain(8), 4, 12, processes=2), 3, "evaluation_data gave 8 samples, and 12 when they were counted"),
    ]:
        with pytest.raises(BadInput) as caught:
            list(source.iterate(range(count)))
        assert caught.value.message == words and caught.value.hint
    with pytest.raises(BadInput, match="evaluation_data is empty: 0 samples"):
        evaluation_samples(Plain(0))


def test_lengths_are_known_where_the_data_say_them() -> None:
    class Sized(Counting):
        def __len__(self) -> int:
            return self.counts[0]

    assert training_source(Sized(10), 3).per_epoch == 3 and training_source(Counting(10), 3).per_epoch is None
    assert (length_of(Counting(4)), length_of(Sized(4)), length_of([1, 2])) == (None, 4, 2)
    assert is_map_style([1, 2]) and not is_map_style(Sized(4)) and not is_map_style(Plain(4))


def test_a_stage_without_inputs_goes_through_nothing() -> None:
    class Untouchable(Plain):
        def __iter__(self) -> Iterator[Any]:
            raise AssertionError("read")

    assert list(StreamSource(Untouchable(4), 2, None, processes=2).iterate([0, 1], ())) == [(), ()]
    assert list(EvaluationStream(Untouchable(4), 2, 4).iterate([0, 1], ())) == [(), ()]


class Failing(Plain):
    def __init__(self, how: str) -> None:
        super().__init__(100)
        self.how = how

    def __iter__(self) -> Iterator[Any]:
        for index, sample in enumerate(super().__iter__()):
            if index == 4:
                if self.how == "raise":
                    raise OSError(f"sample {index} is gone")
                os.kill(os.getpid(), signal.SIGKILL)
            yield sample


def test_an_error_in_the_loader_process_is_told_with_the_users_line() -> None:
    stream = training_source(Failing("raise"), 2, processes=2).iterate(itertools.count())
    with pytest.raises(OSError, match="Original Traceback") as caught:
        list(stream)
    assert one_line(caught.value) == "OSError: sample 4 is gone"
    assert "test_stream.py:" in user_line(caught.value) and "in __iter__: raise OSError" in user_line(caught.value)


def test_a_loader_process_that_is_killed_is_an_error() -> None:
    stream = training_source(Failing("kill"), 2, processes=2).iterate(itertools.count())
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid.* (is killed by signal: Killed|exited unexpectedly)"):
        list(stream)
