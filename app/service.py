"""What every transport needs: one object, put together by the composition root and passed in."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from app.access import Access
from app.admission import Admission
from app.calls import Calls
from app.dispatch import Dispatcher
from app.live import LiveConfig
from app.settings import Settings
from app.telemetry import Metrics
from app.wire.native import StreamParameters
from streaming.errors import Overloaded
from streaming.ports import SpeechDetector
from streaming.types import RecognizerInfo


class EngineState(Protocol):
    """What the service asks of the engine besides decoding."""

    @property
    def ready(self) -> bool: ...


class Stream(Protocol):
    """What the service asks of every stream that is open."""

    def finish(self) -> None:
        """Take the audio so far as all there is. Returns at once and never raises."""
        ...


@dataclass
class Service:
    """The running service. ``new_detectors(n)`` gives fresh speech detectors for n channels."""

    settings: Settings
    metrics: Metrics
    logger: structlog.stdlib.BoundLogger
    engine: EngineState
    dispatcher: Dispatcher
    new_detectors: Callable[[int], list[SpeechDetector]]
    sessions: Admission
    files: Admission
    access: Access
    live_config: LiveConfig = field(default_factory=LiveConfig)
    live: set[Stream] = field(default_factory=set)
    calls: Calls = field(default_factory=Calls)
    failure: str = ""  # why the engine could not be started; the service is of no use then

    @property
    def info(self) -> RecognizerInfo:
        """The engine's. Raises Overloaded until it has once been ready."""
        try:
            return self.dispatcher.info
        except RuntimeError:
            raise Overloaded(
                "the engine is still starting; try again in a few seconds", code="starting", retry_after_s=3
            ) from None

    @property
    def stream_defaults(self) -> StreamParameters:
        """What a live stream has where its client asks for nothing."""
        return StreamParameters(
            pause_ms=self.settings.pause_ms,
            partial_interval_ms=self.settings.partial_interval_ms,
            max_utterance_ms=self.settings.max_utterance_ms,
        )

    @contextmanager
    def stream_slot(self) -> Iterator[None]:
        """A live stream's place, over whatever transport. Raises Overloaded where there is none."""
        try:
            with self.sessions.slot(), self.dispatcher.load.stream(self.sessions.open - 1, self.info.workers):
                self.metrics.sessions.set(self.sessions.open)
                yield
        finally:
            self.metrics.sessions.set(self.sessions.open)

    async def drain(self) -> None:
        """Let nobody in, end every stream after the audio it has sent, and wait for the finals to go out."""
        self.sessions.is_draining = self.files.is_draining = True
        self.calls.close()
        for stream in tuple(self.live):
            stream.finish()
        try:
            async with asyncio.timeout(self.settings.drain_timeout_s):
                await self.sessions.wait_empty()
                await self.files.wait_empty()
        except TimeoutError:
            self.logger.warning("drain_timeout", sessions=self.sessions.open, files=self.files.open)
