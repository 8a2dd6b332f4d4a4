"""A Dockerfile read, and its steps carried out in directories instead of containers: for machines without Docker.

What Docker does and this does not: layers and their cache, the .dockerignore of the context (but for ``__pycache__``),
anything about networks and limits. A base image is stood in for by a root directory that the caller names.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

_INSTRUCTION = re.compile(r"(?P<keyword>[A-Z]+)\s+(?P<flags>(?:--[\w-]+=\S+\s+)*)(?P<value>.*)", re.S)
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Instruction:
    """``flags``: those that stand before the value, as in COPY --from=build."""

    keyword: str
    value: str
    flags: Mapping[str, str] = field(default_factory=dict)

    @property
    def argv(self) -> list[str]:
        """The exec form's words, or the shell for a command in the shell form."""
        command = self.value.removeprefix("CMD").strip() if self.keyword == "HEALTHCHECK" else self.value
        return list(json.loads(command)) if command.startswith("[") else ["/bin/sh", "-c", command]


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    base: str
    instructions: tuple[Instruction, ...]

    def last(self, keyword: str) -> Instruction:
        return [instruction for instruction in self.instructions if instruction.keyword == keyword][-1]


def parse(text: str) -> list[Stage]:
    """The stages in their order. Raises ValueError for a line that is no instruction."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    arguments: dict[str, str] = {}
    stages: list[Stage] = []
    for logical in re.sub(r"\\\n", "", lines).splitlines():
        if not logical.strip():
            continue
        found = _INSTRUCTION.fullmatch(logical.strip())
        if found is None:
            raise ValueError(f"not an instruction: {logical}")
        flags = dict(flag.removeprefix("--").split("=", 1) for flag in found["flags"].split())
        instruction = Instruction(found["keyword"], found["value"], flags)
        if instruction.keyword == "FROM":
            base, _, name = instruction.value.partition(" AS ")
            stages.append(Stage(name.strip(), substitute(base.strip(), arguments), ()))
        elif not stages:
            arguments.update(_assignments(instruction.value))
        else:
            stages[-1] = replace(stages[-1], instructions=(*stages[-1].instructions, instruction))
    return stages


def substitute(text: str, variables: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda found: variables.get(found[1] or found[2], ""), text)


def _assignments(value: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in shlex.split(value))


# --- carried out -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Image:
    """A root directory and what the instructions have set for what runs in it."""

    root: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": _PATH})
    directory: str = "/"
    user: str = "0:0"

    def command(self, argv: Sequence[str], *, read_only: bool = False, scratch: Sequence[str] = ()) -> list[str]:
        """A command line for the same process, in a mount namespace of its own: its signals reach ``argv``.

        ``read_only``: the root is, but for new, empty directories in memory at the paths in ``scratch``.
        """
        root = shlex.quote(str(self.root))
        mounts = [f"mount --rbind /proc {root}/proc", f"mount --rbind /dev {root}/dev"]
        if read_only:
            mounts = [f"mount --bind {root} {root}", f"mount -o remount,bind,ro {root}", *mounts]
            mounts += [f"mount -t tmpfs -o mode=1777 none {root}{path}" for path in scratch]
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        inside = ["env", "-i", f"--chdir={self.directory}", *variables, *argv]
        enter = shlex.join(["chroot", f"--userspec={self.user}", "--groups=", str(self.root), *inside])
        return ["unshare", "--mount", "sh", "-ec", "\n".join([*mounts, f"exec {enter}"])]


def build(
    stages: Sequence[Stage],
    target: str,
    *,
    context: Path,
    work: Path,
    stand_in: Path,
    arguments: Mapping[str, str],
    build_environment: Mapping[str, str],
) -> Image:
    """Carry out the target's steps and those of the stages that it copies from.

    ``stand_in``: the root in place of every base image. ``work``: where the stages' roots are made.
    ``build_environment``: seen by RUN alone, for what a machine needs to reach its package index.
    """
    work.mkdir(parents=True, exist_ok=True)
    named = {stage.name: stage for stage in stages}
    built: dict[str, Image] = {}

    def image_of(name: str) -> Image:
        if name not in built:
            stage = named[name]
            image = Image(work / name)
            if stage.base == "scratch":
                image.root.mkdir()
            else:
                subprocess.run(["cp", "-a", "--", stand_in, image.root], check=True)
            given: dict[str, str] = {}
            for instruction in stage.instructions:
                if instruction.keyword == "ARG":
                    defaults = _assignments(instruction.value)
                    given |= {key: arguments.get(key, default) for key, default in defaults.items()}
                elif instruction.keyword == "RUN":
                    _run(image, instruction, {**build_environment, **given})
                elif instruction.keyword == "COPY":
                    source = image_of(instruction.flags["from"]).root if "from" in instruction.flags else context
                    _copy(image, instruction, source)
                else:
                    _set(image, instruction)
            built[name] = image
        return built[name]

    return image_of(target)


def _run(image: Image, instruction: Instruction, given: Mapping[str, str]) -> None:
    print(f"RUN {instruction.value[:100]}", file=sys.stderr, flush=True)
    inside = replace(image, environment={**image.environment, **given})
    subprocess.run(inside.command(instruction.argv), check=True)


def _copy(image: Image, instruction: Instruction, source: Path) -> None:
    *names, goal = instruction.value.split()
    target = image.root / (Path(image.directory) / goal).as_posix().lstrip("/")
    for name in names:
        found = source / name.lstrip("/")
        if found.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(found, target, symlinks=True, ignore=ignored, dirs_exist_ok=True)
        else:
            place = target / found.name if goal.endswith("/") else target
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(found, place)
    if "chown" in instruction.flags:
        subprocess.run(["chown", "-R", instruction.flags["chown"], target], check=True)


def _set(image: Image, instruction: Instruction) -> None:
    match instruction.keyword:
        case "ENV":
            image.environment |= _assignments(substitute(instruction.value, image.environment))
        case "WORKDIR":
            image.directory = instruction.value
            (image.root / instruction.value.lstrip("/")).mkdir(parents=True, exist_ok=True)
        case "USER":
            image.user = instruction.value
        case "EXPOSE" | "STOPSIGNAL" | "HEALTHCHECK" | "CMD" | "ENTRYPOINT":
            pass  # for whoever runs the image
        case other:
            raise ValueError(f"this knows nothing of {other}")


def package_index() -> dict[str, str]:
    """How this machine's pip reaches its index, as environment variables; indexes that are local files are left out."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    known = dict(re.findall(r"(?:global|:env:)\.([\w-]+)='(.*)'", listed.stdout))
    found = {
        f"PIP_{key.upper().replace('-', '_')}": value
        for key, value in known.items()
        if key in ("index-url", "extra-index-url", "cert", "trusted-host", "proxy") and "file:" not in value
    }
    names = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
    return found | {name: os.environ[name] for name in names if name in os.environ}
