"""How much of an all-reduce overlaps: two replicas of a stage of sleeping layers, on a link of limited rate.

    python benchmarks/replicas.py [--rate 200mbit] [--repeats 3]      needs root, for the link

Layers that sleep leave the processor to the all-reduce, as a GPU would. A batch is two microbatches, one a replica, so
the all-reduce has one backward to hide behind; ``DDP`` is torch's DistributedDataParallel with the same model and link. The cost
model adds compute and all-reduce; what is measured lies between that sum and the larger of both.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.pair.network import Place, places  # noqa: E402 - the folder must be on the path first
from benchmarks.pair.processes import pipedream, run_plan, start  # noqa: E402

if TYPE_CHECKING:
    from planner.spec.plan import Plan

LAYERS, FORWARD_MS, BACKWARD_MS = 8, 10.0, 20.0
RATES = {"1gbit": "1Gbit/s", "200mbit": "200Mbit/s", "100mbit": "100Mbit/s"}


def main() -> None:
    """Print a line for each amount of weights."""
    from planner.spec.files import read_document
    from planner.spec.plan import Plan

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rate", default="200mbit", choices=RATES)
    parser.add_argument("--weights", default="1,3,5", help="MB")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    print(f"milliseconds per batch at {arguments.rate}, medians of {arguments.repeats} alternating runs")
    print(f"{'weights':>10} {'compute':>8} {'all-reduce':>10} {'larger':>8} {'sum':>8} {'measured':>9} {'waited':>8} {'DDP':>8}")
    with tempfile.TemporaryDirectory() as scratch, places(arguments.rate) as where:
        for megabytes in map(float, arguments.weights.split(",")):
            folder = Path(scratch) / f"{megabytes}"
            folder.mkdir()
            pipedream("profile", ROOT / "benchmarks" / "napping.py", "--set", f"layers={LAYERS}", "--set", f"forward_ms={FORWARD_MS}",
                      "--set", f"backward_ms={BACKWARD_MS}", "--set", f"weights_bytes={int(megabytes * 1e6)}", "--threads", 2,
                      "--repeats", 2, "-o", folder / "profile.json")
            pipedream("plan", folder / "profile.json", "--cluster", "2x1", "--intra-bandwidth", "100GB/s", "--inter-bandwidth",
                      RATES[arguments.rate], "--stages", 1, "--policy", "flush", "--batch-microbatches", 2, "-o", folder / "plan.json")
            plan = read_document(Plan, folder / "plan.json")
            if plan.replicas != (2,):
                raise SystemExit(f"{megabytes:g} MB: the plan has {plan.replicas} replicas; give less weights")
            compare(plan, where, folder, arguments.repeats, arguments.steps, megabytes)


def compare(plan: Plan, where: tuple[Place, Place], folder: Path, repeats: int, steps: int, megabytes: float) -> None:
    """Ours and DDP in turn."""
    times: dict[str, list[float]] = defaultdict(list)
    peer = ("benchmarks.pair.parallel", LAYERS, FORWARD_MS, BACKWARD_MS, int(megabytes * 1e6), steps)
    for repeat in range(repeats):
        both = run_plan(plan, where, folder / f"run{repeat}", steps)
        means = [{part: one["totals_ns"][part] / one["counts"][part] / 1e6 for part in one["counts"]} for one in both]
        times["measured"].append(both[0]["intervals_ns"] / both[0]["intervals"] / 1e6)
        times["compute"].append(sum(means[0][part] for part in ("forward", "backward", "update")))
        times["waited"].append(min(mean["allreduce"] for mean in means))
        for text in start(where, *peer)[:1]:
            alone_ms, ddp_ms = map(float, text.split(","))
            times["alone"].append(alone_ms)
            times["DDP"].append(ddp_ms)
    middle = {name: statistics.median(laps) for name, laps in times.items()}
    print(f"{megabytes:7g} MB {middle['compute']:8.1f} {middle['alone']:10.1f} {max(middle['compute'], middle['alone']):8.1f} "
          f"{middle['compute'] + middle['alone']:8.1f} {middle['measured']:9.1f} {middle['waited']:8.1f} {middle['DDP']:8.1f}", flush=True)


if __name__ == "__main__":
    main()
