"""The Hugging Face Space that space.yaml describes: created, duplicated and brought up to date from that file alone.

huggingface_hub makes every call and finds the login and the hub by itself (`HF_TOKEN` or `hf auth login`,
`HF_ENDPOINT`). A dry run makes the same calls to a transport that shows them and sends nothing.
"""

import contextlib
import json
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import unquote

import httpx
import yaml
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token, set_client_factory
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

FILE_NAME = "space.yaml"
_README = "README.md"
_KEPT = frozenset({".gitattributes"})  # the hub's own, made with the repository
_HIDDEN = "(not shown)"
# What the hub answers where it does not give a flavour: 402 and 403 for want of a plan or a payment method
# (huggingface_hub#4535, gradio#3804), 400 for a flavour that it does not have (any more).
_REFUSALS = frozenset({400, 402, 403})

Say = Callable[[str], None]


class SpaceError(Exception):
    """Base of what keeps a Space from being made; the text is for a person at a terminal."""


class BadDescription(SpaceError):
    """space.yaml, or the project that it describes, is not as it must be."""


class NotLoggedIn(SpaceError):
    """There is no token, or the hub does not know it."""


class NameTaken(SpaceError):
    """The account has a repository of that name."""


class NoSuchSpace(SpaceError):
    """There is none of that name, or this account may not see it."""


class HubRefused(SpaceError):
    """The hub does not do it, and says why."""


class HubUnreachable(SpaceError):
    """The hub gives no answer."""


# --- the description -------------------------------------------------------------------------------------------------

Color = Literal["red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray"]
VariableName = Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")]
Text = Annotated[str, Field(min_length=1)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Card(_Frozen):
    """The front matter of the Space's README, named as in the hub's configuration reference."""

    title: Text
    emoji: Text
    color_from: Color = Field(alias="colorFrom")
    color_to: Color = Field(alias="colorTo")
    sdk: Literal["docker"]
    app_port: int = Field(ge=1, le=65535)
    short_description: str | None = Field(None, max_length=60)
    license: str | None = None
    tags: list[Text] = []
    models: list[Text] = []
    startup_duration_timeout: str | None = Field(None, pattern=r"^[1-9][0-9]*[smh]$")


class Hardware(_Frozen):
    """A flavour that the Space may run on, and the variables that it gets there."""

    flavor: Text
    sleep_time_s: int | None = Field(None, ge=1)
    variables: dict[VariableName, str] = {}


class Space(_Frozen):
    """All of space.yaml. ``hardware``: in order of preference. ``secrets``: names and what they are for."""

    card: Card
    hardware: list[Hardware] = Field(min_length=1)
    variables: dict[VariableName, str] = {}
    secrets: dict[VariableName, Text] = {}
    files: list[Text] = Field(min_length=1)

    @model_validator(mode="after")
    def _ports_agree(self) -> "Space":
        for hardware in self.hardware:
            port = {**self.variables, **hardware.variables}.get("HARK_PORT", str(self.card.app_port))
            if port != str(self.card.app_port):
                raise ValueError(f"the hub would look at port {self.card.app_port}, but HARK_PORT is {port}")
        return self


def load(project: Path) -> Space:
    """What the project's space.yaml says. Raises BadDescription with one line for each thing that is wrong."""
    path = project / FILE_NAME
    try:
        return Space.model_validate(yaml.safe_load(path.read_text("utf-8")))
    except OSError as error:
        raise BadDescription(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadDescription(f"{path} is not YAML: {error}") from None
    except ValidationError as error:
        lines = [f"{path}: {'.'.join(map(str, e['loc'])) or 'the file'}: {e['msg']}" for e in error.errors()]
        raise BadDescription("\n".join(lines)) from None


def front_matter(space: Space) -> str:
    """The block that the hub reads at the head of README.md."""
    card = space.card.model_dump(by_alias=True, exclude_defaults=True)
    card["suggested_hardware"] = space.hardware[0].flavor
    return f"---\n{yaml.safe_dump(card, sort_keys=False, allow_unicode=True)}---\n"


def uploads(space: Space, project: Path) -> dict[str, bytes | Path]:
    """Every file that the Space consists of: its path there, and its content or where that is.

    Raises BadDescription where a glob finds nothing, or a file that lies elsewhere or belongs to no Space.
    """
    found: dict[str, bytes | Path] = {}
    for pattern in space.files:
        if pattern.startswith("/"):
            raise BadDescription(f"{FILE_NAME}: files: {pattern} must be relative")
        paths = [path for path in sorted(project.glob(pattern)) if path.is_file() and "__pycache__" not in path.parts]
        if not paths:
            raise BadDescription(f"{FILE_NAME}: files: {pattern} finds nothing in {project}")
        for path in paths:
            if path.is_symlink() or not path.resolve().is_relative_to(project.resolve()):
                raise BadDescription(f"{FILE_NAME}: files: {path} is a link or lies outside {project}")
            found[path.relative_to(project).as_posix()] = path
    found[_README] = (front_matter(space) + _readme(project)).encode()
    if "Dockerfile" not in found:
        raise BadDescription(f"{FILE_NAME}: files: a Space with the sdk docker needs Dockerfile")
    return found


def _readme(project: Path) -> str:
    try:
        text = (project / _README).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadDescription(f"{project / _README} cannot be read: {error}") from None
    if text.startswith("---\n"):
        raise BadDescription(f"{project / _README} has a front matter; it belongs into {FILE_NAME}")
    return text


@dataclass(frozen=True, slots=True)
class Order:
    """What of the description is asked for: ``hardware`` in this order, ``secrets`` with their values.

    ``private``: None leaves it to the hub, which takes the account's default or that of the Space which is copied.
    """

    space: Space
    hardware: Sequence[Hardware]
    secrets: Mapping[str, str]
    private: bool | None = None

    def options(self, hardware: Hardware) -> dict[str, Any]:
        """The arguments that huggingface_hub takes for a Space on that hardware."""
        variables = {**self.space.variables, **hardware.variables}
        described = self.space.secrets
        return {
            "repo_type": "space",
            "private": self.private,
            "space_hardware": hardware.flavor,
            "space_sleep_time": hardware.sleep_time_s,
            "space_variables": [{"key": key, "value": value} for key, value in variables.items()] or None,
            "space_secrets": [
                {"key": key, "value": value, "description": described[key]} for key, value in self.secrets.items()
            ]
            or None,
        }


def make_order(
    space: Space,
    *,
    flavor: str | None = None,
    secrets: Sequence[str] = (),
    private: bool | None = None,
    value_of: Callable[[str], str | None],
) -> Order:
    """The description with what the command line chose.

    ``flavor``: that one alone. ``secrets``: ``NAME`` or ``NAME=VARIABLE``, where the value stands in that environment
    variable. Raises BadDescription for what space.yaml does not list and for a variable that is not set.
    """
    hardware = [choice for choice in space.hardware if flavor in (None, choice.flavor)]
    if not hardware:
        known = ", ".join(choice.flavor for choice in space.hardware)
        raise BadDescription(f"{FILE_NAME} lists no hardware {flavor!r}, only {known}")
    values = {}
    for item in secrets:
        name, _, variable = item.partition("=")
        if name not in space.secrets:
            raise BadDescription(f"{FILE_NAME} lists no secret {name!r}, only {', '.join(space.secrets) or 'none'}")
        value = value_of(variable or name)
        if not value:
            raise BadDescription(f"the secret {name} needs its value in the environment variable {variable or name}")
        values[name] = value
    return Order(space, hardware, values, private)


# --- the calls -------------------------------------------------------------------------------------------------------


class Hub:
    """The hub with somebody logged in. ``say`` is told, in sentences, what becomes of what was asked."""

    def __init__(self, api: HfApi, say: Say) -> None:
        self._api = api
        self._say = say

    def create(self, name: str, project: Path, order: Order) -> None:
        """A new Space with the project's files. Raises SpaceError."""
        _check_name(name)
        files = uploads(order.space, project)  # first: nothing is made where these are not in order
        with _typed_errors(name):
            url = self._on_first(order, partial(self._api.create_repo, name, space_sdk=order.space.card.sdk))
        self._upload(name, files)
        self._say(f"the Space is at {url}")

    def duplicate(self, source: str, name: str, order: Order) -> None:
        """Somebody's Space, copied by the hub itself. Raises SpaceError."""
        _check_name(source)
        _check_name(name)
        with _typed_errors(source, name):
            url = self._on_first(order, partial(self._api.duplicate_repo, source, name))
        self._say(f"the Space is at {url}")

    def push(self, name: str, space: Space, project: Path) -> None:
        """Bring the Space's files to the project's, in one commit. Raises SpaceError."""
        _check_name(name)
        self._upload(name, uploads(space, project))
        self._say(f"pushed to {name}; the hub builds it now")

    def _on_first(self, order: Order, make: Callable[..., object]) -> str:
        """``make`` with the first flavour that is not refused. Raises HfHubHTTPError, where all are the last one's."""
        *others, last = order.hardware
        for choice in others:
            try:
                url = make(**order.options(choice))
            except HfHubHTTPError as error:
                if error.response.status_code not in _REFUSALS:
                    raise
                self._say(f"{choice.flavor} was refused: {_reason(error)}")
            else:
                self._say(f"asked for {choice.flavor}")
                return str(url)
        url = make(**order.options(last))
        self._say(f"asked for {last.flavor}")
        return str(url)

    def _upload(self, name: str, files: Mapping[str, bytes | Path]) -> None:
        with _typed_errors(name):
            there = self._api.list_repo_files(name, repo_type="space")
            stale = sorted(set(there) - set(files) - _KEPT)
            self._api.create_commit(
                name,
                repo_type="space",
                operations=[
                    *(CommitOperationAdd(path, content) for path, content in sorted(files.items())),
                    *(CommitOperationDelete(path) for path in stale),
                ],
                commit_message="hark space push",
            )


@contextlib.contextmanager
def _typed_errors(*names: str) -> Iterator[None]:
    """huggingface_hub's errors as SpaceErrors; ``names``: what the calls are about, the one to be made last."""
    try:
        yield
    except RepositoryNotFoundError:
        raise NoSuchSpace(f"there is no Space {names[0]}, or your token may not see it") from None
    except HfHubHTTPError as error:
        raise _typed(error, names) from None
    except (httpx.HTTPError, ConnectionError) as error:
        raise HubUnreachable(f"the hub gives no answer: {str(error) or type(error).__name__}") from None
    except ValueError as error:
        raise HubRefused(str(error)) from None


def _typed(error: HfHubHTTPError, names: Sequence[str]) -> SpaceError:
    match error.response.status_code:
        case 401:
            return NotLoggedIn(f"the hub does not know your token: {_reason(error)}")
        case 404:
            return NoSuchSpace(f"there is no Space {names[0]}, or your token may not see it")
        case 409:
            return NameTaken(f"there is a Space {names[-1]} already; `hark space push` brings it up to date")
        case status:
            return HubRefused(f"the hub answered {status}: {_reason(error)}")


def _reason(error: HfHubHTTPError) -> str:
    return " ".join((error.server_message or str(error)).split())


def _check_name(name: str) -> None:
    """Raises BadDescription unless it is OWNER/NAME."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise BadDescription(str(error)) from None
    if "/" not in name:
        raise BadDescription(f"{name!r} lacks its owner: give OWNER/NAME")


@contextlib.contextmanager
def connected(say: Say) -> Iterator[Hub]:
    """The hub, with the login that is there. Raises NotLoggedIn."""
    token = get_token()
    if token is None:
        raise NotLoggedIn("not logged in to the hub: run `hf auth login`, or put a write token into HF_TOKEN")
    yield Hub(HfApi(token=token), say)


@contextlib.contextmanager
def dry_run(say: Say, show: Say) -> Iterator[Hub]:
    """A hub that has ``show`` say every call with its body, and sends nothing. Needs no login and no network."""
    set_client_factory(lambda: httpx.Client(transport=_Rehearsal(show)))
    try:
        yield Hub(HfApi(token=False), say)
    finally:
        set_client_factory(lambda: httpx.Client(follow_redirects=True, timeout=None))  # as huggingface_hub's own


# --- the dry run -----------------------------------------------------------------------------------------------------


class _Rehearsal(httpx.BaseTransport):
    """Answers as a hub where all goes well and the Space is empty."""

    def __init__(self, show: Say) -> None:
        self._show = show

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        body = request.read()
        answer = _answer(request, body)
        if answer is None:  # huggingface_hub looks up, once a day, whom to name as its user agent: not about the Space
            return httpx.Response(404)
        self._show("\n".join([f"{request.method} {unquote(request.url.raw_path.decode())}", *describe(body)]))
        return httpx.Response(200, json=answer)


def describe(body: bytes) -> list[str]:
    """The body of a call, a line a message: JSON without the values of secrets, and of files their paths and sizes."""
    messages = [json.loads(line) for line in body.splitlines()]
    return [json.dumps(shown, ensure_ascii=False) for message in messages for shown in _shown(message)]


def _shown(message: dict[str, Any]) -> list[dict[str, Any]]:
    match message:
        case {"secrets": list(secrets)}:
            return [{**message, "secrets": [{**secret, "value": _HIDDEN} for secret in secrets]}]
        case {"content": str(readme), "repoType": _}:
            head = readme[: readme.index("\n---\n") + 5]
            return [{**message, "content": f"{head}... ({len(readme)} characters)"}]
        case {"files": list(files)}:
            return [{"path": file["path"], "size": file["size"]} for file in files]
        case {"key": "file", "value": {"path": path, "content": content}}:
            return [{"key": "file", "value": {"path": path, "size": len(b64decode(content))}}]
        case _:
            return [message]


def _answer(request: httpx.Request, body: bytes) -> object | None:
    """None for a call that no Space needs."""
    path = request.url.path
    if path.endswith(("/repos/create", "/duplicate")):
        asked = json.loads(body)
        name = asked.get("repository") or f"{asked['organization']}/{asked['name']}"
        return {"url": f"{request.url.scheme}://{request.url.netloc.decode()}/spaces/{name}"}
    if "/preupload/" in path:
        files = json.loads(body)["files"]
        return {"files": [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]}
    if "/commit/" in path:
        return {"commitUrl": str(request.url).replace("/api/", "/", 1), "commitOid": "0" * 40, "success": True}
    if "/tree/" in path:
        return []
    return {} if path.endswith("/validate-yaml") else None
