"""One WebRTC connection, as a peer of app/conversation.py. FastRTC negotiates it and hands its audio on.

Each connection has a FastRTC of its own: what that keeps by id, it keeps for one, and it goes with it. Where FastRTC
0.0.34 and aiortc 1.16 leave something behind, the place says so.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import av
import structlog
from aiortc import RTCConfiguration, RTCDataChannel, RTCIceServer, RTCPeerConnection
from aiortc.exceptions import InvalidStateError
from aiortc.rtcicetransport import parse_stun_turn_uri
from fastrtc.tracks import AsyncStreamHandler, AudioCallback
from fastrtc.webrtc_connection_mixin import WebRTCConnectionMixin

from app.live import ClientGone, Gap
from app.rtc.audio import FrameConverter
from app.rtc.config import RtcConfig
from app.rtc.ice import IceServers
from app.rtc.inbox import Inbox
from app.rtc.offer import MAX_CANDIDATES, BadOffer, parse_candidate
from app.rtc.redundancy import prefer
from app.wire import native
from streaming.audio import SAMPLE_RATE
from streaming.errors import BadMessage, ClientError

_EMIT_S = 50.0  # FastRTC waits 60 s for audio to send back, and then logs a warning


class NotConnected(ClientError):
    """The offer was answered, but no connection came about."""

    code = "not_connected"


class _Handler(AsyncStreamHandler):
    """What FastRTC calls with the client's audio. It has nothing to send back."""

    def __init__(self, inbox: Inbox) -> None:
        super().__init__(input_sample_rate=SAMPLE_RATE)
        self._inbox = inbox
        self._converter = FrameConverter()
        self._ended = asyncio.Event()

    def copy(self) -> "_Handler":
        return self

    def resample(self, frame: av.AudioFrame) -> Iterator[av.AudioFrame]:  # type: ignore[override]
        """Takes the frame and leaves none for ``receive``, which would get no word of gaps.

        Never FastRTC's own: its av.AudioResampler holds a native thread for each core until garbage is collected.
        """
        try:
            for piece in self._converter.convert(frame):
                self._inbox.put_audio(piece)
        except Exception as error:  # noqa: BLE001 - a task's edge: FastRTC's task would end here without a word
            self._inbox.end(error)
        return iter(())

    async def receive(self, frame: object) -> None:
        """Not called."""

    async def emit(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EMIT_S):
                await self._ended.wait()

    def shutdown(self) -> None:
        """Ends the tasks that wait in ``emit`` and, where no data channel ever came, for one."""
        self._ended.set()
        self.channel_set.set()

    def unlink(self) -> None:
        """FastRTC wraps these methods and leaves the wrappers, which hold the handler, in the handler."""
        for name in ("emit", "receive", "start_up", "shutdown"):
            self.__dict__.pop(name, None)
        self._clear_queue = None


class Connection(WebRTCConnectionMixin):
    """One client, as app/conversation.py's Peer."""

    def __init__(
        self, config: RtcConfig, ice: IceServers, logger: structlog.stdlib.BoundLogger, webrtc_id: str
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode, self.modality = "send", "audio"
        self.concurrency_limit, self.time_limit, self.allow_extra_tracks = 1, None, False
        self.rtc_configuration, self.server_rtc_configuration = None, configuration(ice)
        self._inbox = Inbox(round(config.inbox_s * SAMPLE_RATE), config.max_messages)
        self._handler = self.event_handler = _Handler(self._inbox)
        self._config = config
        self._logger = logger
        self._id = webrtc_id
        self._peer_connection: RTCPeerConnection | None = None
        self._callbacks: list[AudioCallback] = []
        self._candidates = 0
        self._is_negotiated = asyncio.Event()
        self._channel: RTCDataChannel | None = None
        self._opened = asyncio.Event()
        self._writable = asyncio.Event()
        self._closed = asyncio.Event()  # the data channel
        self._is_gone = False
        self._release: asyncio.TimerHandle | None = None

    # Negotiation ---------------------------------------------------------------------------------------------

    async def negotiate(self, sdp: str) -> str:
        """The answer to an offer. Raises BadOffer; then, too, ``dispose`` must follow."""
        try:
            answer = await self.handle_offer({"sdp": sdp, "type": "offer", "webrtc_id": self._id}, None)  # type: ignore[no-untyped-call]
        except Exception as error:  # aiortc answers what it does not like in an offer with whatever exception comes
            self._logger.warning("offer_failed", reason=repr(error))
            raise BadOffer(f"the offer cannot be answered: {error}") from error
        finally:
            self._peer_connection = self.pcs.get(self._id)
            self._is_negotiated.set()
        self._callbacks = list(self.connections[self._id])
        # Nothing can have come yet: the client needs the answer. These are called after FastRTC's own.
        peer = self.pcs[self._id]
        peer.on("datachannel", self._on_channel)
        peer.on("connectionstatechange", self._on_state)
        return prefer(str(answer["sdp"]))

    async def add_candidate(self, given: object) -> None:
        """Raises BadOffer. One that overtakes its offer's answer waits for it."""
        candidate = parse_candidate(given)
        self._candidates += 1
        if self._candidates > MAX_CANDIDATES:
            raise BadOffer(f"more than {MAX_CANDIDATES} candidates")
        await self._is_negotiated.wait()
        if self._peer_connection is not None and not self._is_gone:
            await self._peer_connection.addIceCandidate(candidate)

    # What aiortc tells ---------------------------------------------------------------------------------------

    def _on_channel(self, channel: RTCDataChannel) -> None:
        channel.remove_all_listeners("message")  # FastRTC answers each message with an echo
        if self._channel is not None:
            channel.close()
            return
        self._channel = channel
        channel.bufferedAmountLowThreshold = self._config.unsent_bytes // 2
        channel.on("message", self._on_message)
        channel.on("bufferedamountlow", self._writable.set)
        channel.on("close", self.hang_up)
        self._handler.set_channel(channel)
        self._release = asyncio.get_running_loop().call_later(self._config.hold_s, self._inbox.release)
        self._opened.set()

    def _on_message(self, message: str | bytes) -> None:
        try:
            if isinstance(message, bytes):
                raise BadMessage("binary messages mean nothing here: audio is the connection's track")
            if len(message) > self._config.max_message_chars:
                raise BadMessage(f"a message has more than {self._config.max_message_chars} characters")
            self._inbox.put_message(message, ahead=self._inbox.is_held and _is_config(message))
            self._inbox.release()
        except BadMessage as error:
            self._inbox.end(error)

    def _on_state(self) -> None:
        if self._peer_connection is None or self._peer_connection.connectionState in ("failed", "closed"):
            self.hang_up()

    def hang_up(self) -> None:
        """The connection, or its data channel, is no more, or shall be no more."""
        self._is_gone = True
        self._inbox.end(ClientGone)
        for waited in (self._opened, self._writable, self._closed):
            waited.set()

    # The conversation's peer ---------------------------------------------------------------------------------

    async def open(self) -> None:
        limit_s = self._config.connect_timeout_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._opened.wait()
        if not self._opened.is_set():
            raise NotConnected(f"no WebRTC connection came about within {limit_s:g} s")
        self._require_channel()

    async def receive(self) -> str | bytes | Gap:
        return await self._inbox.get()

    async def send(self, message: str | bytes) -> None:
        channel = self._require_channel()
        while channel.bufferedAmount > self._config.unsent_bytes:
            self._writable.clear()
            await self._writable.wait()
            self._require_channel()
        try:
            channel.send(message)
        except InvalidStateError:
            raise ClientGone from None
        except ValueError as error:  # longer than the client said that it takes
            raise BadMessage(str(error)) from error

    async def close(self, code: int, why: str) -> None:
        """A data channel has no close code: the last message says it. Closing one sends what waits to be sent first."""
        if self._channel is None or self._is_gone:
            return
        self._channel.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.close_timeout_s):
                await self._closed.wait()

    def _require_channel(self) -> RTCDataChannel:
        if self._channel is None or self._is_gone:
            raise ClientGone
        return self._channel

    # The end -------------------------------------------------------------------------------------------------

    def clean_up(self, webrtc_id: str) -> list[Any]:
        """FastRTC's, which forgets two tasks: one waits 30 s for the connection, one may wait for a track for ever."""
        self.connection_timeouts[webrtc_id].set()
        connection = super().clean_up(webrtc_id)
        self.connections[webrtc_id] = self._callbacks
        return list(connection)

    async def dispose(self) -> None:
        """The one place where everything that the connection holds ends, however it ended."""
        self.hang_up()
        if self._release is not None:
            self._release.cancel()
        for callback in self._callbacks:
            callback.stop()  # type: ignore[no-untyped-call]
        if self._peer_connection is not None:
            await _close(self._peer_connection)
        self.clean_up(self._id)
        tasks = [task for callback in self._callbacks for task in _tasks(callback)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._forget()
        if self._inbox.dropped_samples:
            self._logger.warning("inbox_overflowed", lost_s=round(self._inbox.dropped_samples / SAMPLE_RATE, 2))

    def _forget(self) -> None:
        """Let go of all that is large: who still holds the connection, as an error's traceback does, holds little."""
        self._handler.unlink()
        self._callbacks, self._peer_connection, self._channel, self.event_handler = [], None, None, None
        for kept in (self.connections, self.handlers, self.data_channels):
            kept.clear()


def configuration(ice: IceServers) -> RTCConfiguration:
    """Never None, for which aiortc asks a public STUN server. URLs that it does not understand are left out."""
    servers = [(tuple(url for url in server.urls if _is_known(url)), server) for server in ice.servers]
    return RTCConfiguration([RTCIceServer(list(urls), s.username, s.credential) for urls, s in servers if urls])


def _is_known(url: str) -> bool:
    try:
        parse_stun_turn_uri(url)
    except ValueError:
        return False
    return True


async def _close(peer: RTCPeerConnection) -> None:
    """A message that is due to be sent again at this very moment would find the encryption shut down, which nobody
    handles: so the data channel's transport ends first."""
    if peer.sctp is not None:
        await peer.sctp.stop()
        await asyncio.sleep(0)
    await peer.close()


def _tasks(callback: AudioCallback) -> list[asyncio.Task[Any]]:
    """What FastRTC started for a track whose connection has a data channel."""
    return [callback.process_input_task, callback.start_up_task, callback.decode_task] if callback.has_started else []


def _is_config(text: str) -> bool:
    try:
        return isinstance(native.parse_message(text), native.Configure)
    except BadMessage:
        return False
