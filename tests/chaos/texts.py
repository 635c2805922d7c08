"""Texts and prompts of a fixed seed, all different from the first word on, so that no cache of prefixes helps."""

import random

WORDS = (  # noqa: SIM905
    "the of and to in is that for it as was with be by on not at are this have from or had an they which one you were "
    "all there would their we him been has when who will no more if out so up what about into them can only other time "
    "new some could these two may first then do any like now over such our most made after many before through back "
    "server model request memory queue batch token vector index document network power driver window process system"
).split()


def texts(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [_sentence(rng, min(90, max(5, round(rng.lognormvariate(3.5, 0.7))))) for _ in range(count)]


def prompts(count: int, tokens: int, seed: int) -> list[str]:
    rng = random.Random(seed * 1_000_003 + tokens)
    return [f"{rng.randint(100, 999)} Continue: {_sentence(rng, max(4, tokens - 8))}" for _ in range(count)]


def _sentence(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words)).capitalize() + "."
