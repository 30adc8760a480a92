"""Correct experiments drawn at random: what the soak and the planted faults run on.

A ``Drawn`` is plain data; ``experiment`` makes the same experiment of it every time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from equivtest import Experiment, Loss, Plan

PRECISIONS = ("fp64", "fp32", "bf16", "fp16", "bf16-mixed", "fp16-mixed")
VOCABULARY = 11


@dataclass(frozen=True)
class Drawn:
    """One drawn case.

    Attributes:
        architecture: ``mlp``, ``transformer`` or ``embedding``.
        trained: updates of plain training before the comparison starts.
        loss_scale: a constant factor on the loss (with the clip bound scaled alike).
    """

    architecture: str
    width: int
    depth: int
    activation: str
    normalised: bool
    optimizer: str
    plan: Plan
    examples: int
    precision: str
    updates: int
    clip: float | None
    schedule: bool
    trained: int
    ragged: bool
    last_group: str | None
    seed: int
    loss_scale: float = 1.0


def drawn(precisions: tuple[str, ...] = PRECISIONS) -> st.SearchStrategy[Drawn]:
    """Strategy of correct cases in the given precisions."""
    return st.builds(
        _fitted,
        architecture=st.sampled_from(["mlp", "mlp", "transformer", "embedding"]),
        width=st.sampled_from([4, 8, 16]),
        depth=st.sampled_from([1, 2, 3, 5, 8, 16, 40]),
        activation=st.sampled_from(["relu", "gelu", "tanh"]),
        normalised=st.booleans(),
        optimizer=st.sampled_from(["sgd", "momentum", "nesterov", "adam", "adamw", "rmsprop"]),
        m=st.sampled_from([1, 2, 3, 4, 5]),
        A=st.sampled_from([1, 2, 3, 4, 5]),
        D=st.sampled_from([1, 2, 2, 3, 4]),
        left=st.integers(0, 7),
        precision=st.sampled_from(precisions),
        updates=st.sampled_from([1, 2, 3]),
        clip=st.sampled_from([None, None, 0.01, 1.0, 100.0]),
        schedule=st.booleans(),
        trained=st.sampled_from([0, 0, 5, 30]),
        ragged=st.booleans(),
        seed=st.integers(0, 10_000),
    )


def _fitted(*, m: int, A: int, D: int, left: int, precision: str, **values: object) -> Drawn:
    plan = Plan(m, A, D)
    optimizer = str(values["optimizer"])
    if precision == "fp16" and optimizer in ("adam", "adamw", "rmsprop"):
        values["optimizer"] = "momentum"  # their eps is 0 in float16: torch cannot run them
    if precision in ("fp16", "bf16"):
        # Without residual connections a deep stack in 8 or 11 bits computes nothing but noise.
        values["depth"] = min(int(values["depth"]), 8)  # type: ignore[call-overload]
    if precision == "fp16-mixed" and not values["normalised"]:
        values["depth"] = min(int(values["depth"]), 16)  # type: ignore[call-overload]
    left = min(left, plan.examples - 1)
    return Drawn(
        plan=plan,
        examples=plan.examples + left,
        last_group="process" if left else None,
        precision=precision,
        **values,  # type: ignore[arg-type]
    )


class Block(nn.Module):
    """A residual block: normalisation or not, linear, activation, linear."""

    def __init__(self, width: int, activation: str, normalised: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width) if normalised else nn.Identity()
        # A bias before a normalisation that removes the mean has no gradient in exact arithmetic.
        self.inner = nn.Linear(width, width)
        self.after = nn.LayerNorm(width) if normalised else nn.Identity()
        self.outer = nn.Linear(width, width)
        self.activation = {"relu": F.relu, "gelu": F.gelu, "tanh": torch.tanh}[activation]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.activation(self.after(self.inner(self.norm(x)))))


class Attention(nn.Module):
    """Causal self-attention with biases: that of the keys is a null tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        scores = (q @ k.transpose(1, 2)) / math.sqrt(x.shape[2])
        return x + self.out(scores.masked_fill(~mask, -1e4).softmax(-1) @ v)


class Net(nn.Module):
    """Features or tokens in, class scores out."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        width = drawn.width
        self.tokens = drawn.architecture != "mlp"
        self.embed: nn.Module = (
            nn.Embedding(VOCABULARY, width) if self.tokens else nn.Linear(6, width)
        )
        blocks: list[nn.Module] = []
        for _ in range(drawn.depth if drawn.architecture != "embedding" else 1):
            if drawn.architecture == "transformer":
                blocks.append(Attention(width))
            blocks.append(Block(width, drawn.activation, drawn.normalised))
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x)))


def experiment(drawn: Drawn) -> Experiment:
    """The experiment that ``drawn`` describes."""
    start = _trained(drawn) if drawn.trained else None

    def model() -> nn.Module:
        net = Net(drawn)
        if start is not None:
            net.load_state_dict(start)
        return net

    return Experiment(
        model=model,
        data=_data(drawn),
        collate=_pad if drawn.architecture != "mlp" else None,
        loss=partial(_loss, scale=drawn.loss_scale),
        count=_count,
        optimizer=partial(_optimizer, drawn.optimizer),
        scheduler=_warm_up if drawn.schedule else None,
        clip_norm=None if drawn.clip is None else drawn.clip * drawn.loss_scale,
        scaler=partial(torch.amp.GradScaler, "cpu", init_scale=2.0**10),
        updates=drawn.updates,
        last_group=drawn.last_group,  # type: ignore[arg-type]
        seed=drawn.seed,
        name=f"drawn_{drawn.architecture}",
    )


def _data(drawn: Drawn) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(drawn.seed)
    examples = []
    for _ in range(drawn.examples):
        if drawn.architecture == "mlp":
            x = torch.randn(6, generator=generator)
            target = torch.randint(0, VOCABULARY, (), generator=generator)
            if drawn.ragged and torch.rand((), generator=generator) < 0.3:
                target = torch.tensor(-100)
            examples.append({"x": x, "target": target})
        else:
            length = int(torch.randint(2, 9, (), generator=generator)) if drawn.ragged else 6
            tokens = torch.randint(0, VOCABULARY, (length + 1,), generator=generator)
            examples.append({"x": tokens[:-1], "target": tokens[1:]})
    if drawn.architecture == "mlp":
        # At least one supervised element in every group, a last group of one example included.
        examples[0]["target"] = examples[-1]["target"] = torch.tensor(1)
    return examples


def _pad(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    pad = nn.utils.rnn.pad_sequence
    return {
        "x": pad([e["x"] for e in examples], batch_first=True),
        "target": pad([e["target"] for e in examples], batch_first=True, padding_value=-100),
    }


def _loss(model: nn.Module, batch: dict[str, Tensor], scale: float) -> Loss:
    logits = model(batch["x"]).reshape(-1, VOCABULARY)
    target = batch["target"].reshape(-1)
    total = F.cross_entropy(logits, target, ignore_index=-100, reduction="sum")
    return Loss(total=total * scale, count=(target != -100).sum())


def _count(batch: dict[str, Tensor]) -> Tensor:
    return (batch["target"] != -100).sum()


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    parameters = model.parameters()
    match name:
        case "sgd":
            return torch.optim.SGD(parameters, lr=0.1, weight_decay=0.01)
        case "momentum":
            return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        case "nesterov":
            return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)
        case "adam":
            return torch.optim.Adam(parameters, lr=1e-3, weight_decay=0.01)
        case "adamw":
            return torch.optim.AdamW(parameters, lr=1e-3)
        case _:
            return torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.5)


def _warm_up(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, _ramp)


def _ramp(calls: int) -> float:
    return min(1.0, (calls + 1) / 3)


def _trained(drawn: Drawn) -> dict[str, Tensor]:
    """Weights after some plain updates: gradients are smaller and less independent there."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(drawn.seed)
        net = Net(drawn)
        optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
        data = _data(drawn)
        collate = _pad if drawn.architecture != "mlp" else torch.utils.data.default_collate
        for k in range(drawn.trained):
            batch = collate([data[(k * 8 + i) % len(data)] for i in range(8)])
            loss = _loss(net, batch, 1.0)
            optimizer.zero_grad()
            (loss.total / loss.count.clamp(min=1)).backward()
            optimizer.step()
    return {k: v.detach().clone() for k, v in net.state_dict().items()}
