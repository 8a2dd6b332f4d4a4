"""Other people's client libraries, unmodified, against one service with real weights: only the base URL is changed.

They do not agree with the service's own libraries, so they have an environment of their own (`make setup-clients`) and
run as processes of it, `scripts/*.py`. A script gets the service's URL and a folder with recordings, and prints JSON
lines.
"""

import json
import os
import re
import subprocess
import wave
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soxr

from models.host import warm_up_clip
from streaming.types import Pcm16
from tests.support.server import Server, serving
from tests.support.weights import require_vad, require_weights

SCRIPTS = Path(__file__).parent / "scripts"
PAUSE_S = 1.2
RATES_HZ = (8_000, 16_000, 24_000)
SENTENCE = "we are going to the park because the weather is good"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.clients)
            item.add_marker(pytest.mark.real)


def plain(text: str) -> str:
    """Letters and single spaces: how a sentence was punctuated is not a client's matter."""
    return " ".join(re.sub(r"[^a-z ]", " ", text.lower()).split())


@dataclass(frozen=True)
class Clients:
    """The environment with the libraries, a service, and a folder with the sentence said twice at several rates."""

    python: str
    server: Server
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """This process's, without its proxies and settings of Hark."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("HARK_") and not k.lower().endswith("_proxy")}
        return {**kept, "HARK_URL": self.server.url("")}

    def run(self, script: str, *arguments: object, timeout_s: float = 120) -> list[dict[str, Any]]:
        """What the script printed, line by line. Fails where it does."""
        command = [self.python, str(SCRIPTS / script), self.server.url(""), str(self.folder), *map(str, arguments)]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="package")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    python = os.environ.get("HARK_CLIENTS_PYTHON", "")
    if not python:
        pytest.skip("no client libraries: make setup-clients, and set HARK_CLIENTS_PYTHON to their interpreter")
    require_vad()
    require_weights("tiny.en")
    folder = tmp_path_factory.mktemp("speech")
    write_recordings(folder)
    with serving(engine="ctranslate", model="tiny.en", audiosocket_port=0) as server:
        yield Clients(python, server, folder)


def recording(path: Path) -> Pcm16:
    """The samples of a WAV as ``write_recordings`` writes them."""
    with wave.open(str(path)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), np.int16)


def write_recordings(folder: Path) -> None:
    """`talk-RATE.wav`: the sentence, a pause, the sentence, a pause. `quiet-RATE.wav`: nothing is said."""
    said, pause = warm_up_clip()[0], np.zeros(int(PAUSE_S * 16_000), np.int16)
    for name, samples in (("talk", np.concatenate([said, pause, said, pause])), ("quiet", np.tile(pause, 2))):
        for rate_hz in RATES_HZ:
            write_recording(folder / f"{name}-{rate_hz}.wav", samples, rate_hz)


def write_recording(path: Path, samples: Pcm16, rate_hz: int) -> None:
    """Of samples at 16 kHz, a WAV at another rate."""
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate_hz, 0, "NONE", ""))
        file.writeframes(soxr.resample(samples, 16_000, rate_hz).tobytes())
