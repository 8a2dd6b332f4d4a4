"""Prometheus metrics and structured logs. An observer: it never changes what it sees."""

import logging
import sys
import time
from typing import TextIO

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from streaming.audio import samples_to_ms
from streaming.events import Decode, FinalTranscript, Output, PartialTranscript, SpeechStopped, TranscriptFailed
from streaming.types import Hypothesis, Priority

_LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 60)


def configure_logging(level: str, stream: TextIO = sys.stderr) -> None:
    """JSON lines on ``stream``, from structlog and from the libraries' own loggers alike."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("aioice").setLevel(max(root.level, logging.WARNING))  # below that: clients' addresses, in detail
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )


class Metrics:
    """The service's metrics in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.sessions = Gauge("hark_sessions_open", "Live streams open now", registry=r)
        self.sessions_total = Counter("hark_sessions_total", "Streams by how they ended", ["outcome"], registry=r)
        self.audio_s = Counter("hark_audio_seconds_total", "Audio received", ["kind"], registry=r)
        self.lag_s = Histogram(
            "hark_lag_seconds", "Audio received but not yet answered, at each heartbeat", buckets=_LATENCY_S, registry=r
        )
        self.partial_s = Histogram(
            "hark_partial_latency_seconds", "Partial asked until sent", buckets=_LATENCY_S, registry=r
        )
        self.final_s = Histogram(
            "hark_final_latency_seconds", "Endpoint until the final is sent", buckets=_LATENCY_S, registry=r
        )
        self.utterances = Counter("hark_utterances_total", "Utterances by outcome", ["outcome"], registry=r)
        self.rejected = Counter("hark_rejected_texts_total", "Texts dropped by a guard", ["guard"], registry=r)
        self.decode_s = Histogram(
            "hark_decode_seconds", "Decode time in the engine", ["kind"], buckets=_LATENCY_S, registry=r
        )
        self.wait_s = Histogram(
            "hark_decode_wait_seconds", "Time a decode waited its turn", ["kind"], buckets=_LATENCY_S, registry=r
        )
        self.waiting = Gauge("hark_decode_queue_depth", "Decodes that wait their turn", registry=r)
        self.running = Gauge("hark_decodes_running", "Decodes in the engine", registry=r)
        self.decoder_steps = Counter("hark_decoder_steps_total", "Decoder steps taken", registry=r)
        self.decoder_steps_saved = Counter(
            "hark_decoder_steps_saved_total", "Decoder steps that drafts made unnecessary", registry=r
        )
        self.engine_load = Gauge(
            "hark_engine_load", "Engine time that live finals take, in workers; see HARK_MAX_LOAD", registry=r
        )
        self.shed_total = Counter("hark_shed_total", "Requests refused for lack of room", ["kind"], registry=r)
        self.engine_starts = Counter(
            "hark_engine_starts_total", "Engine processes that became ready; all but the first are restarts", registry=r
        )
        self.files = Counter("hark_files_total", "Uploaded recordings by outcome", ["outcome"], registry=r)

    # The dispatcher's observer

    def decoded(self, priority: Priority, waited_s: float, took_s: float) -> None:
        self.wait_s.labels(priority.name.lower()).observe(waited_s)
        self.decode_s.labels(priority.name.lower()).observe(took_s)

    def answered(self, hypothesis: Hypothesis) -> None:
        self.decoder_steps.inc(hypothesis.decoder_steps)
        self.decoder_steps_saved.inc(hypothesis.decoder_steps_saved)

    def shed(self, priority: Priority) -> None:
        self.shed_total.labels(priority.name.lower()).inc()

    def queue_depth(self, waiting: int, running: int) -> None:
        self.waiting.set(waiting)
        self.running.set(running)


class StreamTelemetry:
    """Watches one session's outputs: latencies into the metrics, one log line an utterance."""

    def __init__(self, metrics: Metrics, logger: structlog.stdlib.BoundLogger, *, log_text: bool) -> None:
        self._metrics = metrics
        self._logger = logger
        self._log_text = log_text
        self._asked_s: dict[int, float] = {}  # utterance → when its newest decode was asked
        self._stopped_s: dict[int, float] = {}  # utterance → when its endpoint came

    def observe(self, output: Output) -> None:
        now_s = time.monotonic()
        match output:
            case Decode(request):
                self._asked_s[request.utterance_id] = now_s
            case SpeechStopped(utterance, _, _):
                self._stopped_s[utterance] = now_s
            case PartialTranscript(utterance):
                self._metrics.partial_s.observe(now_s - self._asked_s.get(utterance, now_s))
            case FinalTranscript():
                self._on_final(output, now_s)
            case TranscriptFailed():
                self._metrics.utterances.labels("failed").inc()
                self._logger.error("utterance_failed", utterance=output.utterance_id, code=output.error.code)
                self._forget(output.utterance_id)
            case _:
                pass

    def _on_final(self, final: FinalTranscript, now_s: float) -> None:
        latency_s = now_s - self._stopped_s.get(final.utterance_id, now_s)
        self._metrics.final_s.observe(latency_s)
        self._metrics.utterances.labels("text" if final.text else "empty").inc()
        if final.rejected:
            self._metrics.rejected.labels(final.rejected).inc()
        said = {"text": final.text} if self._log_text else {}
        self._logger.info(
            "utterance",
            utterance=final.utterance_id,
            channel=final.channel,
            start_ms=samples_to_ms(final.start_sample),
            end_ms=samples_to_ms(final.end_sample),
            words=len(final.words),
            language=final.language,
            confidence=round(final.confidence, 3),
            rejected=final.rejected,
            final_latency_ms=round(latency_s * 1000),
            **said,
        )
        self._forget(final.utterance_id)

    def _forget(self, utterance: int) -> None:
        self._asked_s.pop(utterance, None)
        self._stopped_s.pop(utterance, None)
