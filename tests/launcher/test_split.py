"""Every model of the zoo, cut into 1, 2, 3 and n stages, must compute what the plain model computes."""

from __future__ import annotations

import copy
import functools
import itertools
import random

import networkx
import pytest
import torch

from launcher.data.microbatches import EvaluationSource, MicrobatchSource
from launcher.graph.capture import Captured, capture_evaluation, capture_training
from launcher.graph.randomness import keyed
from launcher.graph.split import split, tied_stages
from launcher.graph.step import Step, layout_of
from launcher.job import Job
from planner.spec.errors import Mismatch
from tests.launcher.stages import run_stages
from tests.launcher.zoo import ZOO

RANDOM = {"convolutional", "gpt", "seq2seq", "attention", "contexts", "branches", "towers", "inception"}
BRANCHING = ("branches", "towers", "inception", "residual", "seq2seq")


@functools.cache
def build(name: str, dropout: bool = True) -> Job:
    torch.manual_seed(3)
    return ZOO[name]() if dropout else without_dropout(ZOO[name]())


@functools.cache
def training(name: str, dropout: bool = True) -> Captured:
    return capture_training(build(name, dropout))


@functools.cache
def evaluation(name: str) -> Captured:
    return capture_evaluation(build(name), 2)


def updated_together(captured: Captured) -> list[tuple[str, ...]]:
    return [layers for name, layers in captured.tied.items() if name not in captured.parameters]


def cut(captured: Captured, count: int) -> list[list[str]]:
    """``count`` stages of about equally many layers; those that update one buffer are kept together (so maybe fewer stages)."""
    names = list(captured.layers)
    bounds = {len(names) * k // count for k in range(1, count)}
    for layers in updated_together(captured):
        first, last = names.index(layers[0]), names.index(layers[-1])
        bounds -= set(range(first + 1, last + 1))
    edges = [0, *sorted(bounds - {0}), len(names)]
    return [names[a:b] for a, b in itertools.pairwise(edges)]


def cut_anywhere(captured: Captured, seed: int) -> list[list[str]]:
    """Two to five stages of a random topological order, so that a stage may have layers of several branches and not those between."""
    draw = random.Random(seed)
    names = list(captured.layers)
    place = {node: name for name, members in captured.layers.items() for node in members}
    together = networkx.DiGraph()
    together.add_nodes_from(names)
    together.add_edges_from((place[source], place[node]) for node in place for source in node.all_input_nodes if source in place)
    for layers in updated_together(captured):
        together.add_edges_from([*itertools.pairwise(layers), *itertools.pairwise(reversed(layers))])
    graph = networkx.condensation(together)
    order = list(networkx.lexicographical_topological_sort(graph, key=lambda group: draw.random()))
    count = min(draw.randint(2, 5), len(order))
    edges = [0, *sorted(draw.sample(range(1, len(order)), count - 1)), len(order)]
    parts = [{name for group in order[a:b] for name in graph.nodes[group]["members"]} for a, b in itertools.pairwise(edges)]
    return [sorted(part, key=names.index) for part in parts]


def plain(job: Job, data: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Loss, gradients and buffers of the model itself, uncaptured."""
    job = copy.deepcopy(job)
    step = Step(job, layout_of(job, job.train_data[0]), evaluation=False).train()
    loss = step(*(tensor.clone() for tensor in data))[0]
    loss.backward()
    return (loss.detach(), {name: p.grad for name, p in job.model.named_parameters() if p.grad is not None},
            {name: b.clone() for name, b in job.model.named_buffers()})


def without_dropout(job: Job) -> Job:
    for module in job.model.modules():
        for field in ("p", "dropout"):
            if isinstance(getattr(module, field, None), float):
                setattr(module, field, 0.0)
    return job


@pytest.mark.parametrize("stages", [1, 2, 3, 1000])
@pytest.mark.parametrize("name", sorted(ZOO))
def test_cut_model_equals_plain_model(name: str, stages: int) -> None:
    captured = training(name, dropout=False)
    assert_equals_the_plain_model(name, cut(captured, stages))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", BRANCHING)
def test_model_cut_between_its_branches_equals_plain_model(name: str, seed: int) -> None:
    assert_equals_the_plain_model(name, cut_anywhere(training(name, dropout=False), seed))


def test_such_cuts_have_stages_with_gaps() -> None:
    for name in ("towers", "inception"):
        names = list(training(name).layers)
        stages = [stage for seed in range(8) for stage in cut_anywhere(training(name), seed)]
        assert sum(names.index(stage[-1]) - names.index(stage[0]) >= len(stage) for stage in stages) >= 4


def assert_equals_the_plain_model(name: str, stages: list[list[str]]) -> None:
    job = build(name, dropout=False)
    data = MicrobatchSource(job.train_data, job.microbatch_size, shuffle=False).read(0)
    loss, gradients, buffers = plain(job, data)
    captured = training(name, dropout=False)
    state = {key: value.detach().clone() for key, value in job.model.state_dict().items()}
    results, got = run_stages(split(captured, stages), state, [tensor.clone() for tensor in data])
    torch.testing.assert_close(results[0].detach(), loss, rtol=1e-6, atol=1e-7)
    assert set(got) == set(gradients)
    for key, expected in gradients.items():
        torch.testing.assert_close(got[key], expected, rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")
    for key, expected in buffers.items():
        if key in state:
            torch.testing.assert_close(state[key], expected, rtol=1e-6, atol=1e-7, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("stages", [2, 1000])
@pytest.mark.parametrize("name", sorted(RANDOM))
def test_random_masks_do_not_depend_on_the_cut(name: str, stages: int) -> None:
    job = build(name)
    captured = training(name)
    data = MicrobatchSource(job.train_data, job.microbatch_size, shuffle=False).read(0)
    state = {key: value.detach() for key, value in job.model.state_dict().items()}

    def run(count: int, seed: int, microbatch: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        with keyed(seed, microbatch):
            results, gradients = run_stages(split(captured, cut(captured, count)), {k: v.clone() for k, v in state.items()}, data)
        return results[0].detach(), gradients

    loss, gradients = run(1, 7, 5)
    torch.rand(9)  # what ran before must not matter
    again, same = run(stages, 7, 5)
    assert torch.equal(loss, again)
    for key, expected in gradients.items():
        torch.testing.assert_close(same[key], expected, rtol=1e-6, atol=1e-7)
    assert not torch.equal(loss, run(stages, 7, 6)[0])
    assert not torch.equal(loss, run(stages, 8, 5)[0])


@pytest.mark.parametrize("stages", [1, 3, 1000])
@pytest.mark.parametrize("name", sorted(ZOO))
def test_evaluation_is_cut_at_the_same_layers(name: str, stages: int) -> None:
    assert_evaluation_equals_the_plain_model(name, cut(training(name), stages))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", BRANCHING)
def test_evaluation_is_cut_between_the_same_branches(name: str, seed: int) -> None:
    assert_evaluation_equals_the_plain_model(name, cut_anywhere(training(name), seed))


def assert_evaluation_equals_the_plain_model(name: str, names: list[list[str]]) -> None:
    job = build(name)
    programs = split(evaluation(name), names)
    for program, trained in zip(programs, split(training(name), names), strict=True):
        assert set(program.parameters) <= set(trained.parameters)
        assert set(program.buffers) <= set(trained.buffers)
        assert not any(value.requires_grad for value in program.received)
    data = EvaluationSource(job.train_data, 2).read(1)
    state = {key: value.detach().clone() for key, value in job.model.state_dict().items()}
    with torch.no_grad():
        results, _ = run_stages(programs, state, [tensor.clone() for tensor in data])
        job = copy.deepcopy(job)
        step = Step(job, layout_of(job, job.train_data[0]), evaluation=True).eval()
        expected = step(*(tensor.clone() for tensor in data))
    assert programs[-1].results == ("loss", *job.metrics)
    for got, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", sorted(ZOO))
def test_layers_are_in_topological_order(name: str) -> None:
    captured = training(name)
    place = {node: index for index, members in enumerate(captured.layers.values()) for node in members}
    for node, index in place.items():
        assert all(place[source] <= index for source in node.all_input_nodes if source in place)
    assert len(captured.layers) == len({*captured.layers})


def test_wrong_stage_lists_are_explained() -> None:
    captured = training("mlp")
    names = list(captured.layers)
    for stages, words in [([names[:2], names[1:]], "is in stage 0 and in stage 1"), ([names, ["nothing"]], "not in the model"),
                          ([names[:-1]], "in no stage"), ([names, []], "has no layer"), ([names[2:], names[:2]], "later stage")]:
        with pytest.raises(Mismatch, match=words) as caught:
            split(captured, stages)
        assert caught.value.hint
    repeated = training("repeated")
    with pytest.raises(Mismatch, match=r"shared\.1\.\w+.* is updated in the forward"):
        split(repeated, [list(repeated.layers)[:5], list(repeated.layers)[5:]])


def test_every_stage_that_uses_a_tied_parameter_takes_it() -> None:
    tied = training("gpt_tied")
    programs = split(tied, [[name] for name in tied.layers])
    users = (list(tied.layers).index("tokens"), list(tied.layers).index("head"))
    assert tied_stages(programs) == {"tokens.weight": users}
    assert tied_stages(split(tied, [list(tied.layers)])) == {}


def test_data_is_read_where_it_is_used_and_never_shipped() -> None:
    captured = training("gpt")
    assert captured.inputs == ("inputs", "targets")
    first, *middle, last = split(captured, cut(captured, 4))
    assert (first.inputs, last.inputs) == ((0,), (1,))
    assert all(program.inputs == () for program in middle)
    assert all(value.dtype.is_floating_point for program in (*middle, last) for value in program.received)


def test_position_indices_are_free_even_when_cut_off_from_the_data() -> None:
    captured = training("gpt")
    names = list(captured.layers)
    programs = split(captured, [[name] for name in names])
    positions = programs[names.index("positions")]
    assert "arange" in positions.module.code and all(value.dtype.is_floating_point for value in positions.received)


