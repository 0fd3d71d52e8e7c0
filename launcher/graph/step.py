"""Model and loss (and metrics) as one module of flat tensors: what is captured.

How a sample reaches the model: ``loss(model(inputs), targets)``, where a tuple of inputs is passed as
positional and a dict as keyword arguments if the model's ``forward`` takes them so, and whole if not.
Without a loss function the sample is what the model takes, and the model returns its loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from launcher.data.samples import SampleLayout, flatten_sample, sample_layout
from launcher.graph.outputs import named_outputs
from launcher.job import Job
from planner.spec.errors import BadInput

__all__ = ["Step", "layout_of", "without_targets"]


def without_targets(job: Job, sample: Any, trained: Sequence[str]) -> SampleLayout | None:
    """The layout of a sample that has only the inputs among ``trained``, training's data tensors; None when it has more or other ones."""
    alone = sample_layout(sample, pair=False)
    if job.loss is None:
        return alone if alone.names and set(alone.names) < set(trained) else None
    names = tuple("inputs" if name == "input" else f"inputs.{name}" for name in alone.names)
    wanted = tuple(name for name in trained if name == "inputs" or name.startswith("inputs."))
    return SampleLayout(names, alone.spec) if names == wanted else None


def layout_of(job: Job, sample: Any) -> SampleLayout:
    """The layout of one of the job's samples.

    Raises:
        BadInput: the job has a loss function but its samples are not pairs, or they hold no values.
    """
    pair = job.loss is not None
    if pair and not (isinstance(sample, tuple | list) and len(sample) == 2):
        size = f" of {len(sample)}" if hasattr(sample, "__len__") else ""
        raise BadInput(f"a sample of the data is a {type(sample).__name__}{size}, not (inputs, targets)",
                       hint="return (inputs, targets) for every index, or leave out Job(loss=...) for a model that returns its loss")
    if not flatten_sample(sample)[0]:
        raise BadInput("a sample of the data is empty", hint="return (inputs, targets) for every index")
    return sample_layout(sample, pair=pair)


class _Noted:
    """What an exported step found out by running; a plain attribute of the module would be put back by the export."""

    names: tuple[str, ...] = ()


class Step(nn.Module):
    """``forward(*tensors)`` returns the loss, in evaluation followed by the metrics in the job's order.

    With ``outputs`` what the model itself returns comes after them, and ``output_names`` says, once the step has run,
    how it is called; a sample that is not ``labelled`` (it has no targets) has outputs only.
    """

    def __init__(self, job: Job, layout: SampleLayout, *, evaluation: bool, outputs: bool = False, labelled: bool = True) -> None:
        super().__init__()
        self.model = job.model
        self.loss: Any = job.loss  # a module among them is registered and so captured with its buffers
        self.layout = layout
        self.metrics: dict[str, Any] = dict(job.metrics) if evaluation and labelled else {}
        self.labelled, self.outputs, self._noted = labelled, outputs, _Noted()
        self.results = ("loss", *self.metrics) if labelled else ()
        for index, metric in enumerate(self.metrics.values()):
            if isinstance(metric, nn.Module):
                self.add_module(f"metric_{index}", metric)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sample = self.layout.unflatten(tensors)
        if self.loss is None or not self.labelled:
            outputs = _call(self.model, sample)
            results: tuple[torch.Tensor, ...] = (_own_loss(outputs),) if self.labelled else ()
        else:
            inputs, targets = sample
            outputs = _call(self.model, inputs)
            loss = self.loss(outputs, targets)
            results = (_scalar(loss, "loss"), *(_scalar(metric(outputs, targets), name) for name, metric in self.metrics.items()))
        named = named_outputs(outputs) if self.outputs else {}
        self._noted.names = tuple(named)
        return (*results, *named.values())

    @property
    def output_names(self) -> tuple[str, ...]:
        return self._noted.names


def _call(model: nn.Module, inputs: Any) -> Any:
    signature = inspect.signature(model.forward)
    try:
        if isinstance(inputs, dict):
            signature.bind(**inputs)
            return model(**inputs)
        if isinstance(inputs, list):
            signature.bind(*inputs)
            return model(*inputs)
    except TypeError as error:
        if not _binding_failed(error):
            raise
    return model(inputs)


def _binding_failed(error: TypeError) -> bool:
    """Whether the error is ``bind``'s own: no frame of the model is in its traceback."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename == inspect.__file__


def _own_loss(output: Any) -> torch.Tensor:
    if isinstance(output, dict):
        output = output.get("loss", output)
    loss = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
    if loss is None and isinstance(output, tuple) and output and isinstance(output[0], torch.Tensor):
        loss = output[0]
    if not isinstance(loss, torch.Tensor):
        raise BadInput(f"the model returned {type(output).__name__} without a loss, and the job has no loss function",
                       hint="give Job(loss=...), or return the loss (for Hugging Face models: put labels into the data)")
    return _scalar(loss, "loss")


def _scalar(value: Any, name: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise BadInput(f"{name} is a {type(value).__name__}, not a tensor", hint="return a scalar tensor, without .item()")
    if value.numel() != 1:
        raise BadInput(f"{name} has shape {tuple(value.shape)}, not one number", hint="return the mean over the microbatch")
    return value if value.ndim == 0 else value.reshape(())
