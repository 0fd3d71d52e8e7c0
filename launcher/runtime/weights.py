"""Weight versions of one stage: real versions, held only while a microbatch needs them.

The optimizer owns the *masters*: parameters that never meet autograd. A *version* is a list of fresh
leaf parameters over some storage; the stage program is called with them. The newest version shares
the masters' storage. Copy on write: when an update comes and a microbatch in flight still needs the
newest version, the masters first move to other storage and step there; otherwise they step in place::

    version 3 -- leaves --> storage A <-- masters       in flight: m7 uses version 3
    update:      masters copy A to B and step in B
    version 3 -- leaves --> storage A                   until m7's backward; then A is recycled
    version 4 -- leaves --> storage B <-- masters

Two shortcuts would be wrong. Stepping in place under a pending backward changes the tensors autograd
saved (``.data`` hides it from the version counter, so nothing is raised and gradients are off).
Leaves made with ``detach()`` share that counter, so every in-place step would make an innocent
backward raise. Moving the masters with ``master.data = other`` is safe because no graph holds them.

The first of the two is what the policy ``latest`` is for: with ``overwrites`` the masters always step in
place, and pending backwards read the weights of that moment, unnoticed by autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

__all__ = ["Version", "WeightVersions"]


class Version:
    """``leaves`` hold the weights after ``number`` updates; ``in_flight`` microbatches still need them."""

    __slots__ = ("in_flight", "leaves", "number", "storages")

    def __init__(self, number: int, masters: Sequence[nn.Parameter]) -> None:
        self.number = number
        self.leaves = tuple(nn.Parameter(master.data, requires_grad=master.requires_grad) for master in masters)
        self.in_flight = 0
        self.storages = frozenset(leaf.untyped_storage().data_ptr() for leaf in self.leaves)


class WeightVersions:
    """The versions a stage holds, from the oldest that is needed to the newest.

    ``masters`` are the stage's parameters in the order its program takes them. Frozen ones
    (``requires_grad`` false) are shared by every version and never copied. With ``overwrites`` only the
    newest version exists, and microbatches in flight see every update.
    """

    def __init__(self, masters: Sequence[nn.Parameter], *, overwrites: bool = False) -> None:
        self.masters = tuple(masters)
        self._overwrites = overwrites
        self.trainable = tuple(master for master in masters if master.requires_grad)
        self.newest = 0
        self._held = {0: Version(0, self.masters)}
        self._free: list[list[torch.Tensor]] = []

    @property
    def held(self) -> tuple[int, ...]:
        """Numbers of the versions held now, ascending."""
        return tuple(self._held)

    def begin(self, number: int) -> Version:
        """The version a forward uses; it stays until :meth:`end`. ``KeyError`` when it is gone already."""
        version = self._held[number]
        version.in_flight += 1
        return version

    def end(self, version: Version) -> None:
        """The backward that needed ``version`` is done."""
        version.in_flight -= 1

    def peek(self, number: int) -> Version:
        """A held version, for a forward that leaves nothing in flight."""
        return self._held[number]

    def lend_gradients(self, version: Version) -> None:
        """Let the coming backward add to the gradients gathered so far, in place.

        A leaf without a gradient takes over the first one that arrives, so a batch of one
        microbatch costs no zeroing and no addition.
        """
        for leaf, master in zip(version.leaves, self.masters, strict=True):
            leaf.grad = master.grad

    def take_gradients(self, version: Version) -> None:
        """Take the gradients back after the backward."""
        for leaf, master in zip(version.leaves, self.masters, strict=True):
            master.grad = leaf.grad
            leaf.grad = None

    def discard(self, before: int) -> None:
        """Free the versions older than ``before`` that no microbatch in flight needs; never the newest."""
        for number, version in list(self._held.items()):
            if number < before and number != self.newest and version.in_flight == 0:
                del self._held[number]
                self._free.append([leaf.data for leaf in version.leaves if leaf.requires_grad])

    def advance(self, step: Callable[[], None], keep_from: int) -> None:
        """Make the next version: ``step()`` changes the masters, and nothing that a version needs.

        ``keep_from`` is the oldest version that a later forward may ask for. Versions that only
        this update made unnecessary are freed first, so that their storage takes the new version.
        """
        self.discard(keep_from)
        current = self._held[self.newest]
        if not self._overwrites and (current.in_flight > 0 or self.newest >= keep_from):
            self._move_masters()
        else:
            del self._held[self.newest]  # its storage stays with the masters
        step()
        self.newest += 1
        self._held[self.newest] = Version(self.newest, self.masters)

    def _move_masters(self) -> None:
        if not self.trainable:
            return
        target = self._free.pop() if self._free else [torch.empty_like(master) for master in self.trainable]
        torch._foreach_copy_(target, [master.data for master in self.trainable])
        for master, storage in zip(self.trainable, target, strict=True):
            master.data = storage
