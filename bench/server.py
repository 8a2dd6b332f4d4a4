"""Hark itself, started on a free port of this machine for a measurement, and what its processes use."""

import contextlib
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench import process
from bench.process import answers, free_port, usage

_ROOT = Path(__file__).resolve().parents[1]
_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds used so far and resident bytes, of one part of the service."""

    cpu_s: float
    rss_bytes: int


@dataclass(frozen=True, slots=True)
class Server:
    """A running service. ``pid`` is the gateway's; the engine is below it."""

    url: str
    pid: int

    def usage(self) -> dict[str, Usage]:
        """Of ``gateway`` and ``engine`` (all processes below the gateway together)."""
        gateway = psutil.Process(self.pid)
        return {"gateway": _usage([gateway]), "engine": _usage(gateway.children(recursive=True))}


def _usage(processes: list[psutil.Process]) -> Usage:
    return Usage(*usage(processes))


@contextlib.contextmanager
def started(environment: Mapping[str, str], start_timeout_s: float = _START_TIMEOUT_S) -> Iterator[Server]:
    """``hark serve`` with this environment, ready; stopped at the end. Raises ServerFailed."""
    port = free_port()
    command = [sys.executable, "-m", "app", "serve", "--host", "127.0.0.1", "--port", str(port)]
    is_ready = answers(f"http://127.0.0.1:{port}/readyz")
    with (
        tempfile.TemporaryFile() as log,
        process.started(
            command,
            environment,
            _ROOT,
            log,
            is_ready,
            start_timeout_s=start_timeout_s,
            stop_timeout_s=_STOP_TIMEOUT_S,
        ) as pid,
    ):
        yield Server(f"ws://127.0.0.1:{port}/v1/stream", pid)
