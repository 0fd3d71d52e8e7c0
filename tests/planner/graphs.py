"""Small layer graphs at random, and every pipeline of one by the definition: an oracle that knows nothing of cut states."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from hypothesis import strategies as st

from planner.spec.profile import Profile, Tensor
from tests.planner.instances import layer, profile


@st.composite
def graph_profiles(draw: st.DrawFn, *, most_layers: int = 6, least_layers: int = 1) -> Profile:
    """Layers with any edges at all: branches, several sources and sinks, skips, layers nobody feeds."""
    n = draw(st.integers(least_layers, most_layers))
    times = st.sampled_from([0.0, 1.0, 5.0, 100.0, 250.5])
    amount = st.sampled_from([0, 1, 500, 30_000, 1_000_000])
    layers = [
        layer(f"layer{i}", forward_us=draw(times), backward_us=draw(times), update_us=draw(times) / 3, copy_us=draw(times) / 5,
              parameter_bytes=draw(amount), optimizer_bytes=draw(amount), saved_bytes=draw(amount), workspace_bytes=draw(amount) // 10)
        for i in range(n)
    ]
    tensors = []
    for source in range(n - 1):
        consumers = draw(st.sets(st.integers(source + 1, n - 1), max_size=2))
        if consumers:
            tensors.append(Tensor(f"tensor{source}", source, tuple(sorted(consumers)), draw(amount), draw(amount)))
    return profile(layers, tensors)


def every_pipeline(model: Profile) -> Iterator[tuple[frozenset[int], ...]]:
    """Every way to deal the layers to stages in sequence: no layer before one that feeds it."""
    feeds = {i: {t.source for t in model.tensors if i in t.consumers} for i in range(len(model.layers))}

    def rest(placed: frozenset[int]) -> Iterator[tuple[frozenset[int], ...]]:
        left = [i for i in feeds if i not in placed]
        if not left:
            yield ()
            return
        for size in range(1, len(left) + 1):
            for members in itertools.combinations(left, size):
                stage = frozenset(members)
                if all(feeds[i] <= placed | stage for i in stage):
                    for later in rest(placed | stage):
                        yield (stage, *later)

    return rest(frozenset())


def crossing(model: Profile, placed: frozenset[int]) -> tuple[int, int]:
    """Forward and gradient bytes that cross the cut behind ``placed``."""
    tensors = [t for t in model.tensors if t.source in placed and not placed.issuperset(t.consumers)]
    return sum(t.forward_bytes for t in tensors), sum(t.gradient_bytes for t in tensors)
