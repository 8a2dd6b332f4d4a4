"""Live streams in containers, with the real decoder process and a client that is a list of messages."""

import asyncio
import io
import itertools
from collections.abc import Sequence

import av
import numpy as np
import psutil
import pytest

from app.dialect import Wire
from app.live import ClientGone
from app.stream_media import DecodingPeer, StreamLimits, decoding
from app.wire.wav import HEAD_BYTES, WavHead
from models.scripted import encode_words, read_words
from streaming.config import AudioFormat
from streaming.errors import BadAudio

CLOSE, FLUSH = "close", "flush"
WORDS = ("alpha", "bravo", "charlie", None, None, "golf", "zulu", None)
SAID = [word for word in WORDS if word]


def contained(form: str, codec: str, words: Sequence[str | None], rate_hz: int = 48_000) -> bytes:
    """A file that says these words, as a tone of 1 kHz: no codec keeps a constant level."""
    tone = np.sign(np.sin(2 * np.pi * 1_000 * (np.arange(len(words) * 1_600) + 0.5) / 16_000))
    pcm = (encode_words(words) * tone).astype(np.int16)
    whole = av.AudioFrame.from_ndarray(pcm[None], format="s16", layout="mono")
    whole.sample_rate = 16_000
    out = io.BytesIO()
    with av.open(out, "w", format=form) as container:
        stream = container.add_stream(codec, rate=rate_hz)
        stream.layout = "mono"
        sample_format = stream.codec_context.codec.audio_formats[0].name
        resampler = av.AudioResampler(sample_format, "mono", rate_hz, frame_size=rate_hz // 50)
        for frame in (*resampler.resample(whole), *resampler.resample(None)):
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return out.getvalue()


class Client:
    """A Peer: says these things, then nothing, until it ``leaves``."""

    def __init__(self, *messages: Wire, leaves: bool = False) -> None:
        self._messages = list(messages)
        self._leaves = leaves

    async def open(self) -> None: ...

    async def receive(self) -> Wire:
        if not self._messages:
            if self._leaves:
                raise ClientGone
            await asyncio.Event().wait()
        return self._messages.pop(0)

    async def send(self, message: Wire) -> None: ...

    async def close(self, code: int, why: str) -> None: ...


def decoded(client: Client, limits: StreamLimits | None = None) -> "asyncio.AbstractAsyncContextManager[DecodingPeer]":
    return decoding(client, limits or StreamLimits(), lambda text: text == CLOSE)


async def heard(peer: DecodingPeer, last: str = CLOSE) -> tuple[list[str], list[Wire]]:
    """The words up to that text, and all messages."""
    await peer.open()
    messages: list[Wire] = []
    while not messages or messages[-1] != last:
        messages.append(await peer.receive())
    stream = b"".join(message for message in messages if isinstance(message, bytes))
    found = WavHead().push(stream)
    assert found is not None
    assert found[0] == AudioFormat()
    pcm = np.frombuffer(found[1], np.int16)
    return [word.text.strip() for word in read_words(pcm, 0)], messages


async def drained(peer: DecodingPeer) -> None:
    while True:
        await peer.receive()


@pytest.mark.parametrize(
    ("form", "codec", "rate_hz"), [("webm", "libopus", 48_000), ("ogg", "libopus", 48_000), ("flac", "flac", 16_000)]
)
async def test_a_stream_says_what_its_container_holds_however_it_is_cut(form: str, codec: str, rate_hz: int) -> None:
    data = contained(form, codec, WORDS, rate_hz)
    places = [0, 1, 2, 3, 4, 40, *range(41, len(data), 997), len(data)]
    pieces = [data[start:end] for start, end in itertools.pairwise(places)]
    async with decoded(Client(*pieces, CLOSE)) as peer:
        words, _ = await heard(peer)
    assert words == SAID


async def test_a_text_keeps_its_place_behind_the_audio_that_came_before_it() -> None:
    data = contained("webm", "libopus", WORDS)
    async with decoded(Client(data, FLUSH, FLUSH)) as peer:
        words, messages = await heard(peer, FLUSH)
        assert [word for word in words if word in SAID] == SAID
        assert await peer.receive() == FLUSH, "what is not fed on is not waited for"
    assert all(isinstance(message, bytes) for message in messages[:-1])


async def test_a_text_before_any_audio_is_passed_on_at_once() -> None:
    async with decoded(Client(FLUSH)) as peer:
        await peer.open()
        assert await peer.receive() == FLUSH


async def test_a_wav_stream_is_passed_on_as_it_is() -> None:
    data = contained("wav", "pcm_s16le", WORDS, 16_000)
    async with decoded(Client(b"R", data[1:], b"")) as peer:
        await peer.open()
        assert [await peer.receive() for _ in range(3)] == [b"R", data[1:], b""]


async def test_what_is_not_decoded_yet_counts_as_a_sign_of_life() -> None:
    data = contained("webm", "libopus", WORDS)
    async with decoding(
        Client(data[:50], data[50:], CLOSE), StreamLimits(), lambda text: text == CLOSE, "alive"
    ) as peer:
        words, messages = await heard(peer)
    assert words == SAID
    assert messages[1:3] == ["alive", "alive"], "before the process can have started"


async def test_an_empty_message_is_the_end_of_a_stream_too() -> None:
    data = contained("ogg", "libopus", WORDS)
    async with decoded(Client(data, b"", CLOSE)) as peer:
        words, messages = await heard(peer)
    assert words == SAID
    assert messages[-2] == b""


@pytest.mark.parametrize("data", [b"no audio " * 10_000, b"\x1aE\xdf\xa3" + b"\xff" * 90_000])
async def test_a_stream_that_cannot_be_heard_ends_with_the_reason(data: bytes) -> None:
    async with decoded(Client(data, CLOSE)) as peer:
        await peer.open()
        assert len(await peer.receive()) == HEAD_BYTES
        with pytest.raises(BadAudio) as caught:
            await peer.receive()
    assert caught.value.code == "unsupported_media"


async def test_a_decoder_that_is_killed_ends_the_stream() -> None:
    async with decoded(Client(contained("webm", "libopus", WORDS))) as peer:
        await peer.open()
        await peer.receive()
        (process,) = workers()
        process.kill()
        with pytest.raises(BadAudio, match="ended early"):
            await drained(peer)


async def test_a_client_that_leaves_is_noticed_and_its_decoder_ends() -> None:
    async with decoded(Client(contained("webm", "libopus", WORDS), leaves=True)) as peer:
        await peer.open()
        with pytest.raises(ClientGone):
            await drained(peer)
        assert len(workers()) == 1
    assert workers() == []


def workers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "app.stream_worker" in child.cmdline()]
