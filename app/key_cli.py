"""``hark key``: makes API keys for a service that reads HARK_KEYS_FILE."""

from pathlib import Path
from typing import Annotated

import typer

from app.keys import BadKeyFile, KeyLimits, add_key
from app.settings import load_settings

keys = typer.Typer(no_args_is_help=True, help="API keys, which HARK_KEYS_FILE keeps as hashes.")


@keys.callback()
def _group() -> None:
    """So that ``create`` stays a command of its own while there is no other."""


@keys.command()
def create(
    name: Annotated[str, typer.Argument(help="Whose key it is, for people.")],
    file: Annotated[Path | None, typer.Option(help="The file that it is added to (HARK_KEYS_FILE).")] = None,
    streams: Annotated[int, typer.Option(min=0, help="Streams and recordings at once; 0: any number.")] = 0,
    per_minute: Annotated[int, typer.Option(min=0, help="Streams and recordings begun in a minute.")] = 0,
    minutes: Annotated[float, typer.Option(min=0, help="Minutes of audio a day, from 0:00 UTC.")] = 0.0,
) -> None:
    """Print a new key, once: what is kept of it is a hash. A service that runs accepts it within a second."""
    try:
        path = file or load_settings().keys_file
        if path is None:
            raise BadKeyFile("no file for it: set HARK_KEYS_FILE or give --file")
        typer.echo(add_key(path, name, KeyLimits(streams, per_minute, minutes)))
    except ValueError as error:
        typer.secho(f"hark: {error}", err=True)
        raise typer.Exit(1) from None
