"""Autocast, captured and cut, against the uncut model under ``torch.autocast``: the same bits."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import Tensor, nn

from launcher.data.microbatches import MicrobatchSource
from launcher.graph.capture import Captured, capture_training
from launcher.graph.contexts import within
from launcher.graph.split import split
from launcher.graph.step import Step, layout_of
from launcher.job import Job
from launcher.precision import half_type, scaling_of
from planner.spec.errors import BadInput
from tests.launcher.stages import run_stages
from tests.launcher.test_split import cut, without_dropout
from tests.launcher.zoo import ZOO, vector_job

# torch's own LSTM: none in fp16 on a CPU, and in bf16 its rounding depends on how a tensor lies in memory
PLAIN = sorted(set(ZOO) - {"seq2seq"})


def assert_equals_the_uncut_model(job: Job, stages: tuple[int, ...] = (1, 3, 1000)) -> Captured:
    captured = capture_training(job)
    data = MicrobatchSource(job.train_data, job.microbatch_size, shuffle=False).read(0)
    plain = copy.deepcopy(job)
    step = Step(plain, layout_of(plain, plain.train_data[0]), evaluation=False).train()
    with torch.autocast("cpu", dtype=half_type(job.autocast, "autocast"), cache_enabled=False):
        loss = step(*(tensor.clone() for tensor in data))[0]
    loss.backward()
    for count in stages:
        state = {name: value.detach().clone() for name, value in job.model.state_dict(keep_vars=True).items()}
        results, gradients = run_stages(split(captured, cut(captured, count)), state, data)
        assert torch.equal(results[0], loss.detach()) and results[0].dtype == loss.dtype
        for name, parameter in plain.model.named_parameters():
            assert (parameter.grad is None) == (name not in gradients)
            if parameter.grad is not None and len(captured.tied.get(name, "1")) == 1:
                assert torch.equal(gradients[name], parameter.grad), name
            elif parameter.grad is not None:  # the sum over its uses is taken in another order
                torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-6, atol=1e-7)
    return captured


def within_autocast(captured: Captured) -> list[str]:
    return [str(node.args[1]) for node in captured.module.graph.nodes
            if node.target is within and any(context[0] == "autocast" for context in node.args[0])]  # type: ignore[union-attr]


@pytest.mark.parametrize("autocast", ["bf16", torch.float16])
@pytest.mark.parametrize("name", PLAIN)
def test_cut_model_equals_the_uncut_one(name: str, autocast: str | torch.dtype) -> None:
    torch.manual_seed(3)
    job = dataclasses.replace(without_dropout(ZOO[name]()), autocast=autocast)
    captured = assert_equals_the_uncut_model(job)
    assert captured.fingerprint != capture_training(dataclasses.replace(job, autocast=None)).fingerprint
    assert half_type(autocast, "autocast") in {value.dtype for value in captured.values.values()}
    if name != "writes":
        assert within_autocast(captured) == []


class _Hard(nn.Module):
    """An operation that casts inside, a region without gradients and one without autocast, a type read in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.no_grad():
            scale = self.b(x).abs().mean() + 1
        with torch.autocast("cpu", enabled=False):
            exact = self.b(h.float())
        mixed = torch.einsum("bi,bi->bi", exact, h / scale) * torch.finfo(h.dtype).eps
        return self.c(mixed + exact)


def test_regions_inside_keep_their_meaning() -> None:
    captured = assert_equals_the_uncut_model(dataclasses.replace(vector_job(_Hard()), autocast="bf16"))
    assert set(within_autocast(captured)) <= {"aten.einsum.default"}


def test_weights_stay_as_they_are_and_the_loss_is_scaled_in_fp16_only() -> None:
    job = dataclasses.replace(ZOO["mlp"](), autocast="fp16")
    assert {value.dtype for value in job.model.parameters()} == {torch.float32}
    assert scaling_of(job) is not None
    assert scaling_of(dataclasses.replace(job, autocast="bf16")) is None


@pytest.mark.parametrize("value", ["fp8", torch.float32, 16])
def test_what_is_no_half_type_is_refused(value: object) -> None:
    with pytest.raises(BadInput, match="autocast is"):
        half_type(value, "autocast")  # type: ignore[arg-type]
