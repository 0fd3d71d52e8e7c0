"""The clock of a simulation, and messages that take their time on shared links.

A *connection* is one way between two workers and carries one kind of message: the first is under way,
those behind it wait, as on a socket. When one has left, the next takes its place on the links at once.
A message has arrived when its last byte has left and the latency of its path has passed.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from planner.simulation.routes import Route
from planner.simulation.sharing import Flow, Network

__all__ = ["Clock", "Connection", "Message", "Transfer", "Transport"]

Action = Callable[[float], None]  # given the time, in microseconds


class Clock:
    """Does things at their time; things of one time in the order they were asked for."""

    def __init__(self) -> None:
        self._events: list[tuple[float, int, Action]] = []
        self._order = itertools.count()

    def at(self, time_us: float, action: Action) -> None:
        """Call ``action`` at ``time_us``."""
        heapq.heappush(self._events, (time_us, next(self._order), action))

    def run(self) -> None:
        """Until nothing is left to do."""
        events, pop = self._events, heapq.heappop
        while events:
            time_us, _, action = pop(events)
            action(time_us)


class Transfer(NamedTuple):
    """A message or an all-reduce that has been: on the links from ``start_us`` to ``end_us``, there at ``arrival_us``."""

    name: str  # the operation whose output it carries
    sent_us: float
    start_us: float
    end_us: float
    arrival_us: float
    bytes: float  # over each of the directions
    directions: tuple[int, ...]


class Message(NamedTuple):
    """``arrived`` is called when it is there."""

    name: str
    bytes: float
    sent_us: float
    arrived: Action


class Connection:
    """One message under way, the others behind it."""

    __slots__ = ("flow", "message", "queue", "rate", "remaining_bytes", "route", "since_us", "stamp", "start_us")

    def __init__(self, route: Route) -> None:
        self.route = route
        self.queue: deque[Message] = deque()
        self.message: Message | None = None
        self.flow = Flow(route.directions, self)
        self.start_us = 0.0  # of the message under way
        self.remaining_bytes = 0.0  # of it, at ``since_us``
        self.rate = 0.0  # since then, in bytes per microsecond
        self.since_us = 0.0
        self.stamp = 0  # tells which of the ends that were foreseen is the last word


class Transport:
    """Carries messages; ``transfers`` has those that have arrived or left, in the order in which they left."""

    def __init__(self, clock: Clock, bytes_per_us: Sequence[float]) -> None:
        self._clock = clock
        self._network = Network(bytes_per_us)
        self.transfers: list[Transfer] = []

    def send(self, connection: Connection, message: Message) -> None:
        """Send ``message`` at its ``sent_us``, which is now. One without bytes takes the latency only."""
        if message.bytes <= 0:
            self._clock.at(message.sent_us + connection.route.latency_us, message.arrived)
        elif connection.message is not None:
            connection.queue.append(message)
        else:
            self._load(connection, message, message.sent_us)
            self._pace(self._network.start(connection.flow), message.sent_us)

    def _load(self, connection: Connection, message: Message, now_us: float) -> None:
        connection.message, connection.remaining_bytes = message, message.bytes
        connection.start_us = connection.since_us = now_us

    def _pace(self, flows: Iterable[Flow], now_us: float) -> None:
        """These flows have new rates, so their messages end at another time."""
        for flow in flows:
            connection = flow.owner
            assert isinstance(connection, Connection)
            connection.remaining_bytes = max(0.0, connection.remaining_bytes - connection.rate * (now_us - connection.since_us))
            connection.rate, connection.since_us = flow.rate, now_us
            self._foresee(connection)

    def _foresee(self, connection: Connection) -> None:
        connection.stamp += 1
        end_us = connection.since_us + connection.remaining_bytes / connection.rate
        self._clock.at(end_us, partial(self._left, connection, connection.stamp))

    def _left(self, connection: Connection, stamp: int, now_us: float) -> None:
        """The last byte of the message has left."""
        message = connection.message
        if stamp != connection.stamp or message is None:
            return  # its rate has changed since this was foreseen
        arrival_us = now_us + connection.route.latency_us
        self.transfers.append(Transfer(message.name, message.sent_us, connection.start_us, now_us, arrival_us, message.bytes,
                                       connection.route.directions))
        if connection.queue:
            self._load(connection, connection.queue.popleft(), now_us)
            self._foresee(connection)  # the links see no difference, so every rate stays
        else:
            connection.message, connection.rate = None, 0.0
            connection.stamp += 1
            self._pace(self._network.end(connection.flow), now_us)
        if connection.route.latency_us > 0:
            self._clock.at(arrival_us, message.arrived)
        else:
            message.arrived(now_us)
