"""Hark itself, started on a free port of this machine for a measurement, and what its processes use."""

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx
import psutil

_ROOT = Path(__file__).resolve().parents[1]
_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 30.0


class ServerFailed(Exception):
    """The service did not start; the message ends with the last lines of its log."""


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
    cpu_s, rss_bytes = 0.0, 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess), process.oneshot():
            times = process.cpu_times()
            cpu_s += times.user + times.system
            rss_bytes += process.memory_info().rss
    return Usage(cpu_s, rss_bytes)


@contextlib.contextmanager
def started(environment: Mapping[str, str], start_timeout_s: float = _START_TIMEOUT_S) -> Iterator[Server]:
    """``hark serve`` with this environment, ready; stopped at the end. Raises ServerFailed."""
    port = _free_port()
    command = [sys.executable, "-m", "app", "serve", "--host", "127.0.0.1", "--port", str(port)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, cwd=_ROOT, env=dict(environment), stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            _wait_ready(process, f"http://127.0.0.1:{port}/readyz", log, start_timeout_s)
            yield Server(f"ws://127.0.0.1:{port}/v1/stream", process.pid)
        finally:
            _stop(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: IO[bytes], timeout_s: float) -> None:
    give_up_s = time.monotonic() + timeout_s
    with httpx.Client(trust_env=False, timeout=5.0) as http:
        while time.monotonic() < give_up_s:
            if process.poll() is not None:
                raise ServerFailed(f"the service ended with exit code {process.returncode}{_tail(log)}")
            with contextlib.suppress(httpx.TransportError):
                if http.get(url).status_code == 200:
                    return
            time.sleep(0.2)
    raise ServerFailed(f"the service was not ready within {timeout_s:.0f} s{_tail(log)}")


def _tail(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode("utf-8", "replace").splitlines()[-15:]
    return ":\n" + "\n".join(lines) if lines else ""


def _stop(process: subprocess.Popen[bytes]) -> None:
    """As an operator would; what is still there after that is killed."""
    if process.poll() is not None:
        return
    below = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(below, timeout=2)
    for orphan in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            orphan.kill()
