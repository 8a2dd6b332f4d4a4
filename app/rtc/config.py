"""Bounds of WebRTC connections, in a file that imports nothing heavy."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RtcConfig:
    """Bounds of one connection."""

    connect_timeout_s: float = 10.0
    close_timeout_s: float = 2.0  # for the last messages to arrive, and again for the connection to end
    hold_s: float = 1.0  # how long audio waits for the first config
    inbox_s: float = 10.0  # audio that may wait
    max_messages: int = 64  # of the client's that may wait
    max_message_chars: int = 65_536
    unsent_bytes: int = 16_384  # what a slow client has not read waits where newer can take its place
