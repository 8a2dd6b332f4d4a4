"""Who may come in, how often and for how long."""

import json
from pathlib import Path

import pytest
from hypothesis import given as each
from hypothesis import strategies as st
from starlette.requests import HTTPConnection

from app import tokens
from app.access import (
    Access,
    AccessConfig,
    ForbiddenOrigin,
    Grant,
    KeyRequired,
    TooManyRequests,
    Unauthorized,
    Visitor,
    accepted_subprotocol,
    credentials_in,
    is_public,
    parameters_in,
    visitor,
)
from app.errors import surface
from app.keys import BadKeyFile, KeyLimits, add_key, digest_of, parse_keys


def connection(query: str = "", address: str = "192.0.2.1", **headers: str) -> HTTPConnection:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "headers": raw, "query_string": query.encode(), "client": (address, 1)}
    return HTTPConnection(scope)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


# --- origins ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://localhost:7860", "localhost:7860"),
        ("https://hark.example.org", "hark.example.org"),
        ("https://hark.example.org", "hark.example.org:443"),
        ("https://hark.example.org:443", "hark.example.org"),
        ("HTTP://Hark.Example.Org", "hark.example.org:80"),
        ("http://[::1]:7860", "[::1]:7860"),
    ],
)
def test_a_page_may_use_the_service_it_came_from(origin: str, host: str) -> None:
    Access(AccessConfig()).check(connection(origin=origin, host=host))


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("https://evil.example", "hark.example.org"),
        ("http://localhost:3000", "localhost:7860"),
        ("https://hark.example.org.evil.example", "hark.example.org"),
        ("https://hark.example.org@evil.example", "hark.example.org"),
        ("https://hark.example.org:8443", "hark.example.org"),
        ("null", "hark.example.org"),
        ("", "hark.example.org"),
        ("", ""),
        ("https://[", "hark.example.org"),
        ("nonsense", "nonsense"),
    ],
)
def test_another_page_may_not(origin: str, host: str) -> None:
    with pytest.raises(ForbiddenOrigin) as caught:
        Access(AccessConfig()).check(connection(origin=origin, host=host))
    assert (surface(caught.value).http_status, surface(caught.value).close_code) == (403, 4403)


def test_what_is_no_browser_sends_no_origin_and_may() -> None:
    Access(AccessConfig()).check(connection(host="hark.example.org"))


def test_behind_a_proxy_the_name_that_the_browser_knows_counts() -> None:
    given = {"origin": "https://hark.example.org", "host": "10.0.0.7:7860", "x_forwarded_host": "hark.example.org"}
    Access(AccessConfig()).check(connection(**given))


def test_origins_that_are_allowed_may_use_it_too() -> None:
    access = Access(AccessConfig(origins=frozenset({"https://app.example/", "null"})))
    for origin in ("https://app.example", "https://APP.example", "null", "https://hark.example"):
        access.check(connection(origin=origin, host="hark.example"))
    with pytest.raises(ForbiddenOrigin):
        access.check(connection(origin="http://app.example", host="hark.example"))
    Access(AccessConfig(origins=frozenset({"*"}))).check(connection(origin="https://any.example", host="hark.example"))


# --- keys ------------------------------------------------------------------------------------------------------------


def test_without_keys_none_is_asked_for_and_any_is_accepted() -> None:
    Access(AccessConfig()).check(connection(authorization="Bearer whatever"))


@pytest.mark.parametrize(
    "given",
    [
        connection(authorization="Bearer second"),
        connection(authorization="bearer  first "),
        connection("language=de&key=first"),
        connection("token=first"),
        connection("api_key=second"),
        connection(authorization="Token second"),
        connection(api_key="second"),
        connection(x_api_key="first"),
        connection(sec_websocket_protocol="token, first"),
        connection(sec_websocket_protocol="bearer,first"),
        connection(sec_websocket_protocol="realtime, openai-insecure-api-key.second, openai-beta.realtime-v1"),
        connection(authorization="Bearer for-the-proxy", x_api_key="first"),
    ],
)
def test_a_known_key_is_accepted(given: HTTPConnection) -> None:
    Access(AccessConfig(keys=("first", "second"))).check(given)


@pytest.mark.parametrize(
    "given",
    [
        connection(),
        connection(authorization="Bearer "),
        connection(authorization="Bearer firs"),
        connection(authorization="Bearer first2"),
        connection(authorization="Basic first"),
        connection("key="),
        connection("key=%C3%A4"),
        connection("key=wrong&key=also"),
        connection(sec_websocket_protocol="first"),
        connection(sec_websocket_protocol="token"),
        connection(sec_websocket_protocol="realtime, first"),
        connection(authorization="first"),
        connection(cookie="key=first"),
    ],
)
def test_any_other_is_not(given: HTTPConnection) -> None:
    with pytest.raises(Unauthorized) as caught:
        Access(AccessConfig(keys=("first", "second"))).check(given)
    assert surface(caught.value).headers == {"WWW-Authenticate": "Bearer"}
    assert (surface(caught.value).http_status, surface(caught.value).close_code) == (401, 4401)


def test_the_key_is_no_parameter_of_the_stream() -> None:
    assert parameters_in(connection("key=a&language=de&key=b&token=c&api_key=d")) == [("language", "de")]


@pytest.mark.parametrize(
    ("offered", "accepted"),
    [
        ("", None),
        ("token, first", "token"),
        ("Bearer, first", "Bearer"),
        ("realtime, openai-insecure-api-key.first", "realtime"),
        ("openai-insecure-api-key.first, realtime", "realtime"),
        ("openai-insecure-api-key.first", None),
        ("chat, superchat", None),
    ],
)
def test_a_browser_is_answered_with_a_subprotocol_that_is_no_key(offered: str, accepted: str | None) -> None:
    assert accepted_subprotocol(connection(sec_websocket_protocol=offered)) == accepted


def test_a_key_can_come_in_a_message_too() -> None:
    access = Access(AccessConfig(keys=("first",)))
    with access.stream(connection(), "wrong", "first") as grant:
        assert grant.key_id == "setting-1"
    with access.stream_of(Visitor("192.0.2.1", ("first",))):
        pass
    with pytest.raises(Unauthorized), access.stream(connection(), ""):
        pass
    with access.stream_of(visitor(connection()), is_vouched_for=True) as grant:
        assert grant.key_id == ""


@each(st.text(max_size=40), st.text(max_size=40))
def test_only_the_key_itself_is_accepted(key: str, other: str) -> None:
    access = Access(AccessConfig(keys=(key,)))
    assert access.grant(Visitor("", (key,))).key_id == "setting-1"
    if other != key:
        with pytest.raises(Unauthorized):
            access.grant(Visitor("", (other,)))


def test_nothing_that_is_shown_of_it_holds_a_key() -> None:
    given = connection("key=sesame", authorization="Bearer sesame", sec_websocket_protocol="token, sesame")
    config = AccessConfig(keys=("first", "sesam"), token_secret="s" * 32)
    shown = [repr(config), repr(visitor(given))]
    with pytest.raises(Unauthorized) as caught:
        Access(config).check(given)
    shown += [str(caught.value), json.dumps(surface(caught.value).headers)]
    assert len(credentials_in(given)) == 3
    assert not [text for text in shown if "sesam" in text or "ssss" in text]


# --- the file of keys ------------------------------------------------------------------------------------------------


@pytest.fixture(params=["keys.json", "keys.yaml"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / str(request.param)


def test_a_key_that_was_made_is_accepted_and_nowhere_to_be_read(file: Path) -> None:
    first = add_key(file, "Ann's page", KeyLimits())
    second = add_key(file, "Bob", KeyLimits(streams=2, per_minute=30, minutes_a_day=90.5))
    assert first not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    assert sorted(file.parent.iterdir()) == [file]
    ann, bob = parse_keys(file.read_text())
    assert (ann.digest, ann.name, ann.limits) == (digest_of(first), "Ann's page", KeyLimits())
    assert (bob.digest, bob.limits) == (digest_of(second), KeyLimits(2, 30, 90.5))
    access = Access(AccessConfig(keys_file=file, keys=("plain",)))
    assert access.check(connection(authorization=f"Bearer {second}")).key_id == bob.key_id
    assert access.check(connection(authorization="Bearer plain")).key_id == "setting-1"
    for wrong in (ann.key_id, ann.digest.hex(), ""):
        with pytest.raises(Unauthorized):
            access.check(connection(authorization=f"Bearer {wrong}"))


def test_comments_in_yaml_stay(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("# who may\n")
    add_key(file, "Ann", KeyLimits())
    add_key(file, "Bob", KeyLimits())
    assert file.read_text().startswith("# who may\n- id: ")
    assert [key.name for key in parse_keys(file.read_text())] == ["Ann", "Bob"]


HASH = "0" * 64


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "just words",
        "keys: []",
        "- id: a",
        "- {id: a, sha256: abc}",
        f"- {{id: a, sha256: '{HASH}', limit: {{streams: 1}}}}",
        f"- {{id: a, sha256: '{HASH}', limits: {{stream: 1}}}}",
        f"- {{id: a, sha256: '{HASH}', limits: {{streams: -1}}}}",
        f"- {{id: a, sha256: '{HASH}', limits: {{minutes_a_day: .nan}}}}",
        f"- {{id: a, sha256: '{HASH}'}}\n- {{id: a, sha256: '{HASH}'}}",
        "!!python/object/apply:os.getcwd []",
    ],
)
def test_a_file_with_anything_wrong_in_it_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    for use in (lambda: Access(AccessConfig(keys_file=file)), lambda: add_key(file, "Ann", KeyLimits())):
        with pytest.raises(BadKeyFile, match=r"keys\.yaml: ") as caught:
            use()
        assert HASH not in str(caught.value)
    assert file.read_text() == text


def test_a_file_that_is_missing_or_empty_lets_nobody_in(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    with pytest.raises(BadKeyFile, match="No such file"):
        Access(AccessConfig(keys_file=file))
    file.touch()
    with pytest.raises(Unauthorized):
        Access(AccessConfig(keys_file=file)).check(connection())


def test_a_change_of_the_file_counts_within_a_second(tmp_path: Path) -> None:
    clock, complaints = Clock(), list[str]()
    file = tmp_path / "keys.yaml"
    key = add_key(file, "Ann", KeyLimits())
    access = Access(AccessConfig(keys_file=file), clock, complain=complaints.append)
    added = add_key(file, "Bob", KeyLimits())
    clock.now_s += 1
    access.grant(Visitor("", (added,)))
    before = file.read_text()
    file.write_text("nonsense")
    clock.now_s += 1
    access.grant(Visitor("", (key,)))
    clock.now_s += 1
    access.grant(Visitor("", (key,)))
    assert len(complaints) == 1
    file.write_text("[]")
    clock.now_s += 0.5
    access.grant(Visitor("", (key,)))
    clock.now_s += 0.5
    with pytest.raises(Unauthorized):
        access.grant(Visitor("", (key,)))
    file.write_text(before)
    clock.now_s += 1
    access.grant(Visitor("", (key,)))


# --- what a key may --------------------------------------------------------------------------------------------------


def limited(tmp_path: Path, clock: Clock | None = None, **limits: float) -> tuple[Access, str]:
    file = tmp_path / "keys.json"
    key = add_key(file, "Ann", KeyLimits(**limits))  # type: ignore[arg-type]
    clock = clock or Clock()
    return Access(AccessConfig(keys_file=file), clock, clock), key


def refused(access: Access, credential: str) -> TooManyRequests:
    with pytest.raises(TooManyRequests) as caught, access.stream_of(Visitor("192.0.2.1", (credential,))):
        pass
    assert (surface(caught.value).http_status, surface(caught.value).close_code) == (429, 4429)
    return caught.value


def test_a_key_has_so_many_places_whatever_they_are_used_for(tmp_path: Path) -> None:
    access, key = limited(tmp_path, streams=2)
    request = connection(authorization=f"Bearer {key}")
    with access.stream(request):
        with access.recording(request):
            assert refused(access, key).code == "too_many_streams"
        with pytest.raises(ZeroDivisionError), access.stream(request):
            raise ZeroDivisionError
        with access.stream(request):
            token, _ = access.issue(access.check(request), 60)
            assert refused(access, token).code == "too_many_streams"
    other = add_key(tmp_path / "keys.json", "Bob", KeyLimits())
    access = Access(AccessConfig(keys_file=tmp_path / "keys.json"))
    with (
        access.stream_of(Visitor("", (key,))),
        access.stream_of(Visitor("", (key,))),
        access.stream_of(Visitor("", (other,))),
    ):
        pass


def test_a_key_begins_so_many_a_minute_from_all_its_addresses(tmp_path: Path) -> None:
    clock = Clock()
    access, key = limited(tmp_path, clock, per_minute=3)
    for address in ("192.0.2.1", "192.0.2.2", "192.0.2.3"):
        with access.stream_of(Visitor(address, (key,))):
            pass
    error = refused(access, key)
    assert (error.code, surface(error).retry_after_s) == ("too_many_requests", 20)
    clock.now_s += 20
    with access.recording(connection(x_api_key=key)):
        pass
    assert refused(access, key).code == "too_many_requests"


def test_a_keys_audio_ends_with_its_minutes_and_begins_anew_with_the_day(tmp_path: Path) -> None:
    clock = Clock()
    clock.now_s = 86_400 * 10 + 3_600.0
    access, key = limited(tmp_path, clock, minutes_a_day=1)
    with access.stream_of(Visitor("", (key,))) as first, access.stream_of(Visitor("", (key,))) as second:
        first.spend(30.0)
        second.spend(29.0)
        with pytest.raises(TooManyRequests) as caught:
            first.spend(1.0)
    assert (caught.value.code, caught.value.retry_after_s) == ("audio_limit", 82_800.0)
    assert refused(access, key).code == "audio_limit"
    clock.now_s += 82_800
    with access.stream_of(Visitor("", (key,))) as again:
        again.spend(59.0)


def test_a_grant_that_was_refused_holds_no_place(tmp_path: Path) -> None:
    access, key = limited(tmp_path, streams=1, per_minute=100)
    grant = access.grant(Visitor("", (key,)))
    with grant.place():
        for _ in range(3):
            refused(access, key)
    with grant.place():
        pass


# --- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", [tokens.PREFIX, tokens.OPENAI_PREFIX])
def test_a_token_is_as_good_as_its_key_until_it_expires(prefix: str) -> None:
    clock = Clock()
    access = Access(AccessConfig(keys=("first", "second")), clock, clock)
    token, expires_at = access.issue(access.grant(Visitor("", ("second",))), 60, note='{"a":"é"}', prefix=prefix)
    assert token.startswith(prefix)
    assert expires_at == 1_060
    for given in (
        connection(authorization=f"Bearer {token}"),
        connection(f"token={token}"),
        connection(sec_websocket_protocol=f"realtime, openai-insecure-api-key.{token}"),
        connection(sec_websocket_protocol=f"token, {token}"),
    ):
        grant = access.check(given)
        assert (grant.key_id, grant.note) == ("setting-2", '{"a":"é"}')
        with pytest.raises(KeyRequired) as caught:
            access.issue(grant, 60)
        assert surface(caught.value).http_status == 403
    clock.now_s = 1_060
    with pytest.raises(Unauthorized, match="expired"):
        access.grant(Visitor("", (token,)))
    assert access.grant(Visitor("", (token, "first"))).key_id == "setting-1", "one that is right is enough"


def test_where_no_key_is_asked_for_a_token_brings_its_note() -> None:
    clock = Clock()
    access = Access(AccessConfig(), clock, clock)
    token, _ = access.issue(access.grant(Visitor("", ("none",))), 60, note="x")
    assert access.grant(Visitor("", (token,))).note == "x"
    assert access.grant(Visitor("", (token + "0",))).note == ""
    clock.now_s += 60
    with pytest.raises(Unauthorized, match="expired"):
        access.grant(Visitor("", (token,)))


def test_a_token_ends_with_its_key(tmp_path: Path) -> None:
    clock = Clock()
    access, key = limited(tmp_path, clock)
    token, _ = access.issue(access.grant(Visitor("", (key,))), 600)
    access.grant(Visitor("", (token,)))
    (tmp_path / "keys.json").write_text("[]")
    clock.now_s += 1
    with pytest.raises(Unauthorized):
        access.grant(Visitor("", (token,)))


def test_with_a_common_secret_one_process_knows_the_others_tokens() -> None:
    def make(secret: str) -> Access:
        return Access(AccessConfig(keys=("first",), token_secret=secret))

    token, _ = make("a" * 32).issue(Grant("setting-1", KeyLimits(), make("")._usage("")), 60)
    assert make("a" * 32).grant(Visitor("", (token,))).key_id == "setting-1"
    for other in ("b" * 32, ""):
        with pytest.raises(Unauthorized):
            make(other).grant(Visitor("", (token,)))


CLAIMS = tokens.Claims("setting-1", 2_000_000_000, "note")


@each(st.data())
def test_a_token_that_was_changed_anywhere_is_none(data: st.DataObject) -> None:
    token = tokens.write_token(CLAIMS, b"secret")
    assert tokens.read_token(token, b"secret") == CLAIMS
    at = data.draw(st.integers(0, len(token) - 1))
    other = data.draw(st.text(min_size=0, max_size=3).filter(lambda text: text != token[at]))
    assert tokens.read_token(token[:at] + other + token[at + 1 :], b"secret") is None


@each(st.text(), st.sampled_from(["", *(prefix for prefix in (tokens.PREFIX, tokens.OPENAI_PREFIX))]))
def test_anything_else_is_no_token(text: str, prefix: str) -> None:
    assert tokens.read_token(prefix + text, b"secret") is None


@each(st.builds(tokens.Claims, st.text(), st.integers(0, 2**40), st.text()))
def test_a_token_says_what_was_written_into_it_in_characters_that_pass_everywhere(claims: tokens.Claims) -> None:
    token = tokens.write_token(claims, b"secret")
    assert tokens.read_token(token, b"secret") == claims
    assert set(token) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")


@pytest.mark.parametrize(("ttl_s", "note"), [(9, ""), (7_201, ""), (60, "x" * 4_001)])
def test_what_a_token_may_be_is_bounded(ttl_s: int, note: str) -> None:
    access = Access(AccessConfig())
    with pytest.raises(ValueError, match="range"):
        access.issue(access.grant(Visitor("")), ttl_s, note=note)


# --- where it listens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "public"),
    [
        ("127.0.0.1", False),
        ("127.8.8.8", False),
        ("::1", False),
        ("localhost", False),
        ("0.0.0.0", True),
        ("::", True),
        ("", True),
        ("192.168.1.5", True),
        ("hark.example.org", True),
    ],
)
def test_what_is_no_loopback_may_be_public(host: str, public: bool) -> None:
    assert is_public(host) == public


# --- how often -------------------------------------------------------------------------------------------------------


def opened(access: Access, count: int, address: str = "192.0.2.1") -> int:
    """How many of so many tries at once are let in."""
    done = 0
    for _ in range(count):
        try:
            access.count(connection(address=address))
        except TooManyRequests:
            continue
        done += 1
    return done


def test_no_limit_by_default() -> None:
    assert opened(Access(AccessConfig()), 1_000) == 1_000


def test_an_address_may_open_so_many_in_a_minute() -> None:
    clock = Clock()
    access = Access(AccessConfig(streams_per_minute=6), clock)
    assert opened(access, 10) == 6
    assert opened(access, 10, "192.0.2.2") == 6
    clock.now_s += 20
    assert opened(access, 10) == 2
    clock.now_s += 3_600
    assert opened(access, 10) == 6


def test_the_refusal_says_when_to_come_back() -> None:
    clock = Clock()
    access = Access(AccessConfig(streams_per_minute=2), clock)
    assert opened(access, 2) == 2
    with pytest.raises(TooManyRequests) as caught:
        access.count(connection())
    assert surface(caught.value).headers == {"Retry-After": "30"}
    assert (surface(caught.value).http_status, surface(caught.value).close_code) == (429, 4429)
    clock.now_s += caught.value.retry_after_s
    access.count(connection())


def test_an_ipv6_client_is_its_network() -> None:
    access = Access(AccessConfig(streams_per_minute=1))
    assert opened(access, 1, "2001:db8::1") == 1
    assert opened(access, 1, "2001:db8::ffff:2") == 0
    assert opened(access, 1, "2001:db8:0:1::1") == 1


def test_what_is_kept_of_addresses_is_bounded() -> None:
    access = Access(AccessConfig(streams_per_minute=1))
    for number in range(12_000):
        access.count(connection(address=f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"))
    assert len(access._openings._buckets) == 10_000
