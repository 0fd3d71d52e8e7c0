"""Reading ahead in loader processes, by ``torch.utils.data.DataLoader``; its workers end with ours, and errors keep their words."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from planner.spec.errors import PipedreamError

__all__ = ["Microbatch", "load", "load_stream"]

Microbatch = tuple[torch.Tensor, ...]
_AHEAD = 2  # microbatches read ahead for each loader process asked for


def load(read: Callable[[int], Microbatch], indices: Iterable[int], processes: int) -> Iterator[Microbatch]:
    """``read(index)`` of each of ``indices``, in that order, by ``processes`` loader processes (0: here, when it is needed)."""
    return _started(_Indexed(read), processes, sampler=indices, prefetch_factor=_AHEAD if processes else None)


def load_stream(stream: Callable[[], Iterator[Microbatch]], processes: int) -> Iterator[Microbatch]:
    """What ``stream()`` gives, in that order.

    Two processes would each go through the whole stream, so there is one however many are asked for; it reads
    ahead as far as all of them would. To the data set it is loader process 0 of 1.
    """
    return _started(_Streamed(stream), min(processes, 1), prefetch_factor=_AHEAD * processes or None)


def _started(dataset: Dataset[Any], processes: int, **settings: Any) -> Iterator[Microbatch]:
    loader = DataLoader(dataset, batch_size=None, num_workers=processes, collate_fn=_unchanged,
                        worker_init_fn=functools.partial(_follow, os.getpid()),
                        generator=torch.Generator(), **settings)  # one of its own, so that the process's is left alone
    return _told(iter(loader))  # which starts the loader processes at once


def _told(results: Iterator[Microbatch | PipedreamError]) -> Iterator[Microbatch]:
    for result in results:
        if isinstance(result, PipedreamError):
            raise result
        yield result


class _Indexed(Dataset[Any]):
    """An error of ours is a result like any other: raised in a loader process it would come as a traceback in a text."""

    def __init__(self, read: Callable[[int], Microbatch]) -> None:
        self._read = read

    def __getitem__(self, index: int) -> Microbatch | PipedreamError:
        try:
            return self._read(index)
        except PipedreamError as error:
            return error


class _Streamed(IterableDataset[Any]):
    def __init__(self, stream: Callable[[], Iterator[Microbatch]]) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[Microbatch | PipedreamError]:
        try:
            yield from self._stream()
        except PipedreamError as error:
            yield error


def _follow(worker: int, index: int) -> None:
    """In a loader process: let the kernel end it with its worker, however that ends.

    torch itself looks every 5 seconds whether its parent is another one than at first, which is too late to see one that was gone by then.
    """
    if platform.system() == "Linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != worker:
        os._exit(1)


def _unchanged(value: Any) -> Any:
    return value
