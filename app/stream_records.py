"""What the decoder of a live stream writes: records of a kind, a number, and for some a payload. Pure."""

import struct

AUDIO = b"A"  # length; PCM, mono, 16 kHz, int16 little-endian, as soon as it is decoded
HUNGRY = b"H"  # bytes taken: everything that came is decoded, as far as it can be without more
ERROR = b"E"  # length; JSON, {"code", "message"}: nothing can be heard, and it is over

RECORD = struct.Struct("<cQ")
