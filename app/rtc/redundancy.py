"""Redundant audio (RED, RFC 2198): each RTP packet brings the Opus frame before it along, so that a single loss costs
nothing, not even time. It takes twice the bits: 61 kb/s instead of 29 from Chromium.

aiortc does not know RED. Chromium and its kin offer it and send it when the answer names it first; Firefox does not.
"""

import re

from aiortc.rtcrtpparameters import RTCRtpCodecParameters

# Chromium's number. aiortc puts its own number for a codec into the answer where the client's is below 96, so that a
# packet of this type is RED whatever was offered.
PAYLOAD_TYPE = 63
CODEC = RTCRtpCodecParameters(mimeType="audio/red", clockRate=48_000, channels=2, payloadType=PAYLOAD_TYPE)

_MORE = 0x80  # the bit that says that another block's header follows
_HEADER_BYTES = 4
_MOST_BLOCKS = 10  # Chromium repeats 1 frame, 9 at most


def unpack(payload: bytes) -> list[tuple[int, bytes]]:
    """An RTP payload → its frames, oldest first: ticks before the packet's own time, and the frame.

    Raises ValueError where the payload is malformed.
    """
    lengths, at = [], 0
    while payload[at : at + 1] and payload[at] & _MORE:
        header = int.from_bytes(payload[at : at + _HEADER_BYTES])  # 1 bit more, 7 type, 14 ticks, 10 length
        lengths.append(((header >> 10) & 0x3FFF, header & 0x3FF))
        at += _HEADER_BYTES
    at += 1  # the header of the packet's own frame, whose length is what remains
    if at + sum(length for _, length in lengths) > len(payload):
        raise ValueError("the RED payload ends within a block")
    if len(lengths) >= _MOST_BLOCKS:
        raise ValueError("the RED payload has too many blocks")
    frames = []
    for ticks, length in lengths:
        frames.append((ticks, payload[at : at + length]))
        at += length
    return [*frames, (0, payload[at:])]


def prefer(answer: str) -> str:
    """An SDP answer → the same with RED before all other codecs, where client and service have both RED and Opus."""
    opus = re.search(r"^a=rtpmap:(\d+) opus/48000/2\r?$", answer, re.MULTILINE)
    red = re.search(rf"^a=rtpmap:{PAYLOAD_TYPE} red/48000/2(\r?)$", answer, re.MULTILINE)
    if opus is None or red is None:
        return answer
    # What is in the blocks. Chromium does not send RED unless this matches its own offer.
    named = f"{red[0]}\na=fmtp:{PAYLOAD_TYPE} {opus[1]}/{opus[1]}{red[1]}"
    answer = answer.replace(red[0], named, 1)
    return re.sub(rf"^(m=audio \d+ \S+)(.*?) {PAYLOAD_TYPE}\b", rf"\1 {PAYLOAD_TYPE}\2", answer, flags=re.MULTILINE)
