"""The ``hark`` command: serve, transcribe, stream, mic, fetch, key, space."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from app import client, key_cli
from app.settings import Engine, Settings, environment_value, load_settings
from streaming.errors import SttError

if TYPE_CHECKING:  # loaded by the commands that need it
    from app.space import Hub, Order

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Speech to text, while it is being spoken.",
)
_stderr = Console(stderr=True)


class OutputFormat(StrEnum):
    TEXT = "text"
    JSON = "json"
    SRT = "srt"
    VTT = "vtt"


def _complain(message: str) -> None:
    """Write it as it is: a path in it is neither wrapped nor read as markup."""
    _stderr.print(Text("hark: ", style="red").append(message, style="default"), soft_wrap=True)


def _fail(message: str) -> typer.Exit:
    _complain(message)
    return typer.Exit(1)


def _settings(**overrides: object) -> Settings:
    try:
        return load_settings(**overrides)
    except ValueError as error:
        raise _fail(str(error)) from None


@app.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on (HARK_HOST).")] = None,
    port: Annotated[int | None, typer.Option(help="Port (HARK_PORT).")] = None,
    model: Annotated[str | None, typer.Option(help="Model name, hub repository or directory (HARK_MODEL).")] = None,
    engine: Annotated[str | None, typer.Option(help="ctranslate, vllm or scripted (HARK_ENGINE).")] = None,
    print_config: Annotated[bool, typer.Option("--print-config", help="Show every setting and leave.")] = False,
) -> None:
    """Serve the page and the API."""
    settings = _settings(host=host, port=port, model=model, engine=engine)
    if print_config:
        print(settings.model_dump_json(indent=2))
        return
    from app import main as root
    from app.telemetry import configure_logging

    if reason := root.refusal(settings):
        raise _fail(reason)
    try:
        sock = root.listen(settings.host, settings.port)
    except OSError as error:
        raise _fail(f"cannot listen on {settings.host}:{settings.port}: {error.strerror}") from None
    _fetch_model(settings)
    shown = "localhost" if settings.host in ("0.0.0.0", "::", "127.0.0.1") else settings.host
    _stderr.print(
        f"Hark listens on [bold]http://{shown}:{sock.getsockname()[1]}[/bold]  (Ctrl-C ends it)", soft_wrap=True
    )
    configure_logging(settings.log_level)
    root.serve(settings, sock)


def _fetch(names: list[str], settings: Settings) -> dict[str, Path]:
    from app import main as root
    from models import weights

    try:
        with weights.ProgressBars(_stderr) as bars:
            return root.fetch(names, settings, bars)
    except SttError as error:
        raise _fail(error.message) from None


def _fetch_model(settings: Settings) -> None:
    if settings.engine is not Engine.SCRIPTED:
        _fetch([settings.model], settings)


@app.command()
def fetch(names: Annotated[list[str], typer.Argument(help="Model names, hub repositories or directories.")]) -> None:
    """Fetch weights (and the speech detector) and say where they are."""
    for name, path in _fetch(names, _settings()).items():
        print(f"{name}\t{path}")


@app.command()
def transcribe(
    files: Annotated[list[Path], typer.Argument(help="Audio or video files.")],
    output_format: Annotated[OutputFormat, typer.Option("--format", "-f")] = OutputFormat.TEXT,
    model: Annotated[str | None, typer.Option(help="Model name, hub repository or directory.")] = None,
    language: Annotated[str | None, typer.Option(help="Language code; detected when left out.")] = None,
    translate: Annotated[bool, typer.Option("--translate", help="Into English.")] = False,
    prompt: Annotated[str, typer.Option(help="Text that might have come before.")] = "",
) -> None:
    """Transcribe recordings, without a server. The text goes to stdout, progress to stderr."""
    from app import batch
    from streaming.types import DecodeOptions, Task

    settings = _settings(model=model)
    _fetch_model(settings)
    task = Task.TRANSLATE if translate else Task.TRANSCRIBE
    options = DecodeOptions(language=language, task=task, prompt=prompt)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=_stderr, disable=not sys.stderr.isatty()) as progress:
        work = batch.Batch(settings, options, output_format.value, progress)
        failed = asyncio.run(work.run(files, sys.stdout, _complain))
    if failed:
        raise typer.Exit(1)


@app.command()
def stream(
    source: Annotated[str, typer.Argument(help="A media file, or - for raw 16-bit PCM on stdin.")],
    url: Annotated[str, typer.Option(help="The service.")] = "ws://localhost:7860/v1/stream",
    realtime: Annotated[bool, typer.Option("--realtime", help="Send at the pace of the audio.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print every event as a JSON line.")] = False,
    language: Annotated[str | None, typer.Option()] = None,
    sample_rate: Annotated[int, typer.Option(help="Of raw PCM on stdin, in Hz.")] = 16_000,
) -> None:
    """Stream a file or stdin to a running service and print the text as it comes."""
    parameters = {"language": language} if language else {}
    if source == "-":
        pcm: AsyncIterator[bytes] = client.read_stdin()
        parameters["sample_rate"] = str(sample_rate)
    else:
        if not Path(source).is_file():
            raise _fail(f"no such file: {source}")
        pcm = client.read_file(Path(source))
    _run_client(pcm, url, parameters, realtime_hz=sample_rate if realtime else None, as_json=as_json)


@app.command()
def mic(
    url: Annotated[str, typer.Option(help="The service.")] = "ws://localhost:7860/v1/stream",
    as_json: Annotated[bool, typer.Option("--json")] = False,
    language: Annotated[str | None, typer.Option()] = None,
) -> None:
    """Stream the microphone (needs the extra ``mic``: pip install 'hark[mic]')."""
    try:
        pcm = client.read_microphone()
    except client.NoMicrophone as error:
        raise _fail(str(error)) from None
    _run_client(pcm, url, {"language": language} if language else {}, realtime_hz=None, as_json=as_json)


def _run_client(
    pcm: AsyncIterator[bytes], url: str, parameters: dict[str, str], *, realtime_hz: int | None, as_json: bool
) -> None:
    is_terminal = sys.stdout.isatty() and not as_json
    printer = client.TerminalPrinter(sys.stdout) if is_terminal else client.LinePrinter(sys.stdout, as_json=as_json)
    try:
        code = asyncio.run(client.stream(url, parameters, pcm, printer.show, realtime_hz=realtime_hz))
    except KeyboardInterrupt:
        code = 130
    except (SttError, client.StreamRefused, OSError) as error:
        raise _fail(str(error) or type(error).__name__) from None
    raise typer.Exit(code)


app.add_typer(key_cli.keys, name="key")

# --- the Hugging Face Space ------------------------------------------------------------------------------------------

spaces = typer.Typer(no_args_is_help=True, help="The Hugging Face Space that space.yaml describes.")
app.add_typer(spaces, name="space")
SpaceName = Annotated[str, typer.Argument(help="OWNER/NAME of the Space.")]
Project = Annotated[Path, typer.Option(help="The directory with space.yaml.")]
Flavor = Annotated[str | None, typer.Option(help="Ask for this one of space.yaml's hardware alone.")]
Secrets = Annotated[
    list[str], typer.Option("--secret", help="NAME or NAME=VARIABLE: send the secret; its value is in the environment.")
]
Private = Annotated[bool, typer.Option("--private", help="For the owner's eyes alone.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print every call that would be made, and make none.")]


@spaces.command()
def create(
    name: SpaceName,
    project: Project = Path(),
    hardware: Flavor = None,
    secret: Secrets = [],  # noqa: B006 - typer copies it
    private: Private = False,
    dry_run: DryRun = False,
) -> None:
    """Make a new Space and upload the project."""
    with _hub(dry_run=dry_run) as hub:
        hub.create(name, project, _order(project, hardware, secret, private=private))


@spaces.command()
def duplicate(
    source: Annotated[str, typer.Argument(help="OWNER/NAME of the Space to copy.")],
    name: SpaceName,
    project: Project = Path(),
    hardware: Flavor = None,
    secret: Secrets = [],  # noqa: B006 - typer copies it
    private: Private = False,
    dry_run: DryRun = False,
) -> None:
    """Copy somebody's Space into your account, with hardware, variables and secrets of your own."""
    with _hub(dry_run=dry_run) as hub:
        hub.duplicate(source, name, _order(project, hardware, secret, private=private))


@spaces.command()
def push(name: SpaceName, project: Project = Path(), dry_run: DryRun = False) -> None:
    """Bring a Space's files to the project's, in one commit."""
    from app import space

    with _hub(dry_run=dry_run) as hub:
        hub.push(name, space.load(project), project)


def _order(project: Path, flavor: str | None, secrets: list[str], *, private: bool) -> "Order":
    from app import space

    description = space.load(project)
    return space.make_order(
        description, flavor=flavor, secrets=secrets, private=private or None, value_of=environment_value
    )


@contextlib.contextmanager
def _hub(*, dry_run: bool) -> "Iterator[Hub]":
    """The hub, or a rehearsal of it; what goes wrong with it ends the command with its reason."""
    from app import space

    try:
        with space.dry_run(_complain, print) if dry_run else space.connected(_complain) as hub:
            yield hub
    except space.SpaceError as error:
        raise _fail(str(error)) from None


def main() -> None:
    app()
