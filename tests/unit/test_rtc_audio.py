"""WebRTC frames → 16 kHz pieces and gaps: the clock, the sound, and what senders do to time stamps."""

from collections.abc import Sequence
from fractions import Fraction

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.live import Gap
from app.rtc.audio import LONGEST_HOLE_S, FrameConverter
from streaming.audio import SAMPLE_RATE
from streaming.types import Float32

RATES_HZ = [8_000, 16_000, 24_000, 44_100, 48_000]


def frame(
    samples: int,
    pts: int | None,
    rate_hz: int = 48_000,
    *,
    layout: str = "stereo",
    level: float = 0.0,
    format: str = "s16",
) -> av.AudioFrame:
    return of_wave(np.full(samples, level, np.float32), pts, rate_hz, layout=layout, format=format)


def of_wave(
    wave: Float32, pts: int | None, rate_hz: int = 48_000, *, layout: str = "stereo", format: str = "s16"
) -> av.AudioFrame:
    """The wave, in [-1, 1), in every channel."""
    channels = 2 if layout == "stereo" else 1
    scaled = {
        "u8": (np.rint(wave * 128) + 128).astype(np.uint8),
        "s16": np.rint(wave * 2**15).astype(np.int16),
        "s32": np.rint(wave.astype(np.float64) * 2**31).astype(np.int32),
        "flt": wave,
        "dbl": wave.astype(np.float64),
    }[format.removesuffix("p")]
    planar = np.tile(scaled, (channels, 1))
    made = av.AudioFrame.from_ndarray(
        planar if format.endswith("p") else planar.T.reshape(1, -1), format=format, layout=layout
    )
    made.sample_rate, made.pts, made.time_base = rate_hz, pts, Fraction(1, rate_hz)
    return made


def run(frames: Sequence[av.AudioFrame]) -> list[bytes | Gap]:
    converter = FrameConverter()
    return [piece for f in frames for piece in converter.convert(f)] + converter.flush()


def length(pieces: Sequence[bytes | Gap]) -> int:
    return sum(p.samples if isinstance(p, Gap) else len(p) // 2 for p in pieces)


def gaps(pieces: Sequence[bytes | Gap]) -> list[int]:
    return [p.samples for p in pieces if isinstance(p, Gap)]


def heard(pieces: Sequence[bytes | Gap]) -> Float32:
    """float32, gaps as silence."""
    parts = [np.zeros(0, "<i2")]
    parts += [np.zeros(p.samples, "<i2") if isinstance(p, Gap) else np.frombuffer(p, "<i2") for p in pieces]
    return np.concatenate(parts).astype(np.float32) / 2**15


def tone(samples: int, rate_hz: int, tone_hz: float = 1_000.0) -> Float32:
    return (0.5 * np.sin(2 * np.pi * tone_hz * np.arange(samples) / rate_hz)).astype(np.float32)


# --- the clock -------------------------------------------------------------------------------------------------------


@given(
    st.sampled_from(RATES_HZ),
    st.integers(-(2**40), 2**40),
    st.lists(st.tuples(st.integers(1, 3_000), st.integers(0, 9_000)), min_size=1, max_size=20),
)
def test_what_comes_out_is_as_long_as_the_senders_clock(rate_hz: int, origin: int, cuts: list[tuple[int, int]]) -> None:
    """Any cut into frames and any holes between them, at any rate."""
    frames, pts = [], origin
    for samples, hole in cuts:
        frames.append(frame(samples, pts, rate_hz))
        end = pts + samples
        pts = end + hole
    assert length(run(frames)) == (end - origin) * SAMPLE_RATE // rate_hz


@given(st.lists(st.tuples(st.sampled_from(RATES_HZ), st.integers(1, 400)), min_size=1, max_size=30))
def test_the_clock_stays_true_when_the_rate_changes(cuts: list[tuple[int, int]]) -> None:
    frames, at = [], Fraction(0)
    for rate_hz, samples in cuts:
        made = frame(samples, 0, rate_hz)
        made.time_base = Fraction(1, 7_056_000)  # every rate's samples are whole ticks
        made.pts = int(at / made.time_base)
        frames.append(made)
        at += Fraction(samples, rate_hz)
    pieces = run(frames)
    assert length(pieces) == int(at * SAMPLE_RATE)
    assert gaps(pieces) == []


@given(st.lists(st.booleans(), max_size=60))
def test_each_lost_packet_is_a_gap_of_its_own_length_where_it_was(lost: list[bool]) -> None:
    arrived = [number for number, gone in enumerate([False, *lost, False]) if not gone]
    pieces = run([frame(960, 960 * number) for number in arrived])
    runs, at = [], 0
    for piece in pieces:
        if isinstance(piece, Gap):
            runs += [(at + n) // 320 for n in range(0, piece.samples, 320)]
            assert at % 320 == piece.samples % 320 == 0
        at += length([piece])
    assert runs == [number for number, gone in enumerate([False, *lost, False]) if gone]


def test_hours_of_a_lossy_stream_drift_by_no_sample() -> None:
    """Three hours at 11.025 kHz, whose samples are no whole number of ours; a second in ten is lost."""
    converter, out, second = FrameConverter(), 0, frame(11_025, 0, 11_025, layout="mono")
    for number in range(3 * 3_600):
        second.pts = 11_025 * number
        if number % 10 != 8:
            out += length(converter.convert(second))
    assert out + length(converter.flush()) == 3 * 3_600 * SAMPLE_RATE


def test_the_delay_of_the_filter_does_not_grow() -> None:
    converter, out = FrameConverter(), 0
    for number in range(1_000):
        out += length(converter.convert(frame(960, 960 * number)))
        assert 0 <= 320 * (number + 1) - out <= 640


# --- strange clocks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jump", [-(2**32), -960, -1, LONGEST_HOLE_S * 48_000 + 1, 2**32])
def test_a_clock_that_begins_anew_loses_nothing_and_makes_no_gap(jump: int) -> None:
    first = [frame(960, 960 * number) for number in range(5)]
    second = [frame(960, 4_800 + jump + 960 * number) for number in range(5)]
    pieces = run([*first, *second])
    assert gaps(pieces) == []
    assert length(pieces) == 10 * 320


def test_after_a_clock_that_begins_anew_holes_are_seen_again() -> None:
    pieces = run([frame(960, 0), frame(960, 2**40), frame(960, 2**40 + 1_920)])
    assert gaps(pieces) == [320]


def test_frames_without_time_stamps_follow_each_other() -> None:
    pieces = run([frame(960, None), frame(960, 0), frame(960, None), frame(960, 2_880)])
    assert gaps(pieces) == [320]
    assert length(pieces) == 5 * 320


def test_the_longest_hole_is_a_gap() -> None:
    assert gaps(run([frame(960, 0), frame(960, 960 + 48_000 * LONGEST_HOLE_S)])) == [SAMPLE_RATE * LONGEST_HOLE_S]


def test_flushing_an_unused_converter_or_twice_gives_nothing() -> None:
    converter = FrameConverter()
    assert converter.flush() == []
    converter.convert(frame(960, 0))
    assert length(converter.flush()) > 0
    assert converter.flush() == []


# --- the sound -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate_hz", RATES_HZ)
@pytest.mark.parametrize("layout", ["mono", "stereo"])
@pytest.mark.parametrize("format", ["u8", "s16", "s32", "flt", "dbl", "s16p", "fltp"])
def test_a_tone_stays_the_same_tone(rate_hz: int, layout: str, format: str) -> None:
    wave = tone(rate_hz // 2, rate_hz)
    step = rate_hz // 50
    cut = [
        of_wave(wave[start : start + step], start, rate_hz, layout=layout, format=format)
        for start in range(0, wave.size, step)
    ]
    out = heard(run(cut))
    error = out[400:-400] - tone(out.size, SAMPLE_RATE)[400:-400]
    assert np.sqrt(np.mean(error**2)) < (0.01 if format == "u8" else 0.001)


@given(st.lists(st.integers(1, 4_000), min_size=1, max_size=12))
def test_the_sound_does_not_depend_on_the_cut(sizes: list[int]) -> None:
    wave = np.random.default_rng(1).uniform(-0.5, 0.5, sum(sizes)).astype(np.float32)
    starts = np.cumsum([0, *sizes[:-1]])
    cut = run([of_wave(wave[start : start + size], int(start)) for start, size in zip(starts, sizes, strict=True)])
    np.testing.assert_array_equal(heard(cut), heard(run([of_wave(wave, 0)])))


def test_both_channels_are_heard() -> None:
    left = np.stack([tone(48_000, 48_000), np.zeros(48_000, np.float32)])
    made = av.AudioFrame.from_ndarray(np.rint(left * 2**15).astype(np.int16).T.reshape(1, -1), layout="stereo")
    made.sample_rate, made.pts, made.time_base = 48_000, 0, Fraction(1, 48_000)
    assert np.abs(heard(run([made]))).max() == pytest.approx(0.25, abs=0.01)
