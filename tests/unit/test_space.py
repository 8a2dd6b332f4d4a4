"""The Space: its description, and what huggingface_hub really sends for it, to a hub on loopback."""

import base64
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import HfApi
from typer.main import get_command

from app import cli, space
from app.settings import Settings
from tests.support.dockerfile import parse
from tests.support.hub import TOKEN, FakeHub, fake_hub

ROOT = Path(__file__).resolve().parents[2]
SECRET = "s3cret-of-the-test"


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as served:
        yield served


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A small one, with a description that has everything."""
    root = tmp_path / "project"
    (root / "app" / "__pycache__").mkdir(parents=True)
    (root / "app" / "main.py").write_text("print()\n")
    (root / "app" / "__pycache__" / "main.py").write_text("compiled")
    (root / "app" / "secret.env").write_text("never")
    (root / "Dockerfile").write_text("FROM scratch\n")
    (root / "README.md").write_text("# Demo\n")
    describe(root)
    return root


def describe(project: Path, **changes: Any) -> None:
    description: dict[str, Any] = {
        "card": {
            "title": "Demo",
            "emoji": "👂",
            "colorFrom": "red",
            "colorTo": "blue",
            "sdk": "docker",
            "app_port": 7860,
            "startup_duration_timeout": "1h",
        },
        "hardware": [
            {"flavor": "l4x1", "sleep_time_s": 900, "variables": {"HARK_MODEL": "large"}},
            {"flavor": "cpu-basic", "variables": {"HARK_MODEL": "base"}},
        ],
        "variables": {"HARK_HOST": "0.0.0.0"},
        "secrets": {"HF_TOKEN": "for TURN"},
        "files": ["Dockerfile", "app/**/*.py"],
    }
    (project / "space.yaml").write_text(yaml.safe_dump({**description, **changes}, allow_unicode=True), "utf-8")


def run(hub_url: str, project: Path, *words: str, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    """The real command, without the login of whoever runs the tests."""
    foreign = ("HF_", "HUGGING")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    environment |= {"HF_ENDPOINT": hub_url, "HF_HOME": str(project.parent / "home"), "TURN_TOKEN": SECRET}
    if token:
        environment["HF_TOKEN"] = token
    command = [sys.executable, "-m", "app", "space", *words, "--project", str(project)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)


def order_of(project: Path, **choice: Any) -> space.Order:
    return space.make_order(space.load(project), value_of={"HF_TOKEN": SECRET}.get, **choice)


def connected(hub: FakeHub, said: list[str]) -> space.Hub:
    return space.Hub(HfApi(endpoint=hub.url, token=TOKEN), said.append)


# --- what is sent ----------------------------------------------------------------------------------------------------


def test_create_makes_a_space_with_hardware_variables_and_secrets_and_uploads_the_project(
    hub: FakeHub, project: Path
) -> None:
    done = run(hub.url, project, "create", "me/demo", "--secret", "HF_TOKEN=TURN_TOKEN", "--private")
    assert done.returncode == 0, done.stderr
    made, tree, _, preupload, commit = hub.calls
    assert (made.method, made.path) == ("POST", "/api/repos/create")
    assert made.json == {
        "name": "demo",
        "organization": "me",
        "type": "space",
        "visibility": "private",
        "sdk": "docker",
        "hardware": "l4x1",
        "sleepTimeSeconds": 900,
        "variables": [{"key": "HARK_HOST", "value": "0.0.0.0"}, {"key": "HARK_MODEL", "value": "large"}],
        "secrets": [{"key": "HF_TOKEN", "value": SECRET, "description": "for TURN"}],
    }
    assert tree.path.startswith("/api/spaces/me/demo/tree/main")
    assert preupload.path == "/api/spaces/me/demo/preupload/main"
    assert commit.path == "/api/spaces/me/demo/commit/main"
    files = {line["value"]["path"]: line["value"] for line in commit.lines if line["key"] == "file"}
    assert set(files) == {"Dockerfile", "README.md", "app/main.py"}
    assert base64.b64decode(files["app/main.py"]["content"]) == b"print()\n"
    assert f"{hub.url}/spaces/me/demo" in done.stderr


def test_duplicate_asks_the_hub_to_copy(hub: FakeHub, project: Path) -> None:
    done = run(hub.url, project, "duplicate", "them/hark", "me/mine", "--hardware", "cpu-basic")
    assert done.returncode == 0, done.stderr
    (call,) = hub.calls
    assert (call.method, call.path) == ("POST", "/api/spaces/them/hark/duplicate")
    assert call.json == {
        "repository": "me/mine",
        "hardware": "cpu-basic",
        "variables": [{"key": "HARK_HOST", "value": "0.0.0.0"}, {"key": "HARK_MODEL", "value": "base"}],
    }


def test_push_replaces_what_is_there_in_one_commit(hub: FakeHub, project: Path) -> None:
    hub.files = [".gitattributes", "README.md", "app/old.py"]
    connected(hub, []).push("me/demo", space.load(project), project)
    (commit,) = [call for call in hub.calls if "/commit/" in call.path]
    assert [line["value"]["path"] for line in commit.lines if line["key"] == "deletedFile"] == ["app/old.py"]
    (readme,) = [line["value"] for line in commit.lines if line["value"].get("path") == "README.md"]
    text = base64.b64decode(readme["content"]).decode()
    assert text == space.front_matter(space.load(project)) + "# Demo\n"


@pytest.mark.parametrize(
    "words",
    [
        ("create", "me/demo", "--secret", "HF_TOKEN=TURN_TOKEN"),
        ("duplicate", "them/hark", "me/demo", "--secret", "HF_TOKEN=TURN_TOKEN", "--private"),
        ("push", "me/demo"),
    ],
    ids=["create", "duplicate", "push"],
)
def test_a_dry_run_prints_what_would_be_sent_and_sends_nothing(
    hub: FakeHub, project: Path, words: tuple[str, ...]
) -> None:
    rehearsed = run(hub.url, project, *words, "--dry-run", token="")
    assert rehearsed.returncode == 0, rehearsed.stderr
    assert hub.calls == []
    assert run(hub.url, project, *words).returncode == 0
    assert rehearsed.stdout == "".join(f"{call.shown}\n" for call in hub.calls)
    assert "/demo" in rehearsed.stdout
    assert SECRET not in rehearsed.stdout + rehearsed.stderr
    if "--secret" in words:
        assert '"HF_TOKEN"' in rehearsed.stdout


# --- what may go wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 402, 403])
def test_hardware_that_is_refused_leaves_the_next_with_its_own_variables(
    hub: FakeHub, project: Path, status: int
) -> None:
    hub.flavors = {"l4x1": (status, "You must add a payment method")}
    said: list[str] = []
    connected(hub, said).create("me/demo", project, order_of(project))
    first, second = (call.json for call in hub.calls if call.path == "/api/repos/create")
    assert (first["hardware"], second["hardware"]) == ("l4x1", "cpu-basic")
    assert {"key": "HARK_MODEL", "value": "base"} in second["variables"]
    assert "sleepTimeSeconds" not in second
    assert said[:2] == ["l4x1 was refused: You must add a payment method", "asked for cpu-basic"]


def test_where_all_hardware_is_refused_the_last_reason_is_told_and_nothing_is_uploaded(
    hub: FakeHub, project: Path
) -> None:
    hub.flavors = {"l4x1": (403, "no card"), "cpu-basic": (402, "requires a PRO subscription")}
    done = run(hub.url, project, "create", "me/demo")
    assert done.returncode == 1
    assert "hark: l4x1 was refused: no card" in done.stderr
    assert "hark: the hub answered 402: requires a PRO subscription" in done.stderr
    assert [call.path for call in hub.calls] == ["/api/repos/create"] * 2


def test_a_taken_name_is_not_tried_on_other_hardware_and_not_overwritten(hub: FakeHub, project: Path) -> None:
    hub.taken = {"me/demo"}
    with pytest.raises(space.NameTaken, match="there is a Space me/demo already"):
        connected(hub, []).create("me/demo", project, order_of(project))
    with pytest.raises(space.NameTaken, match="there is a Space me/demo already"):
        connected(hub, []).duplicate("them/hark", "me/demo", order_of(project))
    assert len(hub.calls) == 2


def test_a_space_that_is_not_there_is_named(hub: FakeHub, project: Path) -> None:
    hub.missing = {"me/gone"}
    with pytest.raises(space.NoSuchSpace, match="there is no Space me/gone"):
        connected(hub, []).push("me/gone", space.load(project), project)
    with pytest.raises(space.NoSuchSpace, match="there is no Space me/gone"):
        connected(hub, []).duplicate("me/gone", "me/demo", order_of(project))


def test_without_a_login_nothing_is_asked(hub: FakeHub, project: Path) -> None:
    done = run(hub.url, project, "create", "me/demo", token="")
    assert (done.returncode, hub.calls) == (1, [])
    assert done.stderr.startswith("hark: not logged in to the hub")


def test_a_login_that_the_hub_does_not_know_is_told(hub: FakeHub, project: Path) -> None:
    done = run(hub.url, project, "create", "me/demo", token="hf_other")
    assert done.returncode == 1
    assert done.stderr == "hark: the hub does not know your token: Invalid username or password.\n"


def test_a_hub_that_does_not_answer_is_told(project: Path) -> None:
    with fake_hub() as gone:
        pass
    with pytest.raises(space.HubUnreachable):
        connected(gone, []).duplicate("them/hark", "me/demo", order_of(project))


@pytest.mark.parametrize("name", ["demo", "a/b/c", "me/", "me/de mo", "me/-demo"])
def test_a_bad_name_is_refused_before_anything_is_sent(hub: FakeHub, project: Path, name: str) -> None:
    with pytest.raises(space.BadDescription):
        connected(hub, []).create(name, project, order_of(project))
    assert hub.calls == []


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"flavor": "t4"}, "lists no hardware 't4', only l4x1, cpu-basic"),
        ({"secrets": ["OTHER"]}, "lists no secret 'OTHER', only HF_TOKEN"),
        ({"secrets": ["HF_TOKEN=UNSET"]}, "HF_TOKEN needs its value in the environment variable UNSET"),
    ],
)
def test_what_the_description_does_not_list_cannot_be_chosen(
    project: Path, choice: dict[str, Any], message: str
) -> None:
    with pytest.raises(space.BadDescription, match=message):
        order_of(project, **choice)


# --- the description -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("card: [", "is not YAML"),
        ("- card", "the file: "),
        ("", "the file: "),
        ("colour: red", "colour: Extra inputs are not permitted"),
    ],
)
def test_a_file_that_is_no_description_is_refused(project: Path, text: str, message: str) -> None:
    (project / "space.yaml").write_text(text)
    with pytest.raises(space.BadDescription, match=re.escape(message)):
        space.load(project)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hardware": []}, "hardware: "),
        ({"hardware": [{"flavour": "l4x1"}]}, "hardware.0.flavor: Field required"),
        ({"hardware": [{"flavor": "l4x1", "sleep_time_s": 0}]}, "hardware.0.sleep_time_s: "),
        ({"variables": {"HARK_PORT": 7860}}, "variables.HARK_PORT: Input should be a valid string"),
        ({"variables": {"HARK_PORT": "80"}}, "the hub would look at port 7860, but HARK_PORT is 80"),
        ({"variables": {"hark host": "x"}}, "variables.hark host"),
        ({"secrets": {"HF_TOKEN": ""}}, "secrets.HF_TOKEN: "),
        ({"files": []}, "files: "),
        ({"card": {"title": "x"}}, "card.emoji: Field required"),
    ],
)
def test_every_wrong_key_is_named(project: Path, changes: dict[str, Any], message: str) -> None:
    describe(project, **changes)
    with pytest.raises(space.BadDescription, match=re.escape(message)):
        space.load(project)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("colorFrom", "mauve"),
        ("sdk", "gradio"),
        ("app_port", "7860"),
        ("app_port", 0),
        ("short_description", "x" * 61),
        ("startup_duration_timeout", "soon"),
        ("suggested_hardwear", "l4x1"),
    ],
)
def test_a_card_that_the_hub_would_not_understand_is_refused(project: Path, key: str, value: object) -> None:
    card = yaml.safe_load((project / "space.yaml").read_text("utf-8"))["card"]
    describe(project, card={**card, key: value})
    with pytest.raises(space.BadDescription, match=f"card.{key}"):
        space.load(project)


@pytest.mark.parametrize("pattern", ["nothing/*", "/etc/hostname", "../other.txt", "link.txt", "Dockerfile/"])
def test_files_that_are_not_the_projects_are_refused(project: Path, pattern: str) -> None:
    (project.parent / "other.txt").write_text("x")
    (project / "link.txt").symlink_to(project.parent / "other.txt")
    describe(project, files=["Dockerfile", pattern])
    with pytest.raises(space.BadDescription, match=re.escape(pattern)):
        space.uploads(space.load(project), project)


def test_a_space_without_a_dockerfile_or_with_two_front_matters_is_refused(project: Path) -> None:
    (project / "README.md").write_text("---\ntitle: x\n---\n")
    with pytest.raises(space.BadDescription, match="has a front matter"):
        space.uploads(space.load(project), project)
    (project / "README.md").unlink()
    with pytest.raises(space.BadDescription, match="cannot be read"):
        space.uploads(space.load(project), project)
    (project / "README.md").write_text("# Demo\n")
    describe(project, files=["app/main.py"])
    with pytest.raises(space.BadDescription, match="needs Dockerfile"):
        space.uploads(space.load(project), project)


# --- this project's own ----------------------------------------------------------------------------------------------


def test_the_front_matter_is_the_description() -> None:
    written = yaml.safe_load((ROOT / "space.yaml").read_text("utf-8"))
    head = space.front_matter(space.load(ROOT))
    assert head.startswith("---\n")
    assert head.endswith("\n---\n")
    assert yaml.safe_load(head[4:-4]) == {**written["card"], "suggested_hardware": written["hardware"][0]["flavor"]}


def test_the_space_gets_every_file_that_the_image_is_made_of() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "app", "models", "streaming"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}
    sent = set(space.uploads(space.load(ROOT), ROOT))
    assert tracked - sent == set()
    assert {name for name in sent if name.startswith(("app/", "models/", "streaming/"))} - tracked == set()
    assert {"Dockerfile", ".dockerignore", "pyproject.toml", "README.md", "LICENSE", "space.yaml"} <= sent


def test_its_variables_and_secrets_are_read_by_somebody() -> None:
    described = space.load(ROOT)
    names = {*described.variables, *(name for hardware in described.hardware for name in hardware.variables)}
    settings = {f"HARK_{name.upper()}" for name in Settings.model_fields}
    last = parse((ROOT / "Dockerfile").read_text("utf-8"))
    arguments = {i.value.partition("=")[0] for stage in last for i in stage.instructions if i.keyword == "ARG"}
    assert names <= settings | arguments
    assert set(described.secrets) <= settings | {"HF_TOKEN"}


def test_the_commands_in_the_document_have_their_options() -> None:
    group = get_command(cli.app).commands["space"]  # type: ignore[attr-defined]
    text = (ROOT / "docs" / "deploy.md").read_text("utf-8")
    commands = [line.split("#")[0].split() for line in re.findall(r"hark space (\w.*)", text)]
    assert len(commands) >= 3
    for name, *words in commands:
        known = {option for parameter in group.commands[name].params for option in parameter.opts}
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known, name
