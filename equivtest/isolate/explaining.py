"""What explains an update: its sources isolated one by one and together, and their shares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from equivtest.arms.oracle import NULL, Whole
from equivtest.compare import figures
from equivtest.compare.tables import SourceRow
from equivtest.compare.verdict import Finding
from equivtest.distance import ratio
from equivtest.isolate import attribution, batchnorm, branch, coupling, dropout
from equivtest.isolate.explained import Explained
from equivtest.isolate.isolation import Isolation
from equivtest.isolate.remaining import Remaining
from equivtest.isolate.scene import Scene
from equivtest.isolate.sums import LoopSums, SumSource

Detect = Callable[[Scene, Sequence[Isolation]], Sequence[Isolation]]
"""What of a source is in a scene, beside what was found before."""

FORWARD: tuple[Detect, ...] = (
    batchnorm.detect,
    dropout.detect,
    coupling.detect,
    branch.detect,
    coupling.detect_by_rows,
)
"""Sources of the forward, the cheapest to detect first, and last what is told by exclusion."""


def explain(
    scene: Scene,
    names: Sequence[str],
    null: Sequence[bool],
    tolerances: Sequence[float],
    sums: LoopSums | None = None,
    known: Sequence[SourceRow] = (),
) -> Explained:
    """Isolate what is found in ``scene`` until the split is within tolerance.

    What the claimed of ``known`` sources explain is not attributed again: the rows are empty then.

    Args:
        names: of the tensors, by position.
        null: tensors known to be zero in exact arithmetic, which no split is judged on.
        tolerances: comparison B's, by tensor.
        sums: sources behind the forward, where the loop's own sums are beyond comparison A.
        known: sources as they were attributed in updates before. One that was found and not
            claimed may be what this update needs.
    """
    null = _null(scene.oracle, scene.scale, null)
    return _Explaining(Remaining(scene, null, tolerances, sums), names, null).run(known)


class _Explaining:
    def __init__(self, remaining: Remaining, names: Sequence[str], null: Sequence[bool]) -> None:
        self.remaining, self.names, self.null = remaining, names, null
        self.scene, self.sums = remaining.scene, remaining.sums
        self.refused: list[str] = []

    def run(self, known: Sequence[SourceRow]) -> Explained:
        self._detect()
        sources = self._sources()
        tried, rest = sources[: attribution.MOST], sources[attribution.MOST :]
        together, remaining = frozenset(tried), self.remaining
        enough = together.intersection(row.source for row in known if row.claimed)
        if together <= {row.source for row in known} and remaining.within(enough):
            return self._explained(enough)
        told = attribution.attribute(tried, remaining.squared, remaining.within)
        rows = tuple(
            SourceRow(s, share, self._where(s), s in told.claimed)
            for s, share in told.shares.items()
        )
        claimed = sorted((row for row in rows if row.claimed), key=lambda row: -row.share)
        findings = tuple(self._finding(row, together, row is claimed[0]) for row in claimed)
        return replace(
            self._explained(together, rest), rows=rows, remainder=told.remainder, findings=findings
        )

    def _detect(self) -> None:
        remaining = self.remaining
        for detect in FORWARD:
            looked_for = bool(remaining.isolations or self.sums)
            if looked_for and remaining.split_within(remaining.found):
                break
            try:
                remaining.isolate(detect(self.scene, remaining.isolations))
            except Exception as error:  # a model may refuse the batches that a probe makes
                self.refused.append(
                    "not every source could be looked for: a forward of a few examples raised "
                    f"{type(error).__name__}: {error}"
                )

    def _sources(self) -> list[str]:
        """In the order in which they were found, those behind the forward last."""
        forward = [str(isolation.cause) for isolation in self.remaining.isolations]
        behind = [] if self.sums is None else [source.cause for source in self.sums.sources]
        return list(dict.fromkeys([*forward, *behind]))

    def _explained(self, together: frozenset[str], left_out: Sequence[str] = ()) -> Explained:
        remaining = self.remaining
        return Explained(
            update=self.scene.group.update,
            squared=remaining.squared(frozenset()),
            diverges=not remaining.within(frozenset()),
            within=remaining.within(together),
            left=tuple(remaining.left(together)),
            tolerances=tuple(remaining.allowed(together)),
            null=tuple(self.null),
            notes=tuple(self._notes(together, left_out)),
            reruns=self.scene.reruns,
        )

    # -- words

    def _where(self, source: str) -> str:
        places = [i.where for i in self.remaining.isolations if i.cause == source and i.where]
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
            f"{where}{figures.share(row.share, 2)} of the squared distance between split and large "
            f"batch in update {u}{against if row.share < 0 else ''}"
        )
        text += "".join(f". {source.text}" for source in self._behind(row.source))
        if not first:
            return Finding(row.source, text, update=u)
        raw, left = self.remaining.left(frozenset()), self.remaining.left(together)
        allowed = self.remaining.allowed(together)
        far = self._worst(raw, self.remaining.allowed(frozenset()))
        worst = self._worst(left, allowed)
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
        return max(self.remaining.judged, key=lambda t: ratio(left[t], allowed[t]), default=0)

    def _notes(self, together: frozenset[str], left_out: Sequence[str]) -> Iterable[str]:
        explained = self.remaining.within(together)
        if not explained and self.scene.reorders:
            yield (
                "collate puts examples in an order of its own (by length, say): which row is which "
                "example is not known, and nothing could be isolated by example: keep their order "
                "in collate and sort in the model (pack_padded_sequence(enforce_sorted=False) does)"
            )
        if not explained:
            for isolation in self.remaining.isolations:
                yield from isolation.said()
            yield from self.scene.untold
        yield from dict.fromkeys(self.refused)
        if left_out:
            yield f"not isolated, for there are more than {attribution.MOST}: {', '.join(left_out)}"


def _null(oracle: Whole, scales: Sequence[float], known: Sequence[bool]) -> list[bool]:
    """Comparison B asked only for tensors beyond it; random numbers can leave a null one within.

    Args:
        scales: of the scene; what the split left where the oracle's rounding came out as exactly 0.
    """
    largest = max(oracle.scale, default=0.0)
    return [
        is_null or (0 < scale <= NULL * largest and oracle.unsteady(t, scale))
        for t, (is_null, scale) in enumerate(zip(known, scales, strict=True))
    ]
