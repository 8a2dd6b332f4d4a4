"""Every setting of the service, read from the environment in this one place.

Each field is the variable ``HARK_<NAME>``; ``hark serve --print-config`` shows them all with their values.
"""

import base64
import os
import sys
from enum import StrEnum
from pathlib import Path
from urllib.parse import parse_qsl

from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from app.redaction import Kind, parse_kinds
from app.wire.native import StreamParameters, parse_parameters
from streaming.errors import BadMessage

_LEAST_SECRET_CHARS = 32


class Engine(StrEnum):
    """Which recognizer runs in the engine process."""

    CTRANSLATE = "ctranslate"
    VLLM = "vllm"  # for GPUs; with an interpreter of its own
    SCRIPTED = "scripted"  # no model: for work on pages and clients


class Turn(StrEnum):
    """Where WebRTC's STUN and TURN servers come from."""

    NONE = "none"
    STATIC = "static"
    CLOUDFLARE = "cloudflare"
    HUGGING_FACE = "hugging_face"
    TWILIO = "twilio"


class Settings(BaseSettings):
    """Frozen and validated. Units are in the names."""

    model_config = SettingsConfigDict(env_prefix="HARK_", frozen=True, extra="ignore", protected_namespaces=())

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for every interface")
    port: int = Field(7860, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    model: str = Field(
        "base", description="a Whisper size, a hub repository or a directory; in Transformers' layout for `vllm`"
    )
    engine: Engine = Field(
        Engine.CTRANSLATE, description="`vllm`: docs/vllm.md; `scripted` needs no model: for work on pages and clients"
    )
    engine_python: str = Field(sys.executable, description="interpreter of the engine process")
    device: str = Field("auto", pattern="^(auto|cpu|cuda)$", description="`ctranslate`: where Whisper runs")
    compute_type: str = Field("auto", description="`ctranslate`: its compute type; auto: int8 on CPU, float16 on CUDA")
    workers: int = Field(0, ge=0, le=64, description="`ctranslate`: calls at once; 0: by the number of cores")
    threads: int = Field(0, ge=0, le=64, description="`ctranslate`: threads a call; 0: by the number of cores")
    margin_s: float = Field(3.0, ge=0.5, le=30.0, description="silence encoded after the audio (docs/performance.md)")
    full_window: bool = Field(False, description="always encode Whisper's 30 s window, as the reference does")

    cache_dir: Path = Field(
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hark",
        description="where weights are kept; below `XDG_CACHE_HOME` where that is set",
    )
    offline: bool = Field(False, description="never look for weights on the network")

    pause_ms: int = Field(500, ge=32, le=10_000, description="default pause that ends an utterance")
    partial_interval_ms: int = Field(400, ge=32, le=10_000, description="new speech before the next partial")
    max_utterance_ms: int = Field(
        20_000, ge=1_000, le=26_000, description="default for the longest utterance; a longer one is cut"
    )

    max_load: float = Field(
        0.85, ge=0, le=10, description="engine time that live finals may take before streams are refused; 0: any"
    )
    max_sessions: int = Field(64, ge=1, description="live streams at once; beyond that they are refused with 1013")
    max_message_bytes: int = Field(4 * 2**20, ge=1_024, description="longest WebSocket message")
    idle_timeout_s: float = Field(120.0, gt=0, description="a stream without audio or keepalive is closed after this")
    send_timeout_s: float = Field(20.0, gt=0, description="a client that does not read for this long is dropped")
    drain_timeout_s: float = Field(20.0, ge=0, description="time for the last finals after SIGTERM")

    rtc_host: str = Field("", description="address that WebRTC uses; empty: each of the machine's but loopback")
    rtc_connect_timeout_s: float = Field(10.0, gt=0, description="a WebRTC offer that leads to no connection ends")
    rtc_audio_timeout_s: float = Field(5.0, ge=2, description="a WebRTC stream without audio is closed after this")

    turn: Turn = Field(Turn.NONE, description="TURN servers, for clients that UDP does not reach (docs/protocol.md)")
    turn_urls: str = Field("", description="for `static`: the URLs, with commas between them")
    turn_username: str = Field("", description="user name; Cloudflare's key id; Twilio's account SID")
    turn_credential: SecretStr = Field(
        SecretStr(""),
        validate_default=True,
        description="password or token; `hugging_face` takes `HF_TOKEN` where this is empty",
    )

    allowed_origins: str = Field("", description="other sites whose pages may use the service, with commas; `*`: all")
    api_keys: SecretStr = Field(SecretStr(""), description="keys, with commas; without any, none is asked for")
    keys_file: Path | None = Field(None, description="keys as hashes, with their limits; `hark key create` adds to it")
    token_secret: SecretStr = Field(
        SecretStr(""), description="signs short-lived tokens, for several processes; empty: one of this process's own"
    )
    open: bool = Field(False, description="serve a public address without keys; else that is refused")
    streams_per_minute: int = Field(0, ge=0, description="streams that an address may open in a minute; 0: any number")
    trusted_proxies: str = Field("127.0.0.1", description="proxies whose `X-Forwarded-For` is believed; `*`: all")

    twilio_auth_token: SecretStr = Field(
        SecretStr(""), description="Twilio's calls must be signed with this account's token; empty: not asked for"
    )
    audiohook_secret: SecretStr = Field(
        SecretStr(""), description="Genesys' client secret, in base64, with which it signs; empty: not asked for"
    )
    audiosocket_port: int | None = Field(
        None, ge=0, le=65535, description="port for Asterisk's AudioSocket, which knows no keys; empty: none"
    )
    audiosocket_host: str = Field("127.0.0.1", description="address that AudioSocket listens on")
    audiosocket_parameters: str = Field(
        "", description="how AudioSocket's calls are heard, written as a query: `language=de&pause_ms=400`"
    )

    max_upload_bytes: int = Field(1_024 * 2**20, ge=1_024, description="longest upload")
    max_file_s: float = Field(6 * 3600.0, gt=0, description="longest recording that is transcribed")
    max_files: int = Field(8, ge=1, description="recordings transcribed at once; beyond that 503")

    redact: str = Field("", description="`card`, `phone` or both: such numbers are taken out of what was said")

    request_timeout_s: float = Field(60.0, gt=0, description="an engine silent for this long is restarted")
    start_timeout_s: float = Field(
        600.0,
        gt=0,
        description="time for the engine to get ready; a first start that fails ends the service, others are retried",
    )

    log_level: str = Field("info", pattern="^(debug|info|warning|error)$", description="least level of a log line")
    log_text: bool = Field(False, description="write what was said to the log")

    @field_validator("keys_file", "audiosocket_port", mode="before")
    @classmethod
    def _empty_is_none(cls, given: object) -> object:
        return None if given == "" else given

    @field_validator("audiohook_secret")
    @classmethod
    def _secret_is_base64(cls, secret: SecretStr) -> SecretStr:
        try:
            base64.b64decode(secret.get_secret_value(), validate=True)
        except ValueError:
            raise ValueError("it must be base64, as Genesys shows it") from None
        return secret

    @field_validator("audiosocket_parameters")
    @classmethod
    def _parameters_are_known(cls, query: str) -> str:
        """But for languages: those are the model's, which is not there yet."""
        given = {name: value for name, value in parse_qsl(query) if name not in ("language", "languages")}
        try:
            parse_parameters(StreamParameters(), given, frozenset())
        except BadMessage as error:
            raise ValueError(error.message) from None
        return query

    @field_validator("redact")
    @classmethod
    def _kinds_are_known(cls, redact: str) -> str:
        try:
            parse_kinds(listed(redact))
        except BadMessage as error:
            raise ValueError(error.message) from None
        return redact

    @field_validator("turn_credential")
    @classmethod
    def _turn_is_complete(cls, credential: SecretStr, info: ValidationInfo) -> SecretStr:
        turn, urls, username = (info.data.get(name, "") for name in ("turn", "turn_urls", "turn_username"))
        if turn == Turn.STATIC and not all(url.startswith(("stun", "turn")) for url in listed(urls) or ["none"]):
            raise ValueError("static needs HARK_TURN_URLS, such as turn:turn.example.org:3478?transport=udp")
        if turn in (Turn.CLOUDFLARE, Turn.TWILIO) and not (username and credential.get_secret_value()):
            raise ValueError(f"{turn} needs HARK_TURN_USERNAME and HARK_TURN_CREDENTIAL")
        return credential

    @field_validator("token_secret")
    @classmethod
    def _secret_is_long(cls, secret: SecretStr) -> SecretStr:
        if 0 < len(secret.get_secret_value()) < _LEAST_SECRET_CHARS:
            raise ValueError(f"it needs at least {_LEAST_SECRET_CHARS} characters, as `openssl rand -hex 32` gives")
        return secret

    @property
    def redacted_kinds(self) -> frozenset[Kind]:
        return parse_kinds(listed(self.redact))

    @property
    def resolved_threads(self) -> int:
        """Threads a call: few, so that several can run (docs/performance.md)."""
        return self.threads or (1 if _cores() <= 4 else 2)

    @property
    def resolved_workers(self) -> int:
        return self.workers or max(1, min(8, _cores() // self.resolved_threads))


def listed(text: str) -> list[str]:
    """A setting with commas, as its parts."""
    return [part.strip() for part in text.split(",") if part.strip()]


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load_settings(**overrides: object) -> Settings:
    """The environment's settings, with what the command line gives on top (None: not given).

    Raises ValueError with one line a wrong setting.
    """
    given = {name: value for name, value in overrides.items() if value is not None}
    try:
        return Settings(**given)  # type: ignore[arg-type]
    except ValidationError as error:
        lines = [f"HARK_{str(e['loc'][0]).upper()}: {e['msg']}" for e in error.errors()]
        raise ValueError("\n".join(lines)) from None


def environment_value(name: str) -> str | None:
    """A variable that is no setting: the value of a Space's secret, which nobody should write on a command line."""
    return os.environ.get(name)
