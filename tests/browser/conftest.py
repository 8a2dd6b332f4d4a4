"""The page in a real browser. Needs the package playwright and Chromium from the system; nothing is fetched."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
from playwright.sync_api import Playwright, sync_playwright

from tests.support.browser import Visitors, clip, in_one_breath, write_speech
from tests.support.server import Server, serving
from tests.support.weights import require_vad, require_weights


@pytest.fixture(scope="package")
def playwright() -> Iterator[Playwright]:
    with sync_playwright() as running:
        yield running


@pytest.fixture
def visitors(playwright: Playwright) -> Iterator[Visitors]:
    """Whatever a test does, no page may ask another host."""
    opened = Visitors(playwright)
    yield opened
    opened.leave()
    assert opened.asked_others() == []


@pytest.fixture(scope="package")
def hearing() -> Iterator[Server]:
    """A service with the real engine."""
    require_weights("tiny.en")
    require_vad()
    with serving(engine="ctranslate", model="tiny.en", rtc_host="127.0.0.1") as server:
        yield server


@pytest.fixture(scope="package")
def scripted() -> Iterator[Server]:
    """A service without a model: what is loud is speech, and its words mean nothing."""
    with serving(rtc_host="127.0.0.1") as server:
        yield server


@pytest.fixture
def one_sentence(tmp_path: Path) -> Path:
    return write_speech(tmp_path / "one.wav", [clip()])


@pytest.fixture
def long_sentence(tmp_path: Path) -> Path:
    return write_speech(tmp_path / "long.wav", [in_one_breath(2)])


@pytest.fixture
def sentences(tmp_path: Path) -> Path:
    """Four times the same sentence."""
    return write_speech(tmp_path / "four.wav", [clip()] * 4)
