"""A WebRTC client on loopback, and the bad network between it and the service.

Speech is encoded once and sent as it is, so that a stream costs little. The network's doings are a list made beforehand
from a seed: the same packets are lost whatever receives them.
"""

import asyncio
import contextlib
import fractions
import itertools
import json
import random
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aioice.ice
import av
import httpx
import numpy as np
from aiortc import RTCConfiguration, RTCDataChannel, RTCPeerConnection, RTCSessionDescription
from aiortc.codecs.opus import OpusEncoder
from aiortc.mediastreams import MediaStreamError, MediaStreamTrack
from aiortc.rtp import is_rtcp

from streaming.audio import SAMPLE_RATE
from streaming.types import Pcm16

PACKET_MS = 20
RED_BLOCK_TYPE = 111  # says that a block is Opus; nobody here looks at it
CONNECT_S = 15.0

Event = dict[str, Any]


# --- the network -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Network:
    """Shares of packets, in [0, 1]. ``burst`` is the mean length of a loss in packets: 1 for independent losses, more
    for Gilbert's model. A reordered packet arrives after the next two."""

    loss: float = 0.0
    burst: float = 1.0
    reorder: float = 0.0
    duplicate: float = 0.0
    seed: int = 1

    def fates(self) -> Iterator["Fate"]:
        """What happens to each packet in turn, without end."""
        chance = random.Random(self.seed)
        leave = 1 / self.burst  # of a state in which packets are lost
        enter = self.loss * leave / (1 - self.loss) if self.burst > 1 else self.loss
        losing = False
        while True:
            losing = chance.random() >= leave if losing and self.burst > 1 else chance.random() < enter
            late, twice = chance.random() < self.reorder, chance.random() < self.duplicate
            yield Fate(copies=0 if losing else 2 if twice else 1, late_by=2 if late else 0)


@dataclass(frozen=True, slots=True)
class Fate:
    """One packet: how often it arrives, and after how many later ones."""

    copies: int
    late_by: int


class Wire:
    """Puts a list of fates between a sender and what it sends through. Everything but RTP passes."""

    def __init__(self, network: Network, send: Callable[[bytes], Awaitable[None]]) -> None:
        self._fates = network.fates()
        self._send = send
        self._late: list[tuple[int, bytes]] = []
        self.sent = 0
        self.lost: list[int] = []  # which packets, from 0

    async def send(self, data: bytes) -> None:
        if not 128 <= data[0] <= 191 or is_rtcp(data):  # RFC 7983
            await self._send(data)
            return
        fate, number = next(self._fates), self.sent
        self.sent += 1
        if not fate.copies:
            self.lost.append(number)
        elif fate.late_by:
            self._late.append((number + fate.late_by, data))
        else:
            for _ in range(fate.copies):
                await self._send(data)
        for due in [entry for entry in self._late if entry[0] <= number]:
            self._late.remove(due)
            await self._send(due[1])


# --- what is said ----------------------------------------------------------------------------------------------------


def opus_packets(audio: Pcm16, *, bit_rate: int = 32_000) -> list[bytes]:
    """16 kHz mono → Opus packets of 20 ms, as a browser encodes a microphone."""
    encoder = av.CodecContext.create("libopus", "w")
    encoder.sample_rate, encoder.layout, encoder.format = 48_000, "mono", "s16"
    encoder.bit_rate, encoder.time_base = bit_rate, fractions.Fraction(1, 48_000)
    encoder.options = {"application": "voip", "frame_duration": str(PACKET_MS)}
    frame = av.AudioFrame.from_ndarray(audio.reshape(1, -1), format="s16", layout="mono")
    frame.sample_rate, frame.pts, frame.time_base = SAMPLE_RATE, 0, fractions.Fraction(1, SAMPLE_RATE)
    resampler = av.AudioResampler(format="s16", layout="mono", rate=48_000, frame_size=960)
    frames = [*resampler.resample(frame), *resampler.resample(None)]
    return [bytes(packet) for piece in [*frames, None] for packet in encoder.encode(piece) if packet.size]


def red_payload(frame: bytes, *before: bytes) -> bytes:
    """RFC 2198: a packet that brings along what was in those before it, oldest first, each PACKET_MS long."""
    headers = [
        (1 << 31 | RED_BLOCK_TYPE << 24 | 48 * PACKET_MS * (len(before) - n) << 10 | len(block)).to_bytes(4)
        for n, block in enumerate(before)
    ]
    return b"".join([*headers, bytes([RED_BLOCK_TYPE]), *before, frame])


class EncodedTrack(MediaStreamTrack):
    """Opus packets at the pace of speech, or ``speed`` times as fast; then silence, until it is stopped.

    ``redundant``: each brings the one before it along. ``calling`` sets it where that is what was agreed on.
    """

    kind = "audio"
    redundant = False

    def __init__(self, packets: Sequence[bytes], *, speed: float = 1.0) -> None:
        super().__init__()
        quiet = opus_packets(np.zeros(SAMPLE_RATE, np.int16))[10]
        self._packets = enumerate(itertools.chain(packets, itertools.repeat(quiet)))
        self._count = len(packets)
        self._before = b""
        self._interval_s = PACKET_MS / 1000 / speed
        self._began_s: float | None = None
        self.is_played = asyncio.Event()

    async def recv(self) -> "av.Packet[Any]":
        if self.readyState != "live":
            raise MediaStreamError
        number, payload = next(self._packets)
        now_s = asyncio.get_running_loop().time()
        if self._began_s is None:
            self._began_s = now_s
        await asyncio.sleep(self._began_s + number * self._interval_s - now_s)
        if number == self._count:
            self.is_played.set()
        packet: av.Packet[Any] = av.Packet(red_payload(payload, self._before) if self.redundant else payload)
        self._before = payload
        packet.pts, packet.time_base = number * 48 * PACKET_MS, fractions.Fraction(1, 48_000)
        return packet


# --- the client ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def on_loopback() -> Iterator[None]:
    """ICE offers 127.0.0.1 alone, which aioice otherwise leaves out. For all connections of this process."""
    stock = aioice.ice.get_host_addresses
    aioice.ice.get_host_addresses = lambda use_ipv4, use_ipv6: ["127.0.0.1"]
    try:
        yield
    finally:
        aioice.ice.get_host_addresses = stock


Answer = Callable[[dict[str, str]], Awaitable[dict[str, Any]]]


@dataclass
class Call:
    """An open connection. ``events`` are the JSON messages of its data channel so far."""

    peer: RTCPeerConnection
    channel: RTCDataChannel
    track: MediaStreamTrack
    wire: Wire
    events: list[Event] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def send(self, message: Event) -> None:
        self.channel.send(json.dumps(message))

    def of_type(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["type"] == kind]

    @property
    def texts(self) -> list[str]:
        return [event["text"] for event in self.of_type("final")]

    async def hear(self, kind: str, *, within_s: float = 30.0) -> Event:
        """The first event of that kind. Raises TimeoutError."""
        async with asyncio.timeout(within_s):
            while not self.of_type(kind):
                self.news.clear()
                await self.news.wait()
        return self.of_type(kind)[0]

    def vanish(self) -> None:
        """As a killed tab: nothing is sent any more, not even a goodbye."""

        async def nothing(data: bytes) -> None:
            pass

        self.peer.getSenders()[0].transport.transport._send = nothing


def offer_to(url: str, *, headers: dict[str, str] | None = None) -> Answer:
    """An offer over HTTP to ``POST /v1/rtc/offer``. Raises httpx.HTTPStatusError where it is refused."""

    async def answer(offer: dict[str, str]) -> dict[str, Any]:
        async with httpx.AsyncClient(trust_env=False, timeout=CONNECT_S) as http:
            response = await http.post(url, json=offer, headers=headers)
        response.raise_for_status()
        answered: dict[str, Any] = response.json()
        return answered

    return answer


@contextlib.asynccontextmanager
async def calling(
    answer: Answer, track: MediaStreamTrack, network: Network | None = None, *, label: str = "hark"
) -> AsyncIterator[Call]:
    """A call whose data channel is open and whose track plays, to be made within ``on_loopback``.

    Raises RuntimeError where the answer holds no session description.
    """
    peer = RTCPeerConnection(RTCConfiguration(iceServers=[]))
    try:
        yield await _connect(peer, answer, track, network or Network(), label)
    finally:
        await peer.close()


async def _connect(
    peer: RTCPeerConnection, answer: Answer, track: MediaStreamTrack, network: Network, label: str
) -> Call:
    channel = peer.createDataChannel(label)
    sender = peer.addTrack(track)
    opened = asyncio.Event()
    channel.on("open", opened.set)
    await peer.setLocalDescription(await peer.createOffer())
    ice = sender.transport.transport
    call = Call(peer, channel, track, Wire(network, ice._send))
    ice._send = call.wire.send

    def on_message(message: str) -> None:
        call.events.append(json.loads(message))
        call.news.set()

    channel.on("message", on_message)
    local = peer.localDescription
    answered = await answer({"sdp": local.sdp, "type": local.type, "webrtc_id": str(uuid.uuid4())})
    if "sdp" not in answered:
        raise RuntimeError(f"the offer was refused: {answered}")
    sdp = answered["sdp"]
    if isinstance(track, EncodedTrack) and re.search(r"^m=audio \d+ \S+ 63\b", sdp, re.MULTILINE):
        track.redundant = True
        # aiortc sends the codec whose map comes first, whatever the m line says, and has no encoder for RED; here it
        # only packs what is encoded already.
        sdp = re.sub(r"(?s)(a=rtpmap:.*?)(a=rtpmap:63 .*?\r\n)", r"\2\1", sdp, count=1)
        vars(sender)["_RTCRtpSender__encoder"] = OpusEncoder()
    await peer.setRemoteDescription(RTCSessionDescription(sdp, answered["type"]))
    async with asyncio.timeout(CONNECT_S):
        await opened.wait()
    return call
