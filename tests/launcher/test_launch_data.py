"""Real workers on iterable data and with loader processes: the same weights as on map-style data, and errors that name the cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from launcher.launch import TrainSettings, train
from launcher.runtime.channel import PeerLost
from launcher.runtime.remote import peer_errors
from planner.spec.errors import BadInput, WorkerFailure
from planner.spec.profile import JobReference
from planner.spec.summary import Summary
from tests.launcher.launching import JOB_DATA, make_plan, write_job

JOB = JOB_DATA + '''
import os, signal

class Stream(torch.utils.data.IterableDataset):
    """Map-style data, in order."""
    def __init__(self, data, trouble):
        self.data, self.trouble = data, trouble
    def __iter__(self):
        for index in range(len(self.data)):
            if index == 9 and self.trouble == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if index == 9 and self.trouble == "raise":
                raise OSError(f"sample {index} is gone")
            yield self.data[index]

def job(stream: bool = True, loaders: int = 0, trouble: str = "none", shuffle: bool | None = None):
    make = (lambda data, trouble: Stream(data, trouble)) if stream else (lambda data, trouble: data)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    return Job(model=model, loss=nn.functional.cross_entropy,
               train_data=make(Data(22), trouble), evaluation_data=make(Data(10), "none"), microbatch_size=4,
               optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), loader_processes=loaders, shuffle=shuffle)
'''


def run(folder: Path, replicas: tuple[int, ...], *, updates: int | None = 9, epochs: int | None = None, **settings: Any) -> Summary:
    folder.mkdir()
    reference = JobReference(write_job(folder, JOB), settings)
    wanted = TrainSettings(folder / "run", updates, epochs, evaluate_every=5, oversubscribe=True, timeout_s=60)
    return train(make_plan(reference, replicas), reference, wanted, lambda progress: None)


def test_a_stream_in_order_trains_like_the_same_data_by_index(tmp_path: Path) -> None:
    """An epoch has 22 samples: five microbatches and two samples left out. 9 updates of 2 microbatches go through three epochs and more."""
    indexed = run(tmp_path / "indexed", (2, 1), stream=False, shuffle=False, loaders=2)
    streamed = run(tmp_path / "streamed", (2, 1), loaders=2)
    weights = [torch.load(tmp_path / name / "run" / "weights.pt", weights_only=True) for name in ("indexed", "streamed")]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    assert len(streamed.evaluations) == 2 and streamed.evaluations == indexed.evaluations


@pytest.mark.parametrize(("trouble", "words"), [("kill", "DataLoader worker (pid"), ("raise", "OSError: sample 9 is gone")])
def test_a_loader_process_in_trouble_is_named_and_nobody_is_left(tmp_path: Path, trouble: str, words: str) -> None:
    with pytest.raises(WorkerFailure) as caught:
        run(tmp_path / "failed", (1, 1), loaders=2, trouble=trouble)
    assert words in caught.value.message and "failed at " in caught.value.message
    assert ("fewer loader_processes" in caught.value.hint) == (trouble == "kill")
    assert ("its_job.py:" in caught.value.message) == (trouble == "raise")
    servers = {process.pid for process in psutil.Process().children()}  # multiprocessing's own, which fork the workers
    grandchildren = [process for process in psutil.Process().children(recursive=True) if process.pid not in servers]
    assert not [process for process in psutil.wait_procs(grandchildren, timeout=10)[1] if process.status() != psutil.STATUS_ZOMBIE]


def test_epochs_of_unknown_length_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="how many updates 2 epochs have is not known") as caught:
        run(tmp_path / "refused", (1, 1), updates=None, epochs=2)
    assert "--steps" in caught.value.hint and not (tmp_path / "refused" / "run").exists()


def test_shuffling_a_stream_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="shuffle=True, and train_data is an iterable"):
        run(tmp_path / "refused", (1, 1), shuffle=True)


def test_the_end_of_a_loader_process_is_not_taken_for_the_end_of_a_peer() -> None:
    with pytest.raises(RuntimeError, match="DataLoader worker"), peer_errors(None):
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
    with pytest.raises(PeerLost), peer_errors(None):
        raise RuntimeError("Connection closed by peer")
