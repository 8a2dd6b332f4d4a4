import re

import pytest

from models import catalog
from models.catalog import LANGUAGES, MODELS, SILERO, ModelSpec

ALL = pytest.mark.parametrize("spec", MODELS, ids=lambda spec: spec.name)


def test_every_name_and_alias_finds_its_model() -> None:
    for spec in MODELS:
        for name in (spec.name, *spec.aliases):
            assert catalog.find(name) is spec
    assert catalog.find("turbo") is catalog.find("large-v3-turbo")
    assert catalog.find("large") is catalog.find("large-v3")
    assert catalog.find("base-en") is None


def test_names_are_unique() -> None:
    names = [name for spec in MODELS for name in (spec.name, *spec.aliases)]
    assert len(names) == len(set(names))


def test_names_resolve_as_in_faster_whisper() -> None:
    utils = pytest.importorskip("faster_whisper.utils")
    theirs = {name: utils._MODELS[name] for name in utils.available_models()}
    ours = {name: spec.repository for spec in MODELS for name in (spec.name, *spec.aliases)}
    assert ours == theirs


def test_each_model_has_its_published_repository() -> None:
    published = {spec.name: spec.original for spec in MODELS}
    assert published["large-v1"] == "openai/whisper-large"
    assert published["large-v3-turbo"] == "openai/whisper-large-v3-turbo"
    assert published["tiny.en"] == "openai/whisper-tiny.en"
    assert published["distil-large-v3.5"] == "distil-whisper/distil-large-v3.5"
    assert len(set(published.values())) == len(MODELS)


@ALL
def test_a_model_is_pinned_to_a_commit_and_well_formed_hashes(spec: ModelSpec) -> None:
    assert re.fullmatch(r"[0-9a-f]{40}", spec.weights.revision)
    for file in spec.weights.files:
        assert (file.sha256 == "") == (file.size_bytes == 0)
        assert file.sha256 == "" or re.fullmatch(r"[0-9a-f]{64}", file.sha256)
    names = [file.name for file in spec.weights.files]
    assert {"model.bin", "config.json", "tokenizer.json"} < set(names)
    assert any(name.startswith("vocabulary.") for name in names)


@ALL
def test_disk_bytes_are_near_the_sum_of_the_files(spec: ModelSpec) -> None:
    if spec.weights.size_bytes:
        assert spec.disk_bytes == pytest.approx(spec.weights.size_bytes, rel=0.005)
    assert spec.disk_bytes == pytest.approx(spec.parameters_millions * 2_000_000, rel=0.05)  # float16


@ALL
def test_an_english_name_means_an_english_model(spec: ModelSpec) -> None:
    assert spec.multilingual == (not spec.name.endswith(".en") and not spec.name.startswith("distil-"))
    assert "en" in spec.languages
    assert len(spec.languages) == (1 if not spec.multilingual else 100 if spec.mel_bins == 128 else 99)


@pytest.mark.parametrize("bundle", [SILERO, *(spec.weights for spec in MODELS)], ids=lambda bundle: bundle.name)
def test_archives_give_every_file_and_each_is_pinned(bundle: catalog.Bundle) -> None:
    if not bundle.archives:
        return
    assert {member.target for archive in bundle.archives for member in archive.members} == {
        file.name for file in bundle.files
    }
    assert all(file.sha256 for file in bundle.files)
    for archive in bundle.archives:
        assert re.fullmatch(r"[0-9a-f]{64}", archive.sha256)
        assert archive.size_bytes > 0


def test_languages_are_whispers() -> None:
    tokenizer = pytest.importorskip("faster_whisper.tokenizer")
    assert set(LANGUAGES) == set(tokenizer._LANGUAGE_CODES)
    assert len(set(LANGUAGES.values())) == 100
    assert list(LANGUAGES)[:3] == ["en", "zh", "de"]


@pytest.mark.parametrize(
    ("typed", "meant"), [("tiny-en", "tiny.en"), ("Base", "base"), ("large-v3-trubo", "large-v3-turbo")]
)
def test_a_misspelt_name_gets_a_suggestion(typed: str, meant: str) -> None:
    assert catalog.suggestions(typed)[0] == meant
