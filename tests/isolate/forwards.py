"""Small models that draw in their forward, ragged lines for them, and their keyed gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from equivtest.isolate.random.fields import Layouts
from equivtest.isolate.random.keyed import Keyed
from equivtest.isolate.random.probing import probe

WIDTH = 4
SEED, UPDATE = 7, 0


def lines(lengths: Sequence[int], seed: int = 0) -> list[Tensor]:
    """An example is a line of vectors: (length, WIDTH)."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, WIDTH, generator=generator, dtype=torch.float64) for n in lengths]


@dataclass
class Setup:
    """A model with its loss over padded lines.

    Attributes:
        model: ``(x, mask)`` to a prediction for each token, batch first; x is (N, L, WIDTH), the
            mask (N, L).
        pad: further zeros behind each line; in front of them if ``left``.
    """

    model: nn.Module
    data: list[Tensor]
    pad: int = 0
    left: bool = False
    loss: Callable[[Tensor, Tensor], Tensor] | None = None

    def batch(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        held = [self.data[i] for i in ids]
        side = "left" if self.left else "right"
        x = pad_sequence(held, batch_first=True, padding_side=side)
        mask = pad_sequence(
            [torch.ones(len(h), dtype=torch.bool) for h in held],
            batch_first=True,
            padding_side=side,
        )
        extra = (self.pad, 0) if self.left else (0, self.pad)
        return F.pad(x, (0, 0, *extra)), F.pad(mask, extra)

    def total(self, ids: Sequence[int]) -> Tensor:
        x, mask = self.batch(ids)
        out = self.model(x, mask)
        if self.loss is not None:
            return self.loss(out, mask)
        weight = mask if out.ndim == 2 else mask[..., None]
        return ((out + 0.3) ** 3 * weight).sum()

    def layouts(self, key: tuple[int, ...] = (SEED, UPDATE)) -> Layouts:
        lengths = {i: len(line) for i, line in enumerate(self.data)}
        return probe(self.model, lambda ids: float(self.total(ids).detach()), lengths, key)

    def gradient(
        self,
        parts: Sequence[Sequence[int]],
        layouts: Layouts,
        key: tuple[int, ...] = (SEED, UPDATE),
    ) -> Tensor:
        """Of the sum over ``parts``, all parameters in a row."""
        self.model.zero_grad()
        for ids in parts:
            with Keyed(self.model, ids, key, layouts) as keyed:
                self.total(ids).backward()
            assert keyed.unkeyed == []
        return self.in_a_row()

    def in_a_row(self) -> Tensor:
        """The gradient of all parameters; zeros where there is none."""
        held = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.model.parameters()]
        return torch.cat([gradient.flatten() for gradient in held])


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())
