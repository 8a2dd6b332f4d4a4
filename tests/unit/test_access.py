"""Who may open a stream."""

import pytest
from starlette.requests import HTTPConnection

from app.access import Access, AccessConfig, ForbiddenOrigin, TooManyRequests, Unauthorized, parameters_in
from app.errors import surface


def connection(query: str = "", address: str = "192.0.2.1", **headers: str) -> HTTPConnection:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "headers": raw, "query_string": query.encode(), "client": (address, 1)}
    return HTTPConnection(scope)


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
    ],
)
def test_any_other_is_not(given: HTTPConnection) -> None:
    with pytest.raises(Unauthorized) as caught:
        Access(AccessConfig(keys=("first", "second"))).check(given)
    assert surface(caught.value).headers == {"WWW-Authenticate": "Bearer"}
    assert (surface(caught.value).http_status, surface(caught.value).close_code) == (401, 4401)


def test_the_key_is_no_parameter_of_the_stream() -> None:
    assert parameters_in(connection("key=a&language=de&key=b")) == [("language", "de")]


# --- how often -------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


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
