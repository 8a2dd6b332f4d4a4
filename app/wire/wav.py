"""The head of a WAV file that comes as a stream, in pieces of any length. Pure."""

import struct

from streaming.config import AudioFormat, Encoding
from streaming.errors import BadAudio

MAX_HEAD_BYTES = 65_536  # pictures and names may come before the sound, but not for ever
HEAD_BYTES = 44  # of ``wav_head``
_RIFF_BYTES = 12
_CHUNK_BYTES = 8
_FORMAT_BYTES = 16
_EXTENSIBLE = 0xFFFE  # the real code is then the first two bytes of the GUID at this place of the chunk
_GUID_AT = 24
_CODES = {1: "PCM", 3: "IEEE float", 6: "A-law", 7: "mu-law"}
_ENCODINGS = {
    (1, 16): Encoding.LINEAR16,
    (3, 32): Encoding.FLOAT32,
    (6, 8): Encoding.ALAW,
    (7, 8): Encoding.MULAW,
}


class WavHead:
    """Reads up to the first sample. What the head says about the length is not believed: a stream's is not known."""

    def __init__(self) -> None:
        self._data = b""

    def push(self, data: bytes) -> tuple[AudioFormat, bytes] | None:
        """The format and the audio that has come already; None as long as the head is not all there.

        Raises BadAudio where this is no WAV file or holds what cannot be heard, BadMessage where its rate or number of
        channels is out of range.
        """
        self._data += data
        if not b"RIFF".startswith(self._data[:4]) or (len(self._data) >= _RIFF_BYTES and self._data[8:12] != b"WAVE"):
            raise BadAudio("this is no WAV stream", code="unsupported_media")
        return self._chunks()

    def _chunks(self) -> tuple[AudioFormat, bytes] | None:
        place, audio = _RIFF_BYTES, None
        while len(self._data) >= place + _CHUNK_BYTES:
            kind, size = struct.unpack_from("<4sI", self._data, place)
            place += _CHUNK_BYTES
            if kind == b"data":
                if audio is None:
                    raise BadAudio("the WAV stream has no format before its sound", code="unsupported_media")
                return audio, self._data[place:]
            if kind == b"fmt " and len(self._data) >= place + size:
                audio = _audio_format(self._data[place : place + size])
            place += size + size % 2
        if max(place, len(self._data)) > MAX_HEAD_BYTES:
            raise BadAudio(f"no sound begins in the first {MAX_HEAD_BYTES} bytes", code="unsupported_media")
        return None


def _audio_format(chunk: bytes) -> AudioFormat:
    if len(chunk) < _FORMAT_BYTES:
        raise BadAudio("the WAV stream's format is cut short", code="unsupported_media")
    code, channels, rate_hz, _, _, bits = struct.unpack_from("<HHIIHH", chunk)
    if code == _EXTENSIBLE and len(chunk) >= _GUID_AT + 2:
        (code,) = struct.unpack_from("<H", chunk, _GUID_AT)
    encoding = _ENCODINGS.get((code, bits))
    if encoding is None:
        what = f"{bits}-bit {_CODES.get(code, f'format {code}')}"
        raise BadAudio(f"a WAV stream of {what} is not supported live", code="unsupported_media")
    return AudioFormat(encoding, rate_hz, channels)


def wav_head(audio: AudioFormat, data_bytes: int) -> bytes:
    """What makes a WAV file of so many bytes in this format."""
    code, bits = next(key for key, encoding in _ENCODINGS.items() if encoding is audio.encoding)
    rate_hz, frame_bytes = audio.sample_rate_hz, audio.frame_bytes
    form = struct.pack("<HHIIHH", code, audio.channels, rate_hz, rate_hz * frame_bytes, frame_bytes, bits)
    size = min(data_bytes, 0xFFFFFFFF - HEAD_BYTES)  # four bytes cannot say more; decoders read on to the end
    head = struct.pack("<4sI4s4sI", b"RIFF", HEAD_BYTES - _CHUNK_BYTES + size, b"WAVE", b"fmt ", len(form))
    return head + form + struct.pack("<4sI", b"data", size)
