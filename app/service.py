"""What every transport needs: one object, put together by the composition root and passed in."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from app.admission import Admission
from app.dispatch import Dispatcher
from app.live import LiveConfig, LiveSession
from app.settings import Settings
from app.telemetry import Metrics
from streaming.errors import Overloaded
from streaming.ports import SpeechDetector
from streaming.types import RecognizerInfo


class EngineState(Protocol):
    """What the service asks of the engine besides decoding."""

    @property
    def ready(self) -> bool: ...


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
    live_config: LiveConfig = field(default_factory=LiveConfig)
    live: set[LiveSession] = field(default_factory=set)

    @property
    def info(self) -> RecognizerInfo:
        """The engine's. Raises Overloaded until it has once been ready."""
        try:
            return self.dispatcher.info
        except RuntimeError:
            raise Overloaded(
                "the engine is still starting; try again in a few seconds", code="starting", retry_after_s=3
            ) from None

    async def drain(self) -> None:
        """Let nobody in, end every stream after the audio it has sent, and wait for the finals to go out."""
        self.sessions.is_draining = self.files.is_draining = True
        for live in tuple(self.live):
            live.finish()
        try:
            async with asyncio.timeout(self.settings.drain_timeout_s):
                await self.sessions.wait_empty()
                await self.files.wait_empty()
        except TimeoutError:
            self.logger.warning("drain_timeout", sessions=self.sessions.open, files=self.files.open)
