"""The ``hark`` command: what it prints where, and that every failure is one clear line and an exit status."""

import json
import socket
import wave
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from app import cli
from models.scripted import encode_words
from tests.support.server import PAUSE, Server, serving

LONG_NAME = "a recording whose name is longer than a line of a terminal, " * 2


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The scripted engine, no weights, no network."""
    monkeypatch.setenv("HARK_ENGINE", "scripted")
    monkeypatch.setenv("HARK_OFFLINE", "true")
    monkeypatch.setenv("HARK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "*")


def hark(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def failed_with(result: Result, message: str) -> None:
    """Exit status 1, nothing that looks like a crash, and this as one line on stderr."""
    assert f"hark: {message}" in result.stderr.splitlines()
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)


def record(path: Path, *words: str | None) -> Path:
    samples = encode_words(words)
    samples[::2] *= -1  # a constant level would be taken for an offset, which a file's decoder removes
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(samples.tobytes())
    return path


def broken(path: Path) -> Path:
    path.write_bytes(b"this is not audio " * 100)
    return path


@pytest.fixture
def talk(tmp_path: Path) -> Path:
    return record(tmp_path / "talk.wav", "alpha", "bravo", *PAUSE, *PAUSE, "charlie")


@pytest.fixture
def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


# --- transcribe ------------------------------------------------------------------------------------------------------


def test_transcribe_writes_each_utterance_as_a_line_and_nothing_else(talk: Path) -> None:
    result = hark("transcribe", talk)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "alpha bravo\ncharlie\n", "")


def test_transcribe_writes_srt(talk: Path) -> None:
    blocks = hark("transcribe", talk, "-f", "srt").stdout.strip().split("\n\n")
    assert [block.splitlines()[0] for block in blocks] == ["1", "2"]
    assert all(" --> " in block.splitlines()[1] for block in blocks)
    assert [block.splitlines()[2] for block in blocks] == ["alpha bravo", "charlie"]


def test_transcribe_writes_vtt(talk: Path) -> None:
    head, *cues = hark("transcribe", talk, "-f", "vtt").stdout.strip().split("\n\n")
    assert head == "WEBVTT"
    assert [cue.splitlines()[-1] for cue in cues] == ["alpha bravo", "charlie"]


def test_transcribe_writes_json_one_line_a_file(talk: Path, tmp_path: Path) -> None:
    other = record(tmp_path / "other.wav", "delta")
    first, second = map(json.loads, hark("transcribe", talk, other, "-f", "json").stdout.splitlines())
    assert [first["text"], second["text"]] == ["alpha bravo charlie", "delta"]
    assert [word["word"] for word in first["words"]] == ["alpha", "bravo", "charlie"]
    assert len(first["segments"]) == 2
    assert first["duration"] == pytest.approx(1.9)


def test_transcribe_of_an_unknown_format_is_refused_by_name(talk: Path) -> None:
    result = hark("transcribe", talk, "-f", "xml")
    assert result.exit_code == 2
    assert "xml" in result.stderr


def test_a_missing_file_is_named_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / f"{LONG_NAME}.wav"
    failed_with(hark("transcribe", path), f"{path}: no such file")


def test_a_name_is_not_read_as_markup(tmp_path: Path) -> None:
    path = tmp_path / "[red]take[/red] [2].wav"
    failed_with(hark("transcribe", path), f"{path}: no such file")


@pytest.mark.parametrize("output", ["text", "srt", "json"])
def test_a_broken_file_is_complained_of_and_the_others_are_written(talk: Path, tmp_path: Path, output: str) -> None:
    bad = broken(tmp_path / f"{LONG_NAME}.mp3")
    result = hark("transcribe", bad, talk, "-f", output)
    failed_with(result, f"{bad}: this is no audio or video file that can be read")
    assert result.stdout == hark("transcribe", talk, "-f", output).stdout != ""


def test_an_engine_that_does_not_start_is_said_once(
    talk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARK_ENGINE_PYTHON", "/nowhere/python")
    result = hark("transcribe", talk, talk)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.count("the engine did not start") == 1
    assert "/nowhere/python" in result.stderr


# --- stream ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


def test_stream_prints_what_is_said(server: Server, talk: Path) -> None:
    result = hark("stream", talk, "--url", server.stream_url())
    assert (result.exit_code, result.stdout, result.stderr) == (0, "alpha bravo\ncharlie\n", "")


def test_stream_prints_every_event_as_a_json_line(server: Server, talk: Path) -> None:
    events = [
        json.loads(line)
        for line in hark("stream", talk, "--json", "--url", server.stream_url()).stdout.split("\n")[:-1]
    ]
    assert [event["type"] for event in events][:: len(events) - 1] == ["ready", "done"]
    assert [event["text"] for event in events if event["type"] == "final"] == ["alpha bravo", "charlie"]
    assert all(event["received_ms"] >= 0 for event in events)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_stream_says_that_no_service_answers(talk: Path, free_port: int, host: str) -> None:
    url = f"ws://{host}:{free_port}/v1/stream"
    failed_with(
        hark("stream", talk, "--url", url),
        f"no service answers at {url}; `hark serve` starts one, --url names another",
    )


@pytest.mark.parametrize("path", ["/v1/nothing", "/healthz"])
def test_stream_to_what_is_no_stream_is_a_clear_failure(server: Server, talk: Path, path: str) -> None:
    result = hark("stream", talk, "--url", server.url(path).replace("http", "ws"))
    assert result.exit_code == 1
    assert result.stderr.startswith("hark: no service answers at ws://")
    assert "HTTP" in result.stderr


def test_stream_to_what_is_no_address_is_a_clear_failure(talk: Path) -> None:
    result = hark("stream", talk, "--url", "localhost:7860")
    assert result.exit_code == 1
    assert result.stderr.startswith("hark: no service answers at localhost:7860")


def test_stream_of_a_broken_file_ends_at_once(server: Server, tmp_path: Path) -> None:
    result = hark("stream", broken(tmp_path / "a.mp3"), "--url", server.stream_url())
    failed_with(result, "this is no audio or video file that can be read")


def test_stream_of_a_missing_file_is_said_before_anything_else(tmp_path: Path) -> None:
    path = tmp_path / f"{LONG_NAME}.wav"
    failed_with(hark("stream", path), f"no such file: {path}")


def test_stream_says_why_the_service_refuses(server: Server, talk: Path) -> None:
    result = hark("stream", talk, "--language", "xx", "--url", server.stream_url())
    assert result.exit_code == 1
    assert "xx" in result.stderr
    assert isinstance(result.exception, SystemExit)


# --- serve and fetch -------------------------------------------------------------------------------------------------


def test_serve_says_that_the_port_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        failed_with(hark("serve", "--port", port), f"cannot listen on 127.0.0.1:{port}: Address already in use")


def test_a_wrong_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARK_PAUSE_MS", "soon")
    result = hark("serve", "--port", 0)
    assert result.exit_code == 1
    assert result.stderr.startswith("hark: HARK_PAUSE_MS: ")


def test_print_config_shows_every_setting_and_leaves() -> None:
    shown = json.loads(hark("serve", "--port", 1234, "--print-config").stdout)
    assert shown["port"] == 1234
    assert shown["engine"] == "scripted"


def test_fetch_of_a_model_that_does_not_exist_says_so() -> None:
    result = hark("fetch", "nosuchmodel")
    failed_with(result, "the weights 'nosuchmodel' cannot be had:")
    assert result.stdout == ""
