"""A whole call over loopback UDP, through a network that loses packets: what is lost is all that is lost."""

import numpy as np
import pytest
from aiortc import codecs, rtcrtpreceiver

from app.rtc.jitter import install
from bench.loss import Listener, OurHandler
from streaming.audio import SAMPLE_RATE
from tests.support.rtc import PACKET_MS, EncodedTrack, Network, calling, on_loopback, opus_packets

PACKET_SAMPLES = SAMPLE_RATE * PACKET_MS // 1000


@pytest.fixture(scope="module")
def speech() -> list[bytes]:
    noise = np.random.default_rng(1).normal(0, 3_000, 6 * SAMPLE_RATE)
    return opus_packets(noise.astype(np.int16))[:300]


@pytest.fixture(autouse=True)
def receive_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put back after each test."""
    for name in ("JitterBuffer", "get_decoder"):
        monkeypatch.setattr(rtcrtpreceiver, name, getattr(rtcrtpreceiver, name))
    monkeypatch.setitem(codecs.CODECS, "audio", list(codecs.CODECS["audio"]))
    install()


@pytest.mark.parametrize(
    "network",
    [
        Network(),
        Network(loss=0.05, seed=5),
        Network(loss=0.10, burst=4, seed=3),
        Network(loss=0.05, reorder=0.05, duplicate=0.05, seed=3),
    ],
    ids=["clean", "5 %", "10 % in bursts", "lost, late and double"],
)
async def test_every_packet_that_arrives_is_heard_at_its_own_time(speech: list[bytes], network: Network) -> None:
    listener = Listener(OurHandler)
    track = EncodedTrack(speech, speed=6)
    with on_loopback():
        async with calling(listener.answer, track, network) as call:
            await listener.heard.wait(len(speech) * PACKET_SAMPLES)
    arrived = np.array([number not in call.wire.lost for number in range(len(speech))])
    expected = arrived[arrived.argmax() :]  # the clock begins with the first that arrives
    heard = listener.heard.is_there[: expected.size * PACKET_SAMPLES].reshape(-1, PACKET_SAMPLES)
    np.testing.assert_array_equal(heard.all(axis=1), expected)
    np.testing.assert_array_equal(heard.any(axis=1), expected)


@pytest.mark.parametrize("network", [Network(loss=0.05, seed=5), Network(loss=0.10, burst=4, seed=3)])
async def test_what_the_next_packet_brings_along_is_not_lost(speech: list[bytes], network: Network) -> None:
    listener = Listener(OurHandler, redundant=True)
    with on_loopback():
        async with calling(listener.answer, EncodedTrack(speech, speed=6), network) as call:
            await listener.heard.wait(len(speech) * PACKET_SAMPLES)
    lost = set(call.wire.lost)
    expected = np.array([number not in lost or number + 1 not in lost for number in range(len(speech))])
    assert len(lost) > 10
    assert expected[0]
    heard = listener.heard.is_there[: len(speech) * PACKET_SAMPLES].reshape(-1, PACKET_SAMPLES)
    np.testing.assert_array_equal(heard.all(axis=1), expected)
    np.testing.assert_array_equal(heard.any(axis=1), expected)


@pytest.mark.parametrize("redundant", [False, True])
async def test_at_5_percent_loss_the_goals_are_met(speech: list[bytes], redundant: bool) -> None:
    """99 % of the clock and 94 % of the samples; stock aiortc keeps less than 85 % of either."""
    listener, track = Listener(OurHandler, redundant=redundant), EncodedTrack(speech * 2, speed=6)
    with on_loopback():
        async with calling(listener.answer, track, Network(loss=0.05, seed=5)) as call:
            await track.is_played.wait()
            track.stop()
            await listener.heard.wait(round(0.99 * call.wire.sent * PACKET_SAMPLES), within_s=5)
    assert listener.heard.is_there.mean() >= (0.99 if redundant else 0.94)
    assert len(call.wire.lost) >= 0.045 * call.wire.sent
