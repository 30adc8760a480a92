"""Findings in words and in order: what a comparison of gradients found, the most telling first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from equivtest.causes import Cause, Kind
from equivtest.compare import figures
from equivtest.compare.gradient import AgainstOracle, AgainstReplay
from equivtest.compare.tolerance import WEIGHT_SIGMAS
from equivtest.compare.verdict import About, Finding
from equivtest.compare.weights import Weights

ORDER = (
    Cause.NOT_APPLIED,
    Cause.CLIP_MISSING,
    Cause.EXAMPLES,
    Cause.COUNTERS,
    Cause.SKIP,
    Cause.NONFINITE,
    Cause.STATE,
    Cause.HYPERPARAMETERS,
    Cause.GRADIENT,
    Cause.CLIP,
    Cause.RANKS,
    Cause.PARAMETERS,
    Cause.BUFFERS,
    Cause.LOSS,
)
"""Findings that tell most come first: a later one is often a consequence of an earlier. Sources
follow in the order of their shares."""

SINGLE = (1e-9, 2.0**-22)
"""How far from 1 a weight is that float32 rounded, once or a few times. It chooses words only."""

MEAN_LIKE = 0.2
"""How far, relatively, the parts' summed losses may be from as many times the whole's and still be
called means: those of unequal parts are not equal. It chooses words, never a status."""


def telling(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Findings in the order of what they tell, without mere consequences of others."""
    causes = {f.cause for f in findings}
    consequences: set[str] = set()
    if Cause.NOT_APPLIED in causes:  # another forward: other gradients and losses
        consequences |= {Cause.GRADIENT, Cause.LOSS, Cause.BUFFERS}
    if Cause.HYPERPARAMETERS in causes:
        consequences |= {Cause.PARAMETERS}
    # What has a name of its own says more than any general one; sources come last.
    order: dict[str, int] = {cause: -1 for cause in Cause if cause.kind is not Kind.SOURCE}
    order |= {cause: k for k, cause in enumerate(ORDER)}
    # It makes groups of its own: what else was named happens in those.
    order[Cause.UPDATE_PER_MICROBATCH] = -2
    kept: dict[tuple[object, ...], Finding] = {}
    for f in _worst_for_all(findings):  # the same on several ranks is said once
        if f.cause not in consequences:
            kept.setdefault((f.cause, f.update, f.tensor), f)
    return tuple(
        sorted(kept.values(), key=lambda f: (order.get(f.cause, len(order)), f.update or 0))
    )


def sums_finding(u: int, names: Sequence[str], a: Sequence[AgainstReplay]) -> list[Finding]:
    """A loop that is right to the bit and beyond A all the same: its sums lose that much."""
    beyond = [t for t, one in enumerate(a) if not one.within]
    worst = max(beyond, key=lambda t: over(a[t].distance, a[t].tolerance))
    one = a[worst]
    text = (
        f"gradient of {names[worst]!r} is {one.distance:.3g} of its scale away from the plan's in "
        f"update {u}, allowed {one.tolerance:.3g} ({len(beyond)} of {len(a)} tensors), and is to "
        "the bit what the plan's microbatches add up to in this precision and order"
    )
    return [
        Finding(
            "",
            text,
            update=u,
            tensor=names[worst],
            distance=one.distance,
            tolerance=one.tolerance,
            about=About.SUMS,
        )
    ]


def gradient_findings(
    u: int,
    names: Sequence[str],
    states: Sequence[str],
    a: Sequence[AgainstReplay],
    weights: Weights | None,
) -> Iterator[Finding]:
    """What comparison A found, tensor by tensor: a cause may account for some of them."""
    clause = _weights_clause(weights)
    for t, state in enumerate(states):
        if state == "differs":
            yield Finding(
                Cause.GRADIENT,
                _gradient_text(u, names[t], a[t]) + clause,
                update=u,
                rank=a[t].rank,
                tensor=names[t],
                distance=a[t].distance,
                tolerance=a[t].tolerance,
            )


def _gradient_text(u: int, name: str, one: AgainstReplay) -> str:
    if one.missing:
        return (
            f"gradient of {name!r} is None on one side and a tensor on the other in update {u} "
            "(None also keeps weight decay and optimizer state away)"
        )
    return (
        f"gradient of {name!r} is {one.distance:.3g} of its scale away from the plan's in update "
        f"{u}, allowed {one.tolerance:.3g}"
    )


def _worst_for_all(findings: Sequence[Finding]) -> list[Finding]:
    """Of the gradients that differ in an update the worst speaks for all."""
    by_update: dict[int | None, list[Finding]] = {}
    for finding in findings:
        if finding.cause == Cause.GRADIENT and finding.tensor is not None:
            by_update.setdefault(finding.update, []).append(finding)
    left = [f for f in findings if not (f.cause == Cause.GRADIENT and f.tensor is not None)]
    for several in by_update.values():
        worst = max(several, key=lambda f: over(f.distance or 0.0, f.tolerance or 0.0))
        more = len(several) - 1
        text = f"{worst.text} ({more} more tensors differ)" if more else worst.text
        left.append(replace(worst, text=text))
    return left


def split_finding(
    u: int, names: Sequence[str], c: AgainstOracle, shape: Sequence[Sequence[int]]
) -> list[Finding]:
    """What comparison B found, apart from any loop.

    Args:
        shape: examples by replica and microbatch.
    """
    failing = c.split_failures
    if not failing:
        return []
    worst = max(failing, key=lambda t: over(c.split[t], c.split_tolerances[t]))
    if not c.repeatable:
        text = (
            f"the float64 large batch of update {u}, run twice from the same state, gives other "
            "bits: the model, the loss, collate or the data is not repeatable (an unseeded "
            "generator, a counter, the clock), and nothing that differs is evidence"
        )
        return [Finding("", text, update=u, about=About.REPEATING)]
    parts = sum(1 for replica in shape for n in replica if n)
    mean = parts > 1 and abs(c.loss_ratio - parts) < MEAN_LIKE * parts
    why = (
        f"the parts' losses add up to {c.loss_ratio:.3g} times the whole's: Loss.total must be a "
        'sum over the supervised elements (reduction="sum"), not a mean'
        if mean
        else "the forward draws random numbers"
        if c.drew
        else "examples see each other in the model or the loss"
        if c.coupled
        else "something in the model, the loss or collate depends on how the batch is cut"
    )
    return [
        Finding(
            "",
            f"in float64, without any loop, the split gradient of {names[worst]!r} is "
            f"{c.split[worst]:.3g} of its scale away from the large batch's in update {u}, allowed "
            f"{c.split_tolerances[worst]:.3g} ({len(failing)} of {len(c.split)} tensors): {why}",
            update=u,
            tensor=names[worst],
            distance=c.split[worst],
            tolerance=c.split_tolerances[worst],
            about=About.SPLIT,
        )
    ]


def rounding_note(u: int, states: Sequence[str]) -> Iterator[str]:
    """Tensors beyond A that comparison C acquits."""
    rounding = sum(state == "rounding" for state in states)
    if rounding:
        yield (
            f"update {u}: {rounding} gradients are beyond the replay's tolerance and within the "
            "oracle's: rounding of another forward"
        )


def vanished_note(u: int, names: Sequence[str], precision: str) -> Iterator[str]:
    """Tensors of which nothing was compared, by name."""
    if names:
        yield (
            f"update {u}: {len(names)} gradients are all zeros where the oracle's are not "
            f"({names[0]} first): they vanish in {precision}, not judged"
        )


def over(distance: float, tolerance: float) -> float:
    """Distance over tolerance; inf where nothing is allowed."""
    return distance / tolerance if tolerance > 0 else math.inf


def _weights_clause(weights: Weights | None) -> str:
    if weights is None or not weights.differ() or not weights.tell():
        return ""
    differ = weights.differ()
    r, k = max(differ, key=lambda key: abs(weights.found[key] - 1))
    unsure = WEIGHT_SIGMAS * weights.sigma[r, k]
    weight = weights.found[r, k] if abs(weights.found[r, k]) > unsure else 0.0
    alike = all(abs(w - weights.found[r, k]) <= unsure for w in weights.found.values())
    times = f"{figures.weight(weight)} times what the plan gives it"
    single = SINGLE[0] < abs(weight - 1) < SINGLE[1]
    why = ", as with a count or a factor that float32 rounded" if single else ""
    if alike and len(weights.found) > 1:
        return f"; every microbatch counts {times}{why}"
    return (
        f"; microbatch {k} of replica {r} counts {times} ({len(differ)} of {len(weights.found)} "
        f"weights differ){why}"
    )
