"""What the scripts share: arguments, recordings, pace, and how they tell the test what they got."""

import json
import sys
import wave
from collections.abc import Iterator
from pathlib import Path

URL = sys.argv[1]
WS_URL = URL.replace("http", "ws", 1)
FOLDER = Path(sys.argv[2])
FRAME_MS = 20
SPEED = 1.0  # of real time: faster, and a busy machine has no time for partials


def path(name: str, rate_hz: int = 16_000) -> Path:
    return FOLDER / f"{name}-{rate_hz}.wav"


def pcm(name: str, rate_hz: int) -> bytes:
    """16-bit mono."""
    with wave.open(str(path(name, rate_hz))) as file:
        return file.readframes(file.getnframes())


def frames(data: bytes, rate_hz: int, frame_ms: int = FRAME_MS) -> Iterator[bytes]:
    size = 2 * rate_hz * frame_ms // 1000
    for start in range(0, len(data), size):
        yield data[start : start + size]


def tell(**values: object) -> None:
    print(json.dumps(values), flush=True)
