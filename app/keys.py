"""API keys: made, kept as hashes, and found again.

A key is 256 random bits, so a plain SHA-256 is enough: a slow hash, as passwords need, defends against guessing what
people think up, and nobody guesses 256 bits. It would make each request slow, and a flood of wrong keys costly.
"""

import hashlib
import hmac
import json
import os
import secrets
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

PREFIX = "hark_"
_LOOK_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What a key may do; 0 is any amount. ``streams``: live streams and recordings at once. ``per_minute``: of both
    together that may be begun. ``minutes_a_day``: of audio that is heard from midnight to midnight, UTC."""

    streams: int = 0
    per_minute: int = 0
    minutes_a_day: float = 0.0


@dataclass(frozen=True, slots=True)
class Key:
    """A key without itself. ``digest``: SHA-256 of it, 32 bytes. ``name``: for people."""

    key_id: str
    digest: bytes
    name: str = ""
    limits: KeyLimits = KeyLimits()


class BadKeyFile(ValueError):
    """The file of keys cannot be read, or is not as it must be. The message names no key and no hash."""


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def plain_keys(keys: Iterable[str]) -> tuple[Key, ...]:
    """Keys that a setting lists, without limits. Their ids are their places: an id is seen by who holds a token, and
    part of the hash of a key that a person thought up would let it be guessed."""
    return tuple(Key(f"setting-{number}", digest_of(key)) for number, key in enumerate(keys, 1))


class _Limits(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    streams: int = Field(default=0, ge=0)
    per_minute: int = Field(default=0, ge=0)
    minutes_a_day: float = Field(default=0.0, ge=0, allow_inf_nan=False)


class _Entry(BaseModel):
    # An entry without its limits would have none: a misspelt name must not make one.
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    id: str = Field(min_length=1, max_length=100)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    name: str = Field(default="", max_length=200)
    limits: _Limits = _Limits()


_ENTRIES = TypeAdapter(list[_Entry])


def parse_keys(text: str) -> tuple[Key, ...]:
    """A list of ``{id, sha256, name, limits}``, in JSON or YAML. Raises BadKeyFile."""
    try:
        entries = _ENTRIES.validate_python(yaml.safe_load(text) or [])
    except yaml.YAMLError:
        raise BadKeyFile("it is neither JSON nor YAML") from None
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        raise BadKeyFile(f"{place}: {first['msg']}") from None
    if len({entry.id for entry in entries}) < len(entries):
        raise BadKeyFile("an id is there twice")
    return tuple(
        Key(entry.id, bytes.fromhex(entry.sha256), entry.name, KeyLimits(**entry.limits.model_dump()))
        for entry in entries
    )


def read_keys(path: Path) -> tuple[Key, ...]:
    """Raises BadKeyFile."""
    try:
        return parse_keys(_read(path))
    except BadKeyFile as error:
        raise BadKeyFile(f"{path}: {error}") from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise BadKeyFile(str(reason)) from None


def add_key(path: Path, name: str, limits: KeyLimits) -> str:
    """A new key, kept nowhere. Its hash is appended to the file, which need not exist. Raises BadKeyFile."""
    text = ""
    if path.exists():
        read_keys(path)
        text = _read(path)
    key = PREFIX + secrets.token_urlsafe(32)
    given = {field: value for field in KeyLimits.__slots__ if (value := getattr(limits, field))}
    entry: dict[str, object] = {"id": secrets.token_hex(8), "sha256": digest_of(key).hex(), "name": name}
    entry |= {"limits": given} if given else {}
    is_json = text.lstrip().startswith("[") or (not text.strip() and path.suffix == ".json")
    if is_json:
        after = json.dumps([*(json.loads(text) if text.strip() else []), entry], indent=2, ensure_ascii=False) + "\n"
    else:  # appended as text: the comments that are there stay
        head = text if not text or text.endswith("\n") else text + "\n"
        after = head + yaml.safe_dump([entry], sort_keys=False, allow_unicode=True)
    parse_keys(after)
    _replace(path, after)
    return key


def _replace(path: Path, text: str) -> None:
    """All or nothing: a service that reads it meanwhile sees the old file or the new one. For the owner's eyes alone,
    where it is new."""
    try:
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, mode)
        os.replace(name, path)
    except OSError as error:
        raise BadKeyFile(f"{path}: {error.strerror}") from None


class KeyRing:
    """The keys that are accepted now. The file is read again when it has changed, within a second: so a key can be
    added and taken back while the service runs."""

    def __init__(
        self,
        fixed: Sequence[Key],
        path: Path | None,
        clock: Callable[[], float],
        complain: Callable[[str], None],
    ) -> None:
        """``complain`` is told why a changed file was not taken; the keys from before stay. Raises BadKeyFile where it
        cannot be read the first time."""
        self._fixed = tuple(fixed)
        self._path = path
        self._clock = clock
        self._complain = complain
        self._looked_s = clock()
        self._seen = _look(path) if path else None
        self._keys = self._fixed + (read_keys(path) if path else ())

    @property
    def is_asked_for(self) -> bool:
        """False where everybody may come in; a file that lists nobody lets nobody in."""
        return bool(self._keys) or self._path is not None

    def find(self, credentials: Iterable[str]) -> Key | None:
        """The key that is among these. Each is compared with all, in constant time: how long it takes says nothing."""
        self._look_again()
        found: Key | None = None
        for credential in credentials:
            digest = digest_of(credential)
            for key in self._keys:
                if hmac.compare_digest(digest, key.digest):
                    found = key
        return found

    def get(self, key_id: str) -> Key | None:
        self._look_again()
        return next((key for key in self._keys if key.key_id == key_id), None)

    def _look_again(self) -> None:
        now_s = self._clock()
        if self._path is None or now_s - self._looked_s < _LOOK_AGAIN_S:
            return
        self._looked_s = now_s
        seen = _look(self._path)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._keys = self._fixed + read_keys(self._path)
        except BadKeyFile as error:
            self._complain(str(error))


def _look(path: Path) -> tuple[int, int, int] | None:
    """What changes with the file; None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
