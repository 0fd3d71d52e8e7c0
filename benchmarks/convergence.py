"""Validation loss against samples seen: every weight policy beside a plain loop in one process, over several seeds.

    python benchmarks/convergence.py [--seeds N] [--only TEXT] [--write]

All train the same microbatches in the same order and update after as many of them; they differ in the weights that a gradient
is of. Four stages, so that the oldest weights are three batches old. ``--write`` makes docs/convergence.md and its plots.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

POLICIES = ("stash", "vertical", "2bw", "flush", "latest")
STAGES, BATCH = 4, 4
EVALUATIONS = 8
Curve = tuple[tuple[int, float], ...]  # samples seen, validation loss


@dataclass(frozen=True)
class Case:
    """A job, its settings, and how many updates it trains."""

    job: str
    settings: tuple[str, ...]
    updates: int

    @property
    def every(self) -> int:
        return self.updates // EVALUATIONS


CASES = (
    Case("bytes_gpt", ("layers=4", "width=128", "context=64", "learning_rate=1e-3"), 400),
    Case("digits_cnn", ("dropout=0", "learning_rate=1e-3", "microbatch_size=16"), 320),
)


def pipedream(*words: str) -> None:
    """Run the command; its messages are shown only if it fails."""
    done = subprocess.run([sys.executable, "-m", "pdcli", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"pipedream {' '.join(words)}\n{done.stderr}")


def pipeline_curve(case: Case, policy: str, seed: int, folder: Path) -> Curve:
    """What ``pipedream train`` measures."""
    from launcher.supervision.progress import read_metrics

    profile, plan, run = folder / f"{case.job}.json", folder / f"{case.job}-{policy}.json", folder / f"{case.job}-{policy}-{seed}"
    if not profile.exists():
        settings = [word for setting in case.settings for word in ("--set", setting)]
        pipedream("profile", f"examples/{case.job}.py", *settings, "--threads", "1", "-o", str(profile))
    if not plan.exists():
        pipedream("plan", str(profile), "--cluster", str(STAGES), "--intra-bandwidth", "10GB/s", "--stages", str(STAGES),
                  "--max-replicas", "1", "--policy", policy, "--batch-microbatches", str(BATCH), "-o", str(plan))
    pipedream("train", str(plan), "--steps", str(case.updates), "--evaluate-every", str(case.every), "--seed", str(seed), "--threads", "1",
              "--oversubscribe", "--run-dir", str(run))
    lines = [line for line in read_metrics(run / "metrics.jsonl") if "evaluation" in line]
    samples = {line["update"]: line["samples"] for line in read_metrics(run / "metrics.jsonl") if "samples" in line}
    return tuple((samples[line["update"]], line["evaluation"]["loss"]) for line in lines)


def plain_curve(case: Case, seed: int) -> Curve:
    """An ordinary loop over the same samples from the same weights."""
    import torch
    from plain import evaluate
    from torch.utils.data import DataLoader

    from launcher.data.microbatches import MicrobatchSource
    from launcher.load import load_job
    from planner.spec.profile import JobReference

    torch.set_num_threads(1)
    settings = dict(setting.split("=") for setting in case.settings)
    job = load_job(JobReference(str(ROOT / "examples" / f"{case.job}.py"), settings), seed=seed)
    optimizer = job.optimizer(job.model.parameters())
    order = MicrobatchSource(job.train_data, job.microbatch_size, True, seed)
    microbatches = iter(DataLoader(job.train_data, batch_sampler=[order.samples(m) for m in range(case.updates * BATCH)]))  # type: ignore[arg-type, var-annotated]
    found = []
    for update in range(1, case.updates + 1):
        job.model.train()
        optimizer.zero_grad()
        for inputs, targets in islice(microbatches, BATCH):
            assert job.loss is not None
            (job.loss(job.model(inputs), targets) / BATCH).backward()
        optimizer.step()
        if update % case.every == 0:
            found.append((update * BATCH * job.microbatch_size, evaluate(job)["loss"]))
    return tuple(found)


def curves(case: Case, seeds: int, only: str) -> Iterator[tuple[str, list[Curve]]]:
    """Of each way to train, one for each seed."""
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("plain", *POLICIES):
            if only in f"{case.job} {name}":
                yield name, [plain_curve(case, seed) if name == "plain" else pipeline_curve(case, name, seed, Path(scratch))
                             for seed in range(seeds)]


def row(name: str, found: list[Curve]) -> str:
    """The last loss of every seed, their mean, and their spread."""
    last = [curve[-1][1] for curve in found]
    spread = f"{statistics.stdev(last):.4f}" if len(last) > 1 else "-"
    return f"| {name} | {' | '.join(f'{loss:.4f}' for loss in last)} | {statistics.mean(last):.4f} | {spread} |"


def mean_curve(found: list[Curve]) -> Curve:
    """The mean over the seeds at each number of samples."""
    return tuple((points[0][0], statistics.mean(loss for _, loss in points)) for points in zip(*found, strict=True))


def main() -> None:
    """Print the tables, and write the document if asked to."""
    from planner.plot import Point, Series, line_plot

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="rows whose job and name contain this")
    parser.add_argument("--write", action="store_true", help="make docs/convergence.md and its plots")
    arguments = parser.parse_args()
    sections = []
    for case in CASES:
        heading = f"| {case.job} | {' | '.join(f'seed {seed}' for seed in range(arguments.seeds))} | mean | deviation |"
        lines, series = [heading, "|---" * (arguments.seeds + 3) + "|"], []
        print("\n".join(lines), flush=True)
        for name, found in curves(case, arguments.seeds, arguments.only):
            lines.append(row(name, found))
            print(lines[-1], flush=True)
            series.append(Series(name, tuple(Point(samples, loss) for samples, loss in mean_curve(found))))
        if arguments.write:
            plot = ROOT / "docs" / f"convergence-{case.job}.svg"
            plot.write_text(line_plot(f"{case.job}: mean of {arguments.seeds} seeds", "samples seen", "validation loss", series))
            about = f"`examples/{case.job}.py` with {', '.join(case.settings)}; {case.updates} updates."
            picture = f"![Validation loss against samples seen]({plot.name})"
            sections.append("\n".join([f"## {case.job}", "", about, "", picture, "", *lines]))
    if arguments.write:
        (ROOT / "docs" / "convergence.md").write_text(TEXT.format(stages=STAGES, batch=BATCH, seeds=arguments.seeds,
                                                                  sections="\n\n".join(sections)))


TEXT = """# What stale weights cost

Made by `make bench-convergence`. Validation loss after training on the same samples in the same order from the same weights:
{stages} stages of one worker each, an update after every {batch} microbatches, {seeds} seeds, and a plain loop in one process with the
same batches beside them. [schedule.md](schedule.md) says of which weights each policy's gradient is. `latest` is there to
show what happens without stashing: its backward uses other weights than its forward did.

{sections}
"""

if __name__ == "__main__":
    main()
