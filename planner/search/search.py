"""The smallest time over all scenarios: bisection over T with :mod:`planner.search.ilp`, between proven bounds.

The time of a plan is the cost of one of its candidates or the load of a shared link. With the
candidates' costs in order, v_0 < v_1 < ...::

    no plan within v_i, one within v_{i+1}:   the smallest time is v_{i+1}, unless plans made of
                                              candidates <= v_i have a busiest link below that

So a scenario is asked at its position-free bound first, which is often the answer; otherwise the
answer is bracketed from there in growing steps, bisected, and the links are asked last.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from planner.cost import Stage, evaluate
from planner.hardware.topology import Allocation
from planner.search.along import MOST_STEPS
from planner.search.bound import Bound, best_sites
from planner.search.coarse import Pairings
from planner.search.columns import Candidate, all_allocations
from planner.search.groups import Groups
from planner.search.heuristic import allowed, first_plans, laid_plans, plans_along
from planner.search.ilp import Answer, Effort, any_plan, fewest_devices, least_load
from planner.search.laying import Laying, Left
from planner.search.loose import Loose
from planner.search.placings import placings
from planner.search.problem import Problem, Scenario, scenarios
from planner.search.work import Work, is_late
from planner.spec.errors import Infeasible

__all__ = ["Found", "search"]

MOST_ARCS = 40_000  # of a full network; more make the program slower than its coarser form
MOST_SCENARIOS = 64  # that are looked at one by one
MOST_HALVED = 16  # groups of scenarios, where other bounds are less sharp than theirs anyway
PROMISING = 3  # looked at first where there are more
MOST_KNOWN = 100_000  # candidates that a scenario keeps between its steps
MOST_WORK = 1_200_000  # candidates in all networks of one search: about ten seconds
MOST_GIVEN_UP = 3  # programs too large before the others are not tried either
ROUGH, FINE = 3e-3, 1e-9  # how exactly a scenario's bound is found first, and when a good plan is known
EQUAL = 1e-9  # relative difference below which two times are one
_NOTHING = Answer((), math.inf, True)
_NEAR = (1.1, 1.5, math.inf)  # how far above a bound the quick plans are looked for
_STEPS = (1.02, 1.03, 1.05, 1.05, 1.05, 1.1, 1.1, 1.2, 1.5, 2.0, 5.0, math.inf)  # how far above what has failed the search looks next


@dataclass(frozen=True)
class Found:
    """The best plan, and how far it is proven."""

    stages: tuple[Stage, ...]
    batch_microbatches: int
    microbatch_us: float
    bound_us: float  # no plan is faster
    every_allocation: bool  # False: only those of planner.search.columns.families were searched
    in_time: bool  # False: the time limit came first, or the program was too large


def search(problem: Problem, *, deadline: float | None = None, known: tuple[Stage, ...] = ()) -> Found | None:
    """The fastest plan; of equally fast ones, one with the fewest devices. None when no plan fits.

    ``deadline`` is a :func:`time.monotonic`; the best plan found until then is returned. ``known`` is a plan to begin with.

    Raises:
        Infeasible: code ``time_limit``; no plan was found until then, though there may be one.
    """
    state = _Search(problem, deadline)
    state.offer_allowed(known)
    state.offer_all(first_plans(problem))
    limited = any(place.device_type.memory_bytes is not None for place in problem.topology.places)
    halved = math.inf if len(problem.topology.places) == 1 else MOST_HALVED
    groups = Groups(problem, scenarios(problem, memory_matters=limited), state.sites, deadline, halved)
    for scenario in groups.promising(PROMISING) if len(groups.scenarios) > MOST_SCENARIOS else ():
        if not state.late:
            state.look_at(scenario, Loose(problem, [scenario], state.sites, None, deadline), 0.0)
    left: list[Left] = []
    for scenario, loose, low_us in groups.within(state.ceiling_us):
        better_us = state.look_at(scenario, loose, low_us)
        if better_us is not None:
            left.append(Left(better_us, len(left), scenario, loose))
        if len(left) > MOST_SCENARIOS:
            break
    if groups.bound_us < state.ceiling_us():
        state.unproven(groups.bound_us)
    state.raise_bounds(state.laying.better(left) if state.laying is not None else left)
    state.prefer_fewer_devices(groups)
    possible = bool(state.best.stages) or groups.root.fewest_devices(math.inf) is not None
    if not state.best.stages and possible and not (state.in_time and state.every_allocation):
        reason = "within the time limit" if state.late else "among the placements that were searched"
        raise Infeasible(f"no plan was found {reason}, though there may be one",
                         hint="give a longer --time-limit, or loosen the limits on memory, stages or replicas", code="time_limit")
    if not state.best.stages:
        return None
    return Found(state.best.stages, state.best_batch, state.best.microbatch_us, min(state.bound_us, state.best.microbatch_us),
                 state.every_allocation, state.in_time)


@dataclass
class _Search:
    problem: Problem
    deadline: float | None
    best: Answer = _NOTHING
    best_batch: int = 0
    best_load_us: float = math.inf  # on all shared links, while ``best`` is not settled
    bound_us: float = math.inf  # the smallest of what unproven scenarios may reach
    in_time: bool = True
    settled: bool = False  # whether ``best`` is the program's own answer
    given_up: int = 0  # scenarios whose program was too large
    work: Work = field(default_factory=lambda: Work(MOST_STEPS))
    effort: Effort = field(default_factory=lambda: Effort(MOST_ARCS, Pairings(), Work(MOST_WORK)))

    def __post_init__(self) -> None:
        most = min(self.problem.max_replicas, self.problem.max_devices)
        self.sites = best_sites(self.problem.topology, most)
        found, self.every_allocation = all_allocations(self.problem.topology, most)
        placed = placings(self.problem.topology, most) if self.problem.topology.shared else None
        self.laying = Laying(self.problem, placed, self.offer_allowed, self.ceiling_us, self.deadline) if placed is not None else None
        if self.laying is not None:
            self.work.left //= 2  # it finds plans itself
        if not self.every_allocation:
            self.effort = Effort(MOST_ARCS // 2, None, self.effort.work)  # the coarser network would take minutes, and prove nothing
        self.allocations: dict[int, list[Allocation]] = defaultdict(list)
        for allocation in found:
            self.allocations[sum(allocation)].append(allocation)

    @property
    def late(self) -> bool:
        return is_late(self.deadline)

    def ceiling_us(self) -> float:
        """What a plan must be within to be better than the best."""
        return self.best.microbatch_us * (1 - EQUAL)

    def offer(self, stages: tuple[Stage, ...]) -> None:
        """A plan that is allowed; it is taken if it is faster, or as fast on fewer devices or with less load on shared links."""
        batch = self.problem.batch(stages)
        found = evaluate(self.problem.chain, self.problem.topology, self.problem.policy, stages, batch)
        load_us = sum(found.shared_link_us)
        devices = sum(stage.replicas for stage in stages)
        ties = found.microbatch_us <= self.best.microbatch_us * (1 + EQUAL) and (devices, load_us) < (self.devices, self.best_load_us)
        if found.microbatch_us < self.ceiling_us() or ties:
            self.best, self.best_batch, self.settled = Answer(stages, found.microbatch_us, True), batch, False
            self.best_load_us = load_us

    def offer_all(self, plans: Iterable[tuple[Stage, ...]]) -> None:
        """Each of them."""
        for stages in plans:
            self.offer(stages)

    def offer_allowed(self, stages: tuple[Stage, ...]) -> None:
        """A plan, if there is one and it is allowed."""
        if stages and allowed(self.problem, stages):
            self.offer(stages)

    def unproven(self, low_us: float) -> None:
        """There may be plans as fast as this that were not looked for."""
        self.bound_us, self.in_time = min(self.bound_us, low_us), False

    def look_at(self, scenario: Scenario, loose: Loose, low_us: float) -> float | None:
        """Good plans of the scenario; what it can still be better than the best by, if it can."""
        flat = len(self.problem.topology.places) == 1
        for tolerance in (ROUGH, FINE):
            bounds = loose.lowest_us(self.ceiling_us(), tolerance, low_us)
            if bounds is None:
                return None
            low_us = bounds[0]
            self.offer_all(laid_plans(self.problem, loose.path(bounds[1])))
            if self.best.stages:
                loose = loose.narrowed(self.ceiling_us())
            if tolerance == ROUGH and not flat:
                self._try_along(scenario, loose, low_us)
            if self.laying is not None:
                break  # it raises bounds further
        if flat and low_us <= self.ceiling_us() and not self.late:  # the path's batch is another one, or its number of stages
            bound = Bound(self.problem, scenario, self.sites, loose.useful(self.ceiling_us()).rows)
            exact_us = bound.lowest_us(self.ceiling_us())
            if exact_us is None:
                return None
            low_us = exact_us
            self.offer_all(laid_plans(self.problem, bound.path(low_us)))
        return low_us if low_us <= self.ceiling_us() else None

    def _try_along(self, scenario: Scenario, loose: Loose, low_us: float) -> None:
        """Plans near the bound first: there are few stages to choose from."""
        for near in _NEAR:
            before_us, within_us = self.best.microbatch_us, min(low_us * near, self.ceiling_us())
            self.offer_all(plans_along(self.problem, scenario, loose.useful(within_us).rows, within_us, self.work, self.deadline))
            if self.best.microbatch_us < before_us or within_us >= self.ceiling_us() or self.late:
                return

    def raise_bounds(self, left: list[Left]) -> None:
        """Ask the programs of the scenario with the lowest bound, a step further each time, until none can be better than the best."""
        heapq.heapify(left)
        searches: dict[int, _ScenarioSearch] = {}
        while left and left[0][0] <= self.ceiling_us():
            low_us, index, scenario, loose = left[0]
            if self.late or self.given_up >= MOST_GIVEN_UP or not self.allocations or self.effort.work.left <= 0:
                self.unproven(low_us)
                return
            heapq.heappop(left)
            if index not in searches:
                bound = Bound(self.problem, scenario, self.sites, loose.useful(self.ceiling_us()).rows)
                lowest_us = bound.lowest_us(self.ceiling_us())
                if lowest_us is None:
                    continue
                searches[index] = _ScenarioSearch(self, bound, max(lowest_us, low_us))
            one = searches[index]
            answer = one.step()
            if answer.microbatch_us < self.ceiling_us():
                self.best, self.best_batch, self.settled = answer, scenario.batch_microbatches, True
            if not self.every_allocation:
                self.bound_us = min(self.bound_us, one.lowest_us)  # what failed may do with other allocations
            if not one.proven:
                self.given_up += 1
                self.unproven(one.failed_us)
            elif not answer.stages and not one.exhausted:
                heapq.heappush(left, Left(one.failed_us, index, scenario, loose))

    def prefer_fewer_devices(self, groups: Groups) -> None:
        """Improve ``best`` if a scenario has a plan as fast on fewer devices, or settle which of equally good ones it is."""
        if not self.best.stages or not self.allocations:
            return
        tried = 0
        if len(groups.scenarios) > MOST_SCENARIOS:  # only whether the best one's own scenario has a plan with fewer
            own = [scenario for scenario in groups.scenarios if scenario.batch_microbatches == self.best_batch]
            groups = Groups(self.problem, own, self.sites, self.deadline)
        for scenario, loose in self._on_fewer(groups):
            tried += 1
            if tried > MOST_SCENARIOS or self.late or self.given_up >= MOST_GIVEN_UP or self.effort.work.left <= 0:
                return
            within_us = self.best.microbatch_us * (1 + EQUAL)
            bound = Bound(self.problem, scenario, self.sites, loose.useful(within_us).rows)
            fewest = bound.fewest_devices(within_us)
            settle = not self.settled and scenario.batch_microbatches == self.best_batch
            if fewest is None or fewest > self.devices or (fewest == self.devices and not settle):
                continue
            one = _ScenarioSearch(self, bound, within_us)
            if fewest == self.devices:  # the program only confirms what the bound proves
                one.effort = Effort(MOST_ARCS // 8, None, self.effort.work)
            answer = one.within(within_us)
            self.given_up += not one.proven
            if answer.stages and (settle or sum(stage.replicas for stage in answer.stages) < self.devices):
                self.best, self.best_batch, self.settled = answer, scenario.batch_microbatches, True

    def _on_fewer(self, groups: Groups) -> Iterator[tuple[Scenario, Loose]]:
        """Scenarios that may have a plan as fast as the best on fewer devices; without places, on as many too, if it is not settled."""
        if self.laying is None:
            for scenario, loose, _ in groups.within(lambda: self.best.microbatch_us * (1 + EQUAL), lambda: self.devices - self.settled):
                yield scenario, loose
            return
        within_us = self.best.microbatch_us * (1 + EQUAL)
        left = [Left(0.0, number, scenario, loose) for number, (scenario, loose, _)
                in enumerate(groups.within(lambda: within_us, lambda: self.devices - 1))]
        for one in self.laying.on_fewer(left, within_us, lambda: self.devices):
            yield one.scenario, one.loose

    @property
    def devices(self) -> int:
        """Of the best plan."""
        return sum(stage.replicas for stage in self.best.stages)


class _ScenarioSearch:
    def __init__(self, state: _Search, bound: Bound, lowest_us: float) -> None:
        self.state, self.scenario, self.bound, self.lowest_us = state, bound.scenario, bound, lowest_us
        self.proven, self.effort = True, state.effort
        self.failed_us = lowest_us  # no plan of the scenario is below this
        self.exhausted = False  # nor is any better than the best
        self._steps = iter((1.0, *_STEPS))
        self._known: dict[tuple[int, int, Allocation, bool], Candidate | None] = {}

    def step(self) -> Answer:
        """The fastest plan, if it is within a step of what has failed and beats the best so far."""
        trial_us = min(self.failed_us * next(self._steps), self.state.ceiling_us())
        best = self._any(trial_us)
        if not best.stages:
            if self.proven:
                self.failed_us, self.exhausted = trial_us, trial_us >= self.state.ceiling_us()
            if len(self._known) > MOST_KNOWN:
                self._known = {}
            return best
        if best.microbatch_us > self.lowest_us * (1 + EQUAL):
            best = self._by_links(*self._bisect(best, self.failed_us))
        return self._with_fewer_devices(best)

    def within(self, time_us: float) -> Answer:
        """A plan within ``time_us`` with the fewest devices, if there is one."""
        state = self.state
        named = self._named(time_us, fewest=len(state.problem.topology.places) == 1)  # there the bound is exact
        return self._noted(fewest_devices(state.problem, self.scenario, named, time_us, self.effort, state.deadline))

    def _any(self, time_us: float) -> Answer:
        state = self.state
        return self._noted(any_plan(state.problem, self.scenario, self._named(time_us), time_us, self.effort, state.deadline))

    def _bisect(self, best: Answer, failed_us: float) -> tuple[Answer, float]:
        """Until no candidate's cost lies between the time of the best plan and one that has failed."""
        costs = sorted({c.cost_us for c in self._named(best.microbatch_us) if c.cost_us > failed_us})
        while self.proven and (costs := [cost for cost in costs if failed_us < cost < best.microbatch_us * (1 - EQUAL)]):
            middle = costs[len(costs) // 2]
            answer = self._any(middle)
            if answer.stages:
                best = answer if answer.microbatch_us < best.microbatch_us else best
                costs = [cost for cost in costs if cost < middle]
            elif self.proven:
                self.failed_us = failed_us = middle
        return best, failed_us

    def _by_links(self, best: Answer, failed_us: float) -> Answer:
        """Whether plans made of candidates that cost less than ``best`` have a busiest link below it too."""
        state = self.state
        if not state.problem.topology.shared or not self.proven:
            return best
        cheaper = [c for c in self._named(failed_us) if c.cost_us <= failed_us]
        answer = self._noted(least_load(state.problem, self.scenario, cheaper, best.microbatch_us, self.effort, state.deadline))
        return answer if answer.microbatch_us < best.microbatch_us * (1 - EQUAL) else best

    def _with_fewer_devices(self, best: Answer) -> Answer:
        smaller = self.within(best.microbatch_us * (1 + EQUAL))
        return smaller if smaller.stages and smaller.microbatch_us <= best.microbatch_us * (1 + EQUAL) else best

    def _noted(self, answer: Answer) -> Answer:
        self.proven = self.proven and answer.proven
        return answer if answer.stages else Answer((), math.inf, answer.proven)

    def _named(self, time_us: float, *, fewest: bool = False) -> list[Candidate]:
        """The candidates with their allocations, as far as the position-free bound leaves them."""
        state, found = self.state, []
        for free in self.bound.useful(time_us, fewest=fewest):
            if state.late:
                self.proven = False
                return []
            for allocation in state.allocations[free.replicas]:
                key = (free.first, free.last, allocation, free.recompute)
                if key not in self._known:
                    site = state.problem.topology.site(allocation)
                    self._known[key] = self.bound.table.candidate(free.first, free.last, site, allocation, free.recompute)
                named = self._known[key]
                if named is not None and named.cost_us <= time_us:
                    found.append(named)
        self.effort.work.left -= len(found)
        return found
