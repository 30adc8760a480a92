"""A contrastive loss over features that are gathered from the replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from equivtest.causes import Cause
from equivtest.experiment import Experiment, Loss, Rank
from equivtest.faults.pieces import backward, finish
from equivtest.faults.planting import Planted
from equivtest.faults.setting import Setting

Gather = Callable[[Rank, Tensor], Tensor]
"""Features of all replicas, in the order of the ranks."""


class Towers(nn.Module):
    """Two encoders into one space, and the temperature that their similarities are scaled with."""

    def __init__(self, images: int = 6, texts: int = 5, features: int = 4) -> None:
        super().__init__()
        self.image = nn.Linear(images, features)
        self.text = nn.Linear(texts, features)
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Features of length 1, ``[example, feature]`` twice, and the factor on similarities."""
        image = F.normalize(self.image(batch["image"]), dim=-1)
        text = F.normalize(self.text(batch["text"]), dim=-1)
        return image, text, self.scale.exp()


def contrastive(model: Any, batch: dict[str, Tensor]) -> Loss:
    """Each image against all texts of the batch."""
    image, text, scale = model(batch)
    return Loss(total=_against_all(image, text, scale), count=len(image))


def _against_all(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    pairs = torch.arange(len(image), device=image.device)
    return F.cross_entropy(scale * image @ text.T, pairs, reduction="sum")


class Gathered(torch.autograd.Function):
    """The layer that is copied from one contrastive training script to the next."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any, factor: float) -> Tensor:
        ctx.group, ctx.factor, ctx.size = group, factor, len(own)
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, own.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        whole = gradients[0].contiguous()
        dist.all_reduce(whole, group=ctx.group)
        first = dist.get_rank(ctx.group) * ctx.size
        return whole[first : first + ctx.size] * ctx.factor, None, None


def gathered_right(rank: Rank, own: Tensor) -> Tensor:
    """With a gradient, which sums over the ranks what the wrapper then averages."""
    gathered: Tensor = Gathered.apply(own, rank.dp_group, 1.0)
    return gathered


def gathered_without_gradient(rank: Rank, own: Tensor) -> Tensor:
    """The others' features as constants, the own ones put back: 1/D of the gradient."""
    parts = [torch.empty_like(own) for _ in range(rank.D)]
    dist.all_gather(parts, own.detach(), group=rank.dp_group)
    parts[rank.dp_rank] = own
    return torch.cat(parts)


def gathered_double(rank: Rank, own: Tensor) -> Tensor:
    """With a gradient that is multiplied by D, as if the wrapper's average were still to undo."""
    gathered: Tensor = Gathered.apply(own, rank.dp_group, float(rank.D))
    return gathered


def contrasted(rank: Rank, gather: Gather) -> None:
    """One microbatch an update: every rank takes the loss of the whole, gathered batch."""
    for group in rank.groups:
        for batch in group:
            with rank.autocast():
                image, text, scale = rank.model(batch)
                total = _against_all(gather(rank, image), gather(rank, text), scale)
            backward(rank, total / group.count)
        finish(rank)


def right(rank: Rank) -> None:
    """The large batch's gradient."""
    contrasted(rank, gathered_right)


def gather_no_grad(rank: Rank) -> None:
    contrasted(rank, gathered_without_gradient)


def gather_double(rank: Rank) -> None:
    contrasted(rank, gathered_double)


def gathers(setting: Setting) -> str:
    """It is written for one experiment: what another gathers is not known."""
    if setting.experiment.loss is contrastive:
        return ""
    return "the loss gathers no features from the replicas"


def at_once(setting: Setting) -> str:
    if setting.accumulations > 1 or setting.plan.D == 1:
        return "features are gathered over replicas, not over accumulations: it needs A=1 and D>1"
    return ""


def pairs(updates: int = 2, examples: int = 16, **more: Any) -> Experiment:
    """Images and texts that belong together, drawn once."""
    drawn = torch.Generator().manual_seed(0)
    data = [
        {"image": torch.randn(6, generator=drawn), "text": torch.randn(5, generator=drawn)}
        for _ in range(examples)
    ]
    return Experiment(
        model=Towers,
        data=data,
        loss=contrastive,
        count=lambda batch: len(batch["image"]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        updates=updates,
        **more,
    )


FAULTS = (
    Planted(
        "loss.gather_no_grad",
        Cause.GATHER_NO_GRAD,
        "open_clip #616",
        gather_no_grad,
        conditions=(gathers, at_once),
    ),
    Planted(
        "loss.gather_double",
        Cause.GATHER_DOUBLE,
        "lightly #1977",
        gather_double,
        conditions=(gathers, at_once),
    ),
)
