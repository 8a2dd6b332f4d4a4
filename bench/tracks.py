"""Recordings → what one live stream says: utterances with pauses between them, and when each of them is spoken."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bench.corpus import Recording
from streaming.audio import SAMPLE_RATE
from streaming.types import Pcm16

SHORTEST_PAUSE_S = 1.2
LONGEST_PAUSE_S = 2.5
ROOM_NOISE_LSB = 8.0  # RMS; -72 dBFS, a quiet room: digital silence would be an unfairly easy pause

_GRID_SAMPLES = SAMPLE_RATE // 10  # recordings start on tenths of a second, where the scripted engine reads its words
_FADE_SAMPLES = SAMPLE_RATE // 100
_FRAME_SAMPLES = SAMPLE_RATE // 100
_SHORTEST_RUN_FRAMES = 3
# Over 97 read recordings the end found so lies 66 ms (median; quartiles 16 and 90) before Silero's.
_BELOW_LOUD_DB = 30.0
_ABOVE_FLOOR_DB = 10.0


@dataclass(frozen=True, slots=True)
class Spoken:
    """One utterance of a track. Samples of the track at which its speech begins and ends."""

    recording: str
    text: str
    language: str
    start_sample: int
    end_sample: int

    @property
    def start_s(self) -> float:
        return self.start_sample / SAMPLE_RATE

    @property
    def end_s(self) -> float:
        return self.end_sample / SAMPLE_RATE


@dataclass(frozen=True, slots=True, eq=False)
class Track:
    """What one stream says: int16 mono at 16 kHz, and the utterances in it."""

    audio: Pcm16
    utterances: tuple[Spoken, ...]

    @property
    def duration_s(self) -> float:
        return self.audio.size / SAMPLE_RATE

    @property
    def speech_s(self) -> float:
        return sum(spoken.end_s - spoken.start_s for spoken in self.utterances)


def speech_bounds(audio: Pcm16) -> tuple[int, int]:
    """Samples at which the first sound begins and the last ends, by energy. Raises ValueError where there is none.

    Sound is 30 ms or more within 30 dB of the loud frames (the 95th percentile), and 10 dB over the quiet ones (the
    5th) where these are clearly quieter.
    """
    n_frames = audio.size // _FRAME_SAMPLES
    if n_frames < _SHORTEST_RUN_FRAMES or not audio.any():
        raise ValueError("no sound in the recording")
    frames = audio[: n_frames * _FRAME_SAMPLES].reshape(n_frames, _FRAME_SAMPLES).astype(np.float64)
    level_db = 10 * np.log10(np.mean(frames**2, axis=1) + 1)
    floor_db, loud_db = np.percentile(level_db, (5, 95))
    threshold_db = loud_db - _BELOW_LOUD_DB
    if loud_db - floor_db > _ABOVE_FLOOR_DB + 15:
        threshold_db = max(threshold_db, floor_db + _ABOVE_FLOOR_DB)
    runs = np.convolve(level_db > threshold_db, np.ones(_SHORTEST_RUN_FRAMES), "valid") >= _SHORTEST_RUN_FRAMES
    loud = np.flatnonzero(runs)
    if not loud.size:
        raise ValueError("no sound in the recording")
    return int(loud[0]) * _FRAME_SAMPLES, (int(loud[-1]) + _SHORTEST_RUN_FRAMES) * _FRAME_SAMPLES


def build_track(recordings: Iterator[Recording], seconds: float, seed: int) -> Track:
    """A track of at least ``seconds``: lead-in, then recordings with a pause after each, the last one too.

    The lead-in differs between tracks, so that streams which start together do not speak in step.
    """
    rng = random.Random(seed)
    parts: list[Pcm16] = [np.zeros(_on_grid(rng.uniform(0.3, 2.0)), np.int16)]
    utterances: list[Spoken] = []
    position = parts[0].size
    while position < seconds * SAMPLE_RATE or not utterances:
        recording = next(recordings)
        begin, end = speech_bounds(recording.audio)
        utterances.append(
            Spoken(recording.id, recording.text, recording.language, position + begin, position + end),
        )
        pause = _on_grid(rng.uniform(SHORTEST_PAUSE_S, LONGEST_PAUSE_S)) + -recording.audio.size % _GRID_SAMPLES
        parts += [_faded(recording.audio), np.zeros(pause, np.int16)]
        position += recording.audio.size + pause
    return Track(_with_room_noise(np.concatenate(parts), seed), tuple(utterances))


def deal(recordings: Iterator[Recording], n_tracks: int, seconds: float, seed: int) -> list[Track]:
    """Tracks of different recordings, as long as there are enough. Track k is the same however many are dealt."""
    return [build_track(recordings, seconds, seed * 1_000 + number) for number in range(n_tracks)]


def _on_grid(seconds: float) -> int:
    return round(seconds * SAMPLE_RATE / _GRID_SAMPLES) * _GRID_SAMPLES


def _faded(audio: Pcm16) -> Pcm16:
    """Without a click where the recording's own noise begins and ends."""
    length = min(_FADE_SAMPLES, audio.size // 2)
    gain = np.ones(audio.size, np.float32)
    gain[:length] = np.linspace(0, 1, length, dtype=np.float32)
    gain[audio.size - length :] = np.linspace(1, 0, length, dtype=np.float32)
    faded: Pcm16 = np.round(audio * gain).astype(np.int16)
    return faded


def _with_room_noise(audio: Pcm16, seed: int) -> Pcm16:
    noise = np.random.default_rng(seed).normal(0.0, ROOM_NOISE_LSB, audio.size)
    noisy: Pcm16 = np.clip(np.round(audio + noise), -32_768, 32_767).astype(np.int16)
    return noisy
