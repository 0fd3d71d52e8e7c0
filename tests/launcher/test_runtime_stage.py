"""One stage's forward and backward at its borders: what is received, sent, passed on, unused, frozen, or a view."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from launcher.graph.program import StageProgram, Value
from launcher.runtime.stage import Stage
from launcher.runtime.weights import WeightVersions


def value(name: str, *, dtype: torch.dtype = torch.float64, grad: bool = True) -> Value:
    return Value(name, (3,), dtype, grad)


def make(function: Callable[..., tuple[torch.Tensor, ...]], parameters: Sequence[nn.Parameter], received: Sequence[Value],
         sent: Sequence[Value], buffers: Sequence[torch.Tensor] = (), batch: int = 1) -> Stage:
    module = torch.fx.symbolic_trace(function)
    names = tuple(f"p{index}" for index in range(len(parameters)))
    program = StageProgram(module, names, tuple(f"b{index}" for index in range(len(buffers))), tuple(received), (), tuple(sent),
                           () if sent else ("loss",))
    return Stage(program, WeightVersions(parameters), buffers, batch)


def doubles(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_a_tensor_passed_on_and_used_gets_both_gradients() -> None:
    weight = nn.Parameter(doubles(1, 2, 3))

    def function(w, x):
        return w * x, x

    stage = make(function, [weight], [value("x")], [value("y"), value("x")])
    y, passed = stage.forward(0, 0, [doubles(4, 5, 6)], [])
    assert torch.equal(y, doubles(4, 10, 18)) and torch.equal(passed, doubles(4, 5, 6))
    assert not y.requires_grad and not passed.requires_grad
    (gradient,) = stage.backward(0, [doubles(1, 1, 1), doubles(10, 20, 30)])
    assert torch.equal(gradient, doubles(1 + 10, 2 + 20, 3 + 30))
    assert torch.equal(weight.grad, doubles(4, 5, 6))
    assert stage.in_flight == 0


def test_a_tensor_only_passed_on_gets_its_gradient_back() -> None:
    def function(x, skip):
        return x * 2, skip

    stage = make(function, [], [value("x"), value("skip")], [value("y"), value("skip")])
    stage.forward(0, 0, [doubles(1, 1, 1), doubles(2, 2, 2)], [])
    gradients = stage.backward(0, [doubles(1, 2, 3), doubles(7, 8, 9)])
    assert [gradient.tolist() for gradient in gradients] == [[2, 4, 6], [7, 8, 9]]


def test_an_unused_tensor_gets_zeros_and_integers_get_nothing() -> None:
    def function(x, unused, index):
        return (x[index] * 2,)

    stage = make(function, [], [value("x"), value("unused"), value("index", dtype=torch.int64, grad=False)], [value("y")])
    stage.forward(0, 0, [doubles(1, 2, 3), doubles(4, 5, 6), torch.tensor([2, 0, 0])], [])
    gradients = stage.backward(0, [doubles(1, 1, 1)])
    assert [gradient.tolist() for gradient in gradients] == [[4, 0, 2], [0, 0, 0]]


def test_a_gradient_is_sent_contiguous() -> None:
    def function(x):
        return (x.sum().expand(3),)

    stage = make(function, [], [value("x")], [value("y")])
    (sent,) = stage.forward(0, 0, [doubles(1, 2, 3)], [])
    assert sent.is_contiguous()
    (gradient,) = stage.backward(0, [doubles(1, 2, 3)])
    assert gradient.is_contiguous() and gradient.tolist() == [6, 6, 6]


def test_the_loss_is_divided_by_the_batch() -> None:
    weight = nn.Parameter(doubles(1, 2, 3))

    def function(w, x):
        return ((w * x).sum(),)

    stage = make(function, [weight], [value("x")], [], batch=4)
    (loss,) = stage.forward(0, 0, [doubles(1, 1, 1)], [])
    assert loss.item() == 6
    (gradient,) = stage.backward(0, [])
    assert torch.equal(gradient, doubles(1, 2, 3) / 4)
    assert torch.equal(weight.grad, doubles(1, 1, 1) / 4)


@pytest.mark.parametrize("kind", ["weight", "buffer"])
def test_a_sent_view_of_a_weight_or_a_buffer_is_a_copy(kind: str) -> None:
    """The optimizer, or the next forward, writes to the original while the send is under way."""
    weight, buffer = nn.Parameter(doubles(1, 2, 3)), doubles(7, 8, 9)

    def function(w, b):
        return w.view(3) if kind == "weight" else b.view(3), w * 2

    stage = make(function, [weight], [], [value("view", grad=kind == "weight"), value("y")], [buffer])
    view, _ = stage.forward(0, 0, [], [])
    before = view.clone()
    with torch.no_grad():
        stage.weights.peek(0).leaves[0].data.zero_()
        buffer.zero_()
    assert torch.equal(view, before)


def test_a_frozen_stage_has_no_backward_and_sends_none() -> None:
    weight = nn.Parameter(doubles(1, 2, 3), requires_grad=False)

    def function(w, x):
        return (w * x,)

    stage = make(function, [weight], [value("x", grad=False)], [value("y", grad=False)])
    stage.forward(0, 0, [doubles(1, 1, 1)], [])
    assert stage.backward(0, []) == ()
    assert weight.grad is None and stage.in_flight == 0
    assert stage.weights.begin(0).in_flight == 1, "the version was released"


def test_a_sent_tensor_is_not_kept_for_the_backward() -> None:
    """Only what autograd itself saved stays: an addition saves nothing."""
    weight = nn.Parameter(doubles(1, 2, 3))

    def function(w, x):
        return (w + x,)

    stage = make(function, [weight], [value("x")], [value("y")])
    outputs = stage.forward(0, 0, [doubles(1, 1, 1)], [])
    storage = weakref.ref(outputs[0].untyped_storage())
    address = outputs[0].untyped_storage().data_ptr()
    del outputs
    assert storage() is None
    graph = stage._pending[0].graph
    assert graph is not None
    assert address not in {leaf.untyped_storage().data_ptr() for leaf in graph.leaves}
    assert not any(isinstance(root, torch.Tensor) for root in graph.roots)
    (gradient,) = stage.backward(0, [doubles(1, 2, 3)])
    assert torch.equal(gradient, doubles(1, 2, 3))


def test_microbatches_in_flight_keep_their_own_version() -> None:
    weight = nn.Parameter(doubles(1, 1, 1))

    def function(w, x):
        return ((w * w * x).sum(),)

    stage = make(function, [weight], [value("x")], [])
    stage.forward(0, 0, [doubles(1, 1, 1)], [])
    stage.weights.advance(lambda: weight.data.mul_(10), 1)
    stage.forward(1, 1, [doubles(1, 1, 1)], [])
    stage.backward(0, [])
    assert torch.equal(weight.grad, doubles(2, 2, 2)), "2w of version 0"
    weight.grad = None
    stage.backward(1, [])
    assert torch.equal(weight.grad, doubles(20, 20, 20)), "2w of version 1"
