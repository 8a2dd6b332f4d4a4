"""A server as a process of this machine: started, watched, and stopped with its children."""

import asyncio
import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx
import psutil

_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 10.0
_SAMPLE_INTERVAL_S = 0.5
_TAIL_LINES = 15
_IDLE_CORES = 0.2
_IDLE_WINDOW_S = 1.0


class ServerFailed(Exception):
    """The server did not start; the message ends with the last lines of its log."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a process and all below it used over a time: % of one core, and the most resident MiB."""

    cpu_percent: float
    rss_mib: float


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def started(
    command: Sequence[str],
    environment: Mapping[str, str],
    cwd: Path,
    log: IO[bytes],
    is_ready: Callable[[], bool],
    *,
    start_timeout_s: float = _START_TIMEOUT_S,
    stop_timeout_s: float = _STOP_TIMEOUT_S,
) -> Iterator[int]:
    """The server's pid once it is ready; it is stopped at the end. Raises ServerFailed with the end of its log."""
    try:
        process = subprocess.Popen(
            command, cwd=cwd, env=dict(environment), stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    except OSError as error:
        raise ServerFailed(f"{command[0]}: {error}") from None
    try:
        _wait_ready(process, log, is_ready, start_timeout_s)
        yield process.pid
    finally:
        stop(process, stop_timeout_s)


@contextlib.contextmanager
def logged(
    command: Sequence[str], environment: Mapping[str, str], log_path: Path, is_ready: Callable[[], bool]
) -> Iterator[int]:
    """``started`` with a log that stays. The server runs in the log's folder, which is made where it is missing."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("w+b") as log, started(command, environment, log_path.parent, log, is_ready) as pid:
        yield pid


def answers(url: str) -> Callable[[], bool]:
    """Ready when this URL answers 200."""

    def ask() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(url, timeout=5.0, trust_env=False).status_code == 200
        return False

    return ask


def listens(port: int) -> Callable[[], bool]:
    """Ready when this port takes connections."""

    def ask() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5.0):
            return True
        return False

    return ask


def stop(process: subprocess.Popen[bytes], timeout_s: float = _STOP_TIMEOUT_S) -> None:
    """As an operator would; what is still there after that, of it or below it, is killed."""
    below = _tree(process.pid)[1:]
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
        if process.poll() is None:
            process.kill()
            process.wait()
    _, alive = psutil.wait_procs(below, timeout=2)
    for orphan in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            orphan.kill()
    psutil.wait_procs(alive, timeout=2)


async def watched(pid: int, work: "asyncio.Task[object]") -> Load | None:
    """What the process and those below it use until the work is done; None where it died."""
    began_s, before_s, most = time.monotonic(), None, 0
    now_s = 0.0
    while True:
        processes = _tree(pid)
        if not processes:
            await asyncio.wait([work])
            return None
        now_s, rss_bytes = usage(processes)
        before_s = now_s if before_s is None else before_s
        most = max(most, rss_bytes)
        if work.done():
            break
        await asyncio.wait([work], timeout=_SAMPLE_INTERVAL_S)
    return Load(100 * max(0.0, now_s - before_s) / (time.monotonic() - began_s), most / 2**20)


async def idle(pid: int, timeout_s: float) -> bool:
    """Wait until it uses less than a fifth of a core; False where it still does not after ``timeout_s``.

    A server may go on decoding for clients that have left, and the next ones would have to wait for that.
    """
    give_up_s = time.monotonic() + timeout_s
    while time.monotonic() < give_up_s:
        began_s, before_s = time.monotonic(), usage(_tree(pid))[0]
        await asyncio.sleep(_IDLE_WINDOW_S)
        if usage(_tree(pid))[0] - before_s < _IDLE_CORES * (time.monotonic() - began_s):
            return True
    return False


def _wait_ready(
    process: subprocess.Popen[bytes], log: IO[bytes], is_ready: Callable[[], bool], timeout_s: float
) -> None:
    give_up_s = time.monotonic() + timeout_s
    while time.monotonic() < give_up_s:
        if process.poll() is not None:
            raise ServerFailed(f"the server ended with exit code {process.returncode}{_tail(log)}")
        if is_ready():
            return
        time.sleep(0.2)
    raise ServerFailed(f"the server was not ready within {timeout_s:.0f} s{_tail(log)}")


def _tail(log: IO[bytes]) -> str:
    log.seek(0, os.SEEK_SET)
    lines = log.read().decode("utf-8", "replace").splitlines()[-_TAIL_LINES:]
    return ":\n" + "\n".join(lines) if lines else ""


def _tree(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    return []


def usage(processes: Sequence[psutil.Process]) -> tuple[float, int]:
    """CPU seconds so far, resident bytes."""
    cpu_s, rss_bytes = 0.0, 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess), process.oneshot():
            times = process.cpu_times()
            cpu_s += times.user + times.system
            rss_bytes += process.memory_info().rss
    return cpu_s, rss_bytes
