"""What a stage's forward writes to beside its outputs: running statistics and the like, one copy a microbatch.

Such state is a buffer of the model, or a constant in the captured module (a buffer that is not in
``state_dict()``). It goes from forward to forward, while the backward of one microbatch must find it as its
own forward left it, and the second forward of a recomputing stage as its first forward found it::

    forward  m       copy of state 4 -> 5, kept by autograd where it needs it; the state becomes 5
    forward  m+1     copy of state 5 -> 6, the same; the state becomes 6
    backward m       reads its own copy, 5
    recomputing m    copy of state 4 -> 5 again, thrown away; the state stays 6
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from launcher.graph.program import StageProgram

__all__ = ["StageState"]

Written = tuple[torch.Tensor, ...]


class StageState:
    """Runs a stage's program on its buffers; ``buffers`` are in the program's order and stay the same tensors."""

    def __init__(self, program: StageProgram, buffers: Sequence[torch.Tensor]) -> None:
        self._program, self._buffers = program, dict(zip(program.buffers, buffers, strict=True))
        self._constants = tuple(name for name in program.written if name not in self._buffers)

    def written(self) -> Written:
        """The tensors that the program writes to, themselves."""
        module, buffers = self._program.module, self._buffers
        return tuple(buffers[name] if name in buffers else getattr(module, name) for name in self._program.written)

    def copy(self) -> Written:
        """Copies of them."""
        return tuple(tensor.clone() for tensor in self.written())

    def adopt(self, copies: Written) -> None:
        """Give the tensors themselves the values of ``copies``, which may be they."""
        changed = [(own, copy) for own, copy in zip(self.written(), copies, strict=True) if own is not copy]
        if changed:
            torch._foreach_copy_([own for own, _ in changed], [copy for _, copy in changed])

    def run(self, written: Written, leaves: Sequence[torch.Tensor], received: Sequence[torch.Tensor],
            inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The program's outputs with their graph, with ``written`` in the place of what it writes to."""
        module, places = self._program.module, dict(zip(self._program.written, written, strict=True))
        buffers = [places.get(name, tensor) for name, tensor in self._buffers.items()]
        own = {name: getattr(module, name) for name in self._constants}
        try:
            for name in self._constants:
                setattr(module, name, places[name])
            with torch.enable_grad():
                outputs: tuple[torch.Tensor, ...] = module(*leaves, *buffers, *received, *inputs)
        finally:
            for name, tensor in own.items():
                setattr(module, name, tensor)
        return outputs
