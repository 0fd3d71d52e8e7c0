"""Microbatches of the stream: which samples, in which order, and equal for every reader."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from launcher.blame import one_line, user_line
from launcher.data.microbatches import EvaluationSource, MicrobatchSource
from launcher.data.samples import sample_layout
from planner.spec.errors import BadInput


class Numbers:
    """Sample i is (i, {"b": -i, "a": 10 i})."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return index, {"b": -index, "a": torch.tensor([10.0 * index])}


@given(count=st.integers(1, 40), size=st.integers(1, 9), seed=st.integers(0, 5), shuffle=st.booleans())
def test_each_epoch_is_a_permutation_cut_into_full_microbatches(count: int, size: int, seed: int, shuffle: bool) -> None:
    if size > count:
        with pytest.raises(BadInput, match="larger than the data"):
            MicrobatchSource(Numbers(count), size, shuffle, seed)
        return
    source = MicrobatchSource(Numbers(count), size, shuffle, seed)
    assert source.per_epoch == count // size
    for epoch in range(3):
        seen = [i for m in range(epoch * source.per_epoch, (epoch + 1) * source.per_epoch) for i in source.samples(m)]
        assert len(seen) == len(set(seen)) == source.per_epoch * size and set(seen) <= set(range(count))
        if not shuffle:
            assert seen == list(range(len(seen)))


def test_epochs_and_seeds_differ_and_repeat() -> None:
    def order(seed: int) -> list[list[int]]:
        source = MicrobatchSource(Numbers(20), 20, True, seed)
        return [source.samples(epoch) for epoch in range(3)]

    assert order(1) == order(1)
    lists = [*order(1), *order(2)]
    assert all(a != b for a, b in itertools.combinations(lists, 2))


@pytest.mark.parametrize("processes", [0, 2])
def test_iterate_reads_the_wanted_positions_of_the_wanted_microbatches(processes: int) -> None:
    source = MicrobatchSource(Numbers(12), 3, True, 7, processes)
    layout = sample_layout(source.dataset[0], pair=True)
    assert layout.names == ("inputs", "targets.a", "targets.b")
    wanted = [5, 0, 9, 5]
    for microbatch, (b, x) in zip(wanted, source.iterate(wanted, (2, 0)), strict=True):
        indices = source.samples(microbatch)
        assert x.tolist() == indices and b.tolist() == [-i for i in indices]


def test_iterate_is_lazy_over_an_endless_stream() -> None:
    source = MicrobatchSource(Numbers(4), 2, False)
    stream = source.iterate(itertools.count(), (0,))
    assert [next(stream)[0].tolist() for _ in range(3)] == [[0, 1], [2, 3], [0, 1]]


def test_a_stage_without_inputs_touches_no_data() -> None:
    class Untouchable(Numbers):
        def __getitem__(self, index: int) -> Any:
            raise AssertionError("read")

    source = MicrobatchSource(Untouchable(4), 2, True, 0, processes=2)
    torch.manual_seed(1)
    assert list(source.iterate([0, 1], ())) == [(), ()]
    drawn = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(1))


def test_evaluation_is_in_order_with_a_smaller_last_microbatch() -> None:
    source = EvaluationSource(Numbers(10), 4)
    assert source.sizes == (4, 4, 2)
    assert [x.tolist() for (x,) in source.iterate(range(3), (0,))] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert EvaluationSource(Numbers(3), 8).sizes == (3,)


class Noisy(Numbers):
    def __getitem__(self, index: int) -> Any:
        return torch.rand(2) + random.random(), torch.rand(1)


def test_random_data_is_the_same_for_every_stage_and_leaves_generators_alone() -> None:
    source = MicrobatchSource(Noisy(6), 2, True, 3)
    torch.manual_seed(1)
    first = source.read(4)
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(1))
    torch.rand(5)
    (targets,) = source.read(4, (1,))
    assert torch.equal(first[1], targets) and not torch.equal(first[1], source.read(5)[1])
    (loaded,) = MicrobatchSource(Noisy(6), 2, True, 3, processes=1).iterate([4], (0,))
    assert torch.equal(loaded[0], first[0])


def test_unusable_samples_are_explained() -> None:
    class Ragged(Numbers):
        def __getitem__(self, index: int) -> Any:
            return torch.zeros(index + 1), 0

    class Text(Numbers):
        def __getitem__(self, index: int) -> Any:
            return "text", 0

    class Changing(Numbers):
        def __getitem__(self, index: int) -> Any:
            return (0, 0) if index else (0, (0, 0))

    for data, words in [(Ragged(4), "cannot be stacked"), (Text(4), "is a str, not a tensor"), (Changing(4), "differ in structure")]:
        with pytest.raises(BadInput, match=words):
            MicrobatchSource(data, 2, False).read(0)


class Broken(Numbers):
    def __getitem__(self, index: int) -> Any:
        raise OSError(f"sample {index} is gone")


def test_an_error_in_a_loader_process_is_told_with_the_users_line() -> None:
    stream = MicrobatchSource(Broken(4), 1, shuffle=False, processes=1).iterate(range(4))
    with pytest.raises(OSError, match="Original Traceback") as caught:
        next(stream)
    assert one_line(caught.value) == "OSError: sample 0 is gone"
    assert "test_data.py:" in user_line(caught.value) and "in __getitem__: raise OSError" in user_line(caught.value)


SCRIPT = """
import os
from launcher.data.microbatches import MicrobatchSource
data = [(float(i), float(i)) for i in range(100)]
stream = MicrobatchSource(data, 1, processes=2).iterate(range(100))
next(stream)
import multiprocessing
print(*(child.pid for child in multiprocessing.active_children()), flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_loader_processes_end_with_their_worker_even_by_kill() -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=root)
    processes = [psutil.Process(pid) for pid in map(int, done.stdout.split()) if psutil.pid_exists(pid)]
    alive = [process for process in psutil.wait_procs(processes, timeout=2)[1] if process.status() != psutil.STATUS_ZOMBIE]
    assert len(done.stdout.split()) == 2 and not alive
