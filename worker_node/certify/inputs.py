"""What a certification sends: prompts and texts of every length in several languages, recordings, images.

The same on every machine, so that answers can be stored. What is sent here and how references are made go together: a
change of this file needs new ones (CONTRIBUTING.md).
"""

from __future__ import annotations

import base64
import io
import itertools
import struct
import wave
import zlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

PASSAGES = (
    "The lighthouse stood at the end of the harbour wall, and every evening its keeper climbed the stairs with a lamp, "
    "a book and some bread. When the fog came he rang the bell each minute, so that the fishermen knew the way home. ",
    "Der Zug hielt lange an der Grenze, und alle standen am Fenster. Ein Kind fragte, warum auf beiden Seiten "
    "derselbe Schnee liege; der Schaffner lachte und gab ihm seine alte Mütze. ",
    "Le marché ouvrait avant le jour: on y vendait du pain, des pommes, des poissons encore froids, et la vieille dame "
    "au coin de la place racontait à chacun l'histoire de la fontaine. ",
    "The committee reviewed figure 7 on page 42: revenue rose from 1,204 to 1,871 units, costs fell by 12.5 %. The "
    "remaining items (a) to (f) were moved to the next meeting on 14 March. ",
    "En el valle nadie recordaba un invierno tan largo. Los pastores contaban las ovejas cada mañana y cada mañana "
    "faltaba una, hasta que llegó la primavera y volvieron todas juntas. ",
    "def area(shapes):\n    total = 0.0\n    for shape in shapes:\n        total += shape.width * shape.height\n"
    "    return round(total, 2)\n\n",
    "山の上の小さな村では、毎年秋になると祭りがある。",
)
_ENDINGS = (
    "\nThe next sentence is:",
    "\nIn one word, the subject is",
    "\nOnce upon a time",
    "\nSummary:",
)
RANKED = (
    "Who keeps the lamp of the harbour burning?",
    "Warum hielt der Zug?",
    "What happened to revenue and costs?",
    "How is the area of rectangles added up?",
)
DOCUMENTS = tuple(text.strip() for text in PASSAGES)
# In tokens, each a quarter longer than the one before: 13, 16, 20 … 1024 … 16384.
LENGTHS = tuple(round(2 ** (step / 3)) for step in range(11, 43))
# No text has more tokens than this many for each of its words.
_TOKENS_PER_WORD = (2, 5, 5, 2, 5)
_TEXTS = 300


def lengths(window: int, count: int) -> list[int]:
    """Up to `count` of `LENGTHS` below the window, spread evenly, and the window itself."""
    shorter = [length for length in LENGTHS if length < window]
    spread = np.linspace(0, len(shorter) - 1, min(count - 1, len(shorter))).round().astype(int)
    return [*(shorter[at] for at in spread), window]


def prompt(length: int, variant: int, tokenize: Callable[[str], list[int]]) -> list[int]:
    """A prompt of exactly `length` token ids; equal arguments give equal prompts."""
    ending = tokenize(_ENDINGS[(length + variant) % len(_ENDINGS)])
    room = max(1, length - len(ending))
    first = (length + variant) % len(PASSAGES)
    # Each by itself: a node does not tokenize more than a model can hold.
    passages = itertools.islice(itertools.cycle([tokenize(passage) for passage in PASSAGES]), first, None)
    return list(itertools.islice(itertools.chain.from_iterable(passages), room)) + ending[-(length - room) :]


def texts(window: int, count: int) -> list[str]:
    """Up to `count` texts, from one word to those that are sure to fit a window of tokens; all differ."""
    fitting = []
    for index in range(_TEXTS):
        words, most = PASSAGES[index % 5].split(), _TOKENS_PER_WORD[index % 5]
        size = round(2 ** (8 * index / (_TEXTS - 1)))
        if most * (size + 2) <= window:
            begin = index % len(words)
            fitting.append(f"{index}: " + " ".join(itertools.islice(itertools.cycle(words), begin, begin + size)))
    spread = np.linspace(0, len(fitting) - 1, min(count, len(fitting))).round().astype(int)
    return [fitting[at] for at in spread]


def recordings() -> tuple[bytes, bytes]:
    """Two recordings (WAV, mono, 16 kHz) that say different things: the second is half of the first."""
    from worker_node.tasks.transcribe.building import canary_samples  # noqa: PLC0415  (PyAV, for speech alone)

    samples = np.frombuffer(canary_samples(), "<i2")
    return _wav(samples), _wav(samples[: len(samples) // 2])


def _wav(samples: npt.NDArray[np.int16]) -> bytes:
    target = io.BytesIO()
    with wave.open(target, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(samples.astype("<i2").tobytes())
    return target.getvalue()


def images() -> tuple[str, ...]:
    return tuple(f"data:image/png;base64,{base64.b64encode(_png(colour)).decode()}" for colour in _COLOURS)


_COLOURS = (b"\xdc\x14\x14", b"\x14\xb4\x14", b"\x14\x28\xdc")


def _png(colour: bytes, size: int = 64) -> bytes:
    rows = (b"\0" + colour * size) * size
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    )
    parts = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
