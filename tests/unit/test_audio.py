"""Bytes to windows: G.711 against the standard and FFmpeg, frames and resampling in any cut, what cannot be audio."""

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streaming.audio import (
    SAMPLE_RATE,
    WINDOW_SAMPLES,
    FrameDecoder,
    Resampler,
    Windower,
    decode_samples,
    ms_to_samples,
    samples_to_ms,
    to_pcm16,
)
from streaming.config import MAX_SAMPLE_RATE_HZ, MIN_SAMPLE_RATE_HZ, AudioFormat, Encoding
from streaming.errors import BadAudio, BadMessage
from streaming.types import Float32, Pcm16

RATES = [4_000, 7_350, 8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000, 88_200, 96_000, 192_000]
CUTS = st.lists(st.integers(1, 700), min_size=1, max_size=12)


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces, position, step = [], 0, 0
    while position < len(data):
        size = sizes[step % len(sizes)]
        pieces.append(data[position : position + size])
        position, step = position + size, step + 1
    return pieces


# --- encodings -------------------------------------------------------------------------------------------------------


def ffmpeg_g711(codec: str) -> Pcm16:
    """What FFmpeg makes of the 256 codes, int16, shape (256,)."""
    decoder = av.CodecContext.create(codec, "r")
    assert isinstance(decoder, av.AudioCodecContext)
    decoder.sample_rate, decoder.layout = 8_000, "mono"
    frames = decoder.decode(av.Packet(bytes(range(256))))
    return np.concatenate([frame.to_ndarray().reshape(-1) for frame in frames]).astype(np.int16)


@pytest.mark.parametrize(
    ("encoding", "codec"), [(Encoding.MULAW, "pcm_mulaw"), (Encoding.ALAW, "pcm_alaw")], ids=["mulaw", "alaw"]
)
def test_g711_is_what_ffmpeg_decodes(encoding: Encoding, codec: str) -> None:
    ours = decode_samples(bytes(range(256)), encoding)
    np.testing.assert_array_equal(to_pcm16(ours), ffmpeg_g711(codec))


def test_mulaw_at_the_values_of_the_standard() -> None:
    """ITU-T G.711, table 2: decoder output values in 14 bits, here shifted to 16."""
    codes = bytes([0x80, 0x8F, 0x9F, 0xFE, 0xFF, 0x7F, 0x7E, 0x00])
    values = [8031 * 4, 4191 * 4, 2079 * 4, 2 * 4, 0, 0, -2 * 4, -8031 * 4]
    assert to_pcm16(decode_samples(codes, Encoding.MULAW)).tolist() == values


def test_alaw_at_the_values_of_the_standard() -> None:
    """ITU-T G.711, table 1: decoder output values in 13 bits, shifted to 16; even bits are inverted on the wire."""
    codes = bytes(code ^ 0x55 for code in (0xFF, 0xF0, 0x80, 0x00, 0x70, 0x7F))
    values = [4032 * 8, 2112 * 8, 1 * 8, -1 * 8, -2112 * 8, -4032 * 8]
    assert to_pcm16(decode_samples(codes, Encoding.ALAW)).tolist() == values


@given(st.lists(st.integers(-32_768, 32_767), max_size=200))
def test_linear16_goes_there_and_back_unchanged(values: list[int]) -> None:
    pcm = np.array(values, "<i2")
    decoded = decode_samples(pcm.tobytes(), Encoding.LINEAR16)
    assert decoded.dtype == np.float32
    assert np.all(np.abs(decoded) <= 1)
    np.testing.assert_array_equal(to_pcm16(decoded), pcm)


@given(st.lists(st.floats(-4, 4, width=32), max_size=100))
def test_float32_is_taken_as_it_is_and_clipped_only_as_pcm(values: list[float]) -> None:
    samples = np.array(values, "<f4")
    decoded = decode_samples(samples.tobytes(), Encoding.FLOAT32)
    np.testing.assert_array_equal(decoded, samples)
    pcm = to_pcm16(decoded)
    assert np.all(np.abs(pcm / 32_768 - np.clip(samples, -1, 1)) <= 1 / 32_768)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 64.5, -1e30])
@pytest.mark.parametrize("position", [0, 77, 159])
def test_float32_that_cannot_be_audio_is_refused(bad: float, position: int) -> None:
    samples = np.zeros(160, "<f4")
    samples[position] = bad
    with pytest.raises(BadAudio) as raised:
        decode_samples(samples.tobytes(), Encoding.FLOAT32)
    assert raised.value.code == "implausible_audio"
    assert "linear16" in raised.value.message


@pytest.mark.parametrize("amplitude", [30, 300, 3_000, 30_000])
@pytest.mark.parametrize("seed", range(3))
def test_int16_declared_as_float32_is_noticed_within_20_ms_however_soft(amplitude: int, seed: int) -> None:
    """Half of the small values are negative, and as the upper half of a float32 those are NaN."""
    noise = np.random.default_rng(seed).normal(0, amplitude, 320).clip(-32_768, 32_767).astype("<i2")
    with pytest.raises(BadAudio):
        decode_samples(noise.tobytes(), Encoding.FLOAT32)


def test_digital_silence_is_audio_in_every_encoding() -> None:
    for encoding in Encoding:
        silence = {Encoding.MULAW: b"\xff", Encoding.ALAW: b"\xd5"}.get(encoding, b"\0") * 64
        assert np.all(np.abs(decode_samples(silence, encoding)) < 0.001)


# --- frames ----------------------------------------------------------------------------------------------------------


@given(st.sampled_from(Encoding), st.integers(1, 2), st.binary(max_size=3_000), CUTS)
def test_frames_do_not_depend_on_the_cut_and_a_rest_waits(
    encoding: Encoding, channels: int, data: bytes, sizes: list[int]
) -> None:
    if encoding is Encoding.FLOAT32:
        data = (np.frombuffer(data, np.uint8) / 256).astype("<f4").tobytes()
    audio_format = AudioFormat(encoding, 16_000, channels)
    decoder = FrameDecoder(audio_format)
    frames = [decoder.decode(piece) for piece in cut(data, sizes)]
    assert all(piece.shape[1] == channels for piece in frames)
    whole = FrameDecoder(audio_format).decode(data)
    assert whole.shape == (len(data) // audio_format.frame_bytes, channels)
    np.testing.assert_array_equal(np.concatenate([np.zeros((0, channels), np.float32), *frames]), whole)


def test_channels_are_interleaved() -> None:
    data = np.array([1, -1, 2, -2, 3, -3], "<i2").tobytes()
    frames = FrameDecoder(AudioFormat(channels=2)).decode(data)
    assert (frames * 32_768).tolist() == [[1, -1], [2, -2], [3, -3]]


@pytest.mark.parametrize(
    ("encoding", "channels", "size"), [("linear16", 1, 2), ("linear16", 2, 4), ("float32", 2, 8), ("mulaw", 2, 2)]
)
def test_a_frame_is_one_sample_of_each_channel(encoding: str, channels: int, size: int) -> None:
    assert AudioFormat(Encoding(encoding), 8_000, channels).frame_bytes == size


@pytest.mark.parametrize("rate", [0, -1, 3_999, 192_001, 10**9])
def test_rates_that_nobody_uses_are_refused(rate: int) -> None:
    with pytest.raises(BadMessage):
        AudioFormat(sample_rate_hz=rate)


@pytest.mark.parametrize("channels", [0, -1, 3, 100])
def test_numbers_of_channels_that_are_not_served_are_refused(channels: int) -> None:
    with pytest.raises(BadMessage):
        AudioFormat(channels=channels)


# --- resampling ------------------------------------------------------------------------------------------------------


def tone(rate: int, frequency_hz: float, duration_s: float = 0.5, channels: int = 1) -> Float32:
    time_s = np.arange(round(rate * duration_s)) / rate
    wave = 0.5 * np.sin(2 * np.pi * frequency_hz * time_s)
    return np.repeat(wave.astype(np.float32)[:, None], channels, axis=1)


def resample(frames: Float32, rate: int, sizes: list[int]) -> Float32:
    resampler = Resampler(rate, frames.shape[1])
    out, position, step = [], 0, 0
    while position < len(frames):
        size = sizes[step % len(sizes)]
        out.append(resampler.resample(frames[position : position + size]))
        position, step = position + size, step + 1
    out.append(resampler.resample(frames[:0], last=True))
    return np.concatenate(out)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("channels", [1, 2])
def test_any_rate_gives_the_same_tone_at_16_khz(rate: int, channels: int) -> None:
    out = resample(tone(rate, 1_000, channels=channels), rate, [rate // 50])
    assert out.shape[1] == channels
    assert abs(len(out) - SAMPLE_RATE // 2) <= 2
    expected = tone(SAMPLE_RATE, 1_000, channels=channels)[: len(out)]
    inner = slice(800, 7_200)  # the filter rings at the ends
    np.testing.assert_allclose(out[inner], expected[inner], atol=2e-3)


@settings(max_examples=60, deadline=None)
@given(st.integers(MIN_SAMPLE_RATE_HZ, MAX_SAMPLE_RATE_HZ), CUTS, st.integers(1, 2), st.integers(0, 2**32 - 1))
def test_resampling_does_not_depend_on_the_cut(rate: int, sizes: list[int], channels: int, seed: int) -> None:
    noise = np.random.default_rng(seed).uniform(-1, 1, (3_000, channels)).astype(np.float32)
    whole = resample(noise, rate, [len(noise)])
    pieces = resample(noise, rate, sizes)
    assert pieces.shape == whole.shape
    np.testing.assert_allclose(pieces, whole, atol=1e-6)
    assert abs(len(whole) - len(noise) * SAMPLE_RATE / rate) <= 2


@pytest.mark.parametrize("rate", [8_000, 44_100, 48_000])
def test_a_constant_offset_passes_unchanged(rate: int) -> None:
    out = resample(np.full((rate // 2, 1), 0.25, np.float32), rate, [137])
    np.testing.assert_allclose(out[800:7_200], 0.25, atol=1e-3)


def test_what_16_khz_cannot_hold_is_removed_and_does_not_come_back_as_something_else() -> None:
    out = resample(tone(48_000, 12_000), 48_000, [960])
    assert np.abs(out[800:7_200]).max() < 1e-3


def test_16_khz_is_not_touched() -> None:
    frames = tone(SAMPLE_RATE, 440)
    assert Resampler(SAMPLE_RATE, 1).resample(frames) is frames


def test_channels_do_not_mix() -> None:
    left, right = tone(48_000, 500), np.zeros((24_000, 1), np.float32)
    out = resample(np.concatenate((left, right), axis=1), 48_000, [777])
    assert np.abs(out[:, 0]).max() > 0.4
    assert np.abs(out[:, 1]).max() == 0


# --- windows and units -----------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2_000), max_size=20))
def test_windows_are_the_samples_in_order_and_the_rest_comes_at_the_end(sizes: list[int]) -> None:
    samples = np.arange(sum(sizes), dtype=np.float32)
    windower, position, windows = Windower(), 0, []
    for size in sizes:
        windows.append(windower.push(samples[position : position + size]))
        position += size
    rest, real = windower.flush()
    assert real == samples.size % WINDOW_SAMPLES
    assert rest.shape == (1 if real else 0, WINDOW_SAMPLES)
    joined = np.concatenate([np.zeros((0, WINDOW_SAMPLES), np.float32), *windows, rest]).reshape(-1)
    np.testing.assert_array_equal(joined[: samples.size], samples)
    assert not joined[samples.size :].any()
    assert windower.flush()[1] == 0


def test_what_waits_for_its_window_is_no_view_of_what_was_given() -> None:
    windower, samples = Windower(), np.ones(100, np.float32)
    windower.push(samples)
    samples[:] = 7
    assert windower.flush()[0][0, :100].tolist() == [1.0] * 100


@given(st.integers(0, 10**9))
def test_milliseconds_and_samples_agree(ms: int) -> None:
    assert ms_to_samples(ms) == ms * 16
    assert samples_to_ms(ms * 16) == ms
