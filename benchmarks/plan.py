"""Plans for published models, beside what others found: cost under the same cost model, ratio, seconds, status.

    python benchmarks/plan.py [--repeats N] [--only TEXT]

Each plan is made by a whole ``pipedream plan`` command, from the prompt to its answer, and the median of
``--repeats`` is shown. Published inputs are looked for in PIPEDREAM_DATA, or in ../shared/data; without
them only the models made here are planned.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

CLUSTERS = {"hier4x4": ["4x4", "12GB/s", "1.25GB/s"], "hier8x2": ["2x8", "100GB/s", "3.125GB/s"]}
MODELS = ("alexnet", "vgg16", "resnet18", "resnet50", "gnmt", "densenet121", "nasnetalarge")
OPTIMA = {  # exact, every link at 3.125 GB/s, the first stage's sending counted: 4, 16, 64 and 1,024 devices
    "alexnet": (0.0282460, 0.00628926, 0.00448782, 0.000388002),
    "vgg16": (0.173387, 0.0455248, 0.0116143, 0.00134218),
    "resnet50": (0.116426, 0.0328833, 0.00878886, 0.000559583),
    "gnmt": (0.025868, 0.010687, 0.00805306, 0.00104938),
}
PLACEMENTS = {"layer-bert24_training": 41.7458, "layer-resnet50_training": 78.6318, "operator-bert_l-3_training": 65.3031}


class Result(NamedTuple):
    """One command's answer."""

    found: dict[str, Any]
    seconds: float
    peak_bytes: int


def run(arguments: list[str], repeats: int, timeout_s: float = 150) -> Result:
    """The JSON answer of ``pipedream ARGUMENTS`` and the median of its whole duration; an error where it takes too long."""
    seconds, peak, answer = [], 0, {}
    for _ in range(repeats):
        start = time.monotonic()
        code = "import resource, sys; from pdcli.main import main; code = main(sys.argv[1:]); sys.stdout.flush(); " \
               "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr); sys.exit(code)"
        try:
            done = subprocess.run([sys.executable, "-c", code, *arguments, "--json"], capture_output=True, text=True, timeout=timeout_s,
                                  cwd=ROOT)
        except subprocess.TimeoutExpired:
            return Result({"status": "error", "message": f"stopped after {timeout_s:g} s"}, timeout_s, peak)
        seconds.append(time.monotonic() - start)
        answer = json.loads(done.stdout)
        peak = max(peak, int(done.stderr.split()[-1]) * 1024)
    return Result(answer, statistics.median(seconds), peak)


def plan(profile: Path, cluster: list[str], options: list[str], repeats: int) -> Result:
    """A plan for the profile; ``cluster`` is a shorthand and its bandwidths, inside and between servers."""
    words = ["plan", str(profile), "--cluster", cluster[0], "--intra-bandwidth", cluster[1]]
    words += ["--inter-bandwidth", cluster[2]] if len(cluster) > 2 else []
    return run([*words, *options, "-o", str(profile.with_suffix(".plan"))], repeats)


def status(found: dict[str, Any]) -> str:
    """``optimal``, or how far from the bound, or what went wrong."""
    if found["status"] != "ok":
        return str(found["message"])
    solver = found["solver"]
    return "optimal" if solver["status"] == "optimal" else f"within {solver['gap']:.2%} of the bound"


def print_table(title: str, headings: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> None:
    """Rows as they come, in columns."""
    widths = (14, 16, 14, 14, 9, 9, 30)
    print(f"\n{title}\n" + " ".join(heading.ljust(width) for heading, width in zip(headings, widths, strict=False)), flush=True)
    for row in rows:
        print(" ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip(), flush=True)


def against_the_original(profiles: dict[str, Path], reference: Path, only: str, repeats: int) -> Iterator[tuple[str, ...]]:
    """Every row of the reference that the cost model can say something about."""
    for row in json.loads(reference.read_text())["runs"]:
        name, (kind, _, variant) = row["profile"], row["cluster"].partition("_")
        if name not in profiles or "mem" in variant or variant == "noact" or only not in f"{name} {row['cluster']}":
            continue
        cluster = CLUSTERS.get(kind) or [kind.removeprefix("flat"), "1GB/s"]
        options = ["--cost-model", "pipedream-2019", *(["--max-replicas", "1"] if variant == "straight" else [])]
        result = plan(profiles[name], cluster, options, repeats)
        theirs_s, ours_s = row["time_per_microbatch_s"], result.found["predicted"]["microbatch_us"] / 1e6
        yield (name, row["cluster"], f"{theirs_s:.9f}" if theirs_s else "timed out", f"{ours_s:.9f}",
               f"{ours_s / theirs_s:.6f}" if theirs_s else "-", f"{result.seconds:.2f}", status(result.found))


def exact_optima(profiles: dict[str, Path], only: str) -> Iterator[tuple[str, ...]]:
    """The optima of the model in which the first stage pays for the cut after it too; solved in this process."""
    from planner.model.graph import chain_of
    from planner.published.pipedream2019.solve import Level, best_plan
    from planner.published.pipedream2019.stages import model_of
    from planner.spec.files import read_document
    from planner.spec.profile import Profile

    for name, optima in OPTIMA.items():
        if name in profiles and only in name:
            document = read_document(Profile, profiles[name])
            for devices, optimum_s in zip((4, 16, 64, 1024), optima, strict=True):
                start = time.monotonic()
                answer = best_plan(model_of(document, chain_of(document).states), [Level(devices, 3.125e9, 1)], first_pays=True)
                seconds, proven = time.monotonic() - start, answer.bound_us >= answer.time_us * (1 - 1e-8)
                ours_s = answer.time_us / 1e6
                yield (name, f"{devices} devices", f"{optimum_s:.6g}", f"{ours_s:.9f}", f"{ours_s / optimum_s:.6f}", f"{seconds:.2f}",
                       "optimal" if proven else "not proven")


def placements(folder: Path, only: str) -> Iterator[tuple[str, ...]]:
    """The inputs of the dnn-partitioning paper; solved in this process."""
    from planner.imports.dnn_partitioning import read_dnn_partitioning
    from planner.published.dnn_partitioning import place

    for name, optimum in PLACEMENTS.items():
        if only in name:
            start = time.monotonic()
            found = place(read_dnn_partitioning(folder / f"{name}.json"))
            used = f"{len(found.accelerators)} accelerators, {len(found.cpus)} CPUs"
            proven = found.bound >= found.largest_load * (1 - 1e-8)
            yield (name[:13], used[:16], f"{optimum:.4f}", f"{found.largest_load:.4f}", f"{found.largest_load / optimum:.6f}",
                   f"{time.monotonic() - start:.2f}", "optimal" if proven else "not proven")


def measured_model(profiles: dict[str, Path], only: str, repeats: int) -> Iterator[tuple[str, ...]]:
    """Published profiles under the default cost model, as an engineer would plan them."""
    for name, path in profiles.items():
        for cluster in (["4", "1GB/s"], ["8", "1GB/s"], ["16", "1GB/s"], CLUSTERS["hier4x4"], CLUSTERS["hier8x2"]):
            if only in f"{name} {cluster[0]}":
                yield _plan_row(name, path, cluster, [], repeats)


def made_models(folder: Path, only: str, repeats: int) -> Iterator[tuple[str, ...]]:
    """Chains of unequal layers, with the time that planning them may take."""
    for title, layers, cluster, options in (
        ("40 layers", 40, ["16", "10GB/s"], []),
        ("1000 layers", 1000, ["1024", "10GB/s"], []),
        ("1000 layers", 1000, ["128x8", "100GB/s", "10GB/s"], ["--memory", "16GB"]),
        ("100 layers", 100, [str(folder / "unequal.toml")], []),
    ):
        if only in title:
            path = folder / f"chain{layers}.json"
            yield _plan_row(title, path, cluster, options, repeats)


def _plan_row(name: str, path: Path, cluster: list[str], options: list[str], repeats: int) -> tuple[str, ...]:
    words = ["plan", str(path), "--cluster", cluster[0], *options, "-o", str(path.with_suffix(".plan"))]
    words += ["--intra-bandwidth", cluster[1]] if len(cluster) > 1 else []
    words += ["--inter-bandwidth", cluster[2]] if len(cluster) > 2 else []
    result = run(words, repeats)
    ours = f"{result.found['predicted']['microbatch_us'] / 1e6:.9f}" if result.found["status"] == "ok" else "-"
    return (name, Path(cluster[0]).stem, "", ours, f"{result.peak_bytes / 1e6:.0f} MB", f"{result.seconds:.2f}", status(result.found))


def write_made(folder: Path) -> None:
    """Profiles of unequal layers, the same every time, and a cluster of unequal servers."""
    import random

    from planner.spec.files import write_document
    from planner.spec.profile import Device, Layer, Profile, Tensor

    device = Device("cuda", "device", 1, 1, 16 * 10**9, 1e10, 0.0)
    for count in (40, 100, 1000):
        rng = random.Random(count)
        layers = tuple(
            Layer(f"layer{i}", forward := rng.uniform(100, 5000), 2 * forward, 0.0, 0.0, rng.uniform(1, 50), 5.0,
                  rng.randrange(10**5, 10**7), 0, rng.randrange(10**5, 10**7), rng.randrange(10**5, 10**8), 10**6, ())
            for i in range(count))
        tensors = tuple(Tensor(f"x{i}", i, (i + 1,), size := rng.randrange(10**5, 10**7), size) for i in range(count - 1))
        model = Profile("chain", None, "made", f"chain{count}", device, 8, True, None, layers, tensors, ())
        write_document(model, folder / f"chain{count}.json")
    kinds = '[[device_types]]\nname = "fast"\nspeed = 1.0\n\n[[device_types]]\nname = "slow"\nspeed = 0.6\n\n'
    servers = (("a", 8, "fast"), ("b", 4, "fast"), ("c", 4, "slow"), ("d", 2, "slow"))
    (folder / "unequal.toml").write_text(kinds + "".join(
        f'[[nodes]]\nname = "{name}"\nbandwidth = "3 GB/s"\n\n[[nodes.children]]\nname = "device"\ncount = {count}\ndevice = "{kind}"\n'
        'bandwidth = "20 GB/s"\n\n' for name, count, kind in servers))


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--skip-measured", action="store_true", help="leave out the default cost model")
    arguments = parser.parse_args()
    data = Path(os.environ.get("PIPEDREAM_DATA") or ROOT.parent / "shared" / "data")
    with tempfile.TemporaryDirectory() as scratch:
        folder, profiles = Path(scratch), {}
        if data.is_dir():
            for name in MODELS:
                profiles[name] = folder / f"{name}.json"
                source = str(data / "pipedream" / f"{name}.txt")
                run(["profile", "import", source, "--from", "pipedream-graph", "-o", str(profiles[name])], 1)
            print_table("The original's cost model (seconds per microbatch), beside what its program returned",
                        ("model", "cluster", "original", "ours", "ratio", "seconds", "status"),
                        against_the_original(profiles, data / "pipedream" / "reference.json", arguments.only, arguments.repeats))
            print_table("Exact optima with every link at 3.125 GB/s, the first stage's sending counted",
                        ("model", "cluster", "optimum", "ours", "ratio", "seconds", "status"), exact_optima(profiles, arguments.only))
            print_table("The dnn-partitioning objective (largest load), beside the published optimum",
                        ("input", "used", "published", "ours", "ratio", "seconds", "status"),
                        placements(data / "dnn-partitioning", arguments.only))
        else:
            print("published inputs are absent: set PIPEDREAM_DATA to plan them too")
        if not arguments.skip_measured:
            write_made(folder)
            headings = ("model", "cluster", "", "ours", "memory", "seconds", "status")
            print_table("The default cost model (seconds per microbatch)", headings,
                        measured_model(profiles, arguments.only, arguments.repeats))
            print_table("Chains made here", headings, made_models(folder, arguments.only, arguments.repeats))


if __name__ == "__main__":
    main()
