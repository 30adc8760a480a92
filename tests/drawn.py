"""Correct experiments drawn at random: what the soak and the planted faults run on.

A ``Drawn`` is plain data; ``experiment`` makes the same experiment of it every time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from equivtest import Experiment, Loss, Plan
from equivtest.batches import Batches
from equivtest.plan import GroupLayout, layout
from equivtest.precision import precision

PRECISIONS = ("fp64", "fp32", "bf16", "fp16", "bf16-mixed", "fp16-mixed")
OPTIMIZERS = (
    "sgd",
    "momentum",
    "nesterov",
    "adam",
    "adamw",
    "amsgrad",
    "fused-adamw",
    "rmsprop",
    "adagrad",
)
RARE = ("two-terms", "two-optimizers", "averages", "frozen", "tied", "unused", "overflow")
NO_EPS = ("sgd", "momentum", "nesterov")
"""Optimizers without a guard that is zero in float16."""

SCALABLE = ("fp64", "fp32", "bf16", "bf16-mixed")
"""Precisions in which a power of two on the loss changes no margin."""

VOCABULARY = 11
MOST_EXAMPLES = 48


@dataclass(frozen=True)
class Drawn:
    """One drawn case.

    Attributes:
        architecture: ``mlp``, ``plain`` (without residuals), ``conv``, ``transformer``,
            ``embedding`` or ``lstm``.
        normalised: LayerNorm, InstanceNorm after convolutions (their biases are null tensors).
        shift: a scalar beside the logits, whose gradient is zero in exact arithmetic.
        trained: updates of plain training before the comparison starts.
        ragged: sequences of several lengths, and examples without a supervised element.
        loss_scale: a constant factor on the loss (with the clip bound scaled alike).
        init_scale: what the scaler of fp16-mixed starts with.
        kind: ``common``, or one of ``RARE``.
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
    scheduler_unit: str = "applied"
    shuffle: bool = False
    shift: bool = False
    fused_attention: bool = False
    init_scale: float = 2.0**10
    kind: str = "common"

    @property
    def tokens(self) -> bool:
        return self.architecture in ("transformer", "embedding", "lstm")


def drawn(
    precisions: tuple[str, ...] = PRECISIONS, *, everything: bool = False, stream: int = 0
) -> st.SearchStrategy[Drawn]:
    """Strategy of correct cases, spread evenly over the given precisions.

    One number is drawn and the case derived from it: parts drawn one by one come back in clumps.

    Args:
        everything: rarer kinds as well, some of which need ``wrap``, and what torch refuses.
        stream: other cases for the same numbers.
    """
    numbers = st.integers(0, 2**40)
    return numbers.map(lambda n: _case(random.Random(f"{stream}:{n}"), precisions, everything))


def _case(r: random.Random, precisions: tuple[str, ...], everything: bool) -> Drawn:
    chosen = r.choice(precisions)
    architecture = r.choice(
        ["mlp", "mlp", "mlp", "plain", "conv", "transformer", "transformer", "embedding", "lstm"]
    )
    kind = r.choice(RARE) if everything and r.random() < 0.25 else "common"
    if kind == "overflow" and chosen != "fp16-mixed":
        kind = "common"
    plan = _plan(r)
    groups = r.choice([1, 1, 2, 3])
    left = r.choice([0, r.randrange(plan.examples)])
    case = Drawn(
        architecture=architecture,
        width=r.choice([3, 4, 8, 8, 13, 16, 32]),
        depth=_depth(r, architecture, chosen),
        activation=r.choice(["relu", "relu", "gelu", "gelu", "tanh"]),
        normalised=r.random() < 0.5,
        optimizer=r.choice(OPTIMIZERS),
        plan=plan,
        examples=groups * plan.examples + left,
        precision=chosen,
        updates=3 if kind == "overflow" else r.choice([1, 2, 2, 3, 4]),
        clip=r.choice([None, None, 0.01, 1.0, 100.0]),
        schedule=r.random() < 0.5,
        trained=r.choice([0, 0, 5, 30]),
        ragged=r.random() < 0.6,
        last_group=r.choice(["process", "process", "drop"]) if left else None,
        seed=r.randrange(10_000),
        scheduler_unit=r.choice(["applied", "attempted", "microbatch"]),
        shuffle=r.random() < 0.3,
        shift=r.random() < 0.3,
        fused_attention=r.random() < 0.5,
        init_scale=2.0**30 if kind == "overflow" else r.choice([2.0**10, 2.0**10, 2.0**12]),
        kind=kind,
    )
    if refusal(case) is not None and not (everything and r.random() < 0.1):
        return _accepted(case, r)
    return case


def _accepted(case: Drawn, r: random.Random) -> Drawn:
    """The case without what torch refuses."""
    if case.precision == "fp16" and case.optimizer not in NO_EPS:
        case = replace(case, optimizer=r.choice(NO_EPS))
    if case.architecture == "lstm" and case.precision == "fp16-mixed":
        case = replace(case, architecture="embedding", depth=1)
    if case.architecture == "conv" and refusal(case) is not None:
        case = replace(case, normalised=False)
    return case


def _plan(r: random.Random) -> Plan:
    while True:
        A, D = r.choice([1, 2, 2, 3, 4, 5, 8]), r.choice([1, 2, 2, 3, 3, 4, 4])
        m = r.choice([1, 2, 3, 4, 5, 8])
        if A > 1 and r.random() < 0.2:
            plan = Plan(tuple(r.randint(1, 6) for _ in range(A)), A, D)
        else:
            plan = Plan(m, A, D)
        if plan.examples <= MOST_EXAMPLES:
            return plan


def _depth(r: random.Random, architecture: str, precision: str) -> int:
    if architecture == "embedding":
        return 1
    if architecture in ("conv", "lstm"):
        return r.choice([1, 2, 3])
    most = {"transformer": 16, "plain": 16, "mlp": 40}[architecture]
    if precision in ("fp16", "bf16"):
        # In 8 or 11 bits a deep stack computes nothing but noise.
        most = min(most, 3 if architecture == "plain" else 8)
    return min(most, r.choice([1, 2, 2, 3, 3, 5, 8, 16, 40]))


def scalable(
    precisions: tuple[str, ...] = SCALABLE, *, stream: int = 0
) -> st.SearchStrategy[tuple[Drawn, int]]:
    """Strategy of cases of one update, and a power of two for their loss."""
    numbers = st.integers(0, 2**40)
    return numbers.map(lambda n: _scalable(random.Random(f"scaled:{stream}:{n}"), precisions))


def _scalable(r: random.Random, precisions: tuple[str, ...]) -> tuple[Drawn, int]:
    power = r.choice([k for k in range(-17, 17) if k])
    return replace(_case(r, precisions, everything=False), updates=1), power


def refusal(drawn: Drawn) -> str | None:
    """What torch's reason for refusing the case must contain; None where it must run."""
    if drawn.precision == "fp16" and drawn.optimizer not in NO_EPS:
        return "in float16: the update divides by zero"
    autocast = {"fp16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}.get(drawn.precision)
    if drawn.architecture == "lstm" and autocast is not None and _lstm_refused(autocast):
        return "LSTM forward propagation primitive"
    if drawn.architecture == "conv" and drawn.normalised and _some_empty(drawn):
        return "select(): index 0 out of range"  # InstanceNorm on a batch of no examples
    return None


@lru_cache
def _lstm_refused(dtype: torch.dtype) -> bool:
    """Asked of torch alone: it depends on the processor whether there is such a kernel."""
    try:
        with torch.autocast("cpu", dtype):
            nn.LSTM(2, 2, batch_first=True)(torch.ones(1, 2, 2))
    except RuntimeError as error:
        return "LSTM forward propagation primitive" in str(error)
    return False


def _some_empty(drawn: Drawn) -> bool:
    return any(not ids for group in _groups(drawn) for replica in group.ids for ids in replica)


def _groups(drawn: Drawn) -> tuple[GroupLayout, ...]:
    return layout(
        drawn.plan,
        drawn.examples,
        updates=drawn.updates,
        shuffle=drawn.shuffle,
        last_group=drawn.last_group,  # type: ignore[arg-type]
        seed=drawn.seed,
    )


def wrap(drawn: Drawn) -> Callable[[nn.Module], nn.Module] | None:
    """The wrapper that the case needs, None for the default one."""
    return _finding_unused if drawn.kind == "unused" else None


def _finding_unused(module: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module, find_unused_parameters=True)


ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu, "tanh": torch.tanh}


class Block(nn.Module):
    """A residual block: normalisation or not, linear, activation, linear."""

    def __init__(self, width: int, activation: str, normalised: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width) if normalised else nn.Identity()
        self.inner = nn.Linear(width, width)
        self.after = nn.LayerNorm(width) if normalised else nn.Identity()
        self.outer = nn.Linear(width, width)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.activation(self.after(self.inner(self.norm(x)))))


class Plain(nn.Module):
    """A layer without a residual connection."""

    def __init__(self, width: int, activation: str, normalised: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width) if normalised else nn.Identity()
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.norm(self.linear(x)))


class Convolution(nn.Module):
    """A convolution whose bias is a null tensor where a normalisation by channel follows it."""

    def __init__(self, width: int, activation: str, normalised: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.InstanceNorm2d(width, affine=True) if normalised else nn.Identity()
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.norm(self.conv(x)))


class Attention(nn.Module):
    """Causal self-attention with biases: that of the keys is a null tensor."""

    def __init__(self, width: int, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        if self.fused:
            heads = F.scaled_dot_product_attention(
                q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), is_causal=True
            )
            return x + self.out(heads.squeeze(1))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        scores = (q @ k.transpose(1, 2)) / math.sqrt(x.shape[2])
        return x + self.out(scores.masked_fill(~mask, -1e4).softmax(-1) @ v)


class Recurrent(nn.Module):
    """An LSTM over the whole padded sequence."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, depth, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class Net(nn.Module):
    """Features, an image or tokens in, class scores out."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        width = drawn.width
        self.embed = self._embedding(drawn)
        self.blocks = nn.Sequential(*_blocks(drawn))
        self.pool: nn.Module = _Mean() if drawn.architecture == "conv" else nn.Identity()
        self.head = nn.Linear(width, VOCABULARY)
        if drawn.shift:
            self.shift = nn.Parameter(torch.zeros(1))
        if drawn.kind == "unused":
            self.unused = nn.Linear(width, 2)
        if drawn.kind == "frozen":
            self.embed.requires_grad_(False)
        if drawn.kind == "tied":
            self._tie()

    def _embedding(self, drawn: Drawn) -> nn.Module:
        if drawn.tokens:
            return nn.Embedding(VOCABULARY, drawn.width)
        if drawn.architecture == "conv":
            return nn.Conv2d(2, drawn.width, 3, padding=1)
        return nn.Linear(6, drawn.width)

    def _tie(self) -> None:
        if isinstance(self.embed, nn.Embedding):
            self.head.weight = self.embed.weight
        elif len(self.blocks) > 1:
            self.blocks[-1] = self.blocks[0]

    def forward(self, x: Tensor) -> Tensor:
        scores = self.head(self.pool(self.blocks(self.embed(x))))
        return scores + self.shift if hasattr(self, "shift") else scores


class _Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def _blocks(drawn: Drawn) -> Iterator[nn.Module]:
    parts = drawn.width, drawn.activation, drawn.normalised
    if drawn.architecture == "lstm":
        yield Recurrent(drawn.width, drawn.depth)
        return
    for _ in range(drawn.depth):
        if drawn.architecture == "transformer":
            yield Attention(drawn.width, drawn.fused_attention)
        if drawn.architecture == "plain":
            yield Plain(*parts)
        elif drawn.architecture == "conv":
            yield Convolution(*parts)
        else:
            yield Block(*parts)


def experiment(drawn: Drawn) -> Experiment:
    """The experiment that ``drawn`` describes."""
    data = _data(drawn)
    start = _trained(replace(drawn, loss_scale=1.0)) if drawn.trained else None

    def model() -> nn.Module:
        net = Net(drawn)
        if start is not None:
            net.load_state_dict(start)
        return net

    two_terms, two_optimizers = drawn.kind == "two-terms", drawn.kind == "two-optimizers"
    scheduler = _two(_warm_up) if two_optimizers else _warm_up
    return Experiment(
        model=model,
        data=data,
        collate=_pad if drawn.tokens else None,
        loss=partial(_terms if two_terms else _loss, scale=drawn.loss_scale),
        count=_counts if two_terms else _count,
        optimizer=partial(_optimizers if two_optimizers else _optimizer, drawn.optimizer),
        scheduler=scheduler if drawn.schedule else None,
        scheduler_unit=drawn.scheduler_unit,  # type: ignore[arg-type]
        clip_norm=None if drawn.clip is None else drawn.clip * drawn.loss_scale,
        scaler=partial(_scaler, drawn.init_scale),
        averages=_average if drawn.kind == "averages" else None,
        updates=drawn.updates,
        shuffle=drawn.shuffle,
        last_group=drawn.last_group,  # type: ignore[arg-type]
        seed=drawn.seed,
        name=f"drawn_{drawn.architecture}",
    )


def backward_range(drawn: Drawn) -> tuple[float, float]:
    """Smallest and largest magnitude, zeros left out, of what the plan's backwards compute.

    Of every tensor that an operation returns, with the expected factors, in one process. Forwards
    are not looked at: a factor on the loss scales nothing in them.
    """
    chosen, plan = precision(drawn.precision), experiment(drawn)
    torch.manual_seed(drawn.seed)
    net = plan.model().to(chosen.parameters)
    batches = Batches(plan, chosen.parameters)
    seen = _Magnitudes()
    for group in _groups(drawn):
        count = sum(float(_count(batches(ids))) for replica in group.ids for ids in replica)
        for ids in (ids for replica in group.ids for ids in replica):
            with chosen.context("cpu"):
                loss = _loss(net, batches(ids), drawn.loss_scale)
            with seen:
                (loss.total / count * drawn.plan.D).backward()
    return seen.smallest, seen.largest


class _Magnitudes(TorchDispatchMode):
    """Notes the range of what operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.smallest, self.largest = math.inf, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(returned):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel():
                sizes = leaf.detach().double().abs()
                self.largest = max(self.largest, float(sizes.max()))
                if bool(sizes.any()):
                    self.smallest = min(self.smallest, float(sizes[sizes > 0].min()))
        return returned


def _data(drawn: Drawn) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(drawn.seed)
    examples = []
    for _ in range(drawn.examples):
        if drawn.tokens:
            length = int(torch.randint(2, 9, (), generator=generator)) if drawn.ragged else 6
            tokens = torch.randint(0, VOCABULARY, (length + 1,), generator=generator)
            x, target = tokens[:-1], tokens[1:].clone()
        else:
            shape = (2, 5, 5) if drawn.architecture == "conv" else (6,)
            x = torch.randn(shape, generator=generator)
            target = torch.randint(0, VOCABULARY, (), generator=generator)
        if drawn.ragged and torch.rand((), generator=generator) < 0.3:
            target.fill_(-100)
        examples.append({"x": x, "target": target})
    for group in _groups(drawn):
        # A group without any supervised element has nothing to divide its loss by.
        if all(bool((examples[i]["target"] == -100).all()) for i in group.flat):
            examples[group.flat[-1]]["target"].fill_(1)
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


def _terms(model: nn.Module, batch: dict[str, Tensor], scale: float) -> dict[str, Loss]:
    """Cross entropy over what is supervised, and a penalty on scores over every example."""
    scores = model(batch["x"])
    logits, target = scores.reshape(-1, VOCABULARY), batch["target"].reshape(-1)
    total = F.cross_entropy(logits, target, ignore_index=-100, reduction="sum")
    real = (batch["target"] != -100).unsqueeze(-1)  # padding must not count
    penalty = (scores * real).square().sum()
    return {
        "class": Loss(total=total * scale, count=(target != -100).sum()),
        "penalty": Loss(total=0.01 * penalty * scale, count=len(batch["x"])),
    }


def _count(batch: dict[str, Tensor]) -> Tensor:
    return (batch["target"] != -100).sum()


def _counts(batch: dict[str, Tensor]) -> dict[str, Any]:
    return {"class": _count(batch), "penalty": len(batch["x"])}


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    return _over(name, [p for p in model.parameters() if p.requires_grad])


def _optimizers(name: str, model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    head = set(model.head.parameters())  # type: ignore[operator, union-attr]
    body = [p for p in model.parameters() if p not in head]
    return {"body": _over(name, body), "head": _over("momentum", list(head))}


def _over(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
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
        case "amsgrad":
            return torch.optim.AdamW(parameters, lr=1e-3, amsgrad=True, foreach=True)
        case "fused-adamw":
            return torch.optim.AdamW(parameters, lr=1e-3, fused=True)
        case "adagrad":
            return torch.optim.Adagrad(parameters, lr=1e-2)
        case "rmsprop":
            return torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.5)
    raise ValueError(f"optimizer={name!r}: pass one of {', '.join(OPTIMIZERS)}")


def _warm_up(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, _ramp)


def _two(scheduler: Callable[[Any], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda optimizers: {name: scheduler(one) for name, one in optimizers.items()}


def _ramp(calls: int) -> float:
    return min(1.0, (calls + 1) / 3)


def _scaler(init_scale: float) -> torch.amp.GradScaler:
    # Beyond any gradient, a scale must come down in one step for something to be left to judge.
    backoff = 2.0**-18 if init_scale > 2.0**20 else 0.5
    return torch.amp.GradScaler("cpu", init_scale=init_scale, backoff_factor=backoff)


def _average(model: nn.Module) -> nn.Module:
    return torch.optim.swa_utils.AveragedModel(model)


@lru_cache(maxsize=2)
def _trained(drawn: Drawn) -> dict[str, Tensor]:
    """Weights after some plain updates: gradients are smaller and less independent there."""
    data = _data(drawn)
    with _one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(drawn.seed)
        net = Net(drawn)
        optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
        collate = _pad if drawn.tokens else torch.utils.data.default_collate
        for k in range(drawn.trained):
            batch = collate([data[(k * 8 + i) % len(data)] for i in range(8)])
            loss = _loss(net, batch, 1.0)
            optimizer.zero_grad()
            (loss.total / loss.count.clamp(min=1)).backward()  # type: ignore[union-attr]
            optimizer.step()
    return {k: v.detach().clone() for k, v in net.state_dict().items()}


@contextmanager
def _one_thread() -> Iterator[None]:
    """The same bits on every machine, and no time lost on small operations."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
