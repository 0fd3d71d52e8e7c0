"""A profile's counts against independent ones, and its times against one another (never against a clock)."""

from __future__ import annotations

import copy
import functools
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launcher.data.microbatches import MicrobatchSource
from launcher.graph.capture import capture_training
from launcher.graph.split import split
from launcher.graph.step import Step, layout_of
from launcher.job import Job
from launcher.profiling import links
from launcher.profiling.check import check_capture
from launcher.profiling.layered import LayeredStep
from launcher.profiling.memory import LayerMemory, measure_memory
from launcher.profiling.profile import edges_of, profile_job
from planner.spec.errors import BadInput, WorkerFailure
from planner.spec.files import read_document, write_document
from planner.spec.profile import JobReference, Profile
from tests.launcher.zoo import ZOO, vector_job

JOB = """
import torch
from torch import nn
from launcher import Job

def job(width: int = 32):
    model = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.BatchNorm1d(width), nn.Linear(width, 3, bias=False))
    data = [(torch.randn(6), torch.randn(3)) for _ in range(20)]
    return Job(model, data, lambda p: torch.optim.AdamW(p, lr=1e-3), 4, loss=nn.functional.mse_loss)
"""


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    path = tmp_path_factory.mktemp("job") / "small.py"
    path.write_text(JOB)
    seen: list[tuple[str, int, int]] = []
    result = profile_job(JobReference(str(path), {"width": 16}), microbatch_sizes=(5, 10), repeats=3, command="pipedream profile small.py",
                         on_progress=lambda *step: seen.append(step))
    for stage in {stage for stage, _, _ in seen}:
        done = [(at, total) for name, at, total in seen if name == stage]
        assert done == sorted(done) and done[-1][0] == done[-1][1]
    return result


def test_counts_of_a_small_model(profile: Profile, tmp_path: Path) -> None:
    assert [layer.name for layer in profile.layers] == ["0", "1", "2", "3", "loss"]
    assert profile.sizes == (5, 10) and profile.at(10).fingerprint != profile.fingerprint
    twice = [(layer.saved_bytes, profile.at(10).layers[index].saved_bytes) for index, layer in enumerate(profile.layers)]
    assert all(small <= large <= 2 * small for small, large in twice) and any(large > small for small, large in twice)
    assert profile.microbatch_size == 5 and profile.job is not None and profile.job.settings == {"width": 16}
    parameters = [(6 * 16 + 16) * 4, 0, 2 * 16 * 4, 16 * 3 * 4, 0]
    assert [layer.parameter_bytes for layer in profile.layers] == parameters
    assert [layer.buffer_bytes for layer in profile.layers] == [0, 0, 2 * 16 * 4 + 8, 0, 0]
    # AdamW: two moments as large as the parameter, and a float32 step per parameter tensor
    assert [layer.optimizer_bytes for layer in profile.layers] == [2 * p + 4 * n for p, n in zip(parameters, (2, 0, 2, 1, 0), strict=True)]
    # ReLU saves its result, which BatchNorm saves too; BatchNorm its batch statistics; Linear its input; the loss its input
    assert [layer.saved_bytes for layer in profile.layers] == [0, 5 * 16 * 4, 5 * 16 * 4 + 2 * 16 * 4, 5 * 3 * 4, 0]
    assert [layer.reads for layer in profile.layers] == [("inputs",), (), (), (), ("targets",)]
    assert [(t.source, t.consumers, t.forward_bytes, t.gradient_bytes) for t in profile.tensors] == [
        (0, (1,), 320, 320), (1, (2,), 320, 320), (2, (3,), 320, 320), (3, (4,), 60, 60)]
    path = tmp_path / "profile.json"
    write_document(profile, path)
    assert read_document(Profile, path) == profile


def test_times_add_up(profile: Profile) -> None:
    assert profile.measured is not None
    assert math.isclose(sum(layer.update_us for layer in profile.layers), profile.measured.update_us, rel_tol=1e-6)
    for layer in profile.layers:
        assert layer.forward_us > 0 and layer.forward_spread_us >= 0 and layer.backward_us > 0
        assert (layer.update_us > 0.02 * profile.measured.update_us) == (layer.parameter_bytes > 0)
    assert profile.device.link_bandwidth_bytes_per_s < 1e12 and profile.device.link_latency_us > 0


def test_bad_arguments_are_explained(tmp_path: Path) -> None:
    path = tmp_path / "small.py"
    path.write_text(JOB)
    for arguments, words in [({"microbatch_sizes": (21,)}, "21 samples, and train_data has 20"), ({"microbatch_sizes": (0,)}, "0 samples"),
                             ({"repeats": 0}, "0 repeats"), ({"threads": 10_000}, "10000 threads")]:
        with pytest.raises(BadInput, match=words) as caught:
            profile_job(JobReference(str(path), {}), **arguments)  # type: ignore[arg-type]
        assert caught.value.hint


def layered(job: Job) -> LayeredStep:
    captured = capture_training(job)
    data = MicrobatchSource(job.train_data, job.microbatch_size, shuffle=False).read(0)
    return LayeredStep(captured, job.model.state_dict(keep_vars=True), data)


@functools.cache
def memory(name: str) -> tuple[list[LayerMemory], int]:
    """What is measured by layer, and the bytes that autograd saves in the plain model."""
    torch.manual_seed(0)
    job = ZOO[name]()
    step = layered(job)
    return measure_memory(step, job.model.parameters()), eager_saved_bytes(job, step.data)


def eager_saved_bytes(job: Job, data: Any) -> int:
    known = {t.untyped_storage().data_ptr() for t in (*job.model.parameters(), *job.model.buffers(), *data)}
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.detach())
        return saved[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        Step(job, layout_of(job, job.train_data[0]), evaluation=False).train()(*data)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    return sum(size for pointer, size in storages.items() if pointer not in known)


@pytest.mark.parametrize("name", ["mlp", "residual", "gpt", "gpt_tied", "skips", "seq2seq"])
def test_saved_bytes_of_all_layers_are_those_of_the_plain_model(name: str) -> None:
    measured, expected = memory(name)
    # scalars that eager keeps as numbers, or a mask index, may differ by a few bytes
    assert sum(layer.saved_bytes for layer in measured) == pytest.approx(expected, rel=0.01, abs=128)
    assert expected > 0


class _Scratch(nn.Module):
    """A layer that needs far more than it returns or saves."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.no_grad():
            big = h.repeat(1, 20_000).abs().amax(1, keepdim=True)  # 4 * 120,000 floats, twice
        return self.b(h / (1 + big))


def test_workspace_is_what_a_layer_needs_only_while_it_runs() -> None:
    job = vector_job(_Scratch())
    step = layered(job)
    measured = dict(zip((layer.name for layer in step.layers), measure_memory(step, job.model.parameters()), strict=True))
    big = 4 * 120_000 * 4
    assert 1.99 * big <= measured["a"].workspace_bytes < 2.5 * big
    assert measured["b"].workspace_bytes < 10_000 and measured["a"].saved_bytes < 10_000


def test_edges_are_what_crosses_every_cut() -> None:


    for name in ("skips", "integers", "gpt"):
        captured = capture_training(ZOO[name]())
        names = list(captured.layers)
        edges = list(edges_of(captured))
        for cut in range(1, len(names)):
            before, _ = split(captured, [names[:cut], names[cut:]])
            sent = sum(math.prod(value.shape) * value.dtype.itemsize for value in before.sent)
            assert sent == sum(t.forward_bytes for t in edges if t.source < cut <= t.consumers[-1]), (name, cut)
            back = sum(math.prod(value.shape) * value.dtype.itemsize for value in before.sent if value.requires_grad)
            assert back == sum(t.gradient_bytes for t in edges if t.source < cut <= t.consumers[-1]), (name, cut)


@pytest.mark.parametrize("name", sorted(ZOO))
def test_layered_step_gives_the_gradients_of_the_whole_step(name: str) -> None:
    """What is timed is the real computation: one-layer programs, gradients summed at their makers."""
    torch.manual_seed(1)
    job = ZOO[name]()
    for module in job.model.modules():
        for field in ("p", "dropout"):
            if isinstance(getattr(module, field, None), float):
                setattr(module, field, 0.0)
    step = layered(job)
    step.data = [tensor.clone() for tensor in step.data]
    plain = copy.deepcopy(job)
    Step(plain, layout_of(plain, plain.train_data[0]), evaluation=False).train()(*(tensor.clone() for tensor in step.data))[0].backward()
    expected = {key: parameter.grad for key, parameter in plain.model.named_parameters()}
    calls: list[int] = []
    step.forward(lambda: calls.append(0))
    step.backward(lambda: calls.append(1))
    assert calls == [0] * 2 * len(step.layers) + [1] * 2 * len(step.layers)
    for key, parameter in job.model.named_parameters():
        if expected[key] is None:
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, expected[key], rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")


def test_tied_weights_are_counted_once() -> None:
    job = ZOO["gpt_tied"]()
    owned = [name for layer in layered(job).layers for name in layer.owned]
    assert owned.count("tokens.weight") == 1 and "head.weight" not in owned
    assert sorted(owned) == sorted(name for name, _ in job.model.named_parameters())


@pytest.mark.parametrize("name", sorted(ZOO))
def test_every_model_of_the_zoo_passes_the_check_with_its_dropout(name: str) -> None:
    job = ZOO[name]()
    before = {key: value.clone() for key, value in job.model.state_dict().items()}
    check(job)
    assert all(torch.equal(before[key], value) for key, value in job.model.state_dict().items())


def check(job: Job) -> None:
    data = MicrobatchSource(job.train_data, job.microbatch_size, shuffle=False).read(0)
    check_capture(job, capture_training(job), job.model.state_dict(keep_vars=True), data, seed=3)


class _TwoFaced(nn.Module):
    """Does something else while it is captured."""

    def __init__(self, detach: bool) -> None:
        super().__init__()
        self.a, self.b, self.detach = nn.Linear(6, 6), nn.Linear(6, 3), detach

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if torch.compiler.is_exporting():
            h = h.detach() if self.detach else h * 2
        return self.b(h)


def test_a_graph_that_differs_from_the_model_is_refused() -> None:
    with pytest.raises(BadInput, match="computes the loss") as caught:
        check(vector_job(_TwoFaced(detach=False)))
    assert caught.value.hint and caught.value.code == "capture_differs"
    with pytest.raises(BadInput, match=r"gives 'a.weight' a gradient of norm"):
        check(vector_job(_TwoFaced(detach=True)))


def test_a_second_process_that_ends_is_noticed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links.sys, "executable", "/bin/false")
    start = time.monotonic()
    with pytest.raises(WorkerFailure, match="exit code 1"):
        links.measure_link(30.0)
    assert time.monotonic() - start < 15
