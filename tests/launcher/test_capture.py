"""What a capture holds: layers by name, ties, fingerprints, and refusals in the user's own terms."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from launcher.graph.capture import capture_evaluation, capture_training
from planner.spec.errors import BadInput
from tests.launcher.zoo import ZOO, Data, sgd, vector_job

ROOT = Path(__file__).parents[2]


def layers(name: str) -> list[str]:
    return list(capture_training(ZOO[name]()).layers)


def test_layers_have_the_names_of_the_modules() -> None:
    assert layers("mlp") == ["0", "1", "2", "3", "4", "loss"]
    block = ["ln1", "qkv", "proj", "ln2", "mlp.0", "mlp.1", "mlp.2", "mlp.3"]
    assert layers("gpt") == ["tokens", "positions", *(f"blocks.{i}.{name}" for i in range(2) for name in block), "head", "loss"]
    assert layers("repeated") == ["first", "act", "shared.0", "shared.1", "act#2", "shared.0#2", "shared.1#2", "act#3",
                                  "shared.0#3", "shared.1#3", "act#4", "last", "loss"]


def test_torch_attention_is_one_layer_of_its_own() -> None:
    assert [name for name in layers("attention") if "self_attn" in name] == ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn"]


def test_attention_takes_its_own_transposes_from_the_layer_before() -> None:
    captured = capture_training(ZOO["attention"]())
    assert [str(node.target) for node in captured.layers["embed"]] == ["aten.embedding.default"]


def test_what_layers_share_is_found_by_identity() -> None:
    tied = capture_training(ZOO["gpt_tied"]())
    assert tied.tied == {"tokens.weight": ("tokens", "head")}
    assert tied.aliases == {"head.weight": "tokens.weight"} and "head.weight" not in tied.parameters
    repeated = capture_training(ZOO["repeated"]()).tied
    assert repeated["shared.1.running_mean"] == ("shared.1", "shared.1#2", "shared.1#3") and "first.weight" not in repeated


def test_state_is_named_as_in_state_dict() -> None:
    for name, make in ZOO.items():
        job = make()
        captured = capture_training(job)
        trainable = {key for key, parameter in job.model.named_parameters() if parameter.requires_grad}
        assert set(captured.parameters) == trainable, name
        assert set(captured.buffers) <= set(job.model.state_dict()), name


def test_modes_and_weights_are_left_alone() -> None:
    job = ZOO["convolutional"]()
    job.model[1].eval()
    before = {key: value.clone() for key, value in job.model.state_dict().items()}
    torch.manual_seed(5)
    capture_training(job)
    capture_evaluation(job, 2)
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(1))
    assert job.model.training and not job.model[1].training
    assert all(torch.equal(before[key], value) for key, value in job.model.state_dict().items())


SCRIPT = """
import json, torch
from launcher.graph.capture import capture_training
from tests.launcher.zoo import ZOO
torch.manual_seed(11)
print(json.dumps({name: capture_training(ZOO[name]()).fingerprint for name in ("convolutional", "gpt_tied", "no_grad", "writes")}))
"""


def test_fingerprint_is_the_same_in_another_process() -> None:
    environment = os.environ | {"PYTHONHASHSEED": "77", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    output = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name, digest in json.loads(output).items():
        assert capture_training(ZOO[name]()).fingerprint == digest, name


class _Small(nn.Module):
    def __init__(self, width: int = 6, slope: float = 0.1, name: str = "a", scale: float = 1.0) -> None:
        super().__init__()
        self.add_module(name, nn.Linear(6, width))
        self.first, self.slope = name, slope
        self.register_buffer("scale", torch.tensor(scale), persistent=False)
        self.b = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.leaky_relu(self.get_submodule(self.first)(x), self.slope) * self.scale)


def test_fingerprint_tells_models_apart() -> None:
    jobs = [vector_job(_Small()), vector_job(_Small(width=5)), vector_job(_Small(slope=0.2)), vector_job(_Small(name="c")),
            vector_job(_Small(scale=2.0)), vector_job(_Small(), loss=F.l1_loss), vector_job(_Small().double(), loss=_double_loss)]
    digests = [capture_training(job).fingerprint for job in jobs]
    assert len(set(digests)) == len(digests)
    assert capture_training(vector_job(_Small())).fingerprint == digests[0]


def _double_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target.double())


class _Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)


class _Branch(_Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if h.sum() > 0:  # the user's line
            h = h * 2
        return self.b(h)


class _Item(_Base):
    def forward(self, x: Tensor) -> Tensor:
        count = int(x.abs().sum().item())  # the user's line
        return self.b(self.a(x)[:, : count % 6 + 1].sum(-1, keepdim=True).expand(-1, 6))


class _Numpy(_Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) + torch.from_numpy(x.numpy()))  # the user's line


class _Wrong(_Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).view(7, 5))  # the user's line


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _OwnBackward(_Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(_Straight.apply(self.a(x)))  # the user's line


class _Hooked(_Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h.register_hook(lambda gradient: gradient * 2)  # the user's line
        return self.b(h)


@pytest.mark.parametrize(("model", "words"), [
    (_Branch, "depends on the values of a tensor"), (_Item, "depends on the values of a tensor"), (_Numpy, "numpy"),
    (_Wrong, "fails on its own data with RuntimeError"), (_OwnBackward, "autograd function _Straight"), (_Hooked, "hook on a gradient"),
])
def test_refusals_show_the_users_line_and_the_reason(model: type[nn.Module], words: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BadInput) as caught:
        capture_training(vector_job(model()))
    message = caught.value.message
    number = int(message.split("test_capture.py:")[1].split(" ")[0])
    assert "the user's line" in Path(__file__).read_text().splitlines()[number - 1]
    assert words in message and caught.value.hint and "\n" not in message
    assert capfd.readouterr() == ("", "")


class _Clamped(_Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.a.weight.clamp_(-1, 1)
        return self.b(self.a(x))


class _Detached(_Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)).detach()


def test_steps_that_cannot_be_trained_so_are_refused() -> None:
    hooked = _Base()
    hooked.a.weight.register_hook(lambda gradient: gradient * 0)
    loss_with_weights = nn.Sequential(nn.Linear(3, 1))
    for job, words in [
        (vector_job(_Clamped()), "changes its parameter 'a.weight' in place"),
        (vector_job(_Detached()), "does not depend on any trainable parameter"),
        (vector_job(nn.Linear(6, 3), loss=lambda output, target: (output - target) ** 2), r"loss has shape \(4, 3\)"),
        (vector_job(nn.Linear(6, 3), loss=lambda output, target: 3.0), "loss is a float"),
        (vector_job(nn.Linear(6, 3), loss=None), "without a loss|fails on its own data"),
        (vector_job(hooked), "'a.weight' has a hook"),
        (vector_job(nn.Linear(6, 3), loss=_Weighted(loss_with_weights)), "the loss has a trainable parameter"),
    ]:
        with pytest.raises(BadInput, match=words) as caught:
            capture_training(job)
        assert caught.value.hint


class _Weighted(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.inner(output - target).square().mean()


def test_samples_that_are_not_pairs_are_explained() -> None:
    job = vector_job(nn.Linear(6, 3))
    triple = type(job)(job.model, Data(lambda g: (torch.zeros(6), torch.zeros(3), torch.zeros(1))), sgd, 2, loss=F.mse_loss)
    with pytest.raises(BadInput, match="tuple of 3, not"):
        capture_training(triple)


class _Picks(nn.Module):
    """A size that depends on the data: everything between the choice and its use must stay in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        chosen = (h.sum(-1) > 0).nonzero().squeeze(-1)
        h = h.index_add(0, chosen, self.b(h[chosen]))
        return self.c(h)


def test_values_of_unknown_size_never_cross_a_cut() -> None:
    captured = capture_training(vector_job(_Picks()))
    assert list(captured.layers) == ["a", "c", "loss"]
    assert all(all(isinstance(length, int) for length in value.shape) for value in captured.values.values())
