"""Short-lived tokens for browsers: signed, so that nothing is kept of them. Pure.

``PREFIX payload.signature``: the payload is base64url of JSON ``[key id, expiry, note]``, the signature HMAC-SHA256 of
prefix and payload. Every character is allowed in a header, a query and a WebSocket subprotocol (RFC 9110, 5.6.2).
"""

import base64
import hashlib
import hmac
import json
from dataclasses import dataclass

PREFIX = "hark_tmp_"
OPENAI_PREFIX = "ek_"  # what OpenAI's client secrets begin with
MIN_TTL_S, MAX_TTL_S, DEFAULT_TTL_S = 10, 7_200, 600  # OpenAI's own, of POST /v1/realtime/client_secrets
MAX_NOTE_CHARS = 4_000  # with the rest it must fit into a request's line


@dataclass(frozen=True, slots=True)
class Claims:
    """What a token says. ``expires_at``: Unix time, seconds. ``note``: whatever its issuer put into it."""

    key_id: str
    expires_at: int
    note: str = ""


def write_token(claims: Claims, secret: bytes, *, prefix: str = PREFIX) -> str:
    body = json.dumps([claims.key_id, claims.expires_at, claims.note], separators=(",", ":"), ensure_ascii=False)
    payload = prefix + _encode(body.encode())
    return f"{payload}.{_encode(_sign(payload, secret))}"


def read_token(text: str, secret: bytes) -> Claims | None:
    """What a token of ours says, expired or not; None for anything else."""
    payload, _, signature = text.rpartition(".")
    prefix = next((prefix for prefix in (PREFIX, OPENAI_PREFIX) if payload.startswith(prefix)), None)
    if prefix is None or not text.isascii():
        return None
    if not hmac.compare_digest(_encode(_sign(payload, secret)), signature):
        return None
    body = payload.removeprefix(prefix)
    key_id, expires_at, note = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    return Claims(key_id, expires_at, note)


def _sign(payload: str, secret: bytes) -> bytes:
    return hmac.digest(secret, payload.encode(), hashlib.sha256)


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
