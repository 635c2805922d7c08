"""From probabilities of speech to regions of speech. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

RATE = 16_000
# The network gives one probability for each 32 ms.
FRAME = 512
# Speech goes on while its probability stays above the threshold less this.
_HYSTERESIS = 0.15
_SHORTEST_S = 0.25

Region = tuple[int, int]


@dataclass(frozen=True, slots=True)
class VoiceRules:
    """`threshold` is the probability (0 to 1) from which a frame is speech.

    A silence shorter than `silence_ms` does not end a region, and each region gets `padding_ms` of what surrounds it.
    """

    threshold: float = 0.5
    silence_ms: int = 500
    padding_ms: int = 300


def speech_regions(probabilities: Iterable[float], total: int, rules: VoiceRules) -> list[Region]:
    """Regions of speech as (first sample, sample after the last), in order and apart from each other.

    `probabilities` has one value for each frame of 512 samples of `total`, the last frame being cut short. Speech of
    less than 0.25 s is left out.
    """
    return _padded(_spoken(probabilities, total, rules), total, rules.padding_ms * RATE // 1000)


def _spoken(probabilities: Iterable[float], total: int, rules: VoiceRules) -> list[Region]:
    found: list[Region] = []
    patience = rules.silence_ms * RATE // 1000
    begin: int | None = None
    quiet_since: int | None = None
    for frame, probability in enumerate(probabilities):
        place = frame * FRAME
        if probability >= rules.threshold:
            begin, quiet_since = (place if begin is None else begin), None
        elif begin is not None and probability < rules.threshold - _HYSTERESIS:
            quiet_since = place if quiet_since is None else quiet_since
            if place + FRAME - quiet_since >= patience:
                found.append((begin, quiet_since))
                begin = quiet_since = None
    if begin is not None:
        found.append((begin, total if quiet_since is None else quiet_since))
    return [region for region in found if region[1] - region[0] >= _SHORTEST_S * RATE]


def _padded(regions: list[Region], total: int, padding: int) -> list[Region]:
    padded: list[Region] = []
    for place, (begin, end) in enumerate(regions):
        after = regions[place + 1][0] if place + 1 < len(regions) else None
        # Two regions share what lies between them.
        most = end + padding if after is None else min(end + padding, (end + after) // 2)
        least = max(padded[-1][1], begin - padding) if padded else max(0, begin - padding)
        padded.append((least, min(total, most)))
    return padded
