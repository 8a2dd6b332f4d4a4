"""What a bad network leaves of speech over WebRTC: Hark beside stock FastRTC, on the same packets.

    python -m bench.loss [--percent 0,1,5,10] [--burst 4] [--seconds 80] [--sets read-en] [--seed 1] [--url ws://HOST/v1/stream]

One track of recordings, as Opus, goes through each network: every percentage as independent losses, and as bursts
with a mean length of --burst packets (Gilbert's model). Three receivers get the same packets over loopback UDP: stock
FastRTC at 16 kHz; Hark's jitter buffer and converter behind the same FastRTC, from a client that sends plain Opus
(Firefox); and these from a client that sends RED (Chromium). Samples and clock are counted where they end. What each
has heard, gaps as silence, is then sent to ``/v1/stream`` of one service, which is started for it unless --url names
one, so that the words differ by what was received and by nothing else. Exit codes: 0 measured; 1 the service failed;
2 there is no speech to play.
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Coroutine, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import av
import numpy as np
import websockets
from aiortc import RTCConfiguration
from fastrtc import AsyncStreamHandler
from fastrtc.webrtc_connection_mixin import WebRTCConnectionMixin
from numpy.typing import NDArray

from app.live import Gap
from app.rtc import jitter
from app.rtc.audio import FrameConverter
from app.rtc.redundancy import prefer
from bench.corpus import SpeechMissing, recordings
from bench.process import ServerFailed
from bench.scoring import Score, score
from bench.server import started
from bench.tracks import Track, build_track
from streaming.audio import SAMPLE_RATE
from streaming.types import Pcm16
from tests.support.rtc import PACKET_MS, EncodedTrack, Network, calling, on_loopback, opus_packets

T = TypeVar("T")

EXIT_SERVICE_FAILED, EXIT_NO_SPEECH = 1, 2
_PACKET_SAMPLES = SAMPLE_RATE * PACKET_MS // 1000
_SETTLED_S = 3.0  # nothing new for so long: nothing is under way any more
_LISTENING_SPEED = 3.0  # nothing in the receive paths looks at a clock


class Heard:
    """What came out at the end of a receive path, at 16 kHz."""

    def __init__(self) -> None:
        self._pieces: list[bytes | Gap] = []
        self._grown = asyncio.Event()
        self.kept_samples = 0
        self.clock_samples = 0

    def add(self, piece: bytes | Gap) -> None:
        self._pieces.append(piece)
        if isinstance(piece, Gap):
            self.clock_samples += piece.samples
        else:
            self.kept_samples += len(piece) // 2
            self.clock_samples += len(piece) // 2
        self._grown.set()

    async def wait(self, samples: int, within_s: float = 30.0) -> None:
        """Until the clock says so many. Raises TimeoutError."""
        async with asyncio.timeout(within_s):
            while self.clock_samples < samples:
                self._grown.clear()
                await self._grown.wait()

    async def settled(self) -> None:
        """Until nothing comes any more."""
        with contextlib.suppress(TimeoutError):
            while True:
                self._grown.clear()
                async with asyncio.timeout(_SETTLED_S):
                    await self._grown.wait()

    @property
    def audio(self) -> Pcm16:
        """Gaps are silence."""
        parts = [np.zeros(p.samples, "<i2") if isinstance(p, Gap) else np.frombuffer(p, "<i2") for p in self._pieces]
        return np.concatenate(parts)

    @property
    def is_there(self) -> NDArray[np.bool_]:
        """For each sample whether it was received."""
        parts = [np.zeros(p.samples, bool) if isinstance(p, Gap) else np.ones(len(p) // 2, bool) for p in self._pieces]
        return np.concatenate(parts)


class StockHandler(AsyncStreamHandler):
    """FastRTC as its documentation shows it, at 16 kHz."""

    def __init__(self, heard: Heard) -> None:
        super().__init__(input_sample_rate=SAMPLE_RATE)
        self.heard = heard
        self._closed = asyncio.Event()

    def copy(self) -> "StockHandler":
        return type(self)(self.heard)

    async def receive(self, frame: tuple[int, Any]) -> None:
        self.heard.add(frame[1].tobytes())

    async def emit(self) -> None:
        await self._closed.wait()

    async def shutdown(self) -> None:
        self._closed.set()
        self._resampler = None  # it holds threads


class OurHandler(StockHandler):
    """The same with Hark's conversion; for its jitter buffer app.rtc.jitter.install must have been called."""

    def __init__(self, heard: Heard) -> None:
        super().__init__(heard)
        self._converter = FrameConverter()

    def resample(self, frame: av.AudioFrame) -> Generator[av.AudioFrame, None, None]:
        for piece in self._converter.convert(frame):
            self.heard.add(piece)
        yield from ()


class Listener(WebRTCConnectionMixin):
    """FastRTC's side of one call, without a service around it. ``redundant``: asks for RED where it can be had."""

    def __init__(self, handler: type[StockHandler], *, redundant: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._redundant = redundant
        self.heard = Heard()
        self.event_handler = handler(self.heard)
        self.mode, self.modality = "send", "audio"
        self.concurrency_limit, self.time_limit = 1, None
        self.allow_extra_tracks = False
        self.rtc_configuration = None
        self.server_rtc_configuration = RTCConfiguration(iceServers=[])

    async def answer(self, offer: dict[str, str]) -> dict[str, Any]:
        answer: dict[str, Any] = await self.handle_offer(offer, lambda outputs: None)  # type: ignore[no-untyped-call]
        return answer | {"sdp": prefer(answer["sdp"])} if self._redundant else answer


# Measuring ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Received:
    """What one receive path made of one network, as shares of what was sent."""

    kept: float
    clock: float
    lost: float
    audio: Pcm16


async def listen(
    handler: type[StockHandler], packets: Sequence[bytes], network: Network, *, redundant: bool = False
) -> Received:
    """The packets through the network into a receive path, without a service."""
    listener, track = Listener(handler, redundant=redundant), EncodedTrack(packets, speed=_LISTENING_SPEED)
    async with calling(listener.answer, track, network) as call:
        await track.is_played.wait()
        track.stop()
        await listener.heard.settled()
        heard, sent = listener.heard, call.wire.sent * _PACKET_SAMPLES
        lost = len(call.wire.lost) / call.wire.sent
        return Received(heard.kept_samples / sent, heard.clock_samples / sent, lost, heard.audio)


async def stream(url: str, audio: Pcm16) -> str:
    """The audio to the service, as fast as it takes it; the finals. Raises RuntimeError where the stream fails."""
    texts: list[str] = []
    # No pings: while the service holds this client back, it reads none.
    async with websockets.connect(f"{url}?partials=false", proxy=None, ping_interval=None) as socket:
        sending = asyncio.create_task(_send(socket, audio.tobytes()))
        async for message in socket:
            event = json.loads(message)
            match event["type"]:
                case "final":
                    texts.append(event["text"])
                case "failed" | "error":
                    raise RuntimeError(event["message"])
        await sending
    return " ".join(texts)


async def _send(socket: websockets.ClientConnection, data: bytes) -> None:
    for start in range(0, len(data), SAMPLE_RATE):
        await socket.send(data[start : start + SAMPLE_RATE])
    await socket.send('{"type":"eof"}')


@dataclass(frozen=True, slots=True)
class Row:
    """One network. Stock, Hark, Hark with RED."""

    network: Network
    received: Sequence[Received]
    words: Sequence[Score]


async def measure(url: str, track: Track, networks: Sequence[Network]) -> list[Row]:
    """``url``: of the service's ``/v1/stream``. Raises what ``stream`` and the network do."""
    packets = await asyncio.to_thread(opus_packets, track.audio)
    with on_loopback():
        stock = await _all(listen(StockHandler, packets, network) for network in networks)
        jitter.install()
        plain = await _all(listen(OurHandler, packets, network) for network in networks)
        red = await _all(listen(OurHandler, packets, network, redundant=True) for network in networks)
    reference = " ".join(spoken.text for spoken in track.utterances)
    rows = []
    for network, *received in zip(networks, stock, plain, red, strict=True):
        texts = await _all(stream(url, one.audio) for one in received)
        rows.append(Row(network, received, [score(reference, text, "en") for text in texts]))
    return rows


async def _all(jobs: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """At once; where one fails the others are ended, and its error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(job) for job in jobs]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


# The command --------------------------------------------------------------------------------------------------------


_HEADER = """\
| network | lost, % | samples kept, %: stock | Hark | Hark, RED | clock error, %: stock | Hark | Hark, RED \
| WER, %: stock | Hark | Hark, RED |
|---|---|---|---|---|---|---|---|---|---|---|"""


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    return "\n".join([_HEADER, *map(_line, rows)])


def _line(row: Row) -> str:
    network, received = row.network, row.received
    kind = "random" if network.burst == 1 else f"bursts of {network.burst:g}"
    shares = [received[0].lost, *(r.kept for r in received), *(1 - r.clock for r in received)]
    shares += [words.rate or 0.0 for words in row.words]
    cells = [f"{100 * network.loss:g} %, {kind}" if network.loss else "no loss", *(f"{100 * s:.1f}" for s in shares)]
    return f"| {' | '.join(cells)} |"


def networks(percents: Sequence[float], burst: float, seed: int) -> list[Network]:
    """Each percentage with independent losses and, above 0, with bursts."""
    return [
        Network(loss=percent / 100, burst=mean, seed=seed)
        for percent in percents
        for mean in ((1.0, burst) if percent else (1.0,))
    ]


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.loss", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--percent", type=lambda text: [float(p) for p in text.split(",")], default=[0, 1, 5, 10])
    parser.add_argument("--burst", type=float, default=4.0, help="mean length of a burst, in packets of 20 ms")
    parser.add_argument("--seconds", type=float, default=80.0, help="least length of the track")
    parser.add_argument("--sets", type=lambda text: text.split(","), default=["read-en"], help="sets of the corpus")
    parser.add_argument("--seed", type=int, default=1, help="chooses the recordings, pauses and lost packets")
    parser.add_argument("--url", help="the /v1/stream of a service that runs already")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    asked = arguments(argv)
    chosen = networks(asked.percent, asked.burst, asked.seed)
    try:
        speech, source = recordings(asked.sets, asked.seed)
        track = build_track(source, asked.seconds, asked.seed)
    except SpeechMissing as missing:
        print(f"bench.loss: {missing}", file=sys.stderr)
        return EXIT_NO_SPEECH
    try:
        rows = _measured(asked.url, track, chosen)
    except (ServerFailed, RuntimeError, OSError, websockets.WebSocketException) as error:
        print(f"bench.loss: {error!r}", file=sys.stderr)
        return EXIT_SERVICE_FAILED
    words = rows[0].words[0].units
    print(f"{speech}; {track.duration_s:.0f} s, {len(track.utterances)} utterances, {words} words; seed {asked.seed}\n")
    print(table(rows))
    return 0


def _measured(url: str | None, track: Track, chosen: Sequence[Network]) -> list[Row]:
    if url is not None:
        return asyncio.run(measure(url, track, chosen))
    with started(os.environ) as server:
        return asyncio.run(measure(server.url, track, chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
