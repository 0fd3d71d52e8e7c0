"""One worker process, from its start to its exit: prepare, connect, run, hand over.

The process never outlives its launcher, ignores Ctrl-C (the launcher stops it), and when it fails it
says why in a file before it goes. A worker that only lost another one waits to be stopped, so that the
first process the engine sees failing is the one that caused it.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import multiprocessing.connection
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from launcher import devices
from launcher.graph.randomness import keyed
from launcher.load import load_job
from launcher.runtime.channel import PeerLost, Worker, workers
from launcher.runtime.remote import RemoteTransport, peer_errors
from launcher.runtime.worker import StageWorker
from launcher.supervision.failure import record_failure
from launcher.supervision.memory import PeakMemory
from launcher.supervision.recorder import Measurements, Recorder
from launcher.supervision.status import StatusBoard
from launcher.supervision.task import Task, assign, capture_programs, sized, stage_state

__all__ = ["connect", "disconnect", "supervised", "work", "write_measurements"]

AnyTask = TypeVar("AnyTask", bound=Task)

_STARTING_S = 120.0  # workers may be so far apart in loading and saving, whatever the timeout between operations
_CONSEQUENCE_S = 5.0  # how long a worker that lost its peer leaves the engine to find the cause


def work(task: Task) -> None:
    """The entry point of every worker process that trains; ``RANK`` in the environment says which one it is."""
    supervised(task, _train)


def supervised(task: AnyTask, body: Callable[[AnyTask, int, Worker, StatusBoard], None]) -> None:
    """Run ``body(task, rank, worker, board)`` as this worker process, to its end or to a failure that is told."""
    rank = int(os.environ["RANK"])
    worker = workers(task.plan.replicas)[rank]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _follow_parent()
    if platform.system() == "Linux":  # loader processes: the fork server does not know the job's own classes
        multiprocessing.set_start_method("fork", force=True)
    board = StatusBoard(task.directory.status, task.plan.worker_count)
    try:
        body(task, rank, worker, board)
    except BaseException as error:
        record_failure(task.directory.failure(*worker), worker, rank, board.get(rank), error)
        _flush()
        if isinstance(error, PeerLost):
            time.sleep(_CONSEQUENCE_S)
        os._exit(1)  # no destructor may hang on a peer that is gone
    board.set(rank, "done", "")
    _flush()


def _train(task: Task, rank: int, worker: Worker, board: StatusBoard) -> None:
    settings, pipeline = task.settings, task.pipeline
    device = devices.torch_device(int(os.environ["LOCAL_RANK"]))
    devices.set_threads(settings.threads)
    board.set(rank, "preparing", "loading the job")
    job = sized(load_job(settings.job, seed=settings.seed), task.plan)
    board.set(rank, "preparing", "capturing the model")
    assignment = assign(task, job, capture_programs(task, job), worker, device)
    parameters, buffers = stage_state(assignment, job.model)
    optimizer = job.optimizer
    del job  # the other stages' weights
    memory = PeakMemory([*parameters.values(), *buffers.values()])

    transport = connect(task, rank, board, device)
    board.set(rank, "preparing", "making the optimizer")
    writes_metrics = worker == (len(pipeline.replicas) - 1, 0)
    recorder = Recorder(pipeline, worker, rank, board, task.plan.microbatch_size, task.directory.metrics if writes_metrics else None)
    stage = StageWorker(assignment, parameters, buffers, optimizer, transport, recorder, keyed=lambda m: keyed(settings.seed, m))
    stage.run()

    measurements = recorder.finish(memory.read_bytes())
    board.set(rank, "preparing", "saving")
    final_buffers = stage.final_buffers()
    if worker.replica == 0:
        weights = {name: value.detach().cpu() for name, value in zip(assignment.program.parameters, stage.weights.masters, strict=True)}
        torch.save(weights | {name: value.cpu() for name, value in final_buffers.items()}, task.directory.stage_weights(worker.stage))
    write_measurements(task, worker, measurements)
    disconnect()


def connect(task: Task, rank: int, board: StatusBoard, device: torch.device) -> RemoteTransport:
    """The way to the other workers, once all of them are there."""
    board.set(rank, "preparing", "connecting")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if platform.system() == "Darwin" else "lo")
    patience_s = max(task.settings.timeout_s, _STARTING_S)
    with peer_errors(None):
        dist.init_process_group(devices.backend(), timeout=timedelta(seconds=patience_s))
        transport = RemoteTransport(task.pipeline, device, task.settings.timeout_s)
        dist.barrier()
    return transport


def disconnect() -> None:
    """Leave together: nobody closes a connection that another still reads from."""
    with peer_errors(None):
        dist.barrier()
        dist.destroy_process_group()


def write_measurements(task: Task, worker: Worker, measurements: Measurements) -> None:
    task.directory.measurements(*worker).write_text(json.dumps(dataclasses.asdict(measurements)), encoding="utf-8")


def _follow_parent() -> None:
    """Exit when the launcher is gone, even by ``kill -9``; the engine itself would leave us running."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=wait, name="follow-parent", daemon=True).start()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
