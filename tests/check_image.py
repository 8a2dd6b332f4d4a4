"""`make check-image`: the Dockerfile's cpu target, its steps carried out in a clean Debian and the result served.

Docker is not needed; root, debootstrap and some minutes are. A fresh Debian with its own Python stands in for the base
image (python:*-slim), so the base image itself, the layers and the GPU target's CUDA are not checked here.
"""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.dockerfile import Image, Stage, build, package_index, parse
from tests.support.server import wait_for

ROOT = Path(__file__).parents[1]
STAND_IN = ROOT / "build" / "image" / "debian"  # kept: it is the slowest part, and never written to
MISSING = [tool for tool in ("debootstrap", "unshare", "chroot") if shutil.which(tool) is None]
MOST_MIB = 850  # what docs/deploy.md says that the image adds to its base

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1_800),
    pytest.mark.skipif(os.geteuid() != 0, reason="chroot and mount need root"),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]


@pytest.fixture(scope="session")
def debian() -> Path:
    if not STAND_IN.exists():
        part = STAND_IN.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        packages = "python3,python3-venv,ca-certificates"
        subprocess.run(["debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", part], check=True)
        for path in ("/etc/resolv.conf", "/etc/ssl/certs/ca-certificates.crt"):  # as this machine reaches the network
            shutil.copy(path, part / path.lstrip("/"))
        part.rename(STAND_IN)
    return STAND_IN


@pytest.fixture(scope="session")
def stages() -> list[Stage]:
    return parse((ROOT / "Dockerfile").read_text("utf-8"))


@pytest.fixture(scope="session")
def image(debian: Path, stages: list[Stage], tmp_path_factory: pytest.TempPathFactory) -> Image:
    """The cpu target with a model in it."""
    return build(
        stages,
        "cpu",
        context=ROOT,
        work=tmp_path_factory.mktemp("image"),
        stand_in=debian,
        arguments={"BAKE_MODELS": "tiny.en"},
        build_environment=package_index(),
    )


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


class Container:
    """What `docker run --read-only --tmpfs /tmp` starts, on this machine's network."""

    def __init__(self, image: Image, stage: Stage, port: int, **settings: str) -> None:
        self._image = image
        self._stage = stage
        self.url = f"http://127.0.0.1:{port}"
        image.environment |= {"HARK_HOST": "127.0.0.1", "HARK_PORT": str(port), **settings}
        command = image.command(stage.last("CMD").argv, read_only=True, scratch=["/tmp"])
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def health(self) -> int:
        """The exit status of the HEALTHCHECK."""
        command = self._image.command(self._stage.last("HEALTHCHECK").argv, read_only=True, scratch=["/tmp"])
        return subprocess.run(command, capture_output=True, check=False).returncode

    def is_healthy(self) -> bool:
        assert self.process.poll() is None, "the service ended"
        return self.health() == 0


@pytest.fixture(params=["scripted", "ctranslate"])
def container(request: pytest.FixtureRequest, image: Image, stages: list[Stage], port: int) -> Iterator[Container]:
    stage = next(stage for stage in stages if stage.name == "cpu")
    copy = Image(image.root, dict(image.environment), image.directory, image.user)
    container = Container(copy, stage, port, HARK_ENGINE=request.param, HARK_MODEL="tiny.en", HARK_OFFLINE="true")
    yield container
    container.process.kill()
    container.process.wait()


def test_it_serves_as_an_ordinary_user_on_a_read_only_root_with_the_weights_that_were_baked_in(
    container: Container,
) -> None:
    assert container.health() != 0, "healthy before it listens"
    wait_for(container.is_healthy, 120)
    assert httpx.get(f"{container.url}/readyz").status_code == 200
    assert httpx.get(f"{container.url}/").status_code == 200
    status = Path(f"/proc/{container.process.pid}/status").read_text()
    assert "Uid:\t1000\t1000\t1000\t1000\n" in status
    container.process.terminate()
    assert container.process.wait(30) == 0
    assert container.health() != 0


def test_what_no_test_here_calls_can_be_loaded_without_what_was_left_out(image: Image) -> None:
    command = image.command(["python", "-c", "import aiortc, app.main, fastrtc, gradio, models.ctranslate"])
    subprocess.run(command, check=True)


def test_it_has_the_size_that_the_documents_say(image: Image) -> None:
    listed = subprocess.run(
        ["du", "-sm", image.root / "opt", image.root / "cache"], capture_output=True, text=True, check=True
    )
    opt_mib, cache_mib = (int(line.split()[0]) for line in listed.stdout.splitlines())
    print(f"/opt {opt_mib} MiB, /cache with tiny.en {cache_mib} MiB")
    assert opt_mib <= MOST_MIB
    assert f"{MOST_MIB} MiB" in (ROOT / "docs" / "deploy.md").read_text("utf-8")
