"""What is trained (Experiment, Loss) and what the loop under test is handed (Rank, Group).

Importing this module does not import torch: pytest loads the plugin in every session.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from equivtest.arguments import a, an_instance, callable_with, is_number, is_whole, one_of
from equivtest.plan import LastGroup

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    Count = float | Tensor | Mapping[str, float | Tensor]

SchedulerUnit = Literal["applied", "attempted", "microbatch"]


@dataclass(frozen=True)
class Loss:
    """The loss of one microbatch before normalisation.

    Attributes:
        total: scalar tensor with a graph: the sum over the supervised elements.
        count: number of supervised elements in it (0 for an empty microbatch).

    Raises:
        TypeError: ``total`` is not a tensor of real floating numbers, or ``count`` no number.
        ValueError: ``total`` or ``count`` is not a scalar.
    """

    total: Tensor
    count: Tensor | float

    # Told of every loss that is made, also inside a loop that does not cooperate.
    observer: ClassVar[Callable[[Loss], None] | None] = None

    def __post_init__(self) -> None:
        total, count = self.total, self.count
        if not hasattr(total, "requires_grad"):
            raise TypeError(
                f"Loss.total is {a(total)}: pass the summed loss as a tensor, "
                "still attached to its graph (no .item())"
            )
        if len(total.shape) != 0:
            raise ValueError(
                f"Loss.total has shape {tuple(total.shape)}: pass a scalar, summed over the "
                'supervised elements (reduction="sum")'
            )
        if not total.is_floating_point():
            raise TypeError(
                f"Loss.total is {total.dtype}: pass a real floating scalar, which has a gradient"
            )
        if not hasattr(count, "__float__"):
            raise TypeError(
                f"Loss.count is {a(count)}: pass the number of supervised elements "
                "in the total, as a number or a scalar tensor"
            )
        if getattr(count, "ndim", 0) != 0:
            raise ValueError(
                f"Loss.count has shape {tuple(count.shape)}: pass one number, the supervised "  # type: ignore[union-attr]
                "elements in the total (.sum())"
            )
        if Loss.observer is not None:
            Loss.observer(self)


LossResult = Loss | Mapping[str, Loss]


@dataclass(frozen=True, eq=False)
class Experiment:
    """Model, data, loss and optimizer: what both sides of the comparison train.

    Args:
        model: ``() -> nn.Module``, called under the experiment's seed in every arm and rank.
        data: a sequence of examples; an example is a pytree of tensors.
        loss: ``(model, batch) -> Loss``, or a mapping from term to ``Loss`` where terms have
            counts of their own.
        optimizer: ``model -> Optimizer``, or a mapping of optimizers.
        collate: list of examples -> batch; torch's ``default_collate`` if left out.
        count: ``batch -> supervised elements`` (or a mapping by term), needed before the first
            forward; if left out, a dry forward of the loss in float64 tells.
        scheduler: ``optimizer -> scheduler``; for a mapping of optimizers, of schedulers.
        scheduler_unit: what one call of the scheduler follows: an ``applied`` update, an
            ``attempted`` one, or a ``microbatch``.
        clip_norm: bound of the total gradient norm (``clip_grad_norm_``), or no clip.
        clip_value: bound of each element's magnitude (``clip_grad_value_``) instead, or no clip.
        scaler: ``device -> torch.amp.GradScaler`` for ``fp16-mixed``, with ``"cpu"`` or ``"cuda"``;
            ``() -> GradScaler`` where one device is enough; torch's own defaults if left out.
        averages: ``model -> shadow of the weights`` with ``update_parameters(model)``, such as
            ``torch.optim.swa_utils.AveragedModel``.
        updates: attempted updates to run.
        shuffle: draw each epoch's order from ``seed`` and the epoch.
        last_group: what to do with examples that do not fill a group: ``process`` or ``drop``.
        seed: seeds model construction, data order and the ranks' random numbers.
        name: how the results call it; by default, what the test module calls it.
    """

    model: Callable[[], nn.Module]
    data: Sequence[Any]
    loss: Callable[[Any, Any], LossResult]
    optimizer: Callable[[Any], Any]
    collate: Callable[[list[Any]], Any] | None = None
    count: Callable[[Any], Count] | None = None
    scheduler: Callable[[Any], Any] | None = None
    scheduler_unit: SchedulerUnit = "applied"
    clip_norm: float | None = None
    clip_value: float | None = None
    scaler: Callable[..., Any] | None = None
    averages: Callable[[Any], Any] | None = None
    updates: int = 2
    shuffle: bool = False
    last_group: LastGroup | None = None
    seed: int = 0
    name: str | None = None

    def __post_init__(self) -> None:
        _not_ready(self.model, self.optimizer, self.averages)
        callable_with("model", self.model)
        callable_with("loss", self.loss, "model", "batch")
        callable_with("optimizer", self.optimizer, "model")
        if not (hasattr(self.data, "__len__") and hasattr(self.data, "__getitem__")):
            raise TypeError(
                f"data is {a(self.data)}: pass the dataset itself (a sequence of "
                "examples), not its loader or an iterator"
            )
        for argument, handed in (
            ("collate", ("examples",)),
            ("count", ("batch",)),
            ("scheduler", ("optimizer",)),
            ("scaler", ("device",) if wants_device(self.scaler) else ()),
            ("averages", ("model",)),
        ):
            if getattr(self, argument) is not None:
                callable_with(argument, getattr(self, argument), *handed)
        one_of("scheduler_unit", self.scheduler_unit, ("applied", "attempted", "microbatch"))
        one_of("last_group", self.last_group, ("process", "drop", None))
        one_of("shuffle", self.shuffle, (False, True))
        _clip(self.clip_norm, self.clip_value)
        if not is_whole(self.updates) or self.updates < 1:
            raise ValueError(f"updates={self.updates!r}: pass a whole number of at least 1")
        if not is_whole(self.seed):
            raise ValueError(f"seed={self.seed!r}: pass a whole number")
        if self.name is not None:
            an_instance("name", self.name, str, "a string, or leave it out")


class Group(Sequence[Any]):
    """This replica's microbatches for one update, collated when asked for.

    Attributes:
        count: supervised elements of the whole group, over all replicas (a mapping by term where
            the loss has terms).
        local_count: the same of this replica alone.
        examples: ids of the examples of each of this replica's microbatches.
        update: number of the update, from 0.
    """

    count: Any  # also the name of a method of Sequence, which a group has no use for

    def __init__(
        self,
        fetch: Callable[[int], Any],
        *,
        count: Any,
        local_count: Any,
        examples: tuple[tuple[int, ...], ...],
        update: int,
    ) -> None:
        self._fetch = fetch
        self.count = count
        self.local_count = local_count
        self.examples = examples
        self.update = update

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, k: Any) -> Any:
        if isinstance(k, slice):
            return [self._fetch(i) for i in range(*k.indices(len(self)))]
        if not -len(self) <= k < len(self):
            raise IndexError(f"microbatch {k} of {len(self)}")
        return self._fetch(k % len(self))

    def __iter__(self) -> Iterator[Any]:
        return (self._fetch(k) for k in range(len(self)))


@dataclass(eq=False)
class Rank:
    """What a loop works with in one process. Run once in every process of the plan.

    Attributes:
        model: the model in its wrapper (``DistributedDataParallel`` unless the case wraps it).
        module: the bare model.
        optimizer: what ``Experiment.optimizer`` made (may be a mapping), like ``scheduler``,
            ``scaler`` and ``average``.
        groups: the groups of the attempted updates, in order.
        D: data-parallel replicas; ``dp_rank`` is this one's number, ``dp_group`` their process
            group.
        device: where the model is.
        loss: the experiment's loss function.
        dataset: the experiment's data, for a framework that brings its own loader.
        scheduler_unit, clip_norm, clip_value: the experiment's.
    """

    model: Any
    module: nn.Module
    optimizer: Any
    scheduler: Any
    scaler: Any
    average: Any
    groups: Sequence[Group]
    D: int
    dp_rank: int
    dp_group: ProcessGroup
    device: torch.device
    loss: Callable[[Any, Any], LossResult]
    dataset: Sequence[Any]
    scheduler_unit: SchedulerUnit
    clip_norm: float | None
    clip_value: float | None
    _autocast: Callable[[], AbstractContextManager[Any]] = field(repr=False)
    _reported: Callable[[Any], None] | None = field(default=None, repr=False)

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision's autocast context; nothing where the precision has none."""
        return self._autocast()

    def report(self, loss: Tensor | float) -> None:
        """Say what the loop logs as the loss of an update: once, when it logs it.

        It is compared with the loss that the update has, and changes nothing. An update takes it
        until the next one's first forward.

        Args:
            loss: a number or a tensor of one element, on any device; its value now counts.

        Raises:
            TypeError: it is neither.
            ValueError: the tensor has more than one element.
        """
        if not hasattr(loss, "__float__"):
            raise TypeError(f"rank.report({a(loss)}): pass the loss as a number or a scalar tensor")
        if math.prod(getattr(loss, "shape", ())) != 1:
            raise ValueError(
                f"rank.report of a tensor of shape {tuple(loss.shape)}: "  # type: ignore[union-attr]
                "pass one number, the loss of the update"
            )
        if self._reported is not None:
            self._reported(loss)

    @property
    def mesh(self) -> DeviceMesh:
        """One-dimensional device mesh over the replicas, its axis called ``dp``."""
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(self.dp_group, self.device.type, mesh_dim_names=("dp",))


def wants_device(scaler: Callable[..., Any] | None) -> bool:
    """Whether a factory of scalers is to be called with the device.

    If its first argument must be given or is called ``device``, as that of ``GradScaler`` itself.
    """
    if not callable(scaler):
        return False
    first = next(iter(inspect.signature(scaler).parameters.values()), None)
    if first is None or first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
        return False
    return first.name == "device" or first.default is first.empty


def _not_ready(model: Any, optimizer: Any, averages: Any) -> None:
    """A ready object is of one process, a class may be callable: neither is what is wanted."""
    if hasattr(averages, "named_parameters") and not isinstance(averages, type):
        raise TypeError(
            f"averages is a ready {type(averages).__name__}: pass a function of the model, such as "
            "lambda model: torch.optim.swa_utils.AveragedModel(model)"
        )
    if hasattr(model, "named_parameters") and not isinstance(model, type):
        raise TypeError(
            f"model is a ready {type(model).__name__}: pass what builds it, its class or "
            "lambda: Net(...), so that every process and arm builds its own"
        )
    if isinstance(optimizer, type) or hasattr(optimizer, "param_groups"):
        what = "the class" if isinstance(optimizer, type) else "a ready"
        name = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
        raise TypeError(
            f"optimizer is {what} {name}: pass a function of the model, such as "
            f"lambda model: torch.optim.{name}(model.parameters(), lr=1e-3)"
        )


def _clip(norm: float | None, value: float | None) -> None:
    for argument, bound in (("clip_norm", norm), ("clip_value", value)):
        if bound is not None and not (is_number(bound) and bound > 0):
            raise ValueError(f"{argument}={bound!r}: pass a positive bound, or None")
    if norm is not None and value is not None:
        raise ValueError(
            f"clip_norm={norm!r} and clip_value={value!r} are two clips, and which of them comes "
            "first changes the update: pass one"
        )
