"""A convolutional network with BatchNorm and dropout on the 1,797 handwritten digits of scikit-learn.

    pipedream profile examples/digits_cnn.py             with the pipeline
    python examples/digits_cnn.py --plain --steps 600    without it, in an ordinary loop

The digits ship with scikit-learn (``pip install scikit-learn``): 8 x 8 pixels, ten classes. A fifth
is held out, and the test accuracy is the share of it that is recognised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

if TYPE_CHECKING:
    from launcher import Job

CLASSES = 10
SPLIT_SEED = 0  # of the train/test split: the same for every training seed


def convolution(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


class DigitsNet(nn.Module):
    """Images ``(batch, 1, 8, 8)`` to logits ``(batch, 10)``."""

    def __init__(self, channels: int, dropout: float) -> None:
        super().__init__()
        self.features = nn.Sequential(
            convolution(1, channels),
            convolution(channels, channels),
            nn.MaxPool2d(2),
            convolution(channels, 2 * channels),
            convolution(2 * channels, 2 * channels),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(2 * channels * 4, 4 * channels),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(4 * channels, CLASSES),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images))


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Training and test images in 0..1 with their classes."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit("scikit-learn is not installed: pip install scikit-learn") from None
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    classes = torch.tensor(bunch.target, dtype=torch.int64)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SPLIT_SEED))
    test, train = order[: len(order) // 5], order[len(order) // 5 :]
    return TensorDataset(images[train], classes[train]), TensorDataset(images[test], classes[test])


def accuracy(logits: Tensor, classes: Tensor) -> Tensor:
    """Share of the microbatch whose most likely class is right."""
    return (logits.argmax(1) == classes).float().mean()


def job(channels: int = 32, dropout: float = 0.3, microbatch_size: int = 32, learning_rate: float = 5e-4) -> Job:
    """The job that ``pipedream`` trains."""
    from launcher import Job

    train, test = digits()
    return Job(
        model=DigitsNet(channels, dropout),
        loss=functional.cross_entropy,
        train_data=train,
        evaluation_data=test,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=learning_rate),
        metrics={"accuracy": accuracy},
        microbatch_size=microbatch_size,
    )


if __name__ == "__main__":
    from plain import main

    main(job)
