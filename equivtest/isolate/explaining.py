"""What explains an update: its sources isolated one by one and together, and their shares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from equivtest.arms.oracle import NULL, Whole
from equivtest.compare import noise
from equivtest.compare.tables import SourceRow
from equivtest.compare.tolerance import split_tolerance
from equivtest.compare.verdict import Finding
from equivtest.distance import MaybeTensors, added, minus, norms, ratio
from equivtest.isolate import attribution, batchnorm, branch, coupling, dropout
from equivtest.isolate.explained import Explained
from equivtest.isolate.isolation import Isolation
from equivtest.isolate.scene import Scene
from equivtest.isolate.sums import LoopSums, SumSource

Detect = Callable[[Scene, Sequence[Isolation]], Sequence[Isolation]]
"""What of a source is in a scene, beside what was found before."""

FORWARD: tuple[Detect, ...] = (batchnorm.detect, dropout.detect, coupling.detect, branch.detect)
"""Sources of the forward, the cheapest to detect first."""


def explain(
    scene: Scene,
    names: Sequence[str],
    null: Sequence[bool],
    tolerances: Sequence[float],
    sums: LoopSums | None = None,
    known: frozenset[str] = frozenset(),
) -> Explained:
    """Isolate what is found in ``scene`` until the split is within tolerance.

    What ``known`` sources explain together is not attributed again: the rows are empty then.

    Args:
        names: of the tensors, by position.
        null: tensors known to be zero in exact arithmetic, which no split is judged on.
        tolerances: comparison B's, by tensor.
        sums: sources behind the forward, where the loop's own sums are beyond comparison A.
        known: sources that were attributed in an update before.
    """
    null = _null(scene.oracle, null)
    return _Explaining(scene, names, null, tolerances, sums).run(known)


@dataclass
class _Explaining:
    scene: Scene
    names: Sequence[str]
    null: Sequence[bool]
    tolerances: Sequence[float]
    sums: LoopSums | None
    isolations: list[Isolation] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    _left: dict[frozenset[str], list[float]] = field(default_factory=dict)
    _split: dict[frozenset[str], list[float]] = field(default_factory=dict)
    _within: dict[frozenset[str], bool] = field(default_factory=dict)
    _nudged: dict[frozenset[str], list[float]] = field(default_factory=dict)
    _apart: dict[frozenset[str], MaybeTensors] = field(default_factory=dict)

    def run(self, known: frozenset[str]) -> Explained:
        self._detect()
        behind = () if self.sums is None else self.sums.sources
        sources = list(dict.fromkeys([*self._causes(), *(s.cause for s in behind)]))
        tried, rest = sources[: attribution.MOST], sources[attribution.MOST :]
        together = frozenset(tried)
        if together <= known and self._is_within(together):
            return self._explained(together, None, (), ())
        told = attribution.attribute(tried, self._squared, self._is_within)
        rows = tuple(
            SourceRow(s, share, self._where(s), s in told.claimed)
            for s, share in told.shares.items()
        )
        claimed = sorted((row for row in rows if row.claimed), key=lambda row: -row.share)
        findings = tuple(self._finding(row, together, row is claimed[0]) for row in claimed)
        return self._explained(together, told, rows, findings, rest)

    def _detect(self) -> None:
        for detect in FORWARD:
            if (self.isolations or self.sums) and self._split_is_within(self._found):
                break
            before = self._found
            try:
                self.isolations += detect(self.scene, self.isolations)
            except Exception as error:  # a model may refuse the batches that a probe makes
                self.refused.append(
                    "not every source could be looked for: a forward of a few examples raised "
                    f"{type(error).__name__}: {error}"
                )
            if self._found & before:  # more of a source that was isolated without it
                self._forget()

    def _explained(
        self,
        together: frozenset[str],
        told: attribution.Attribution | None,
        rows: tuple[SourceRow, ...],
        findings: tuple[Finding, ...],
        left_out: Sequence[str] = (),
    ) -> Explained:
        return Explained(
            update=self.scene.group.update,
            squared=self._squared(frozenset()),
            rows=rows,
            remainder=told.remainder if told else 0.0,
            diverges=not self._is_within(frozenset()),
            within=self._is_within(together),
            left=tuple(self._left_with(together)),
            tolerances=tuple(self._tolerance(together, t) for t in range(len(self.null))),
            null=tuple(self.null),
            findings=findings,
            notes=tuple(self._notes(left_out)),
            reruns=self.scene.reruns,
        )

    # -- distances

    @property
    def _found(self) -> frozenset[str]:
        return frozenset(self._causes())

    def _causes(self) -> list[str]:
        return [str(isolation.cause) for isolation in self.isolations]

    def _forget(self) -> None:
        for known in (self._left, self._split, self._within, self._nudged, self._apart):
            known.clear()

    def _split_with(self, isolated: frozenset[str]) -> list[float]:
        """Distance over scale by tensor between the arms, with these sources isolated."""
        forward = isolated & self._found
        if forward not in self._split:
            split, whole = self.scene.pair(self._chosen(forward))
            scale = self.scene.oracle.scale
            left = noise.relative(split.gradients, whole.gradients, scale)
            if forward and self._may_be_noise(left):
                self._nudged[forward] = noise.nudged(whole, scale)
            if self.sums is not None:
                self._apart[forward] = minus(split.gradients, whole.gradients)
            self._split[forward] = left
        return self._split[forward]

    def _left_with(self, isolated: frozenset[str]) -> list[float]:
        """The same with what the loop's sums add to the split, where they are not isolated."""
        split = self._split_with(isolated)
        if self.sums is None or not self.sums.besides(isolated):
            return split
        if isolated not in self._left:
            besides = [source.error for source in self.sums.besides(isolated)]
            apart = added(self._apart[isolated & self._found], *besides)
            self._left[isolated] = list(map(ratio, norms(apart), self.scene.oracle.scale))
        return self._left[isolated]

    def _may_be_noise(self, left: Sequence[float]) -> bool:
        """Beyond B's tolerance somewhere, and nowhere beyond the largest that noise may give it."""
        judged = [t for t, is_null in enumerate(self.null) if not is_null]
        beyond = any(left[t] > self.tolerances[t] for t in judged)
        return beyond and all(left[t] <= split_tolerance(NULL) for t in judged)

    def _chosen(self, isolated: frozenset[str]) -> list[Isolation]:
        return [isolation for isolation in self.isolations if isolation.cause in isolated]

    def _squared(self, isolated: frozenset[str]) -> float:
        """Of the gradient as one vector, relative to the large batch's; null tensors left out.

        Not each tensor over its scale: that depends on which sources are there.
        """
        oracle, left = self.scene.oracle, self._left_with(isolated)
        judged = [t for t, is_null in enumerate(self.null) if not is_null]
        size = norms(oracle.gradients)
        whole = sum(size[t] ** 2 for t in judged) or sum(oracle.scale[t] ** 2 for t in judged)
        return ratio(sum((left[t] * oracle.scale[t]) ** 2 for t in judged if left[t]), whole)

    def _is_within(self, isolated: frozenset[str]) -> bool:
        sums = self.sums is None or self.sums.within(isolated)
        return sums and self._split_is_within(isolated & self._found)

    def _split_is_within(self, forward: frozenset[str]) -> bool:
        if forward not in self._within:
            left = self._split_with(forward)
            self._within[forward] = all(
                is_null or left[t] <= self._tolerance(forward, t)
                for t, is_null in enumerate(self.null)
            )
        return self._within[forward]

    def _tolerance(self, isolated: frozenset[str], t: int) -> float:
        """B's, or that of the noise of the isolated large batch where this is larger.

        Statistics of a few examples magnify rounding as those of a whole group do not.
        """
        nudged = self._nudged.get(isolated & self._found)
        own = self.tolerances[t]
        return own if nudged is None else max(own, split_tolerance(nudged[t]))

    # -- words

    def _where(self, source: str) -> str:
        places = [i.where for i in self.isolations if i.cause == source and i.where]
        places += [s.where for s in self._behind(source)]
        return "; ".join(dict.fromkeys(places))

    def _behind(self, source: str) -> list[SumSource]:
        return [s for s in self.sums.sources if s.cause == source] if self.sums else []

    def _finding(self, row: SourceRow, together: frozenset[str], first: bool) -> Finding:
        """Where a source enters and its share; with the first of them, what isolation leaves."""
        u = self.scene.group.update
        where = f"{row.where}: " if row.where else ""
        against = "; negative: while others are left on, isolating it takes the two further apart"
        text = (
            f"{where}{row.share:.2%} of the squared distance between split and large batch in "
            f"update {u}{against if row.share < 0 else ''}"
        )
        text += "".join(f". {source.text}" for source in self._behind(row.source))
        if not first:
            return Finding(row.source, text, update=u)
        raw, left = self._left_with(frozenset()), self._left_with(together)
        allowed = [self._tolerance(together, t) for t in range(len(left))]
        far, worst = self._worst(raw, self.tolerances), self._worst(left, allowed)
        isolated = "isolated" if len(together) == 1 else f"with all {len(together)} isolated"
        text += (
            f". As it is, the split gradient of {self.names[far]!r} is {raw[far]:.3g} of its scale "
            f"away from the large batch's; {isolated}, no tensor is further than {left[worst]:.3g} "
            f"({self.names[worst]!r}, allowed {allowed[worst]:.3g})"
        )
        return Finding(
            row.source,
            text,
            update=u,
            tensor=self.names[worst],
            distance=left[worst],
            tolerance=allowed[worst],
        )

    def _worst(self, left: Sequence[float], allowed: Sequence[float]) -> int:
        judged = [t for t, is_null in enumerate(self.null) if not is_null]
        return max(judged, key=lambda t: ratio(left[t], allowed[t]), default=0)

    def _notes(self, left_out: Sequence[str]) -> Iterable[str]:
        for isolation in self.isolations:
            yield from isolation.said()
        yield from dict.fromkeys(self.refused)
        if left_out:
            yield f"not isolated, for there are more than {attribution.MOST}: {', '.join(left_out)}"


def _null(oracle: Whole, known: Sequence[bool]) -> list[bool]:
    """Comparison B asked only for tensors beyond it; random numbers can leave a null one within."""
    largest = max(oracle.scale, default=0.0)
    return [
        is_null or (0 < scale <= NULL * largest and oracle.unsteady(t, scale))
        for t, (is_null, scale) in enumerate(zip(known, oracle.scale, strict=True))
    ]
