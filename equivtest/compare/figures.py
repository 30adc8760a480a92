"""How figures are written and put in order: on the page, in the terminal and in messages."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence

ABSENT = "–"

_CONTROL = ("Cc", "Cf", "Cs")


def distance(value: float | None) -> str:
    """A relative distance, tolerance or floor: two significant digits."""
    if value is None:
        return ABSENT
    return "0" if value == 0 else _compact(f"{value:.1e}")


def margin(value: float | None) -> str:
    """Distance over tolerance: two decimals while they mean something."""
    if value is None or math.isnan(value):
        return ABSENT
    if value == 0:
        return "0"
    if value < 0.005:
        return "<0.01"
    return f"{value:.2f}" if value < 99.995 else _compact(f"{value:.1e}")


def share(value: float, decimals: int = 0) -> str:
    """A part of a whole in per cent; ``<1%`` for what would round to nothing, and never ``-0%``."""
    least = 10.0**-decimals
    per_cent = 100 * value
    if 0 < per_cent < least / 2:
        return f"<{least:g}%"
    return f"{per_cent:.{decimals}f}%" if abs(per_cent) >= least / 2 else "0%"


def per_cent(value: float) -> str:
    """A part of a whole in per cent, however small: ``0.02 %``, ``1.1e-11 %``."""
    return f"{_compact(f'{100 * value:.2g}')} %" if value < 1 else f"{100 * value:.0f} %"


def quantity(value: float | None) -> str:
    """A loss, a learning rate, a scale: six significant digits, whole numbers whole."""
    if value is None:
        return ABSENT
    if math.isfinite(value) and value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return _compact(f"{value:.6g}")


def weight(value: float) -> str:
    """A contribution weight: six significant digits, beside 1 what it is off by, 0 for rounding."""
    off = value - 1
    if 0 < abs(off) < 1e-5:
        return f"1 {'+' if off > 0 else '-'} {_compact(f'{abs(off):.1e}')}"
    return "0" if abs(value) < 1e-12 else f"{value:.6g}"


def unrounded(value: float) -> float:
    """A weight, and 0 for one that is rounding beside 0: float32 leaves some 1e-7."""
    return 0.0 if abs(value) < 1e-5 else value


def size(value: int | None) -> str:
    """Bytes in binary units."""
    if value is None:
        return ABSENT
    amount = float(value)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"


def duration(seconds: float) -> str:
    """A duration for people: ``840 ms``, ``41.8 s``, ``3 min 20 s``."""
    if not math.isfinite(seconds):
        return ABSENT
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60)} s"


def shortened(text: str, limit: int = 500) -> str:
    """The beginning of a text that is too long to be a sentence."""
    return text if len(text) <= limit else f"{text[: limit - 2].rstrip()} …"


def printable(text: str) -> str:
    """Control characters and those that turn the writing round, as escapes: for a terminal."""
    return "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    if character == "\n" or unicodedata.category(character) not in _CONTROL:
        return character
    return character.encode("unicode_escape").decode()


def several(count: int, noun: str, plural: str = "") -> str:
    """``1 case``, ``3 cases``."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def orderly(margin: float) -> float:
    """NaN compares with nothing: as a margin of a broken tensor it is the worst there is."""
    return math.inf if math.isnan(margin) else margin


def _compact(text: str) -> str:
    """``1.5e+05`` as ``1.5e5``."""
    mantissa, e, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if e else text


def replica_names(replicas: Sequence[int]) -> str:
    """``replica 0``, ``replicas 0–3``, as ``rank_names``."""
    return rank_names(replicas).replace("rank", "replica")


def rank_names(ranks: Sequence[int]) -> str:
    """``rank 0``, ``ranks 0–3``, ``ranks 0, 2``; ``no rank`` where there is none."""
    if not ranks:
        return "no rank"
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]}–{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"
