"""The import rules, read from the sources: who may know whom (docs/architecture.md)."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("app", "models", "streaming")
FORBIDDEN_IN_THE_CORE = {"asyncio", "threading", "time", "logging", "socket", "subprocess", "os", "concurrent"}
CORE_LIBRARIES = {"numpy", "soxr"}
CORE_FOR_MODELS = {f"streaming.{name}" for name in ("types", "ports", "errors", "audio", "config")}
HEAVY = {"ctranslate2", "faster_whisper", "torch", "transformers", "vllm"}
ENGINE_ONLY = {"models.host", "models.ctranslate", "models.vllm_engine", "models.vllm_plugin"}
PURE_MODELS = ("ladder", "batching", "whisper_text", "silence_tail", "framing", "drafts", "word_alignment")
PURE_MODELS += ("vllm_settings",)


def modules(package: str) -> Iterator[tuple[str, Path]]:
    """Dotted names and files of a package."""
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def is_module(dotted: str) -> bool:
    path = ROOT.joinpath(*dotted.split("."))
    return path.with_suffix(".py").is_file() or path.is_dir()


def imports(path: Path) -> set[str]:
    """What the file imports, inside functions too; of our own packages down to the module."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if is_module(name) else node.module for name in submodules}
    return found


def top(name: str) -> str:
    return name.split(".")[0]


def of_package(names: set[str], package: str) -> set[str]:
    return {name for name in names if name == package or name.startswith(package + ".")}


def parametrized(package: str) -> pytest.MarkDecorator:
    found = list(modules(package))
    assert found
    return pytest.mark.parametrize("path", [path for _, path in found], ids=[name for name, _ in found])


@parametrized("streaming")
def test_the_core_knows_no_clock_no_loop_no_io_and_none_of_the_other_packages(path: Path) -> None:
    tops = {top(name) for name in imports(path)}
    assert tops & FORBIDDEN_IN_THE_CORE == set()
    assert tops - CORE_LIBRARIES - {"streaming"} <= sys.stdlib_module_names


def test_within_the_core_imports_go_downward() -> None:
    """Each file may import those that stand before it."""
    order = ["errors", "types", "config", "events", "ports", "audio", "context", "stabilizer", "endpointer"]
    order += ["segmenter", "scheduler", "session"]
    names = [name.removeprefix("streaming.") for name, _ in modules("streaming") if name != "streaming"]
    assert sorted(names) == sorted(order), "a file of the core has no place in the order"
    for name, path in modules("streaming"):
        allowed = (
            {f"streaming.{lower}" for lower in order[: order.index(top(name.removeprefix("streaming.")))]}
            if (name != "streaming")
            else set()
        )
        assert of_package(imports(path), "streaming") <= allowed, name


@parametrized("models")
def test_models_know_of_the_core_only_its_vocabulary(path: Path) -> None:
    found = imports(path)
    assert of_package(found, "app") == set()
    assert of_package(found, "streaming") <= CORE_FOR_MODELS


@pytest.mark.parametrize("name", PURE_MODELS)
def test_what_all_engines_share_is_as_pure_as_the_core(name: str) -> None:
    tops = {top(other) for other in imports(ROOT / "models" / f"{name}.py")}
    assert tops & FORBIDDEN_IN_THE_CORE == set()
    assert tops - CORE_LIBRARIES - {"streaming", "models"} <= sys.stdlib_module_names


@parametrized("app/transports")
def test_transports_know_neither_each_other_nor_models(path: Path) -> None:
    found = imports(path)
    assert of_package(found, "app.transports") <= {"app.transports.peer"}, "what any of them may use"
    assert of_package(found, "models") == set()


@pytest.mark.parametrize("name", ["dialect", "offset"])
def test_what_codecs_are_spoken_to_in_is_as_pure_as_they_are(name: str) -> None:
    found = imports(ROOT / "app" / f"{name}.py")
    assert {top(other) for other in found} & FORBIDDEN_IN_THE_CORE == set()
    assert of_package(found, "app") <= {"app.dialect"}


@parametrized("app/wire")
def test_codecs_are_pure(path: Path) -> None:
    found = imports(path)
    assert {top(name) for name in found} & (FORBIDDEN_IN_THE_CORE | {"fastapi", "starlette", "uvicorn"}) == set()
    assert {name for name in of_package(found, "app") if not name.startswith("app.wire.")} <= {"app.dialect"}
    assert of_package(found, "models") == set()


@parametrized("app")
def test_only_the_composition_root_knows_models(path: Path) -> None:
    """The command line shows the progress of weights, and so may know their module."""
    allowed = {"main": {"remote", "scripted", "silero", "weights", "catalog"}, "cli": {"weights"}, "batch": {"weights"}}
    known = {f"models.{name}" for name in allowed.get(path.stem, set()) if path.parent.name == "app"}
    assert of_package(imports(path), "models") - known == set()


@parametrized("app")
def test_what_is_heavy_stays_in_the_engine_process(path: Path) -> None:
    assert {top(name) for name in imports(path)} & HEAVY == set()


def test_nothing_that_the_service_loads_imports_what_is_heavy() -> None:
    """Followed through our own modules from the command line; the engine process starts at models.host."""
    seen, ahead = set[str](), ["app.cli", "app.main"]
    while ahead:
        name = ahead.pop()
        path = ROOT.joinpath(*name.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        found = imports(path)
        assert {top(other) for other in found} & HEAVY == set(), name
        assert found & ENGINE_ONLY == set(), name
        seen.add(name)
        ahead += [other for other in found if top(other) in PACKAGES and is_module(other) and other not in seen]
    assert {"app.transports.websocket", "models.remote", "streaming.session"} <= seen


def reads_environment(path: Path) -> bool:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "getenvb"):
            return True
        if (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and {a.name for a in node.names}
            & {
                "environ",
                "environb",
                "getenv",
            }
        ):
            return True
    return False


def test_only_the_settings_read_the_environment() -> None:
    readers = {name for name, path in modules("app") if reads_environment(path)}
    assert readers == {"app.settings"}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_reaches_into_the_tests_or_the_bench(package: str) -> None:
    for name, path in modules(package):
        assert {top(other) for other in imports(path)} & {"tests", "bench"} == set(), name
