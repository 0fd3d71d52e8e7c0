"""Run a microbatch's forward once more, for its backward, exactly as it ran the first time.

What a stage keeps of the microbatch in between is its inputs: received tensors, data, and copies of the state
that its forward writes to (BatchNorm's running statistics), as they were before it. The second run
gets those copies, so it computes the same and leaves the state alone, however far that is by now::

    forward  m    copies state 4    reads and writes state: 4 -> 5
    forward  m+1                                             5 -> 6
    backward m    the copies: 4 -> 5, thrown away            6 stays
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from launcher.program import StageProgram

__all__ = ["Recomputation"]


class Recomputation:
    """Made before a microbatch's forward; :meth:`run` is its second run and may be called once."""

    def __init__(self, program: StageProgram, buffers: Sequence[torch.Tensor], received: Sequence[torch.Tensor],
                 inputs: Sequence[torch.Tensor]) -> None:
        self._program, self._received, self._inputs = program, tuple(received), tuple(inputs)
        written = set(program.written)
        self._buffers = tuple(buffer.clone() if name in written else buffer for name, buffer in zip(program.buffers, buffers, strict=True))
        self._constants = {name: getattr(program.module, name).clone() for name in program.written if name not in program.buffers}

    def run(self, leaves: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The outputs, with their graph, for the weights that the first run used."""
        module = self._program.module
        now = {name: getattr(module, name) for name in self._constants}
        try:
            for name, value in self._constants.items():
                setattr(module, name, value)
            with torch.enable_grad():
                outputs: tuple[torch.Tensor, ...] = module(*leaves, *self._buffers, *self._received, *self._inputs)
        finally:
            for name, value in now.items():
                setattr(module, name, value)
        return outputs
