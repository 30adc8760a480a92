"""Models that draw in their forward, one for each way to do it: ``(x, mask) -> (N, L, WIDTH)``."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from forwards import WIDTH
from torch import Tensor, nn
from torch.distributions import Normal
from torch.func import vmap
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

P = 0.3


class Between(nn.Module):
    """Linear, what draws, linear: by token."""

    def __init__(self, noise: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.noise = noise

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.after(self.noise(torch.sin(self.before(x))))


class Through(nn.Module):
    """A module on the batch in another shape, which is turned back."""

    def __init__(self, module: nn.Module, turn: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.module, self.turn = module, turn

    def forward(self, x: Tensor) -> Tensor:
        turned, back = self.turn(x)
        return back(self.module(turned))


def channels(axes: int) -> Callable[[Tensor], Any]:
    """(N, L, W) to (N, W, L, 1 ...), with ``axes`` behind the channels."""
    ones = (1,) * (axes - 1)
    return lambda x: (
        x.transpose(1, 2).reshape(len(x), WIDTH, -1, *ones),
        lambda y: y.reshape(len(x), WIDTH, -1).transpose(1, 2),
    )


def second(x: Tensor) -> Any:
    """The batch second."""
    return x.transpose(0, 1), lambda y: y.transpose(0, 1)


def folded(x: Tensor) -> Any:
    """Tokens in one axis, example after example."""
    return x.reshape(-1, WIDTH), lambda y: y.reshape(x.shape)


def folded_second(x: Tensor) -> Any:
    """Tokens in one axis, the examples in turn."""
    n, length, width = x.shape
    return (
        x.transpose(0, 1).reshape(-1, width),
        lambda y: y.reshape(length, n, width).transpose(0, 1),
    )


class Attention(nn.Module):
    """Causal attention with dropout, by torch's function: (N, H, L, L)."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=P, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


class MultiHead(nn.Module):
    def __init__(self, batch_first: bool, need_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=P, batch_first=batch_first)
        self.batch_first, self.need_weights = batch_first, need_weights

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        x, _ = self.attention(x, x, x, key_padding_mask=~mask, need_weights=self.need_weights)
        return x if self.batch_first else x.transpose(0, 1)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=P, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.layers(x, src_key_padding_mask=~mask)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], batch_first: bool) -> None:
        super().__init__()
        self.cells = kind(WIDTH, WIDTH, num_layers=3, dropout=P, batch_first=batch_first)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.cells.batch_first:
            return self.cells(x)[0]
        return self.cells(x.transpose(0, 1))[0].transpose(0, 1)


class PackedRecurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=P, bidirectional=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        lengths = mask.sum(1)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(
            self.cells(packed)[0], batch_first=True, total_length=x.shape[1]
        )
        return out


class PackedButTheLast(nn.Module):
    """Of each line all but the last token, which a shorter line keeps in a longer one's batch."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.cells = nn.GRU(WIDTH, WIDTH, num_layers=2, dropout=P, batch_first=batch_first)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        first = self.cells.batch_first
        held = mask[:, : max(x.shape[1] - 1, 1)]
        packed = pack_padded_sequence(
            x if first else x.transpose(0, 1), held.sum(1), batch_first=first, enforce_sorted=False
        )
        out, _ = pad_packed_sequence(
            self.cells(packed)[0], batch_first=True, total_length=x.shape[1]
        )
        return out * F.pad(mask[:, 1:], (0, 1)).unsqueeze(-1)


class PackedSorted(PackedButTheLast):
    """The same that sorts by length itself: a packed sequence does not say where each line stood.

    Args:
        by: gives the order of lengths, the longest first.
    """

    def __init__(self, by: Callable[[Tensor], Tensor]) -> None:
        super().__init__(batch_first=True)
        self.by = by

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        lengths = mask[:, : max(x.shape[1] - 1, 1)].sum(1)
        order = self.by(lengths)
        packed = pack_padded_sequence(x[order], lengths[order], batch_first=True)
        out, _ = pad_packed_sequence(
            self.cells(packed)[0], batch_first=True, total_length=x.shape[1]
        )
        return out[order.argsort()] * F.pad(mask[:, 1:], (0, 1)).unsqueeze(-1)


class WithoutPadding(nn.Module):
    """Dropout on the tokens alone, in one axis, as kernels for ragged batches take them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(P)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        out[mask] = self.drop(self.linear(x[mask]))
        return out


class Depth(nn.Module):
    """Stochastic depth: a branch is left out for an example, or for the whole batch."""

    def __init__(self, by_example: bool) -> None:
        super().__init__()
        self.by_example = by_example

    def forward(self, x: Tensor) -> Tensor:
        size = (len(x), 1, 1) if self.by_example else ()
        return x + torch.sin(x) * (torch.rand(size) > P)


class LayerDrop(nn.Module):
    """Layers left out by Python's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if random.random() > P:
                x = layer(x)
        return x


class OwnGenerator(nn.Module):
    """Noise from a generator that the module holds."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn(x.shape, generator=self.generator, dtype=x.dtype)


class Chosen(nn.Module):
    """A feature drawn for each token, by ``torch.multinomial``."""

    def __init__(self, count: int, replacement: bool) -> None:
        super().__init__()
        self.count, self.replacement = count, replacement

    def forward(self, x: Tensor) -> Tensor:
        chances = x.detach().softmax(-1).flatten(0, 1)
        chosen = torch.multinomial(chances, self.count, self.replacement)
        return x * (1 + F.one_hot(chosen, WIDTH).sum(1)).reshape(x.shape)


class DroppedWeights(nn.Module):
    """The same weights dropped for all examples."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, F.dropout(self.linear.weight, P))


class Shuffled(nn.Module):
    """The features in an order drawn for the whole batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x[..., torch.randperm(WIDTH)] * (1 + torch.arange(WIDTH))


class Loop(nn.Module):
    """One Dropout, called once for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(P)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.drop(token) for token in x.unbind(1)], 1)


def noise(draw: Callable[[Tensor], Tensor]) -> nn.Module:
    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return draw(x)

    return Noise()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "Dropout": lambda: Between(nn.Dropout(P)),
    "Dropout in place": lambda: Between(nn.Dropout(P, inplace=True)),
    "Dropout1d": lambda: Between(Through(nn.Dropout1d(P), channels(1))),
    "Dropout2d": lambda: Between(Through(nn.Dropout2d(P), channels(2))),
    "Dropout3d": lambda: Between(Through(nn.Dropout3d(P), channels(3))),
    "AlphaDropout": lambda: Between(nn.AlphaDropout(P)),
    "FeatureAlphaDropout": lambda: Between(Through(nn.FeatureAlphaDropout(P), channels(1))),
    "batch second": lambda: Between(Through(nn.Dropout(P), second)),
    "folded": lambda: Between(Through(nn.Dropout(P), folded)),
    "folded, batch second": lambda: Between(Through(nn.Dropout(P), folded_second)),
    "folded both ways": lambda: Between(
        nn.Sequential(Through(nn.Dropout(P), folded), Through(nn.Dropout(P), folded_second))
    ),
    "folded both ways, behind a coin": lambda: Between(
        nn.Sequential(
            nn.Dropout(0.5), Through(nn.Dropout(P), folded_second), Through(nn.Dropout(P), folded)
        )
    ),
    "without padding": WithoutPadding,
    "attention": lambda: Between(Attention()),
    "MultiheadAttention": lambda: MultiHead(batch_first=True, need_weights=False),
    "MultiheadAttention, batch second, weights": lambda: MultiHead(False, True),
    "TransformerEncoder": Encoder,
    "depth by example": lambda: Between(Depth(by_example=True)),
    "depth by batch": lambda: Between(Depth(by_example=False)),
    "layers by random": lambda: Between(LayerDrop()),
    "RReLU": lambda: Between(nn.RReLU()),
    "RReLU in place": lambda: Between(nn.RReLU(inplace=True)),
    "Gumbel": lambda: Between(noise(F.gumbel_softmax)),
    "rand": lambda: Between(noise(lambda x: x * torch.rand(x.shape))),
    "randn_like": lambda: Between(noise(lambda x: x + torch.randn_like(x))),
    "normal": lambda: Between(noise(lambda x: torch.normal(x.detach(), 0.5) + x)),
    "bernoulli": lambda: Between(noise(lambda x: x * torch.bernoulli(x.detach().sigmoid()))),
    "Normal": lambda: Between(noise(lambda x: Normal(x, x.exp()).rsample())),
    "vmap": lambda: Between(noise(vmap(partial(F.dropout, p=P), randomness="different"))),
    "weights": lambda: Between(DroppedWeights()),
    "poisson": lambda: Between(noise(lambda x: x * torch.poisson(x.detach().exp()))),
    "randint": lambda: Between(noise(lambda x: x * torch.randint(1, 5, x.shape))),
    "multinomial": lambda: Between(Chosen(2, replacement=False)),
    "multinomial with replacement": lambda: Between(Chosen(3, replacement=True)),
    "randperm of features": lambda: Between(Shuffled()),
    "own generator": lambda: Between(OwnGenerator()),
    "once a position": lambda: Between(Loop()),
    "LSTM": lambda: Recurrent(nn.LSTM, batch_first=True),
    "LSTM, batch second": lambda: Recurrent(nn.LSTM, batch_first=False),
    "GRU": lambda: Recurrent(nn.GRU, batch_first=True),
    "RNN": lambda: Recurrent(nn.RNN, batch_first=False),
    "packed LSTM": PackedRecurrent,
    "packed GRU, all but the last": lambda: PackedButTheLast(batch_first=True),
    "packed GRU, all but the last, batch second": lambda: PackedButTheLast(batch_first=False),
    "packed GRU, sorted by the model": lambda: PackedSorted(
        lambda lengths: lengths.argsort(descending=True)
    ),
}


LAYERS: tuple[Callable[[], nn.Module], ...] = (
    lambda: nn.Dropout(0.5),
    nn.RReLU,
    lambda: nn.AlphaDropout(P),
    lambda: nn.LayerNorm(WIDTH),
    lambda: Through(nn.Dropout(P), folded),
    lambda: Through(nn.Dropout(P), folded_second),
    lambda: Through(nn.Dropout(P), second),
    lambda: Through(nn.Dropout1d(P), channels(1)),
    lambda: noise(F.gumbel_softmax),
    lambda: noise(lambda x: x + torch.randn_like(x)),
    lambda: Depth(by_example=True),
    lambda: Depth(by_example=False),
    lambda: Chosen(2, replacement=True),
    LayerDrop,
    DroppedWeights,
)
"""Of tokens, in any order."""


class Checkpointed(nn.Module):
    """The blocks of a stack, each computed again in backward; the outer ones within another."""

    def __init__(self, use_reentrant: bool | None, nested: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            Between(nn.Sequential(nn.Dropout(P), nn.RReLU())) for _ in range(3)
        )
        self.use_reentrant, self.nested = use_reentrant, nested

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x.clone().requires_grad_()  # which a re-entrant checkpoint wants of one input
        if self.nested:
            return self._again(lambda y: self._blocks(y, mask), x)
        return self._blocks(x, mask)

    def _blocks(self, x: Tensor, mask: Tensor) -> Tensor:
        x = F.dropout(x, P)
        for block in self.blocks:
            x = self._again(block, x, mask)
        return x

    def _again(self, function: Callable[..., Tensor], *args: Tensor) -> Tensor:
        if self.use_reentrant is None:
            return function(*args)
        return checkpoint(function, *args, use_reentrant=self.use_reentrant)
