"""Work of a fixed seed, so that every run and every server gets the same.

`texts(n)`: English-like texts, lengths log-normal (median about 44 WordPiece tokens, mean 57, 8 to 208), as in the
measurements of the peers. `prompts(n, tokens)`: prompts of about so many tokens, all different from the first token on,
so that no prefix cache helps.
"""

import random

WORDS = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they "
    "which one you were all her she there would their we him been has when who will no more if out so up said "
    "what its about than into them can only other time new some could these two may first then do any like my now "
    "over such our man me even most made after also did many before must through back years where much your way "
    "well down should because each just those people how too little state good very make world still see own work "
    "men day get here server model request latency memory queue batch token vector index search document storage "
    "network power battery driver kernel window laptop graph tensor weight layer cache page buffer stream thread "
    "process system update report budget customer meeting invoice contract policy region river mountain winter "
    "summer garden kitchen doctor teacher student history science "
).split()


def _sentence(rng, words):
    out = [rng.choice(WORDS) for _ in range(words)]
    out[0] = out[0].capitalize()
    for i in range(9, words - 1, 11):
        out[i] += ","
    return " ".join(out) + "."


def _text(rng, words):
    out = []
    while words > 0:
        size = min(words, rng.randint(6, 18))
        words -= size
        if words < 3:
            size, words = size + words, 0
        out.append(_sentence(rng, size))
    return " ".join(out)


def texts(count, seed=20261121):
    """Texts to embed."""
    rng = random.Random(seed)
    lengths = [min(200, max(8, rng.lognormvariate(3.7, 0.75))) for _ in range(count)]
    return [_text(rng, max(4, round((length - 3) / 1.11))) for length in lengths]


def prompts(count, tokens, seed=7):
    """Prompts to continue."""
    rng = random.Random(seed * 1000003 + tokens)
    words = max(4, round((tokens - 6) / 1.13)) - 6
    return [
        f"{rng.randint(100, 999)} {rng.choice(WORDS)} Continue this text: {_text(rng, words)}" for _ in range(count)
    ]
