"""From a job to its profile: capture, then measure times, memory and the link between two workers."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch.fx import Node

from launcher import devices
from launcher.data.microbatches import length_of, training_source
from launcher.explain import explain
from launcher.graph.capture import Captured, capture_training
from launcher.job import Job
from launcher.load import load_job
from launcher.profiling.check import check_capture
from launcher.profiling.layered import LayeredStep, element_bytes
from launcher.profiling.links import measure_link
from launcher.profiling.measure import Times, measure_times
from launcher.profiling.memory import LayerMemory, measure_memory, storage_bytes
from planner.spec.errors import BadInput
from planner.spec.profile import AtSize, Device, JobReference, Layer, Profile, Tensor, TiedParameter

__all__ = ["edges_of", "profile_job"]

OnProgress = Callable[[str, int, int], None]


def profile_job(reference: JobReference, *, microbatch_sizes: Sequence[int] = (), repeats: int = 10, threads: int | None = None,
                seed: int = 0, command: str = "", on_progress: OnProgress | None = None) -> Profile:
    """Profile the job that ``reference`` names on this machine's device.

    Args:
        reference: The job.
        microbatch_sizes: Samples of a microbatch, measured one after the other; the job's own when empty.
        repeats: Measured steps.
        threads: Threads one CPU worker computes with; 1 when None.
        seed: For initial weights, data order and dropout masks.
        command: The command line, kept in the profile.
        on_progress: Called with (what is done now, done, total).

    Raises:
        BadInput: the job cannot be loaded, captured or run, or an argument is out of range.
    """
    report = on_progress or (lambda *_: None)
    if repeats < 1:
        raise BadInput(f"{repeats} repeats", hint="use 1 or more")
    device = devices.describe(threads=threads, link_bandwidth_bytes_per_s=1.0, link_latency_us=0.0)  # the link follows
    before = torch.get_num_threads()
    devices.set_threads(device.threads)
    try:
        loaded = load_job(reference, seed=seed)
        jobs = [_with_size(loaded, size) for size in microbatch_sizes] or [loaded]
        with explain("moving the model to the device"):
            loaded.model.to(devices.torch_device())
        captures = []
        for done, job in enumerate(jobs):
            report("capturing the model", done, len(jobs))
            captures.append(capture_training(job))
        report("capturing the model", len(jobs), len(jobs))
        report("measuring the link between two workers", 0, 1)  # starts processes: after everything that a bad job fails at
        bandwidth_bytes_per_s, latency_us = measure_link()
        device = dataclasses.replace(device, link_bandwidth_bytes_per_s=bandwidth_bytes_per_s, link_latency_us=latency_us)
        report("measuring the link between two workers", 1, 1)
        with contextlib.redirect_stdout(sys.stderr):
            measured = [_measure(job, captured, reference, device, repeats, seed, command, _of_size(report, job, len(jobs)))
                        for job, captured in zip(jobs, captures, strict=True)]
        return dataclasses.replace(measured[0], other_sizes=tuple(
            AtSize(one.microbatch_size, one.fingerprint, one.measured, one.layers, one.tensors) for one in measured[1:]))
    finally:
        devices.set_threads(before)


def _of_size(report: OnProgress, job: Job, sizes: int) -> OnProgress:
    """Say which microbatch size it is about, where there are several."""
    prefix = f"microbatches of {job.microbatch_size}: " if sizes > 1 else ""
    return lambda what, done, total: report(prefix + what, done, total)


def _with_size(job: Job, microbatch_size: int) -> Job:
    samples = length_of(job.train_data)
    if microbatch_size < 1 or (samples is not None and microbatch_size > samples):
        found = "an unknown number" if samples is None else samples
        raise BadInput(f"a microbatch of {microbatch_size} samples, and train_data has {found}",
                       hint="use 1 or more" if samples is None else f"use 1 to {samples}")
    return dataclasses.replace(job, microbatch_size=microbatch_size)


def _measure(job: Job, captured: Captured, reference: JobReference, device: Device, repeats: int, seed: int, command: str,
             report: OnProgress) -> Profile:
    place = devices.torch_device()
    with explain("the job's data"):
        data = [tensor.to(place) for tensor in training_source(job.train_data, job.microbatch_size, job.shuffle, seed).read(0)]
    state = job.model.state_dict(keep_vars=True)
    report("checking the captured graph against the model", 0, 1)
    with explain("the training step", None):
        check_capture(job, captured, state, data, seed=seed)
    report("checking the captured graph against the model", 1, 1)
    with explain("the training step", None):
        times = measure_times(job, captured, state, data, repeats=repeats, seed=seed,
                              on_repeat=lambda done, total: report(f"measuring {len(captured.layers)} layers, round", done, total))
    report("measuring memory", 0, 1)
    step = LayeredStep(captured, state, data)
    memory = measure_memory(step, (state[name] for name in captured.parameters))
    report("measuring memory", 1, 1)
    index = {name: position for position, name in enumerate(captured.layers)}
    return Profile(
        model=type(job.model).__name__,
        job=reference,
        command=command,
        fingerprint=captured.fingerprint,
        device=device,
        microbatch_size=job.microbatch_size,
        estimated=False,
        measured=times.whole,
        layers=tuple(_layers(captured, step, state, times, memory)),
        tensors=tuple(edges_of(captured)),
        tied=tuple(TiedParameter(name, _bytes([state[name]]) if name in captured.parameters else 0, tuple(index[layer] for layer in layers))
                   for name, layers in captured.tied.items()),
    )


def _layers(captured: Captured, step: LayeredStep, state: Mapping[str, torch.Tensor], times: Times,
            memory: list[LayerMemory]) -> Iterable[Layer]:
    """What several layers share (a tied weight) is counted at the first of them."""
    trainable = set(captured.parameters)
    for layer, timed, kept in zip(step.layers, times.layers, memory, strict=True):
        parameters = [state[name] for name in layer.owned if name in trainable]
        held = [value for parameter in parameters for value in times.optimizer.state.get(parameter, {}).values()
                if isinstance(value, torch.Tensor)]
        yield Layer(
            name=layer.name,
            **dataclasses.asdict(timed),
            parameter_bytes=_bytes(parameters),
            buffer_bytes=_bytes(state[name] for name in layer.owned if name not in trainable),
            optimizer_bytes=storage_bytes(held),
            saved_bytes=kept.saved_bytes,
            workspace_bytes=kept.workspace_bytes,
            reads=tuple(captured.inputs[position] for position in layer.program.inputs),
        )


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def edges_of(captured: Captured) -> Iterable[Tensor]:
    """The graph's edges: every value that one layer makes and another uses."""
    layer_of: dict[Node, int] = {node: index for index, members in enumerate(captured.layers.values()) for node in members}
    for node in captured.module.graph.nodes:
        if node not in layer_of:
            continue
        consumers = sorted({layer_of[user] for user in node.users if user in layer_of} - {layer_of[node]})
        if consumers:
            value = captured.values[node]
            size = element_bytes(value)
            yield Tensor(node.name, layer_of[node], tuple(consumers), size, size if value.requires_grad else 0)
