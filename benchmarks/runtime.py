"""Two workers against the ideal and against others, in alternating runs: milliseconds per microbatch.

    python benchmarks/runtime.py [--shapes compute,parameters] [--optimizers sgd,adamw] [--rates none,1gbit,200mbit] [--repeats 5]

The ideal is two loops that know nothing of each other, a core each. All update once in 16 microbatches, one thread a
worker. A rate joins the two workers by a link of that speed between two network namespaces (needs root); on such a
link DDP sends every gradient once a batch, a pipeline its activations.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.pair.network import Place, places  # noqa: E402 - the folder must be on the path first
from benchmarks.pair.processes import pipedream, run_plan, start  # noqa: E402
from benchmarks.torch_schedules import SCHEDULES, stages_of  # noqa: E402

MICROBATCHES = 16
POLICIES = ("stash", "2bw", "flush")
PEERS = ("ideal", "DDP", *SCHEDULES)


class Case(NamedTuple):
    """A model with its optimizer on a link."""

    shape: str
    optimizer: str
    rate: str | None
    where: tuple[Place, Place]
    folder: Path
    steps: int


def plan_files(case: Case) -> dict[str, Path]:
    """The profile of the model and a two-stage plan for each policy on the case's link."""
    profile = case.folder / f"{case.shape}-{case.optimizer}.json"
    if not profile.exists():
        pipedream("profile", ROOT / "benchmarks" / "pair" / "decoder.py", "--set", f"shape={case.shape}",
                  "--set", f"optimizer_name={case.optimizer}", "--threads", 1, "--repeats", 5, "-o", profile)
    found = {}
    bandwidth = {"1gbit": "1Gbit/s", "200mbit": "200Mbit/s"}.get(case.rate or "", "")
    cluster = ["--cluster", "2x1", "--intra-bandwidth", "100GB/s", "--inter-bandwidth", bandwidth] if bandwidth else ["--cluster", "local"]
    for policy in POLICIES:
        found[policy] = case.folder / f"{case.shape}-{case.optimizer}-{case.rate}-{policy}.json"
        pipedream("plan", profile, *cluster, "--stages", 2, "--max-replicas", 1, "--policy", policy, "--batch-microbatches", MICROBATCHES,
                  "-o", found[policy])
    return found


def cuts_of(case: Case, parts: int) -> str:
    """Where torch's stages begin: pieces in as many parts, the largest time as small as can be."""
    layers = json.loads((case.folder / f"{case.shape}-{case.optimizer}.json").read_text())["layers"]
    times: dict[int, float] = defaultdict(float)
    for layer in layers:
        head = layer["name"].split(".")[0]
        times[int(head) if head.isdigit() else max(times)] += layer["forward_us"] + layer["backward_us"]
    count = max(times) + 1

    def slowest(cuts: tuple[int, ...]) -> float:
        return max(sum(times[piece] for piece in range(a, b)) for a, b in itertools.pairwise((0, *cuts, count)))

    return ",".join(map(str, min(itertools.combinations(range(1, count), parts - 1), key=slowest)))


def our_ms(case: Case, plan_file: Path, number: int) -> tuple[float, float]:
    """Milliseconds per microbatch, measured and predicted."""
    from planner.spec.files import read_document
    from planner.spec.plan import Plan

    plan = read_document(Plan, plan_file)
    last = run_plan(plan, case.where, case.folder / f"run-{plan_file.stem}-{number}", case.steps)[-1]
    predicted_us = plan.predicted.simulated_us or plan.predicted.microbatch_us
    return last["intervals_ns"] / last["intervals"] / plan.batch_microbatches / 1e6, predicted_us / 1e3


def peer_ms(case: Case, contestant: str) -> float:
    """Milliseconds per microbatch, the mean of both processes."""
    parts = 2 * len(stages_of(contestant, 0, 2))
    printed = start(case.where, "benchmarks.pair.peers", contestant, case.shape, case.optimizer, MICROBATCHES, case.steps,
                    cuts_of(case, parts))
    return statistics.mean(map(float, printed))


def compare(case: Case, repeats: int) -> None:
    """All contestants in turn, ``repeats`` times, and a table of medians."""
    plans, times, predicted = plan_files(case), defaultdict(list), {}
    for repeat in range(repeats):
        for peer in PEERS:
            times[peer].append(peer_ms(case, peer))
        for policy, plan in plans.items():
            measured_ms, predicted[policy] = our_ms(case, plan, repeat)
            times[policy].append(measured_ms)
    print(f"\n{case.shape}, {case.optimizer}, {case.rate or 'loopback'}: medians of {repeats} alternating runs")
    ideal_ms = statistics.median(times["ideal"])
    for name, laps in times.items():
        shares = [ideal / lap for ideal, lap in zip(times["ideal"], laps, strict=True)]
        said = f"   predicted {predicted[name]:.2f} ms, measured / predicted {statistics.median(laps) / predicted[name]:.2f}" \
            if name in predicted else ""
        print(f"  {name:18} {statistics.median(laps):8.2f} ms   {ideal_ms / statistics.median(laps):.3f} of ideal "
              f"({min(shares):.2f} to {max(shares):.2f}){said}", flush=True)


def main() -> None:
    """Print a table for each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shapes", default="compute,parameters")
    parser.add_argument("--optimizers", default="sgd,adamw")
    parser.add_argument("--rates", default="none,1gbit,200mbit")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help="updates in a run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for text in arguments.rates.split(","):
            rate = None if text == "none" else text
            with places(rate) as where:
                for shape, optimizer in itertools.product(arguments.shapes.split(","), arguments.optimizers.split(",")):
                    compare(Case(shape, optimizer, rate, where, Path(scratch), arguments.steps), arguments.repeats)


if __name__ == "__main__":
    main()
