"""What can be known of the Dockerfile without building it; `make check-image` carries its steps out."""

import shlex
from pathlib import Path

import pytest

from app import space
from tests.support.dockerfile import Stage, parse

ROOT = Path(__file__).resolve().parents[2]
STAGES = {stage.name: stage for stage in parse((ROOT / "Dockerfile").read_text("utf-8"))}
IMAGES = ("cpu", "gpu")


def environment(stage: Stage) -> dict[str, str]:
    words = [word for i in stage.instructions if i.keyword == "ENV" for word in shlex.split(i.value)]
    return dict(word.split("=", 1) for word in words)


def test_what_a_space_builds_runs_on_its_hardware() -> None:
    """The hub builds the last stage."""
    assert list(STAGES)[-1] == "gpu"
    assert STAGES["gpu"].base.startswith("vllm/vllm-openai:v")


def test_base_images_are_pinned() -> None:
    bases = {stage.base for stage in STAGES.values() if stage.base not in STAGES}
    assert bases == {"scratch", STAGES["cpu"].base, STAGES["gpu"].base}
    for base in bases - {"scratch"}:
        assert base.partition(":")[2] not in ("", "latest"), base


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_runs_as_an_ordinary_user_and_writes_to_its_cache_alone(name: str) -> None:
    stage = STAGES[name]
    assert stage.last("USER").value == "1000:1000"
    keywords = [instruction.keyword for instruction in stage.instructions]
    assert "RUN" not in keywords[keywords.index("USER") :]
    places = environment(stage)
    assert (places["HARK_CACHE_DIR"], places["HF_HOME"], places["HOME"]) == (
        "/cache/hark",
        "/cache/huggingface",
        "/tmp",
    )
    assert [i.value for i in stage.instructions if i.flags.get("chown") == "1000:1000"] == ["/cache /cache"]


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_answers_where_the_space_says(name: str) -> None:
    stage, port = STAGES[name], str(space.load(ROOT).card.app_port)
    assert environment(stage)["HARK_PORT"] == stage.last("EXPOSE").value == port
    assert environment(stage)["HARK_HOST"] == "0.0.0.0"
    assert stage.last("CMD").argv == ["hark", "serve"]
    assert stage.last("STOPSIGNAL").value == "SIGTERM"


def test_both_images_are_made_alike() -> None:
    """What differs is the base, cuBLAS, what vLLM as the engine needs, and the entry point that vLLM's image has."""
    only_gpu = {"nvidia-cublas-cu12", "ldconfig", "/usr/bin/python3", "HARK_ENGINE", "[]"}
    for suffix in ("-build", ""):
        cpu, gpu = (
            [(i.keyword, i.value.replace(f"{name}-build", "build")) for i in STAGES[f"{name}{suffix}"].instructions]
            for name in IMAGES
        )
        assert cpu == [step for step in gpu if not any(word in step[1] for word in only_gpu)]
    assert STAGES["gpu"].last("ENTRYPOINT").argv == []


def test_the_context_holds_what_is_copied_and_nothing_else() -> None:
    """In .dockerignore all is ignored but what it names, and the Dockerfile copies just that."""
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    kept = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    copied = {name for i in STAGES["source"].instructions for name in i.value.split()[:-1]}
    assert kept == copied
    assert all((ROOT / name).exists() for name in copied)
    assert [rule for rule in rules[1:] if not rule.startswith("!")] == ["**/__pycache__", "**/*.pyc"]
    others = [i for stage in STAGES.values() for i in stage.instructions if i.keyword in ("COPY", "ADD")]
    assert all("from" in i.flags for i in others if i not in STAGES["source"].instructions)


def test_a_dockerfile_is_read_as_docker_reads_it() -> None:
    stages = parse(
        "# a comment\nARG BASE=debian:12\nFROM ${BASE} AS one\nRUN echo a \\\n    # within\n    && echo b\n"
        'FROM one\nCOPY --from=one --chown=1:1 /a /b\nCMD ["x", "y"]\nHEALTHCHECK --timeout=1s CMD z $P\n'
    )
    assert [(stage.name, stage.base) for stage in stages] == [("one", "debian:12"), ("", "one")]
    assert stages[0].instructions[0].argv == ["/bin/sh", "-c", "echo a     && echo b"]
    assert stages[1].last("COPY").flags == {"from": "one", "chown": "1:1"}
    assert stages[1].last("CMD").argv == ["x", "y"]
    assert stages[1].last("HEALTHCHECK").argv == ["/bin/sh", "-c", "z $P"]
    with pytest.raises(ValueError, match="not an instruction"):
        parse("FROM scratch\nrubbish")
