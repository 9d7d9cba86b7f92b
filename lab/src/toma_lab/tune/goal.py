"""What the user wants: a limit on the distance from the original images, or a speed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log10
from types import MappingProxyType

from toma_diffusion.checks import check_number, check_one_of
from toma_diffusion.errors import UsageError

TIERS: Mapping[str, float] = MappingProxyType({"lossless": 0.01, "high": 0.05, "medium": 0.15})
"""The largest LPIPS by the name of a quality."""
DEFAULT_TIER = "high"
PSNR_AT_LPIPS_1, PSNR_PER_TENTH = 10.1, 12.3
"""PSNR ≈ 10.1 + 12.3 dB for every factor of ten below an LPIPS of 1: a line through the 144 rows of 20 steps in
benchmarks/results/quality_bundled.csv, which lie within 1.1 dB of it (root mean square). Other models may differ."""
LEAST_GAIN = 1.03
"""A smaller speed-up is noise of the clock: such a setting is not an answer."""
LPIPS_SLACK, SPEED_SLACK = 3.0, 0.2
"""What is beyond a limit on few images may be within it on more: it stays in the search. LPIPS differs much from image
to image: that of one may be 1 + 3 times the limit, the mean of four 1 + 1.5 times. A wanted speed may be missed by a
fifth on one image."""


@dataclass(frozen=True)
class Figures:
    """What was measured of one setting, over several images or clips."""

    images: int
    speed_up: float
    """Median over the images of the original's seconds divided by the setting's."""
    psnr: float
    lpips: float | None = None
    """None if its weights could not be loaded."""
    flicker: float | None = None
    """Of clips; it is reported, and decides nothing."""

    @property
    def distance(self) -> float:
        """Lower is nearer to the original: LPIPS, or without it the negative PSNR."""
        return -self.psnr if self.lpips is None else self.lpips

    def beats(self, other: Figures) -> bool:
        """Whether it is at least as fast and as near, and better in one of the two."""
        own, others = (-self.speed_up, self.distance), (-other.speed_up, other.distance)
        return own != others and own[0] <= others[0] and own[1] <= others[1]


@dataclass(frozen=True)
class Goal:
    """Limits that all must hold, or a wanted speed-up."""

    max_lpips: float | None = None
    min_psnr: float | None = None
    speed_up: float | None = None
    note: str = ""
    """What was changed in the user's wish, and why."""

    @classmethod
    def of(
        cls,
        *,
        quality: str = "",
        max_lpips: float | None = None,
        min_psnr: float | None = None,
        speed_up: float | None = None,
        without_lpips: str = "",
    ) -> Goal:
        """From what the user says. Without anything, the quality is `high`.

        Args:
            without_lpips: the reason why LPIPS cannot be measured, if so. A limit of it becomes one of PSNR.
        """
        values = {
            "--quality": quality or None,
            "--max-lpips": max_lpips,
            "--min-psnr": min_psnr,
            "--speed-up": speed_up,
        }
        given = [name for name, value in values.items() if value is not None]
        if len(given) > 1 and given != ["--max-lpips", "--min-psnr"]:
            raise UsageError(
                f"{' and '.join(given)} exclude each other: give one quality, limits (--max-lpips, --min-psnr), or one "
                "speed."
            )
        if speed_up is not None:
            return cls(speed_up=check_number("speed_up", speed_up, "above 1", lambda value: value > 1))
        if quality or not given:
            check_one_of("quality", quality or DEFAULT_TIER, tuple(TIERS))
            max_lpips = TIERS[quality or DEFAULT_TIER]
        if max_lpips is not None:
            max_lpips = check_number("max_lpips", max_lpips, "above 0", lambda value: value > 0)
        if min_psnr is not None:
            min_psnr = check_number("min_psnr", min_psnr, "above 0 dB", lambda value: value > 0)
        if max_lpips is None or not without_lpips:
            return cls(max_lpips, min_psnr)
        instead = round(like_lpips(max_lpips), 1)
        note = (
            f"LPIPS is not measured ({without_lpips.rstrip('.')}). In place of LPIPS ≤ {max_lpips:g} the limit is "
            f"PSNR ≥ {instead:g} dB, which is about the same on the demo model."
        )
        return cls(min_psnr=max(instead, min_psnr or instead), note=note)

    def holds(self, figures: Figures) -> bool:
        """Whether it is reached, by a setting that is faster than the original."""
        return not self.missed(figures)

    def missed(self, figures: Figures) -> list[str]:
        """The conditions that do not hold, in words."""
        found = []
        if self.max_lpips is not None and (figures.lpips is None or figures.lpips > self.max_lpips):
            found.append(f"its LPIPS is above {self.max_lpips:g}")
        if self.min_psnr is not None and figures.psnr < self.min_psnr:
            found.append(f"its PSNR is below {self.min_psnr:g} dB")
        if self.speed_up is not None and figures.speed_up < self.speed_up:
            found.append(f"it is slower than {self.speed_up:g}×")
        if figures.speed_up < LEAST_GAIN:
            found.append(f"it is not faster than the original (from {LEAST_GAIN:g}× it would count)")
        return found

    def may_hold(self, figures: Figures) -> bool:
        """Whether it may be reached on more images."""
        doubt = figures.images**-0.5
        lpips_factor, speed_factor = 1 + LPIPS_SLACK * doubt, 1 - SPEED_SLACK * doubt
        likely = Figures(
            figures.images,
            figures.speed_up / speed_factor,
            figures.psnr + PSNR_PER_TENTH * log10(lpips_factor),
            None if figures.lpips is None else figures.lpips / lpips_factor,
        )
        return self.holds(likely)

    def preference(self, figures: Figures) -> tuple[float, float]:
        """Sorts what reaches the goal, best first: by speed within a limit, by distance at a speed."""
        if self.speed_up is None:
            return -figures.speed_up, figures.distance
        return figures.distance, -figures.speed_up

    def shortfall(self, figures: Figures) -> tuple[float, float]:
        """Sorts what does not reach it, the nearest miss first."""
        if self.speed_up is None:
            return figures.distance, -figures.speed_up
        return -figures.speed_up, figures.distance

    def __str__(self) -> str:
        if self.speed_up is not None:
            return f"the nearest at {self.speed_up:g}× the speed"
        limits = [f"LPIPS ≤ {self.max_lpips:g}"] if self.max_lpips is not None else []
        limits += [f"PSNR ≥ {self.min_psnr:g} dB"] if self.min_psnr is not None else []
        return f"the fastest with {' and '.join(limits)}"


def like_lpips(lpips: float) -> float:
    """The PSNR that images of this LPIPS have on the demo model, about."""
    return PSNR_AT_LPIPS_1 - PSNR_PER_TENTH * log10(lpips)
