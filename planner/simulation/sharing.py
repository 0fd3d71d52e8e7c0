"""Links shared by the transfers under way: max-min fair, kept up to date as transfers come and go.

Connections that share a link get equal parts of it, except that what one cannot use (because it is
held up elsewhere) goes to the others; so does TCP on average, and so do switches that interleave
packets. The rates are max-min fair exactly when no link is over its capacity and every flow has a
*bottleneck*: a full link on which no flow is faster (Bertsekas and Gallager, Data Networks, 6.5.2).

A change is local. The flows it touches are given new rates by water-filling while all others keep
theirs; a neighbour that has thereby lost its bottleneck, or is faster than a touched flow that a link
holds up, joins them, until every flow has a bottleneck again. That is the exact allocation, and mostly
only two or three flows are touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["Flow", "Network"]

_EXACT = 1e-9  # relative: rates nearer than this are equal


class Flow:
    """A transfer under way for its ``owner``: ``rate`` in bytes per microsecond, over all of ``directions`` at once."""

    __slots__ = ("bottleneck", "directions", "owner", "rate")

    def __init__(self, directions: tuple[int, ...], owner: object) -> None:
        self.directions = directions
        self.owner = owner
        self.rate = 0.0
        self.bottleneck = -1  # a direction: full, and this flow is the fastest on it


class Network:
    """Flows over links of given capacity. ``start`` and ``end`` say which flows' rates have changed."""

    def __init__(self, bytes_per_us: Sequence[float]) -> None:
        self.capacity = list(bytes_per_us)
        self.load = [0.0] * len(self.capacity)
        self.flows: list[dict[Flow, None]] = [{} for _ in self.capacity]  # in order of arrival, so that runs repeat

    def start(self, flow: Flow) -> Iterable[Flow]:
        """Let ``flow`` begin."""
        capacity, load, flows = self.capacity, self.load, self.flows
        flow.rate, narrowest, free = 0.0, -1, float("inf")
        for direction in flow.directions:
            left = capacity[direction] - load[direction] if flows[direction] else capacity[direction]
            if left < free:
                narrowest, free = direction, left
        alone = all(other.rate <= free for other in flows[narrowest])  # else others must give way
        for direction in flow.directions:
            flows[direction][flow] = None
        if alone:
            flow.rate, flow.bottleneck = free, narrowest
            for direction in flow.directions:
                load[direction] = load[direction] + free if len(flows[direction]) > 1 else free
            return (flow,)
        return self._share(dict.fromkeys(other for direction in flow.directions for other in flows[direction]))

    def end(self, flow: Flow) -> Iterable[Flow]:
        """Take ``flow`` away."""
        released: dict[Flow, None] = {}
        for direction in flow.directions:
            mine = self.flows[direction]
            del mine[flow]
            self.load[direction] = self.load[direction] - flow.rate if mine else 0.0
            for other in mine:
                if other.bottleneck == direction:
                    released[other] = None
        return self._share(released) if released else ()

    def _share(self, touched: dict[Flow, None]) -> list[Flow]:
        """New max-min rates, starting from the flows that certainly need one; those whose rate has changed."""
        before = {flow: flow.rate for flow in touched}
        while True:
            totals = self._fill(touched)
            neighbours = self._unsettled(touched, totals)
            if not neighbours:
                break
            for flow in neighbours:
                touched[flow] = None
                before[flow] = flow.rate
        for direction, total in totals.items():
            self.load[direction] = total
        return [flow for flow, rate in before.items() if abs(flow.rate - rate) > _EXACT * flow.rate]

    def _fill(self, touched: dict[Flow, None]) -> dict[int, float]:
        """Water-filling among the touched flows, in what the others leave; the new load of every link they use."""
        left: dict[int, float] = {}
        waiting: dict[int, list[Flow]] = {}
        for flow in touched:
            for direction in flow.directions:
                if direction not in left:
                    left[direction] = self.capacity[direction]
                    waiting[direction] = []
                    for other in self.flows[direction]:
                        if other not in touched:
                            left[direction] -= other.rate
                waiting[direction].append(flow)
        unfilled = {direction: len(flows) for direction, flows in waiting.items()}
        filled: set[Flow] = set()
        while unfilled:
            narrowest = min(unfilled, key=lambda direction: left[direction] / unfilled[direction])
            rate = max(0.0, left[narrowest] / unfilled[narrowest])
            for flow in waiting[narrowest]:
                if flow in filled:
                    continue
                filled.add(flow)
                flow.rate, flow.bottleneck = rate, narrowest
                for direction in flow.directions:
                    left[direction] -= rate
                    if unfilled[direction] == 1:
                        del unfilled[direction]
                    else:
                        unfilled[direction] -= 1
        return {direction: self.capacity[direction] - rest for direction, rest in left.items()}

    def _unsettled(self, touched: dict[Flow, None], totals: dict[int, float]) -> list[Flow]:
        """Flows that kept their rate although it is no longer, or makes another one's no longer, the fair one."""
        found: dict[Flow, None] = {}
        for direction, total in totals.items():
            flows = self.flows[direction]
            if all(flow in touched for flow in flows):
                continue
            held = min((flow.rate for flow in flows if flow in touched and flow.bottleneck == direction), default=float("inf"))
            fastest = max(flow.rate for flow in flows)
            full = total >= self.capacity[direction] * (1 - _EXACT)
            for flow in flows:
                if flow in touched:
                    continue
                lost = flow.bottleneck == direction and not (full and flow.rate >= fastest * (1 - _EXACT))
                if lost or flow.rate > held * (1 + _EXACT):
                    found[flow] = None
        return list(found)
