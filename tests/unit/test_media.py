"""Files through the real decoder process: damaged ones, odd ones, hostile ones, and its death."""

import asyncio
import os
import signal
import struct
import wave
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from app.media import MediaDecoder, MediaLimits, MediaReport, open_media
from bench.corpus import find_corpus
from streaming.audio import SAMPLE_RATE
from streaming.errors import BadAudio, ServerError
from tests.support.corpus import CorpusRow, corpus_rows

LIMITS = MediaLimits()


@dataclass(frozen=True)
class Decoded:
    pcm: NDArray[np.int16]
    report: MediaReport

    @property
    def rms(self) -> float:
        return float(np.sqrt(np.mean((self.pcm / 32768.0) ** 2)))


async def decode(source: Path | int, limits: MediaLimits = LIMITS) -> Decoded:
    async with asyncio.timeout(60), open_media(source, limits) as media:
        data = b"".join([chunk async for chunk in media.chunks()])
        return Decoded(np.frombuffer(data, "<i2"), media.report)


async def outcome(source: Path) -> Decoded | BadAudio:
    try:
        return await decode(source)
    except BadAudio as error:
        return error


def tone(seconds: float, rate: int = 16_000, hz: float = 440.0) -> NDArray[np.int16]:
    return (8_000 * np.sin(2 * np.pi * hz * np.arange(round(seconds * rate)) / rate)).astype(np.int16)


def write_wav(path: Path, frames: NDArray[np.int16], rate: int = 16_000) -> Path:
    """int16 (n,) or (n, channels)."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1 if frames.ndim == 1 else frames.shape[1])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(frames.astype("<i2").tobytes())
    return path


def encode(path: Path, codec: str, frames: NDArray[np.int16], layout: str, rate: int = 48_000, pts: int = 0) -> Path:
    """int16 (n, channels), encoded without PyAV's planes, which are wrong from eight channels on."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate, layout=layout)
        resampler = av.AudioResampler(stream.format, layout, rate, frame_size=1024)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(frames.reshape(1, -1)), format="s16", layout=layout)
        frame.sample_rate, frame.pts = rate, pts
        for converted in [*resampler.resample(frame), *resampler.resample(None)]:
            container.mux(stream.encode(converted))
        container.mux(stream.encode(None))
    return path


class TestCorpus:
    """Every damaged or odd file of the corpus."""

    pytestmark = [pytest.mark.corpus, pytest.mark.slow]  # noqa: RUF012 - pytest wants a list

    @pytest.mark.parametrize("row", corpus_rows("broken") if find_corpus() else [], ids=lambda row: row.id)
    async def test_decodes_or_says_why_not(self, row: CorpusRow) -> None:
        decoded = await outcome(row.path)
        if isinstance(decoded, BadAudio):
            assert row.expect in ("reject", None), decoded.message
            assert decoded.code in ("unsupported_media", "empty_audio", "empty_file", "no_audio_stream")
            assert decoded.message
            return
        assert row.expect != "reject"
        assert decoded.report.duration_s == len(decoded.pcm) / SAMPLE_RATE
        assert len(decoded.pcm) > 0
        if row.expect == "decode":
            assert row.duration_s is not None
            assert decoded.report.duration_s == pytest.approx(row.duration_s, rel=0.05)
            assert decoded.report.warning == ""
            assert decoded.rms > 0.003, "the speech is there"

    def test_the_corpus_was_there(self) -> None:
        if find_corpus() is None:
            pytest.skip("no speech corpus: set HARK_CORPUS to its folder")
        assert len(corpus_rows("broken")) >= 60

    async def test_what_comes_after_damage_is_kept(self) -> None:
        damaged = next(row for row in corpus_rows("broken") if "garbage-in-the-middle" in row.id)
        decoded = await decode(damaged.path)
        assert decoded.report.duration_s > 4.5, "speech on both sides of the damage"
        assert "damaged" in decoded.report.warning


class TestFiles:
    async def test_a_plain_wav_arrives_as_it_is(self, tmp_path: Path) -> None:
        decoded = await decode(write_wav(tmp_path / "a.wav", tone(1.5)))
        assert len(decoded.pcm) == 24_000
        assert np.max(np.abs(decoded.pcm.astype(int) - tone(1.5))) < 400
        assert (decoded.report.codec, decoded.report.sample_rate_hz, decoded.report.channels) == (
            "pcm_s16le",
            16_000,
            1,
        )

    async def test_an_open_descriptor_of_an_unlinked_file(self, tmp_path: Path) -> None:
        path = write_wav(tmp_path / "a.wav", tone(0.5))
        descriptor = os.open(path, os.O_RDONLY)
        path.unlink()
        try:
            os.lseek(descriptor, 7, os.SEEK_SET)
            assert len((await decode(descriptor)).pcm) == 8_000
        finally:
            os.close(descriptor)

    @pytest.mark.parametrize("rate", [8_000, 11_025, 44_100, 48_000, 192_000])
    async def test_every_rate_becomes_16_khz(self, tmp_path: Path, rate: int) -> None:
        decoded = await decode(write_wav(tmp_path / "a.wav", tone(1.0, rate), rate))
        assert len(decoded.pcm) == pytest.approx(16_000, abs=2)
        spectrum = np.abs(np.fft.rfft(decoded.pcm[2_000:14_000].astype(float)))
        assert np.argmax(spectrum) * 16_000 / 12_000 == pytest.approx(440, abs=2)

    @pytest.mark.parametrize(("channels", "speaking"), [(2, 1), (6, 2), (40, 33)])
    async def test_speech_on_one_channel_of_many(self, tmp_path: Path, channels: int, speaking: int) -> None:
        frames = np.zeros((16_000, channels), np.int16)
        frames[:, speaking] = tone(1.0)
        decoded = await decode(write_wav(tmp_path / "a.wav", frames))
        assert decoded.report.channels == channels
        assert decoded.rms == pytest.approx(8_000 / 32_768 / np.sqrt(2), rel=0.1)

    async def test_antiphase_stereo(self, tmp_path: Path) -> None:
        decoded = await decode(write_wav(tmp_path / "a.wav", np.stack((tone(1.0), -tone(1.0)), axis=1)))
        assert decoded.rms == pytest.approx(8_000 / 32_768 / np.sqrt(2), rel=0.1)

    @pytest.mark.parametrize(("codec", "layout", "name"), [("aac", "7.1", "a.m4a"), ("wavpack", "22.2", "a.wv")])
    async def test_planar_frames_of_many_channels(self, tmp_path: Path, codec: str, layout: str, name: str) -> None:
        channels = av.AudioLayout(layout).nb_channels
        frames = np.repeat(tone(1.0, 48_000)[:, None], channels, axis=1)
        decoded = await decode(encode(tmp_path / name, codec, frames, layout))
        assert decoded.report.channels == channels
        assert decoded.report.duration_s == pytest.approx(1.0, abs=0.1)
        assert decoded.rms > 0.1

    async def test_a_video_without_sound(self, tmp_path: Path) -> None:
        with pytest.raises(BadAudio) as caught:
            await decode(write_video(tmp_path / "silent.mp4", audio_at_s=None))
        assert caught.value.code == "no_audio_stream"

    async def test_sound_that_starts_later_than_the_picture_keeps_its_time(self, tmp_path: Path) -> None:
        decoded = await decode(write_video(tmp_path / "late.mkv", audio_at_s=2.0))
        first_loud = int(np.argmax(np.abs(decoded.pcm) > 1_000)) / SAMPLE_RATE
        assert first_loud == pytest.approx(2.0, abs=0.1)

    async def test_a_pause_in_the_time_stamps_becomes_silence(self, tmp_path: Path) -> None:
        """A muted browser sends nothing; what follows must not move forward."""
        decoded = await decode(write_video(tmp_path / "muted.mkv", audio_at_s=0.0, gap_s=3.0))
        assert decoded.report.duration_s == pytest.approx(2.0 + 3.0, abs=0.2)

    @pytest.mark.parametrize("value", [np.float32(1.6), np.float32(20_000.0)], ids=["hot", "integers"])
    async def test_float_wav_beyond_full_scale(self, tmp_path: Path, value: np.float32) -> None:
        samples = (value / 8_000 * tone(2.0)).astype("<f4")
        header = struct.pack(
            "<4sI4s4sIHHIIHH4sI", b"RIFF", 36 + samples.nbytes, b"WAVE", b"fmt ", 16, 3, 1, 16_000, 64_000, 4, 32,
            b"data", samples.nbytes,
        )  # fmt: skip
        (tmp_path / "f.wav").write_bytes(header + samples.tobytes())
        pcm = (await decode(tmp_path / "f.wav")).pcm
        assert np.count_nonzero(np.abs(pcm.astype(int)) >= 32_767) < 200, "scaled, not clipped"
        assert np.max(np.abs(pcm)) > 10_000


def write_video(path: Path, *, audio_at_s: float | None, gap_s: float = 0.0) -> Path:
    """Four seconds of grey, with a tone of two seconds beside it, torn apart in its middle by ``gap_s``."""
    with av.open(str(path), "w") as container:
        video = container.add_stream("mpeg4", rate=10, width=64, height=48, pix_fmt="yuv420p")
        audio = None if audio_at_s is None else container.add_stream("pcm_s16le", rate=16_000, layout="mono")
        for i in range(40):
            frame = av.VideoFrame.from_ndarray(np.full((72, 64), 128, np.uint8), format="yuv420p")
            frame.pts = i
            container.mux(video.encode(frame))
        container.mux(video.encode(None))
        if audio is not None and audio_at_s is not None:
            for i, block in enumerate(np.split(tone(2.0), 20)):
                sound = av.AudioFrame.from_ndarray(block[None], format="s16", layout="mono")
                sound.sample_rate = 16_000
                sound.pts = round((audio_at_s + i * 0.1 + (gap_s if i >= 10 else 0.0)) * 16_000)
                container.mux(audio.encode(sound))
            container.mux(audio.encode(None))
    return path


class TestHostile:
    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"RIFF",
            b"\0" * 50_000,
            b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nSECRET\n#EXT-X-ENDLIST\n",
            b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nhttp://127.0.0.1:9/a.ts\n#EXT-X-ENDLIST\n",
            b"ffconcat version 1.0\nfile SECRET\n",
            b"<?xml version='1.0'?><MPD><Period><AdaptationSet><BaseURL>SECRET</BaseURL></AdaptationSet></Period>"
            b"</MPD>",
            b"%PDF-1.7 and so on" * 100,
        ],
        ids=["empty", "four", "zeros", "hls-file", "hls-http", "concat", "dash", "pdf"],
    )
    async def test_what_is_no_media_is_refused_and_opens_nothing(self, tmp_path: Path, content: bytes) -> None:
        secret = write_wav(tmp_path / "secret.wav", tone(1.0))
        path = tmp_path / "upload.wav"
        path.write_bytes(content.replace(b"SECRET", str(secret).encode()))
        with pytest.raises(BadAudio) as caught:
            await decode(path)
        assert caught.value.code in ("unsupported_media", "empty_file")
        assert caught.value.message in ("this is no audio or video file that can be read", "the file is empty")

    async def test_random_bytes_behind_good_headers_never_crash_the_service(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(7)
        good = encode(tmp_path / "a.ogg", "libopus", tone(1.0, 48_000)[:, None], "mono").read_bytes()
        for i in range(6):
            data = bytearray(good)
            for position in rng.integers(40, len(data), 60):
                data[position] = int(rng.integers(256))
            path = tmp_path / f"{i}.ogg"
            path.write_bytes(data)
            decoded = await outcome(path)
            assert decoded.message if isinstance(decoded, BadAudio) else decoded.report.duration_s > 0

    async def test_a_header_that_says_it_is_too_long_is_refused_at_once(self, tmp_path: Path) -> None:
        path = write_wav(tmp_path / "long.wav", np.zeros(16_000 * 30, np.int16))
        async with open_media(path, MediaLimits(max_duration_s=20.0)) as media:
            with pytest.raises(BadAudio) as caught:
                await anext(media.chunks())
        assert caught.value.code == "audio_too_long"

    async def test_hours_without_a_header_stop_at_the_limit(self, tmp_path: Path) -> None:
        """A small FLAC that decodes to more than is allowed, in bounded memory on both sides."""
        path = encode(tmp_path / "hours.flac", "flac", np.zeros((16_000 * 1_200, 1), np.int16), "mono", 16_000)
        data = bytearray(path.read_bytes())
        data[21] &= 0xF0  # STREAMINFO: the number of samples is not known
        data[22:26] = b"\0\0\0\0"
        path.write_bytes(data)
        assert len(data) < 2_000_000
        before, worker_peak, samples = psutil.Process().memory_info().rss, 0, 0
        async with open_media(path, MediaLimits(max_duration_s=900.0)) as media:
            with pytest.raises(BadAudio) as caught:  # noqa: PT012 - what comes before the error is measured
                async for chunk in media.chunks():
                    samples += len(chunk) // 2
                    if samples % (60 * SAMPLE_RATE) < SAMPLE_RATE:
                        worker_peak = max(worker_peak, memory(media.pid))
        assert caught.value.code == "audio_too_long"
        assert samples == 900 * SAMPLE_RATE
        assert 0 < worker_peak < 130 << 20
        assert psutil.Process().memory_info().rss - before < 30 << 20

    async def test_a_container_that_promises_hours_and_has_a_second(self, tmp_path: Path) -> None:
        path = write_wav(tmp_path / "liar.wav", tone(1.0))
        data = bytearray(path.read_bytes())
        data[40:44] = struct.pack("<I", 0x7FFF_FFF0)
        path.write_bytes(data)
        assert (await decode(path, MediaLimits(max_duration_s=3_600))).report.duration_s == pytest.approx(1.0)


def memory(pid: int) -> int:
    """Resident bytes; 0 for a process that has ended."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


@asynccontextmanager
async def long_decode(tmp_path: Path) -> AsyncIterator[MediaDecoder]:
    path = write_wav(tmp_path / "long.wav", np.tile(tone(1.0), 600))
    async with open_media(path, LIMITS) as media:
        yield media


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid)


class TestProcess:
    async def test_the_decoder_waits_while_nobody_takes_chunks(self, tmp_path: Path) -> None:
        async with long_decode(tmp_path) as media:
            chunks = media.chunks()
            await anext(chunks)
            worker = psutil.Process(media.pid)
            spent: list[float] = []
            for _ in range(200):
                spent.append(sum(worker.cpu_times()[:2]))
                if len(spent) > 20 and spent[-1] == spent[-20]:
                    break
                await asyncio.sleep(0.02)
            assert spent[-1] == spent[-20], "it stopped working"
            assert worker.is_running()
            total = sum([len(chunk) async for chunk in chunks])
            assert total // 2 > 590 * SAMPLE_RATE, "and went on to the end"

    async def test_a_worker_killed_from_outside_is_the_services_fault(self, tmp_path: Path) -> None:
        async with long_decode(tmp_path) as media:
            chunks = media.chunks()
            await anext(chunks)
            os.kill(media.pid, signal.SIGKILL)
            with pytest.raises(ServerError) as caught:
                async for _ in chunks:
                    pass
        assert caught.value.code == "decoder_killed"

    async def test_a_worker_that_crashes_midway_leaves_what_it_gave(self, tmp_path: Path) -> None:
        async with long_decode(tmp_path) as media:
            chunks = media.chunks()
            await anext(chunks)
            os.kill(media.pid, signal.SIGSEGV)
            async for _ in chunks:
                pass
            assert "crashed" in media.report.warning
            assert media.report.duration_s > 0

    async def test_leaving_early_ends_the_worker(self, tmp_path: Path) -> None:
        async with long_decode(tmp_path) as media:
            await anext(media.chunks())
            pid = media.pid
        assert is_gone(pid)

    async def test_cancelling_ends_the_worker(self, tmp_path: Path) -> None:
        started: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def work() -> None:
            async with long_decode(tmp_path) as media:
                async for _ in media.chunks():
                    if not started.done():
                        started.set_result(media.pid)
                        await asyncio.Event().wait()

        task = asyncio.create_task(work())
        pid = await started
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert is_gone(pid)

    async def test_a_stalled_worker_is_given_up(self, tmp_path: Path) -> None:
        path = write_wav(tmp_path / "long.wav", np.tile(tone(1.0), 600))
        async with open_media(path, MediaLimits(stall_timeout_s=2.0)) as media:
            chunks = media.chunks()
            await anext(chunks)
            os.kill(media.pid, signal.SIGSTOP)
            with pytest.raises(ServerError) as caught:
                async for _ in chunks:
                    pass
            pid = media.pid
        assert caught.value.code == "decoder_stalled"
        assert is_gone(pid)

    async def test_processor_time_is_limited(self, tmp_path: Path) -> None:
        path = write_wav(tmp_path / "dear.wav", np.zeros((1, 64), np.int16))
        header = bytearray(path.read_bytes()[:44])
        size = 64 * 2 * 16_000 * 600  # ten minutes take about 10 s, and a file with a hole in it next to no disk
        header[40:44] = struct.pack("<I", size)
        path.write_bytes(header)
        os.truncate(path, len(header) + size)
        async with open_media(path, MediaLimits(cpu_s=1)) as media:
            async for _ in media.chunks():
                pass
            assert "1 s" in media.report.warning

    def test_limits_are_checked(self) -> None:
        with pytest.raises(ValueError, match="256 MiB"):
            MediaLimits(memory_bytes=1)
        with pytest.raises(ValueError, match="positive"):
            MediaLimits(max_duration_s=0)
