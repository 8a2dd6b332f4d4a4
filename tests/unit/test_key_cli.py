"""``hark key`` and when ``hark serve`` refuses to start."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from app import cli
from app.access import Access, AccessConfig, Visitor
from app.keys import KeyLimits, parse_keys
from app.main import refusal
from app.settings import load_settings
from tests.support.server import serving


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARK_ENGINE", "scripted")


def hark(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def test_a_key_is_printed_once_and_lets_its_holder_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys.yaml"
    monkeypatch.setenv("HARK_KEYS_FILE", str(file))
    made = hark("key", "create", "Ann's page", "--streams", 2, "--per-minute", 30, "--minutes", 60)
    assert (made.exit_code, made.stderr) == (0, "")
    (key,) = made.stdout.split()
    assert key not in file.read_text()
    (kept,) = parse_keys(file.read_text())
    assert (kept.name, kept.limits) == ("Ann's page", KeyLimits(2, 30, 60))
    assert Access(AccessConfig(keys_file=file)).grant(Visitor("", (key,))).key_id == kept.key_id
    other = tmp_path / "other.json"
    assert hark("key", "create", "Bob", "--file", other).exit_code == 0
    assert [len(parse_keys(path.read_text())) for path in (file, other)] == [1, 1]


def test_what_goes_wrong_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text("keys: 1")
    for path in (None, tmp_path / "wrong.yaml", tmp_path / "nowhere" / "keys.yaml"):
        failed = hark("key", "create", "Ann", *([] if path is None else ["--file", path]))
        assert failed.exit_code == 1
        assert failed.stdout == ""
        assert failed.stderr.startswith("hark: ")
        assert len(failed.stderr.splitlines()) == 1


def test_a_public_address_without_a_key_must_be_asked_for(tmp_path: Path) -> None:
    empty = tmp_path / "keys.yaml"
    empty.touch()
    assert refusal(load_settings(host="0.0.0.0")).startswith("0.0.0.0 may be reached from other machines")
    for allowed in ({"host": "127.0.0.1"}, {"open": "1"}, {"api_keys": "sesame"}, {"keys_file": empty}):
        assert refusal(load_settings(**{"host": "0.0.0.0", **allowed})) == ""
    assert refusal(load_settings(host="0.0.0.0", keys_file="")) != ""
    for host in ("127.0.0.1", "0.0.0.0"):
        assert "keys.json: No such file" in refusal(load_settings(host=host, keys_file=tmp_path / "keys.json"))


def test_serve_refuses_it_before_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARK_HOST", "0.0.0.0")
    monkeypatch.setenv("HARK_PORT", "0")
    refused = hark("serve")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "HARK_OPEN=true" in refused.stderr
    with serving(host="0.0.0.0", open=True) as server:
        assert server.get("/readyz").status_code == 200


def test_a_short_secret_for_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"HARK_TOKEN_SECRET: .*32 characters"):
        load_settings(token_secret="x" * 31)
    assert "x" * 32 not in load_settings(token_secret="x" * 32).model_dump_json()
