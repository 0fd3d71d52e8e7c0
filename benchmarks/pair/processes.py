"""Processes in two places, and a plan's workers among them."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.pair.network import Place
from planner.spec.plan import Plan

__all__ = ["ROOT", "pipedream", "run_plan", "start"]

ROOT = Path(__file__).resolve().parent.parent.parent


def pipedream(*words: object) -> dict[str, Any]:
    """The JSON answer of a command; its failure ends the benchmark."""
    command = [sys.executable, "-m", "pdcli", *map(str, words), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    answer: dict[str, Any] = json.loads(done.stdout)
    if answer["status"] != "ok":
        raise SystemExit(f"pipedream {' '.join(map(str, words))}: {answer}")
    return answer


def start(where: tuple[Place, ...], *words: object) -> list[str]:
    """A process of ``python -m WORDS`` in each place, to their end; what each printed last."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = []
    for rank, place in enumerate(where):
        environment = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(where)), "MASTER_ADDR": place.master,
            "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": place.interface, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [*place.prefix, sys.executable, "-m", *map(str, words)]
        running.append(subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    printed = []
    for process in running:
        out, err = process.communicate(timeout=900)
        if process.returncode:
            raise SystemExit(f"{' '.join(map(str, words))}: exit {process.returncode}\n{err[-3000:]}")
        printed.append(out.split()[-1] if out.split() else "")
    return printed


def run_plan(plan: Plan, where: tuple[Place, ...], folder: Path, steps: int) -> list[dict[str, Any]]:
    """Train ``steps`` updates under ``plan`` with a worker in each place; each one's measurements, by rank."""
    from launcher.runtime.channel import workers
    from launcher.supervision.rundir import RunDirectory, RunSettings
    from launcher.supervision.status import StatusBoard
    from launcher.supervision.task import Task, pipeline_of
    from planner.spec.files import digest

    assert plan.job is not None
    directory = RunDirectory(folder)
    settings = RunSettings(plan.job, digest(plan), steps, None, 0, 0, 0, 1, False, 300.0)
    directory.create(plan, settings)
    StatusBoard.create(directory.status, plan.worker_count)
    task = Task(plan, settings, pipeline_of(plan, steps, 0, 0), directory, 0)
    (folder / "task").write_bytes(pickle.dumps(task))
    start(where, "benchmarks.pair.ours", folder / "task")
    return [json.loads(directory.measurements(*worker).read_text()) for worker in workers(plan.replicas)]
