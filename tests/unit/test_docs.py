"""README.md and docs/protocol.md say what the code does, and their examples run.

``python -m tests.unit.test_docs`` rewrites the README's table of settings; what a setting means is taken from its
description, or kept from the table where it has none.
"""

import ast
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import wave
from collections.abc import Iterator
from dataclasses import fields
from enum import Enum
from pathlib import Path

import pytest
import typer
from pydantic import SecretStr
from typer.core import TyperGroup

from app import cli
from app.errors import surface
from app.live import LiveConfig
from app.main import create_app
from app.settings import Settings, load_settings
from app.telemetry import Metrics
from app.wire import native
from models.scripted import VOCABULARY, encode_words
from streaming import errors, events
from streaming.audio import SAMPLE_RATE
from streaming.errors import BadMessage, RecognizerFailed
from streaming.types import Word

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PROTOCOL = (ROOT / "docs" / "protocol.md").read_text("utf-8")
LANGUAGES = frozenset({"en", "de"})
START_MARK = "<!-- settings: written by python -m tests.unit.test_docs -->\n"
END_MARK = "<!-- /settings -->"


# --- reading the documents -------------------------------------------------------------------------------------------


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.M | re.S)


def table(text: str, first_header: str) -> dict[str, list[str]]:
    """The rows of the table whose first column has this header: name in backticks → the other cells."""
    lines = text[text.index(f"| {first_header} |") :].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return {name: row[1:] for row in rows for name in re.findall(r"`([^`]+)`", row[0])}


# --- settings --------------------------------------------------------------------------------------------------------


def shown_default(name: str, value: object) -> str:
    match name, value:
        case "engine_python", _:
            return "Hark's own"
        case "cache_dir", _:
            return "`~/.cache/hark`"
        case _, "" | SecretStr():
            return "none"
        case _, bool():
            return f"`{str(value).lower()}`"
        case _, Enum():
            return f"`{value.value}`"
        case _, float():
            return f"`{value:g}`"
        case _:
            return f"`{value}`"


def shown_range(schema: dict[str, object], definitions: dict[str, dict[str, object]]) -> str:
    if "$ref" in schema:
        schema = definitions[str(schema["$ref"]).rsplit("/", 1)[-1]]
    match schema:
        case {"enum": list(values)}:
            return ", ".join(f"`{value}`" for value in values)
        case {"pattern": str(pattern)}:
            return ", ".join(f"`{value}`" for value in pattern.strip("^()$").split("|"))
        case {"type": "boolean"}:
            return "`true`, `false`"
        case {"minimum": low, "maximum": high}:
            return f"{low:g} to {high:g}"
        case {"minimum": low}:
            return f"{low:g} and more"
        case {"exclusiveMinimum": low}:
            return f"more than {low:g}"
        case _:
            return ""


def settings_table(meanings: dict[str, str]) -> str:
    schema = Settings.model_json_schema()
    rows = ["| variable | default | allowed | meaning |", "|---|---|---|---|"]
    for name, field in Settings.model_fields.items():
        variable = f"HARK_{name.upper()}"
        meaning = field.description or meanings.get(variable, "")
        allowed = shown_range(schema["properties"][name], schema.get("$defs", {}))
        rows.append(f"| `{variable}` | {shown_default(name, field.default)} | {allowed} | {meaning} |")
    return "\n".join(rows) + "\n"


def settings_block(readme: str) -> str:
    return readme.split(START_MARK)[1].split(END_MARK)[0]


def meanings_in(block: str) -> dict[str, str]:
    return {name: row[2] for name, row in table(block + "\n\n", "variable").items()} if block.strip() else {}


def rewrite_readme() -> None:
    readme = README.read_text("utf-8")
    block = settings_block(readme)
    README.write_text(readme.replace(START_MARK + block, START_MARK + settings_table(meanings_in(block))), "utf-8")


def test_the_readme_lists_every_setting_as_it_is() -> None:
    block = settings_block(README.read_text("utf-8"))
    assert block == settings_table(meanings_in(block)), "run python -m tests.unit.test_docs"
    assert all(meanings_in(block).values()), "a setting has neither a description nor a meaning in the README"


def test_settings_that_the_documents_name_exist() -> None:
    known = {f"HARK_{name.upper()}" for name in Settings.model_fields} | {"HARK_CORPUS"}
    for path in [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]:
        assert set(re.findall(r"HARK_[A-Z_]+", path.read_text("utf-8"))) <= known, path.name


# --- error codes -----------------------------------------------------------------------------------------------------


def _constants(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value:
        yield node.value


def _codes_of(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(code, name of the class that is raised with it, "" where that is not plain) at this node of a syntax tree."""
    match node:
        case ast.ClassDef(name=name):
            for line in node.body:
                if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "code":
                    yield from ((code, name) for code in _constants(line.value))
        case ast.Call(func=ast.Name(id=name)):
            for keyword in node.keywords:
                if keyword.arg == "code":
                    yield from ((code, name) for code in _constants(keyword.value))
            position = {"Unusable": 0, "Report": 0, "_object": 2}.get(name)
            if position is not None and len(node.args) > position:
                yield from ((code, "") for code in _constants(node.args[position]))
        case ast.Call(func=ast.Attribute(attr="_failed")):
            yield from ((code, "") for code in _constants(node.args[0]) if node.args)
        case ast.Assign(targets=[ast.Tuple(elts=[ast.Name(id="code"), *_])]):
            pairs = [child for child in ast.walk(node.value) if isinstance(child, ast.Tuple)]
            yield from ((code, "") for pair in pairs for code in _constants(pair.elts[0]))


def codes_in_the_code() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path in [*sorted((ROOT / "app").rglob("*.py")), *sorted((ROOT / "streaming").rglob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            for code, name in _codes_of(node):
                found.setdefault(code, set()).add(name)
    return found


def test_the_protocol_lists_every_error_code_and_no_other() -> None:
    listed, raised = set(table(PROTOCOL, "code | HTTP")), set(codes_in_the_code()) | {"not_found"}
    assert "bad_parameter" in raised, "the search itself is broken"
    assert "media_too_complex" in raised, "the search itself is broken"
    assert raised - listed == set()
    assert listed - raised == set()


def test_the_protocol_gives_the_status_and_the_close_code_of_every_error() -> None:
    rows = table(PROTOCOL, "code | HTTP")
    checked = 0
    for code, names in codes_in_the_code().items():
        for name in names & set(vars(errors)):
            error = vars(errors)[name]("message", code=code)
            close = "4400" if code in ("bad_parameter", "unknown_parameter", "unknown_language") else ""
            http_status, stated_close = rows[code][:2]
            if code == "shutting_down" and name == "SttError":
                continue  # a stream's farewell: 1012
            assert http_status == str(surface(error).http_status), code
            assert stated_close in ("-", close or str(surface(error).close_code)), code
            checked += 1
    assert checked > 15


# --- the native protocol ---------------------------------------------------------------------------------------------


def test_the_protocol_lists_every_parameter_with_its_default() -> None:
    rows = table(PROTOCOL, "parameter")
    assert set(rows) == {field.name for field in fields(native.StreamParameters)}
    for name, row in rows.items():
        default = getattr(native.StreamParameters(), name)
        if default in (None, "", ()):
            assert row[0] in ("detect", "none"), name
        else:
            plain = default.value if isinstance(default, Enum) else default
            assert row[0] == f"`{str(plain).lower() if isinstance(plain, bool) else plain}`", name
        if isinstance(default, Enum):
            assert re.findall(r"`([^`]+)`", row[1]) == [choice.value for choice in type(default)], name


def _accepts(name: str, value: object) -> bool:
    try:
        native.parse_parameters(native.StreamParameters(), {name: value}, LANGUAGES)
    except BadMessage:
        return False
    return True


def test_the_protocol_gives_the_range_of_every_number() -> None:
    checked = 0
    for name, row in table(PROTOCOL, "parameter").items():
        if found := re.fullmatch(r"(\d+) to (\d+)", row[1]):
            low, high = int(found[1]), int(found[2])
            assert [_accepts(name, value) for value in (low - 1, low, high, high + 1)] == [False, True, True, False], (
                name
            )
            checked += 1
    assert checked == 5
    assert [_accepts("threshold", value) for value in (0.049, 0.05, 0.99, 1.0)] == [False, True, True, False]
    assert _accepts("prompt", "x" * 1000)
    assert not _accepts("prompt", "x" * 1001)
    assert _accepts("hotwords", ["x" * 100] * 200)
    assert not _accepts("hotwords", ["x"] * 201)
    assert not _accepts("hotwords", ["x" * 101])


def rendered_examples() -> list[dict[str, object]]:
    """One of every message that the service sends."""
    word = Word(" a", 0, 1, 1.0)
    failure = RecognizerFailed("message")
    outputs: list[events.ClientEvent] = [
        events.SpeechStarted(0, 0, 0),
        events.SpeechStopped(0, 0, 0),
        events.PartialTranscript(0, 0, "", "", 0, 0),
        events.FinalTranscript(0, 0, "a", (word,), "en", 1.0, 1.0, 0, 0),
        events.TranscriptFailed(0, 0, 0, 0, failure),
        events.SessionDone(0),
    ]
    ready = native.render_ready("id", native.StreamParameters(), "base")
    others = [ready, native.render_lag(0, 0), native.render_error(failure, fatal=False)]
    return [*(native.render(output) for output in outputs), *others]


def test_the_protocol_shows_every_message_with_all_its_fields() -> None:
    shown = {message["type"]: message for message in map(json.loads, blocks(PROTOCOL, "json")) if "type" in message}
    sent = {str(message["type"]): message for message in rendered_examples()}
    assert set(shown) == set(sent)
    for kind, message in sent.items():
        assert list(shown[kind]) == list(message), kind
    assert list(shown["ready"]["config"]) == [field.name for field in fields(native.StreamParameters)]
    assert list(shown["final"]["words"][0]) == list(sent["final"]["words"][0])  # type: ignore[index]


def test_the_protocol_names_every_control_message() -> None:
    section = PROTOCOL.split("## 1.2")[1].split("## 1.3")[0]
    shown = set(re.findall(r'"type":"(\w+)"', section))
    assert shown == {"config", *(control.value for control in native.Control)}


def test_the_protocol_gives_the_bounds_of_a_stream() -> None:
    limits, prose = LiveConfig(), " ".join(PROTOCOL.split())
    assert f"more than {limits.max_outstanding} utterances wait" in prose
    assert f"more than {limits.max_complaints} errors that are not fatal" in prose
    assert f"no more than {limits.max_outbox} messages ahead" in prose
    assert limits.lag_interval_s == 1.0
    assert "`lag`: once a second" in prose


# --- the HTTP endpoints and the command ------------------------------------------------------------------------------


def test_the_protocol_names_every_path_and_metric() -> None:
    paths = {str(route.path) for route in create_app(load_settings(engine="scripted")).routes if hasattr(route, "path")}
    public = {path.replace("{model_id:path}", "{id}") for path in paths if not path.startswith(("/api/v1", "/static"))}
    for path in public - {"/docs/oauth2-redirect"}:
        assert f"{path}`" in PROTOCOL, path
    served = {f"{m.name}_total" if m.type == "counter" else m.name for m in Metrics().registry.collect()}
    assert served == set(re.findall(r"`(hark_\w+)`", PROTOCOL))


def test_the_commands_in_the_readme_have_their_options() -> None:
    group = typer.main.get_command(cli.app)
    assert isinstance(group, TyperGroup)
    text = README.read_text("utf-8")
    lines = [line.split("#")[0] for block in blocks(text, "sh") for line in block.splitlines()]
    lines += re.findall(r"`(hark [^`]+)`", text)
    commands = [found[0].split() for line in lines if (found := re.search(r"\bhark .*", line))]
    assert len(commands) > 5
    for _, name, *words in commands:
        known = {option for parameter in group.commands[name].params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, name


# --- the examples run ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """The port of the real command with the scripted engine."""
    command = [sys.executable, "-m", "app", "serve", "--host", "127.0.0.1", "--port", "0", "--engine", "scripted"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = ""
            while "engine_ready" not in said:
                line = process.stderr.readline()
                assert line, said
                said += line
            found = re.search(r"http://[\w.]+:(\d+)", said)
            assert found, said
            yield int(found[1])
        finally:
            process.terminate()


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Two utterances for the scripted engine."""
    words = [None, "alpha", "bravo", "charlie", *[None] * 9, "delta", "echo", "foxtrot", None]
    path = tmp_path / "talk.wav"
    with wave.open(str(path), "wb") as wav:
        wav.setparams((1, 2, SAMPLE_RATE, 0, "NONE", ""))
        wav.writeframes(encode_words(words).tobytes())
    return path


def run(command: list[str], port: int) -> str:
    local = [word.replace("localhost:7860", f"127.0.0.1:{port}") for word in command]
    done = subprocess.run(local, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def python_example(module: str) -> str:
    [example] = [code for code in blocks(README.read_text("utf-8"), "python") if f"{module}" in code.split("\n\n\n")[0]]
    return example


def test_the_python_example_streams(port: int, recording: Path) -> None:
    lines = run([sys.executable, "-c", python_example("import websockets"), str(recording)], port).splitlines()
    finals = [line for line in lines if not line.startswith("...")]
    assert finals == ["0.1 s, channel 0: alpha bravo charlie", "1.3 s, channel 0: delta echo foxtrot"]


def test_the_sdk_example_transcribes(port: int, recording: Path) -> None:
    if importlib.util.find_spec("openai") is None:
        pytest.skip("the package openai is not installed")
    said = run([sys.executable, "-c", python_example("from openai"), str(recording)], port)
    assert_words(said)


def test_the_curl_examples_transcribe(port: int, recording: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    block = next(block for block in blocks(README.read_text("utf-8"), "sh") if "curl" in block)
    answers = [run(_on(line, recording), port) for line in block.splitlines()]
    assert_words(json.loads(answers[0])["text"])
    assert "00:00:01," in answers[1]


def _on(command: str, recording: Path) -> list[str]:
    return ["curl", "-sS", *(re.sub(r"file=@.*", f"file=@{recording}", word) for word in command.split()[1:])]


def test_the_readme_streams_a_file_with_the_command(port: int, recording: Path) -> None:
    assert "hark stream talk.mp3 " in README.read_text("utf-8")
    url = f"ws://127.0.0.1:{port}/v1/stream"
    said = run([sys.executable, "-m", "app", "stream", str(recording), "--url", url], port)
    assert len(said.splitlines()) == 2
    assert_words(said)


def assert_words(text: str) -> None:
    """A file's way through the decoder takes the offset off its samples, so that its words become other ones."""
    assert text.split()
    assert set(text.split()) <= set(VOCABULARY)


if __name__ == "__main__":
    rewrite_readme()
