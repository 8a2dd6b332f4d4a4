"""The audio jitter buffer: what a network may do to packets, and what must come out."""

import itertools
from collections.abc import Iterator, Sequence

import aiortc
import numpy as np
import pytest
from aiortc import codecs, rtcrtpreceiver
from aiortc.codecs import get_decoder
from aiortc.jitterbuffer import JitterBuffer
from aiortc.rtcrtpparameters import RTCRtpCodecParameters
from aiortc.rtp import RtpPacket
from hypothesis import given
from hypothesis import strategies as st

from app.rtc import jitter
from app.rtc.jitter import FAR, PATIENCE_PACKETS, ReorderBuffer, UnknownAiortc, install
from streaming.audio import SAMPLE_RATE
from tests.support.rtc import opus_packets, red_payload

OPUS = RTCRtpCodecParameters(mimeType="audio/opus", clockRate=48_000, channels=2, payloadType=96)
VP8 = RTCRtpCodecParameters(mimeType="video/VP8", clockRate=90_000, payloadType=97)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """For this test alone: the names are put back after it."""
    for name in ("JitterBuffer", "get_decoder"):
        monkeypatch.setattr(rtcrtpreceiver, name, getattr(rtcrtpreceiver, name))
    monkeypatch.setitem(codecs.CODECS, "audio", list(codecs.CODECS["audio"]))
    install()


def play(sequences: Sequence[int]) -> list[int]:
    """Packets, named by how many there were before them on the sender's side, in the order of their arrival."""
    buffer = ReorderBuffer[int]()
    return [out for sequence in sequences for out in buffer.push(sequence % 65_536, sequence)]


# --- the buffer ------------------------------------------------------------------------------------------------------


@st.composite
def arrivals(draw: st.DrawFn) -> list[int]:
    """Any losses, delays of up to 8 packets and duplicates, around any sequence number."""
    start = draw(st.integers(0, 65_535))
    arrived = []
    for number in range(draw(st.integers(0, 60))):
        copies = draw(st.sampled_from([1, 1, 1, 1, 0, 2]))
        arrived += [(number + draw(st.sampled_from([0, 0, 0, 0, 1, 2, 3, 8])), start + number) for _ in range(copies)]
    return [sequence for _, sequence in sorted(arrived, key=lambda at: at[0])]


@given(arrivals())
def test_packets_come_out_in_order_and_at_most_once(arrived: list[int]) -> None:
    out = play(arrived)
    assert all(a < b for a, b in itertools.pairwise(out))
    assert set(out) <= set(arrived)


@given(arrivals())
def test_few_packets_are_held_and_none_waits_for_more_than_three_later_ones(arrived: list[int]) -> None:
    buffer, out = ReorderBuffer[int](), set[int]()
    waiting: dict[int, set[int]] = {}  # a packet that has come and not gone: the later ones that came since
    for sequence in arrived:
        for later in waiting.values():
            later.add(sequence)
        out |= set(buffer.push(sequence % 65_536, sequence))
        if sequence > max(out):
            waiting.setdefault(sequence, set())
        waiting = {held: later for held, later in waiting.items() if held not in out}
        assert len(buffer) == len(waiting) < PATIENCE_PACKETS
        assert all(len({s for s in later if s > held}) < PATIENCE_PACKETS for held, later in waiting.items())


@given(st.integers(0, 65_535), st.lists(st.sampled_from([1, 1, 1, 2, 3, 20]), max_size=60))
def test_a_lost_packet_costs_itself_alone(start: int, steps: list[int]) -> None:
    """Whatever is lost: what came in order comes out, but for those that the newest hole still holds back."""
    sequences = [start]
    for step in steps:
        sequences.append(sequences[-1] + step)
    out = play(sequences)
    assert out == sequences[: len(out)]
    assert len(sequences) - len(out) < PATIENCE_PACKETS


@given(st.integers(0, 65_535), st.integers(1, 200))
def test_packets_in_order_pass_at_once_also_over_the_wrap(start: int, count: int) -> None:
    buffer = ReorderBuffer[int]()
    for number in range(start, start + count):
        assert buffer.push(number % 65_536, number) == [number]
        assert len(buffer) == 0


@given(st.integers(0, 65_535), st.permutations(range(PATIENCE_PACKETS)))
def test_within_its_patience_any_order_is_put_right(start: int, order: list[int]) -> None:
    assert play([start, *(start + 1 + number for number in order)]) == list(range(start, start + 1 + len(order)))


@pytest.mark.parametrize("jump", [FAR + 1, 30_000, -FAR - 1])
def test_a_far_jump_begins_anew_and_loses_nothing(jump: int) -> None:
    arrived = [1_000, 1_002, 1_001 + jump, 1_002 + jump, 1_003 + jump]
    assert play(arrived) == arrived


def test_a_hole_is_given_up_when_the_third_later_packet_comes() -> None:
    buffer = ReorderBuffer[int]()
    assert [buffer.push(n, n) for n in (7, 9, 10, 11, 12)] == [[7], [], [], [9, 10, 11], [12]]
    assert buffer.push(8, 8) == []


# --- in aiortc -------------------------------------------------------------------------------------------------------


def rtp(
    payloads: Sequence[bytes], *, start: int = 65_534, timestamp: int = 2**32 - 960, payload_type: int = 96
) -> Iterator[RtpPacket]:
    for number, payload in enumerate(payloads):
        yield RtpPacket(
            payload_type=payload_type,
            sequence_number=(start + number) % 65_536,
            timestamp=(timestamp + 960 * number) % 2**32,
            payload=payload,
        )


def decoded(packets: Sequence[RtpPacket]) -> list[int]:
    """Where the frames stand that aiortc's decoder thread would give out, in ticks after the first packet."""
    buffer, decoder = rtcrtpreceiver.JitterBuffer(capacity=16, prefetch=4), rtcrtpreceiver.get_decoder(OPUS)
    mapper = rtcrtpreceiver.TimestampMapper()
    at = []
    for packet in packets:
        _, ready = buffer.add(packet)
        if ready is not None:
            ready.timestamp = mapper.map(ready.timestamp)
            at += [frame.pts for frame in decoder.decode(ready)]
    return at


@pytest.fixture(scope="module")
def speech() -> list[bytes]:
    noise = np.random.default_rng(1).normal(0, 3_000, SAMPLE_RATE // 2)
    return opus_packets(noise.astype(np.int16))[:20]


@pytest.mark.usefixtures("installed")
def test_each_packet_becomes_the_frame_of_its_own_time_over_both_wraps(speech: list[bytes]) -> None:
    packets = list(rtp(speech))
    del packets[5]
    packets[10], packets[11] = packets[11], packets[10]
    packets.insert(15, packets[14])
    assert decoded(packets) == [960 * number for number in range(20) if number != 5]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("payload_type", [96, 63])
def test_an_empty_packet_delays_nothing_and_does_not_end_the_decoder(speech: list[bytes], payload_type: int) -> None:
    """A packet of padding alone has no payload; for libav an empty packet is the end of the stream."""
    payloads = [red_payload(frame) for frame in speech] if payload_type == 63 else speech
    packets = list(rtp([*payloads[:3], b"", *payloads[4:]], payload_type=payload_type))
    assert decoded(packets[:5]) == [0, 960, 1_920, 3_840]
    assert decoded(packets) == [960 * n for n in range(20) if n != 3]


@pytest.mark.usefixtures("installed")
def test_a_damaged_packet_costs_itself_alone(speech: list[bytes]) -> None:
    damaged = list(rtp([*speech[:3], b"\xff\xff", *speech[4:]]))
    assert decoded([*damaged[:2], damaged[3], damaged[4], damaged[2], *damaged[5:]]) == [
        960 * n for n in range(20) if n != 3
    ]


@pytest.mark.usefixtures("installed")
def test_a_pause_of_the_sender_delays_nothing(speech: list[bytes]) -> None:
    """Discontinuous transmission: sequence numbers go on, time stamps jump."""
    packets = [*rtp(speech[:3], start=7, timestamp=0), *rtp(speech[3:6], start=10, timestamp=48_000)]
    assert decoded(packets) == [0, 960, 1_920, 48_000, 48_960, 49_920]


@pytest.mark.usefixtures("installed")
def test_a_packet_that_brings_the_lost_one_along_leaves_no_hole_and_no_wait(speech: list[bytes]) -> None:
    packets = list(rtp([red_payload(frame, before) for before, frame in itertools.pairwise(speech)], payload_type=63))
    del packets[5]
    buffer = rtcrtpreceiver.JitterBuffer(capacity=16, prefetch=4)
    assert [len(buffer.add(packet)[1].packets) for packet in packets] == [2, *[1] * 4, 2, *[1] * 12]
    assert decoded(packets) == [960 * number for number in range(20)]


@pytest.mark.usefixtures("installed")
def test_a_malformed_red_packet_costs_itself_alone(speech: list[bytes]) -> None:
    packets = list(rtp([red_payload(frame) for frame in speech], payload_type=63))
    packets[3].payload = b"\xff"
    assert decoded(packets) == [960 * number for number in range(20) if number != 3]


@pytest.mark.usefixtures("installed")
def test_video_keeps_the_stock_buffer_and_decoder() -> None:
    assert type(rtcrtpreceiver.JitterBuffer(capacity=512, is_video=True)) is JitterBuffer
    assert type(rtcrtpreceiver.get_decoder(VP8)) is type(get_decoder(VP8))


@pytest.mark.usefixtures("installed")
def test_installing_twice_changes_nothing() -> None:
    before = rtcrtpreceiver.JitterBuffer, rtcrtpreceiver.get_decoder, list(codecs.CODECS["audio"])
    install()
    assert (rtcrtpreceiver.JitterBuffer, rtcrtpreceiver.get_decoder, codecs.CODECS["audio"]) == before


class Renamed:
    def __init__(self, size: int) -> None: ...

    def add(self, packet: RtpPacket) -> None: ...


def other_worker() -> None: ...


@pytest.mark.parametrize(
    ("owner", "name", "value", "says"),
    [
        (aiortc, "__version__", "1.17.0", "its version is 1.17.0"),
        (jitter, "JitterBuffer", Renamed, "JitterBuffer takes other arguments"),
        (rtcrtpreceiver, "decoder_worker", other_worker, "decoder in another way"),
    ],
)
def test_another_aiortc_is_refused(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, value: object, says: str
) -> None:
    before = rtcrtpreceiver.JitterBuffer
    monkeypatch.setattr(owner, name, value)
    with pytest.raises(UnknownAiortc, match=says):
        install()
    assert rtcrtpreceiver.JitterBuffer is before
