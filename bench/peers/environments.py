"""A virtual environment for each peer, below .bench: made once, made again when its requirements change."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / ".bench"
_INSTALL_TIMEOUT_S = 1_200.0
_LIST_VERSIONS = (
    "import importlib.metadata, json, platform, sys; "
    "print(json.dumps({'python': platform.python_version()} "
    "| {name: importlib.metadata.version(name) for name in sys.argv[1:]}))"
)


class SetupFailed(Exception):
    """An environment could not be made; the message ends with what pip said."""


def programs(name: str) -> Path:
    """Where the environment's interpreter is."""
    return FOLDER / name.lower() / "venv" / "bin"


def pip_commands(name: str, requirements: Sequence[Sequence[str]]) -> list[list[str]]:
    pip = [str(programs(name) / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    return [[*pip, *arguments] for arguments in requirements]


def set_up(name: str, requirements: Sequence[Sequence[str]]) -> None:
    """Make sure that the environment holds exactly these requirements. Raises SetupFailed."""
    done = FOLDER / name.lower() / "installed.json"
    wanted = json.dumps([list(arguments) for arguments in requirements])
    if done.is_file() and done.read_text("utf-8") == wanted:
        return
    done.unlink(missing_ok=True)
    _run([sys.executable, "-m", "venv", "--clear", str(programs(name).parent)])
    for command in pip_commands(name, requirements):
        _run(command)
    done.write_text(wanted, "utf-8")


def versions(name: str, packages: Sequence[str]) -> Mapping[str, str]:
    """Of the packages, and of Python. Raises SetupFailed."""
    found: dict[str, str] = json.loads(_run([str(programs(name) / "python"), "-c", _LIST_VERSIONS, *packages]))
    return found


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S, check=True)
    except subprocess.TimeoutExpired:
        raise SetupFailed(f"{command[-1]}: not installed within {_INSTALL_TIMEOUT_S:.0f} s") from None
    except OSError as error:
        raise SetupFailed(f"{command[0]}: {error}") from None
    except subprocess.CalledProcessError as failed:
        lines = "\n".join(failed.stderr.strip().splitlines()[-8:])
        raise SetupFailed(f"{' '.join(command[-2:])}: exit code {failed.returncode}:\n{lines}") from None
    return done.stdout
