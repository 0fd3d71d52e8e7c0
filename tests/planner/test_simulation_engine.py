"""The simulation against timelines worked out by hand, against a plain second implementation, and its own laws."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.simulation.engine import Record, run
from planner.simulation.sharing import Flow, Network
from planner.simulation.simulate import pipeline_of
from planner.simulation.workload import workload_of
from planner.spec.cluster import Cluster, DeviceType, Link, Node
from planner.spec.errors import InvalidValue
from planner.spec.plan import Plan
from planner.spec.profile import Profile
from planner.spec.schedule import operations
from tests.planner.instances import clusters, flat, two_level
from tests.planner.naive_simulation import naive
from tests.planner.plans import plan_of, stage_layer

MB = 1_000_000  # at 1e9 bytes/s, 1000 us


def simulated(plan: Plan, profile: Profile, batches: int) -> Record:
    return run(plan, pipeline_of(plan, batches), workload_of(plan, profile).stages)


def written(record: Record, stage: int, replica: int = 0) -> str:
    """A worker's operations with start (of an update: with its all-reduce) and end."""
    return " ".join(f"{done.op} {done.begin_us:g}-{done.end_us:g}" for done in record.workers[stage][replica])


def test_one_stage_just_computes() -> None:
    plan, profile = plan_of([stage_layer(0, 10, 20, update_us=5)], flat(1))
    assert written(simulated(plan, profile, 2), 0) == "0F0 0-10 0B0 10-30 0U0 30-35 0F1 35-45 0B1 45-65 0U1 65-70"


def test_two_equal_stages_and_free_links() -> None:
    """The picture of docs/schedule.md with a forward of 10, a backward of 10 and no update::

        stage 0   F0 F1 .. B0 F2 B1 ..
        stage 1      F0 B0 F1 B1 F2 B2
    """
    plan, profile = plan_of([stage_layer(k, 10, 10) for k in range(2)], flat(2))
    record = simulated(plan, profile, 3)
    assert written(record, 0) == "0F0 0-10 0F1 10-20 0B0 30-40 0U0 40-40 0F2 40-50 0B1 50-60 0U1 60-60 0B2 70-80 0U2 80-80"
    assert written(record, 1) == "1F0 10-20 1B0 20-30 1U0 30-30 1F1 30-40 1B1 40-50 1U1 50-50 1F2 50-60 1B2 60-70 1U2 70-70"


def test_a_slow_link_of_latency_1_and_half_sized_gradients() -> None:
    """Activations of 1 MB take 1000 us, gradients 500 us; a path is two links of latency 1 us each.

    0F0 is done at 100 and there at 1102. 0F1 follows on the link at 1100 (latency holds no link) and is there at 2102.
    1B0 is done at 1102 + 100 + 200 = 1402, its gradient there at 1402 + 500 + 2 = 1904.
    """
    plan, profile = plan_of([stage_layer(k, 100, 200) for k in range(2)], flat(2, latency_us=1.0), cuts=[(MB, MB // 2)])
    record = simulated(plan, profile, 3)
    assert written(record, 0) == "0F0 0-100 0F1 100-200 0B0 1904-2104 0U0 2104-2104 0F2 2104-2204 0B1 2904-3104 0U1 3104-3104 " \
                                 "0B2 4008-4208 0U2 4208-4208"
    assert written(record, 1) == "1F0 1102-1202 1B0 1202-1402 1U0 1402-1402 1F1 2102-2202 1B1 2202-2402 1U1 2402-2402 " \
                                 "1F2 3206-3306 1B2 3306-3506 1U2 3506-3506"
    left = {transfer.name: transfer for transfer in record.transfers}
    assert left["0F0"][1:5] == (100, 100, 1100, 1102)  # sent, start, end, arrival
    assert left["0F1"][1:5] == (200, 1100, 2100, 2102)


def test_replicas_meet_at_the_update_and_reduce_over_their_links() -> None:
    """Two replicas of speed 1 and 1/2 with 1 MB of gradients each: a ring moves 2 * 1/2 * 1 MB over each link, 1000 us."""
    link = Link(1e9, 0.0)
    cluster = Cluster("mixed", (DeviceType("fast", 1.0, None), DeviceType("slow", 0.5, None)),
                      (Node("fast", 1, link, "fast", ()), Node("slow", 1, link, "slow", ())))
    plan, profile = plan_of([stage_layer(0, 100, 200, update_us=10, parameter_bytes=MB)], cluster, replicas=(2,))
    record = simulated(plan, profile, 1)
    assert written(record, 0, 0) == "0F0 0-100 0B0 100-300 0U0 600-1610"
    assert written(record, 0, 1) == "0F1 0-200 0B1 200-600 0U0 600-1620"
    assert [done.start_us for done in (record.workers[0][0][-1], record.workers[0][1][-1])] == [1600, 1600]


def test_messages_that_share_a_network_card_get_half_of_it_each() -> None:
    """Two pipelines' worth of traffic over one card: two replicas on server 0 send to two replicas on server 1.

    Alone a message of 1 MB takes 1000 us over the card; both begin at 100, so both take 2000.
    """
    plan, profile = plan_of([stage_layer(0, 100, 100), stage_layer(1, 100, 100)], two_level(2, 2, intra=1e10, inter=1e9),
                            replicas=(2, 2), cuts=[(MB, 0)])
    record = simulated(plan, profile, 1)
    assert {t.name: (t.start_us, t.end_us) for t in record.transfers if t.bytes} == {"0F0": (100, 2100), "0F1": (100, 2100)}


def test_what_a_message_held_up_elsewhere_cannot_use_goes_to_the_others() -> None:
    """One crosses a link of 1 and one of 4, the other the second only: it gets 3, and all of it when the first has gone."""
    network = Network([1.0, 4.0])
    slow, quick = Flow((0, 1), None), Flow((1,), None)
    network.start(slow)
    network.start(quick)
    assert (slow.rate, quick.rate) == (1.0, 3.0)
    assert list(network.end(slow)) == [quick] and quick.rate == 4.0


def test_a_schedule_that_cannot_finish_is_named_with_its_operations() -> None:
    plan, profile = plan_of([stage_layer(k, 1, 1) for k in range(2)], flat(3), replicas=(1, 2), in_flight=(1, 1))
    assert simulated(plan, profile, 2)  # two replicas fed one at a time: slow, but it ends
    starved, profile = plan_of([stage_layer(k, 1, 1) for k in range(2)], flat(3), replicas=(1, 2), in_flight=(1, 2), batch=2)
    with pytest.raises(InvalidValue, match="stage 1 replica 0 at 1F2"):
        simulated(starved, profile, 2)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, Profile, int]:
    """Random stages, replicas and depths on random clusters; devices in any order; a number of batches."""
    cluster = draw(clusters())
    devices = draw(st.permutations([name for name, _ in cluster.devices()]))
    replicas: list[int] = []
    while sum(replicas) < len(devices) and len(replicas) < 4 and (not replicas or draw(st.booleans())):
        replicas.append(draw(st.integers(1, min(3, len(devices) - sum(replicas)))))
    times = st.one_of(st.just(0.0), st.sampled_from([100.0, 200.0]), st.floats(1, 1000))
    size = draw(st.sampled_from([1e3, 1e5, 1e7]))
    sizes = st.one_of(st.just(0), st.integers(1, int(size)))
    layers = [stage_layer(k, draw(times), draw(times), update_us=draw(times) / 4, parameter_bytes=draw(sizes))
              for k in range(len(replicas))]
    cuts = [(draw(sizes), draw(sizes)) for _ in replicas[1:]]
    starts = [sum(replicas[:k]) for k in range(len(replicas))]
    plan, profile = plan_of(
        layers, cluster, replicas=replicas, cuts=cuts, batch=math.lcm(*replicas) * draw(st.integers(1, 3)), extra=draw(st.integers(0, 2)),
        devices=[devices[start:start + r] for start, r in zip(starts, replicas, strict=True)])
    return plan, profile, draw(st.integers(1, 5))


@settings(max_examples=150)
@given(plans())
def test_equal_to_the_plain_simulation(given_plan: tuple[Plan, Profile, int]) -> None:
    plan, profile, batches = given_plan
    pipeline, workload = pipeline_of(plan, batches), workload_of(plan, profile).stages
    expected = naive(plan, pipeline, workload)
    record = run(plan, pipeline, workload)
    found = {(done.op, i): done.end_us for stage in record.workers for i, replica in enumerate(stage) for done in replica}
    assert found.keys() == expected.keys()
    for key, end_us in expected.items():
        assert found[key] == pytest.approx(end_us, rel=1e-7, abs=1e-6), key


@settings(max_examples=100)
@given(plans())
def test_laws(given_plan: tuple[Plan, Profile, int]) -> None:
    plan, profile, batches = given_plan
    pipeline = pipeline_of(plan, batches)
    record = simulated(plan, profile, batches)
    ends = {done.op: done.end_us for stage in record.workers for replica in stage for done in replica}
    for k, stage in enumerate(record.workers):
        for i, replica in enumerate(stage):
            assert [done.op for done in replica] == list(operations(pipeline, k, i)), "every operation once, in order"
            for done, following in itertools.pairwise(replica):
                assert following.ready_us == done.end_us and done.ready_us <= done.begin_us <= done.start_us <= done.end_us
            for done in replica:
                if done.op.kind == "F" and k > 0:
                    assert done.start_us >= ends[done.op._replace(stage=k - 1)]
                if done.op.kind == "B" and k + 1 < len(record.workers):
                    assert done.start_us >= ends[done.op._replace(stage=k + 1)]
    by_direction = defaultdict(list)
    for transfer in record.transfers:
        assert transfer.sent_us <= transfer.start_us <= transfer.end_us <= transfer.arrival_us
        for direction in transfer.directions:
            by_direction[direction].append(transfer)
    for direction, transfers in by_direction.items():
        for start_us in {transfer.start_us for transfer in transfers}:
            inside = [transfer for transfer in transfers if transfer.start_us >= start_us]
            carried = 0.0
            for transfer in sorted(inside, key=lambda t: t.end_us):  # what began and ended within any interval fits into it
                carried += transfer.bytes
                most = record.directions[direction].bytes_per_us * (transfer.end_us - start_us)
                assert carried <= most * (1 + 1e-6) + 1e-6
