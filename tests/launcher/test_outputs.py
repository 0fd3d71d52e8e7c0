"""What a model returns, by name, and evaluation steps that return it; data without targets."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from launcher.graph.capture import capture_evaluation, capture_training
from launcher.graph.outputs import check_batched, named_outputs
from launcher.graph.program import Value
from launcher.graph.split import split
from launcher.job import Job
from launcher.supervision.outputs import OutputFiles, rows
from planner.spec.errors import BadInput

A, B = torch.ones(2, 3), torch.zeros(2)
Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Result:
    loss: torch.Tensor
    logits: torch.Tensor
    cache: Any = None


@pytest.mark.parametrize(("output", "names"), [
    (A, ["output"]), (torch.tensor(1.0), []), ((A, B), ["0", "1"]), ({"b": B, "a": [A, {"c": B}]}, ["b", "a.0", "a.1.c"]),
    (Result(torch.tensor(1.0), A), ["logits"]), ({"loss": B, "logits": A}, ["logits"]), (Pair(A, "text"), ["0"]), (None, []),
])
def test_outputs_have_names(output: Any, names: list[str]) -> None:
    assert list(named_outputs(output)) == names


def test_outputs_need_a_row_a_sample() -> None:
    good, bad = Value("good", (4, 2), torch.float32, False), Value("bad", (3, 4), torch.float32, False)
    check_batched((good,), 4)
    for outputs, words in [((), "no tensor but its loss"), ((good, bad), r"'bad' has shape \(3, 4\) for 4 samples")]:
        with pytest.raises(BadInput, match=words):
            check_batched(outputs, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_replicas_write_their_rows_of_one_file(tmp_path: Path, dtype: torch.dtype) -> None:
    outputs = (Value("output", (4, 3), dtype, False), Value("none", (4, 0), dtype, False))
    files = OutputFiles(tmp_path / "parts", outputs, 10)
    files.create()
    whole = (torch.arange(30).view(10, 3) % 7).to(dtype)
    for replica in range(2):
        mapped, _ = files.open()
        for microbatch in range(replica, 3, 2):
            mapped[rows((4, 4, 2), microbatch)] = whole[microbatch * 4:microbatch * 4 + 4]
    files.save(tmp_path / "saved.pt")
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    assert torch.equal(saved["output"], whole) and saved["none"].shape == (10, 0)
    with pytest.raises(BadInput, match="cannot write the outputs to"):
        files.save(tmp_path / "nowhere" / "saved.pt")
    dataclasses.replace(files, outputs=outputs[:1]).save(tmp_path / "one.pt")
    assert torch.equal(torch.load(tmp_path / "one.pt", weights_only=True), whole)
    files.remove()
    assert {path.name for path in tmp_path.iterdir()} == {"saved.pt", "one.pt"}


def test_outputs_that_the_disk_cannot_hold_are_refused_at_once(tmp_path: Path) -> None:
    huge = OutputFiles(tmp_path / "parts", (Value("output", (4, 10**6), torch.float64, False),), 10**9)
    with pytest.raises(BadInput, match=f"cannot make room for {8 * 10**15} bytes of outputs in {tmp_path}"):
        huge.create()
    assert not list(tmp_path.iterdir())


class OwnLoss(nn.Module):
    """As Hugging Face's models: a loss where there are labels."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        logits = self.head(torch.relu(self.body(x)))
        return {"loss": None if labels is None else nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.parametrize("labelled", [True, False])
def test_a_model_with_its_own_loss_returns_its_outputs_with_and_without_labels(labelled: bool) -> None:
    data = [{"x": torch.randn(4), "labels": torch.tensor(index % 3)} for index in range(4)]
    held_out = data if labelled else [{"x": sample["x"]} for sample in data]
    model = OwnLoss()
    job = Job(model=model, train_data=data, evaluation_data=held_out, microbatch_size=4,
              optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    layers = list(capture_training(job).layers)
    captured = capture_evaluation(job, 4, outputs=True)
    assert captured.results == (("loss",) if labelled else ()) and [output.name for output in captured.outputs] == ["logits"]
    state, passed = dict(model.named_parameters()), ()
    flat = [torch.stack([sample[key] for sample in held_out]) for key in sorted(held_out[0])]
    for program in split(captured, [layers[:1], layers[1:]]):
        passed = program.module(*(state[name] for name in program.parameters), *passed, *(flat[place] for place in program.inputs))
    expected = model(torch.stack([sample["x"] for sample in data]), torch.tensor([0, 1, 2, 0]))
    assert torch.equal(passed[-1], expected["logits"])
    if labelled:
        assert torch.equal(passed[0], expected["loss"])
