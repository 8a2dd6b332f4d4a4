"""The signature of Genesys' handshakes, on the example of its documentation."""

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.wire.http_signature import is_signed

NOW_S = 1_641_013_200
SECRET = base64.b64decode("TXlTdXBlclNlY3JldEtleVRlbGxOby0xITJAMyM0JDU=")
TARGET = "/api/v1/voicebiometrics/ws"
HOST = "audiohook.example.com"
INPUT = (
    'sig1=("@request-target" "@authority" "audiohook-organization-id" "audiohook-session-id" '
    '"audiohook-correlation-id" "x-api-key");keyid="SGVsbG8sIEkgYW0gdGhlIEFQSSBrZXkh";'
    'nonce="VGhpc0lzQVVuaXF1ZU5vbmNl";alg="hmac-sha256";created=1641013200;expires=3282026430'
)
HEADERS = {
    "host": HOST,
    "audiohook-organization-id": "d7934305-0972-4844-938e-9060eef73d05",
    "audiohook-session-id": "30b0e395-84d3-4570-ac13-9a62d8f514c0",
    "audiohook-correlation-id": "e160e428-53e2-487c-977d-96989bf5c99d",
    "x-api-key": "SGVsbG8sIEkgYW0gdGhlIEFQSSBrZXkh",
    "signature": "sig1=:NZBwyBHRRyRoeLqy1IzOa9VYBuI8TgMFt2GRDkDuJh4=:",
    "signature-input": INPUT,
}


def test_the_example_of_the_documentation_is_signed() -> None:
    assert is_signed(SECRET, HEADERS, TARGET, ["inside:7860", HOST], NOW_S)
    assert is_signed(SECRET, HEADERS, TARGET, [HOST], NOW_S + 29)


@pytest.mark.parametrize("name", [name for name in HEADERS if name != "host"])
def test_nothing_that_is_signed_can_be_left_out_or_changed(name: str) -> None:
    assert not is_signed(SECRET, {**HEADERS, name: ""}, TARGET, [HOST], NOW_S)
    assert not is_signed(SECRET, {key: HEADERS[key] for key in HEADERS if key != name}, TARGET, [HOST], NOW_S)
    assert not is_signed(SECRET, {**HEADERS, name: HEADERS[name].replace("0", "1", 1) + "x"}, TARGET, [HOST], NOW_S)


def test_another_place_time_or_secret_is_not_what_was_signed() -> None:
    assert not is_signed(SECRET, HEADERS, TARGET + "?a=b", [HOST], NOW_S)
    assert not is_signed(SECRET, HEADERS, TARGET, ["evil.example.com"], NOW_S)
    assert not is_signed(SECRET, HEADERS, TARGET, [], NOW_S)
    assert not is_signed(b"another", HEADERS, TARGET, [HOST], NOW_S)
    for now_s in (NOW_S - 31, NOW_S + 31):
        assert not is_signed(SECRET, HEADERS, TARGET, [HOST], now_s)


@given(st.text(max_size=60), st.text(max_size=60))
def test_nonsense_is_not_signed(first: str, second: str) -> None:
    for changed in ({"signature-input": first, "signature": second}, {"signature": second}):
        assert not is_signed(SECRET, {**HEADERS, **changed}, TARGET, [HOST], NOW_S)
    assert (
        not is_signed(SECRET, {**HEADERS, "signature-input": INPUT + first}, TARGET, [HOST], NOW_S) or not first.strip()
    )
