"""The signature by which Genesys shows that a connection is its own: HTTP message signatures (RFC 9421), as far as it
uses them: HMAC-SHA256 over these parts of the handshake. Pure.

Source: RFC 9421, 2.5 and 3.3.3, and app/src/authenticator.ts of the exchange's reference implementation.
"""

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence

_REQUIRED = frozenset(
    {
        "@request-target",
        "@authority",
        "audiohook-organization-id",
        "audiohook-session-id",
        "audiohook-correlation-id",
        "x-api-key",
    }
)
_MAX_AGE_S = 30  # and as much for clocks that do not agree
_INPUT = re.compile(
    r'([a-z*][a-z0-9_.*-]{0,40})=(\(("[a-z@-]{1,60}"(?: "[a-z@-]{1,60}"){0,20})\)((?:;[a-z]+=[^;,]{1,200})*))'
)


def is_signed(secret: bytes, headers: Mapping[str, str], target: str, authorities: Sequence[str], now_s: float) -> bool:
    """``headers`` by their names in lower case; ``target``: path and query; ``authorities``: the hosts by which the
    client may know this service; ``now_s``: Unix time. False for what is not signed, wrongly, or too long ago."""
    found = _INPUT.fullmatch(headers.get("signature-input", "").strip())
    if found is None:
        return False
    label, described, names, parameters = found[1], found[2], found[3], found[4]
    components = [name.strip('"') for name in names.split(" ")]
    if not set(components) >= _REQUIRED or len(set(components)) < len(components):
        return False
    given = _signature(headers.get("signature", ""), label)
    if given is None or not _is_fresh(parameters, now_s):
        return False
    known = {"@request-target": target, **{name: headers[name].strip() for name in components if name in headers}}
    bases = (_base(components, {**known, "@authority": host}, described) for host in authorities)
    return bool(sum(hmac.compare_digest(hmac.new(secret, base, hashlib.sha256).digest(), given) for base in bases))


def _signature(header: str, label: str) -> bytes | None:
    encoded = header.strip().removeprefix(f"{label}=")
    if len(encoded) < 2 or not encoded.startswith(":") or not encoded.endswith(":"):
        return None
    try:
        return base64.b64decode(encoded[1:-1], validate=True)
    except (binascii.Error, ValueError):
        return None


def _is_fresh(parameters: str, now_s: float) -> bool:
    values = dict(part.split("=", 1) for part in parameters.split(";") if part)
    created, expires = values.get("created", ""), values.get("expires", "")
    if (
        not created.isdigit()
        or abs(now_s - int(created)) > _MAX_AGE_S
        or values.get("alg", '"hmac-sha256"') != '"hmac-sha256"'
    ):
        return False
    return not expires or (expires.isdigit() and int(expires) > now_s)


def _base(components: Sequence[str], known: Mapping[str, str], described: str) -> bytes:
    """A component that is not there has a line that nobody signed."""
    lines = [f'"{name}": {known.get(name, "")}' for name in components]
    return "\n".join([*lines, f'"@signature-params": {described}']).encode()
