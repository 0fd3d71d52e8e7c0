"""Predicted and measured peak memory of each worker: a model of large weights and one of large activations.

    python benchmarks/memory.py [--models weights,activations] [--policies stash,vertical,2bw,flush,latest] [--steps 6]

Two stages under every policy, with recomputation and without, and two replicas of one stage. Both models need hundreds
of megabytes, so that a ratio says something. Measured is what training added to the process
(``launcher/supervision/memory.py``). The file is the job, too: ``pipedream profile benchmarks/memory.py --set model=weights``.

On a CPU much of the difference is the C library's: freed pieces of its heap that fit nothing. It keeps none of a few
megabytes or more with ``GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4194304`` in the environment.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.pair.processes import pipedream

if TYPE_CHECKING:
    from launcher import Job

MIB = 2**20
SHAPES = {"weights": (8, 2048, 4), "activations": (8, 256, 12288)}  # layers, width, samples in a microbatch


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error."""
    return nn.functional.mse_loss(outputs, targets)


def job(model: str = "weights") -> Job:
    """Linear layers, each with a GELU; ``model`` is a key of ``SHAPES``."""
    from launcher import Job

    layers, width, samples = SHAPES[model]
    data = torch.randn(4 * samples, width)
    return Job(
        model=nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.GELU()))), loss=loss,
        train_data=TensorDataset(data, data), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
        microbatch_size=samples)


def compare(profile: Path, folder: Path, steps: int, *options: object) -> list[tuple[float, float]]:
    """(predicted, measured) bytes of each stage's replicas."""
    from planner.spec.files import read_document
    from planner.spec.plan import Plan
    from planner.spec.summary import Summary

    folder.mkdir()
    pipedream("plan", profile, "--cluster", "local", "--devices", 2, *options, "-o", folder / "plan.json")
    pipedream("train", folder / "plan.json", "--steps", steps, "--threads", 1, "--run-dir", folder / "run")
    plan, summary = read_document(Plan, folder / "plan.json"), read_document(Summary, folder / "run" / "summary.json")
    return [(predicted.memory.total_bytes, measured.peak_memory_bytes)
            for predicted, measured in zip(plan.predicted.stages, summary.stages, strict=True)]


def main() -> None:
    """Print a line for each worker of each run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", default="weights,activations")
    parser.add_argument("--policies", default="stash,vertical,2bw,flush,latest")
    parser.add_argument("--recompute", default="never,always")
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    print(f"{'model':12} {'policy':9} {'recompute':10} {'stage':6} {'predicted':>10} {'measured':>10} {'ratio':>6}   MiB")
    with tempfile.TemporaryDirectory() as scratch:
        for model in arguments.models.split(","):
            profile = Path(scratch) / f"{model}.json"
            pipedream("profile", Path(__file__).resolve(), "--set", f"model={model}", "--threads", 1, "--repeats", 2, "-o", profile)
            runs: list[tuple[str, str, list[object]]] = [
                (policy, recompute, ["--stages", 2, "--max-replicas", 1, "--policy", policy, "--recompute", recompute])
                for policy in arguments.policies.split(",") for recompute in arguments.recompute.split(",")]
            runs.append(("replicas", "never", ["--stages", 1, "--recompute", "never"]))
            for policy, recompute, options in runs:
                found = compare(profile, Path(scratch) / f"{model}-{policy}-{recompute}", arguments.steps, *options)
                for stage, (predicted, measured) in enumerate(found):
                    print(f"{model:12} {policy:9} {recompute:10} {stage:<6} {predicted / MIB:10.0f} {measured / MIB:10.0f} "
                          f"{measured / predicted:6.2f}", flush=True)


if __name__ == "__main__":
    main()
