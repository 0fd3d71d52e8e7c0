"""What a recomputing stage keeps between forward and backward, and what ``latest`` does with it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from launcher.graph.program import StageProgram, Value
from launcher.runtime.stage import Stage
from launcher.runtime.weights import WeightVersions
from planner.spec.schedule import Pipeline, default_in_flight
from tests.launcher.simulation import simulate
from tests.launcher.toy import LAYERS, OPTIMIZERS, data, initial, layers_of, setup_of, train_on_threads

SIZE, DEPTH = (16, 32), 3


class Saved:
    """Wraps every tensor that autograd saves; those alive are counted by storage."""

    def __init__(self) -> None:
        self._alive: weakref.WeakSet[_Holder] = weakref.WeakSet()
        self.most_bytes = 0

    def bytes(self) -> int:
        return sum({one.tensor.untyped_storage().data_ptr(): one.tensor.untyped_storage().nbytes() for one in self._alive}.values())

    def __enter__(self) -> None:
        def pack(tensor: torch.Tensor) -> _Holder:
            holder = _Holder(tensor.detach())  # a result that holds its own graph would never go
            self._alive.add(holder)
            self.most_bytes = max(self.most_bytes, self.bytes())
            return holder

        self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor)
        self._hooks.__enter__()

    def __exit__(self, *arguments: object) -> None:
        self._hooks.__exit__(*arguments)


class _Holder:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def stage_of_activations(recompute: bool) -> Stage:
    """Four tanh in a row: each saves its output, and the stage needs nothing but its input to make them again."""

    def function(scale: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for _ in range(4):
            x = torch.tanh(x)
        return (x + scale,)

    value = Value("x", SIZE, torch.float32, True)
    program = StageProgram(torch.fx.symbolic_trace(function), ("scale",), (), (value,), (), (value,), ())
    return Stage(program, WeightVersions([nn.Parameter(torch.ones(()))]), [], 1, recompute=recompute)


def microbatch_bytes() -> int:
    return 4 * SIZE[0] * SIZE[1]


def measure(recompute: bool) -> tuple[list[int], int, list[torch.Tensor]]:
    """Saved bytes alive after each of the forwards in flight, the most at any time, and the gradients."""
    stage, saved, alive, gradients = stage_of_activations(recompute), Saved(), [], []
    with saved:
        for microbatch in range(DEPTH):
            (sent,) = stage.forward(microbatch, 0, [torch.full(SIZE, 0.1 + microbatch)], [])
            del sent
            alive.append(saved.bytes())
        for microbatch in range(DEPTH):
            stage.recompute(microbatch)
            gradients += stage.backward(microbatch, [torch.ones(SIZE)])
    assert saved.bytes() == 0 and stage.in_flight == 0
    return alive, saved.most_bytes, gradients


def test_activations_of_one_microbatch_are_alive_instead_of_all_in_flight() -> None:
    alive, most, gradients = measure(recompute=False)
    per_microbatch = alive[0]
    assert per_microbatch >= 4 * microbatch_bytes(), "the four activations, at least"
    assert alive == [per_microbatch, 2 * per_microbatch, 3 * per_microbatch] and most == DEPTH * per_microbatch
    alive_again, most_again, gradients_again = measure(recompute=True)
    assert alive_again == [0, 0, 0], "a graph was kept"
    assert most_again == per_microbatch
    for one, other in zip(gradients, gradients_again, strict=True):
        assert torch.equal(one, other)


def test_the_input_is_kept_until_the_backward_and_the_result_is_not() -> None:
    stage = stage_of_activations(recompute=True)
    received = torch.full(SIZE, 0.5)
    kept = weakref.ref(received.untyped_storage())
    (sent,) = stage.forward(0, 0, [received], [])
    gone = weakref.ref(sent.untyped_storage())
    del received, sent
    assert gone() is None and kept() is not None
    stage.backward(0, [torch.ones(SIZE)])
    assert kept() is None


def test_a_stage_without_gradients_runs_once() -> None:
    runs = []

    def function(weight: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (weight * x,)

    module = torch.fx.symbolic_trace(function)
    module.register_forward_hook(lambda *arguments: runs.append(1))
    value = Value("x", SIZE, torch.float32, False)
    program = StageProgram(module, ("weight",), (), (value,), (), (value,), ())
    stage = Stage(program, WeightVersions([nn.Parameter(torch.ones(()), requires_grad=False)]), [], 1, recompute=True)
    stage.forward(0, 0, [torch.ones(SIZE)], [])
    stage.recompute(0)
    assert stage.backward(0, []) == () and len(runs) == 1


def segmented_loss(stages: int, recompute: Sequence[bool]) -> Callable[[Mapping[str, torch.Tensor], int], torch.Tensor]:
    """The uncut toy model, the layers of each recomputing stage under torch's own checkpoint."""

    def loss(parameters: Mapping[str, torch.Tensor], microbatch: int) -> torch.Tensor:
        x, target = data(microbatch, torch.float64)
        skip = x
        for own, again in zip(layers_of(stages), recompute, strict=True):
            def segment(x: torch.Tensor, skip: torch.Tensor, own: range = own) -> tuple[torch.Tensor, torch.Tensor]:
                for layer in own:
                    x = x + skip if layer == LAYERS - 1 else x
                    x = torch.tanh(nn.functional.linear(x, parameters[f"{layer}.weight"], parameters[f"{layer}.bias"]))
                    skip = x if layer == 0 else skip
                return x, skip

            x, skip = checkpoint(segment, x, skip, use_reentrant=False) if again else segment(x, skip)
        return nn.functional.mse_loss(x, target)

    return loss


@pytest.mark.parametrize(("replicas", "batch", "recompute"), [
    ((1, 1, 1), 1, (True, True, True)), ((1, 1, 1), 2, (True, False, False)), ((2, 1), 2, (True, False)),
    ((1, 2, 1), 2, (False, True, True)),
], ids=str)
@pytest.mark.parametrize("extra", [0, 1])
def test_without_stashing_the_forward_runs_again_with_the_weights_of_that_moment(
    replicas: tuple[int, ...], batch: int, recompute: tuple[bool, ...], extra: int
) -> None:
    pipeline = Pipeline(replicas, default_in_flight(replicas, extra), batch, 8)
    setup = setup_of(pipeline, "latest")
    expected, _ = simulate(initial(torch.float64), segmented_loss(len(replicas), recompute), setup, OPTIMIZERS["adamw"], 8)
    trained = train_on_threads(pipeline, torch.float64, OPTIMIZERS["adamw"], "latest", recompute)
    for (name, _), value in trained.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-14)
    without = train_on_threads(pipeline, torch.float64, OPTIMIZERS["adamw"], "latest")
    assert any((value - without[key]).abs().max() > 1e-9 for key, value in trained.items()), "recomputation made no difference"
