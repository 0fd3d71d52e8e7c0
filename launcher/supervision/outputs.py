"""The model's outputs for every evaluation sample, in order, however many replicas make them.

One file an output, mapped into memory by every replica of the last stage, with a row for each sample. A
replica writes the rows of its own microbatches, so the order is restored by where a row lies, nothing is
gathered, and no process holds more than what the system keeps in memory anyway::

    rows      0..3         4..7         8..11        12..13
    written   replica 0    replica 1    replica 0    replica 1
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from launcher.graph.program import Value
from planner.spec.errors import BadInput

__all__ = ["OutputFiles", "rows"]


@dataclass(frozen=True)
class OutputFiles:
    """``outputs`` of a microbatch (first dimension its samples), for ``samples`` samples, in files in ``folder``."""

    folder: Path
    outputs: tuple[Value, ...]
    samples: int

    def create(self) -> None:
        """Make the folder and the files, with all the room they need: a write to memory that the disk cannot hold kills.

        Raises:
            BadInput: the disk has no room, or the folder cannot be made.
        """
        total = sum(map(self._bytes, range(len(self.outputs))))
        try:
            self.folder.mkdir()
            for index in range(len(self.outputs)):
                with self._path(index).open("wb") as file:
                    if self._bytes(index) and hasattr(os, "posix_fallocate"):
                        os.posix_fallocate(file.fileno(), 0, self._bytes(index))
                    file.truncate(self._bytes(index))
        except OSError as error:
            self.remove()
            raise BadInput(f"cannot make room for {total} bytes of outputs in {self.folder.parent}: {error.strerror}",
                           hint="choose another place for --outputs, or evaluate fewer samples") from error

    def remove(self) -> None:
        """Take the files away."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def open(self) -> tuple[torch.Tensor, ...]:
        """The files as tensors of shape (samples, ...): writing to them is writing to the files."""
        return tuple(self._mapped(index) for index in range(len(self.outputs)))

    def save(self, path: Path) -> None:
        """Put them into one torch file: a tensor where the model returns one, else a dict by name.

        Raises:
            BadInput: the file cannot be written.
        """
        tensors = dict(zip((output.name for output in self.outputs), self.open(), strict=True))
        temporary = path.with_name(f".{path.name}.writing")
        try:
            torch.save(tensors["output"] if tuple(tensors) == ("output",) else tensors, temporary)
            temporary.replace(path)
        except (OSError, RuntimeError) as error:  # torch's writer raises the second when the disk is full
            temporary.unlink(missing_ok=True)
            reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
            raise BadInput(f"cannot write the outputs to {path}: {reason}", hint="choose another place for --outputs") from error

    def _path(self, index: int) -> Path:
        return self.folder / f"output{index}"

    def _bytes(self, index: int) -> int:
        return self._elements(index) * self.outputs[index].dtype.itemsize

    def _elements(self, index: int) -> int:
        return self.samples * math.prod(self.outputs[index].shape[1:])

    def _mapped(self, index: int) -> torch.Tensor:
        output, elements = self.outputs[index], self._elements(index)
        shape = (self.samples, *output.shape[1:])
        if not elements:
            return torch.empty(shape, dtype=output.dtype)
        return torch.from_file(str(self._path(index)), shared=True, size=elements, dtype=output.dtype).view(shape)


def rows(sizes: Sequence[int], index: int) -> slice:
    """The rows of microbatch ``index``.

    >>> rows((4, 4, 2), 2)
    slice(8, 10, None)
    """
    first = index * sizes[0]  # only the last may be smaller
    return slice(first, first + sizes[index])
