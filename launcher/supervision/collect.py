"""After the last update: the workers' parts become weights.pt, trace.json and summary.json."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from launcher.runtime.channel import Worker, workers
from launcher.supervision.progress import read_metrics
from launcher.supervision.recorder import Measurements
from launcher.supervision.rundir import RunDirectory, RunSettings
from planner.spec.files import write_document, write_text
from planner.spec.plan import Plan
from planner.spec.schedule import Pipeline
from planner.spec.summary import Evaluation, StageMeasurement, Summary
from planner.spec.trace import chrome_trace

__all__ = ["collect", "measurements", "write_trace"]


def collect(directory: RunDirectory, plan: Plan, settings: RunSettings, pipeline: Pipeline, model: nn.Module) -> Summary:
    """Write what the run leaves behind, and return its summary. ``model`` is the job's, and gets the weights."""
    measured = {worker: measurements(directory, worker) for worker in workers(pipeline.replicas)}
    _write_weights(directory, len(plan.stages), model)
    write_trace(directory, measured)
    summary = _summarise(directory, plan, settings, pipeline, measured)
    write_document(summary, directory.summary)
    shutil.rmtree(directory.parts, ignore_errors=True)
    return summary


def write_trace(directory: RunDirectory, measured: Mapping[Worker, Measurements]) -> None:
    """Every worker's spans on one clock."""
    origin_ns = min(one.start_ns for one in measured.values())
    spans = [span for worker, one in measured.items() for span in one.as_spans(worker, origin_ns)]
    write_text(directory.trace, json.dumps(chrome_trace(sorted(spans, key=lambda span: span.start_us))) + "\n")


def measurements(directory: RunDirectory, worker: Worker) -> Measurements:
    """What a worker handed over."""
    data = json.loads(directory.measurements(*worker).read_text(encoding="utf-8"))
    return Measurements(**(data | {"spans": tuple(tuple(span) for span in data["spans"])}))


def _write_weights(directory: RunDirectory, stages: int, model: nn.Module) -> None:
    """All stages' weights in one state dict of the model's own names, tied names included."""
    targets = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    with torch.no_grad():
        for stage in range(stages):
            for name, value in torch.load(directory.stage_weights(stage), weights_only=True).items():
                targets[name].copy_(value)
    temporary = directory.weights.with_suffix(".writing")
    torch.save(model.state_dict(), temporary)
    temporary.replace(directory.weights)


def _summarise(
    directory: RunDirectory, plan: Plan, settings: RunSettings, pipeline: Pipeline, measured: dict[Worker, Measurements]
) -> Summary:
    lines = read_metrics(directory.metrics)
    losses = [line["train_loss"] for line in lines if "train_loss" in line]
    tail = losses[-max(1, len(losses) // 10):]
    final = sum(tail) / len(tail) if tail and None not in tail else None
    last = measured[Worker(len(plan.stages) - 1, 0)]
    duration_s = (last.end_ns - last.start_ns) / 1e9
    if last.intervals:
        microbatch_us = last.intervals_ns / last.intervals / pipeline.batch_microbatches / 1e3
    else:
        microbatch_us = duration_s * 1e6 / pipeline.microbatches
    stages = []
    for stage, r in enumerate(pipeline.replicas):
        stages.append(_stage([measured[Worker(stage, replica)] for replica in range(r)], pipeline.batch_microbatches))
    return Summary(
        plan_digest=settings.plan_digest, seed=settings.seed, updates=pipeline.batches, microbatches=pipeline.microbatches,
        samples=pipeline.microbatches * plan.microbatch_size, duration_s=duration_s, microbatch_us=microbatch_us,
        samples_per_s=plan.microbatch_size / microbatch_us * 1e6, final_train_loss=final,
        evaluations=tuple(Evaluation(line["update"], line["evaluation"]) for line in lines if "evaluation" in line), stages=tuple(stages),
    )


def _stage(replicas: Sequence[Measurements], batch_microbatches: int) -> StageMeasurement:
    """Means over a stage's replicas. The last replica to come to an all-reduce waits for none: its time is the least."""

    def mean(category: str) -> float:
        return math.fsum(one.mean_us(category) for one in replicas) / len(replicas)

    forward_us, backward_us, update_us = mean("forward"), mean("backward") + mean("recompute"), mean("update")
    allreduce_us = min(one.mean_us("allreduce") for one in replicas)
    waited_ns = 0.0 + sum(one.totals_ns.get("wait", 0) for one in replicas)
    waited_ns += sum(max(0.0, one.mean_us("allreduce") - allreduce_us) * 1e3 * one.counts.get("allreduce", 0) for one in replicas)
    total_ns = sum(sum(one.totals_ns.values()) for one in replicas)
    return StageMeasurement(
        forward_us=forward_us, backward_us=backward_us, update_us=update_us, allreduce_us=allreduce_us,
        microbatch_us=(forward_us + backward_us) / len(replicas) + (update_us + allreduce_us) / batch_microbatches,
        idle_share=waited_ns / total_ns if total_ns else 0.0, peak_memory_bytes=max(one.peak_memory_bytes for one in replicas),
    )
