"""Small models with everything that makes cutting hard, each as a job on random data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from launcher.job import Job


class Data:
    """``count`` samples made by ``make(generator)``, the same for the same index."""

    def __init__(self, make: Callable[[torch.Generator], Any], count: int = 12) -> None:
        self.make, self.count = make, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.make(torch.Generator().manual_seed(index))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def vector_job(model: nn.Module, loss: Any = F.mse_loss, width: int = 6, out: int = 3, **more: Any) -> Job:
    def make(g: torch.Generator) -> Any:
        return torch.randn(width, generator=g), torch.randn(out, generator=g)

    return Job(model, Data(make), sgd, 4, loss=loss, **more)


def image_job(model: nn.Module) -> Job:
    def make(g: torch.Generator) -> Any:
        return torch.randn(3, 8, 8, generator=g), int(torch.randint(0, 5, (), generator=g))

    return Job(model, Data(make), sgd, 4, loss=nn.CrossEntropyLoss(weight=torch.arange(1.0, 6.0)),
               metrics={"accuracy": lambda outputs, targets: (outputs.argmax(-1) == targets).float().mean()})


def token_job(model: nn.Module, length: int = 7) -> Job:
    def make(g: torch.Generator) -> Any:
        text = torch.randint(0, 11, (length + 1,), generator=g)
        return text[:-1], text[1:]

    return Job(model, Data(make), sgd, 3, loss=lambda out, target: F.cross_entropy(out.flatten(0, 1), target.flatten()))


def mlp() -> Job:
    return vector_job(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)))


def convolutional() -> Job:
    return image_job(nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout2d(0.2), nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6),
        nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.5, inplace=True), nn.Linear(24, 5)))


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x
        return self.relu(y)


def residual() -> Job:
    return image_job(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), _Residual(4), _Residual(4),
                                   nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)))


class _Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(dropout))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.ln2(x))


class _Gpt(nn.Module):
    def __init__(self, tied: bool = False, dropout: float = 0.2, blocks: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, 8), nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(_Block(8, dropout) for _ in range(blocks))
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def gpt() -> Job:
    return token_job(_Gpt())


def gpt_tied() -> Job:
    return token_job(_Gpt(tied=True, dropout=0.0))


class _Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(11, 6), nn.Embedding(11, 6)
        self.encoder, self.decoder = nn.LSTM(6, 6, 2, dropout=0.3, batch_first=True), nn.LSTM(6, 6, batch_first=True)
        self.head = nn.Linear(6, 11)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        _, (h, c) = self.encoder(self.source(source))
        out, _ = self.decoder(self.target(target), (h[-1:].contiguous(), c[-1:].contiguous()))
        return self.head(out)


def seq2seq() -> Job:
    def make(g: torch.Generator) -> Any:
        text = torch.randint(0, 11, (6,), generator=g)
        return (torch.randint(0, 11, (4,), generator=g), text[:-1]), text[1:]

    return Job(_Seq2Seq(), Data(make), sgd, 3, loss=lambda out, target: F.cross_entropy(out.transpose(1, 2), target))


class _Skips(nn.Module):
    """A tensor that skips stages and has two later users; another that only the last layer uses."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d, self.e = (nn.Linear(6, 6) for _ in range(5))
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x).tanh()
        b = self.b(a).tanh()
        c = self.c(b)
        d = self.d(c) * a
        return self.out(self.e(d) + a) + b.mean()


def skips() -> Job:
    return vector_job(_Skips())


class _OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        h = self.embed(input_ids)
        if attention_mask is not None:
            h = h * attention_mask[..., None]
        logits = self.head(h.cumsum(1))
        return {"loss": F.cross_entropy(logits.transpose(1, 2), labels), "logits": logits}


def own_loss() -> Job:
    def make(g: torch.Generator) -> Any:
        ids = torch.randint(0, 11, (5,), generator=g)
        return {"labels": ids.roll(1), "input_ids": ids, "attention_mask": (ids > 2).long()}

    return Job(_OwnLoss(), Data(make), sgd, 3)


class _NoGrad(nn.Module):
    """A region without gradients that also keeps a running mean, a frozen parameter, a non-persistent buffer."""

    ema: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.fixed = nn.Parameter(torch.full((6,), 0.5), requires_grad=False)
        self.register_buffer("ema", torch.zeros(6))
        self.register_buffer("scale", torch.linspace(1, 2, 6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.no_grad():
            centre = h.mean(0)
            if self.training:
                self.ema.mul_(0.9).add_(centre, alpha=0.1)
        h = self.b((h - centre) * self.scale + self.ema)
        return self.c(h * self.fixed)


def no_grad() -> Job:
    return vector_job(_NoGrad())


class _Integers(nn.Module):
    """Integer tensors computed from activations cross the cut, and non-contiguous ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.a, self.b, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 11)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(self.embed(x))
        order = h.detach().sum(-1).argsort(-1)
        h = self.b(h).transpose(0, 1)
        h = F.relu(h)[:, :, ::2].repeat_interleave(2, -1)
        h = h.transpose(0, 1).gather(1, order[..., None].expand(-1, -1, 8))
        return self.head(h)


def integers() -> Job:
    return token_job(_Integers())


class _Writes(nn.Module):
    """In-place writes of every kind: on a residual, through views, on the data, with type promotion."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.act = nn.LeakyReLU(0.1, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x[:, 1] = 0.25
        h = self.a(x)
        skip = h.view(-1, 2, 3)
        h = self.act(h)
        h = self.b(h)
        h[:, 0] = 0
        h += skip.flatten(1)
        y = self.c(h)
        y.add_(torch.ones(6, dtype=torch.float64)).clamp_(-1, 1)
        return self.d(y) + x.sum()


def writes() -> Job:
    return vector_job(_Writes())


class _Repeated(nn.Module):
    """One module called three times, between others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), nn.Linear(6, 3)
        self.act = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.first(x))
        for _ in range(3):
            h = self.act(self.shared(h))
        return self.last(h)


def repeated() -> Job:
    return vector_job(_Repeated())


class _Attention(nn.Module):
    """torch's own attention module, whose projection is a module that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True), 2,
                                             enable_nested_tensor=False)
        self.head = nn.Linear(8, 11)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.encoder(self.embed(x), mask=mask, is_causal=True))


def attention() -> Job:
    return token_job(_Attention())


class _Contexts(nn.Module):
    """A frozen encoder without gradients and a mixed-precision head: whole regions, which must be cut inside."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))
        self.a, self.b, self.c, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.dropout = 0.25

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.encoder(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.b(self.a(h).relu_())
            with torch.autocast("cpu", enabled=False):
                h = self.c(h.float())
            h = F.dropout(h.sin(), self.dropout, self.training)
            h = self.head(h)
        return h.float()


def contexts() -> Job:
    return vector_job(_Contexts())


class _NormalisedData(nn.Module):
    """Statistics of the data itself, without parameters: constant in evaluation, yet updated in training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.BatchNorm1d(6, affine=False), nn.Linear(6, 6), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.b(torch.cat([self.a(x).tanh(), x], 1))


def normalised_data() -> Job:
    return vector_job(_NormalisedData())


@torch.library.custom_op("pipedream_tests::shrink", mutates_args=())
def shrink(x: Tensor, by: float) -> Tensor:
    return x / by


@shrink.register_fake
def _(x: Tensor, by: float) -> Tensor:
    return torch.empty_like(x)


def _keep_factor(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.by = inputs[1]


# not the true derivative: a gradient that only the operation's own backward can give
shrink.register_autograd(lambda ctx, gradient: (gradient * ctx.by, None), setup_context=_keep_factor)


class _OwnOperation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(shrink(self.a(x), 3.0))


def own_operation() -> Job:
    return vector_job(_OwnOperation())


class _Branches(nn.Module):
    """Two branches of the data, joined late, with a skip over both; glue of one branch runs between layers of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.left1, self.left2, self.left3 = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.right1, self.right2, self.right3 = nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 4)
        self.cross, self.head, self.dropout = nn.Linear(4, 4), nn.Linear(16, 3), 0.2

    def forward(self, x: Tensor) -> Tensor:
        stem = self.stem(x).tanh()
        left = self.left1(stem)
        right = self.right1(x)
        left = F.dropout(left.relu(), self.dropout, self.training)
        right = self.right2(right.tanh())
        left = self.left2(left)
        right = self.right3(right)
        left = self.left3(left.sigmoid())
        return self.head(torch.cat([self.cross(left * right), right, stem], 1))


def branches() -> Job:
    return vector_job(_Branches())


class _Towers(nn.Module):
    """Two branches, layer by layer in turn; in evaluation one of them does something between two layers of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList([nn.Linear(6, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 4)])
        self.right = nn.ModuleList([nn.Linear(6, 8), nn.Sigmoid(), nn.Dropout(0.3), nn.Linear(8, 4)])
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        left, right = x, x
        for one, other in zip(self.left, self.right, strict=True):
            left, right = one(left), other(right)
            if not self.training:
                left = left.clamp(-0.5, 0.5)
        return self.head(torch.cat([left, right], 1))


def towers() -> Job:
    return vector_job(_Towers())


class _Inception(nn.Module):
    """Branches written one after the other, as most models do; each block joins four, and the first block feeds the last."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.blocks = nn.ModuleList(
            nn.ModuleList([
                nn.Conv2d(4, 1, 1),
                nn.Sequential(nn.Conv2d(4, 2, 1), nn.BatchNorm2d(2), nn.ReLU(inplace=True), nn.Conv2d(2, 1, 3, padding=1)),
                nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(4, 1, 1), nn.Dropout(0.2)), nn.Conv2d(4, 1, 3, padding=1),
            ]) for _ in range(2))
        self.head = nn.Linear(8 * 36, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        first = None
        for block in self.blocks:
            x = torch.cat([branch(x) for branch in block], 1)  # type: ignore[union-attr]
            first = x if first is None else first
        return self.head(torch.cat([x, first], 1).flatten(1))


def inception() -> Job:
    return image_job(_Inception())


ZOO: dict[str, Callable[[], Job]] = {
    job.__name__: job for job in (mlp, convolutional, residual, gpt, gpt_tied, seq2seq, skips, own_loss, no_grad, integers, writes,
                                  repeated, attention, contexts, own_operation, normalised_data, branches,
                                  towers, inception)
}
