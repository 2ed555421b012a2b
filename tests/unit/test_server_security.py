"""The token, logins made from it, the lists of hosts and origins. 003, D9; R10."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from openjobs.durable import Disk
from openjobs.errors import FileRefused, InvalidConfiguration
from openjobs.server.security import (
    CODE_S,
    LOGIN_S,
    TOKEN,
    Places,
    Refusal,
    TokenAuth,
    check_origin,
    check_places,
    have_token,
    read_token,
)

SECRET = "x" * 20 + "0123456789abcdefghijk"


class Time:
    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def auth(time: Time) -> TokenAuth:
    return TokenAuth(SECRET, now=time)


def cookie_of(auth: TokenAuth) -> str:
    return auth.cookie(secure=False, path="/").partition(";")[0]


class TestToken:
    def test_it_is_made_once_for_its_owner_only(self, tmp_path: Path) -> None:
        """256 random bits in a file of mode 0600; whoever comes later, or at the same time, gets the same."""
        with ThreadPoolExecutor(8) as pool:
            tokens = set(pool.map(lambda _: have_token(tmp_path, Disk(durable=False)), range(16)))
        assert len(tokens) == 1
        token = tokens.pop()
        assert len(token) >= 43
        assert stat.S_IMODE((tmp_path / TOKEN).stat().st_mode) == 0o600
        assert read_token(tmp_path) == token

    def test_a_file_that_others_may_read_is_refused(self, tmp_path: Path) -> None:
        """A token that somebody else may know is none."""
        have_token(tmp_path, Disk(durable=False))
        os.chmod(tmp_path / TOKEN, 0o644)
        with pytest.raises(FileRefused):
            read_token(tmp_path)
        with pytest.raises(FileRefused):
            have_token(tmp_path, Disk(durable=False))

    def test_a_link_and_an_empty_file_are_refused(self, tmp_path: Path) -> None:
        """What stands there and is no token is left alone and named."""
        (tmp_path / "other").write_text(SECRET)
        (tmp_path / TOKEN).symlink_to(tmp_path / "other")
        with pytest.raises(FileRefused):
            read_token(tmp_path)
        (tmp_path / TOKEN).unlink()
        (tmp_path / TOKEN).touch(0o600)
        with pytest.raises(FileRefused):
            read_token(tmp_path)
        with pytest.raises(InvalidConfiguration):
            TokenAuth("short")

    def test_bearer(self, auth: TokenAuth) -> None:
        """The whole token in one header, or nobody."""
        found = auth.admit({"authorization": [f"Bearer {SECRET}"]}, {})
        assert found is not None
        assert not found.by_cookie
        assert auth.admit({"authorization": [f"bearer {SECRET}"]}, {}) is not None
        for wrong in (
            "",
            SECRET,
            f"Basic {SECRET}",
            f"Bearer {SECRET}x",
            f"Bearer {SECRET[:-1]}",
            "Bearer ",
            "Bearer é",
        ):
            assert auth.admit({"authorization": [wrong]}, {}) is None
        assert auth.admit({"authorization": [f"Bearer {SECRET}"] * 2}, {}) is None
        assert auth.admit({}, {}) is None

    def test_it_is_in_no_text_of_the_object(self, auth: TokenAuth) -> None:
        """Logs that show the object show no secret; neither does a cookie or a code."""
        for text in (repr(auth), str(auth), auth.cookie_name, cookie_of(auth), auth.code()):
            assert SECRET not in text


class TestLogin:
    def test_a_cookie_lets_in_until_it_runs_out(self, auth: TokenAuth, time: Time) -> None:
        """Seven days; then there is no way but a new login."""
        cookie = cookie_of(auth)
        found = auth.admit({"cookie": [cookie]}, {})
        assert found is not None
        assert found.by_cookie
        assert found.until_s == time.now + LOGIN_S
        time.now += LOGIN_S
        assert auth.admit({"cookie": [cookie]}, {}) is None

    def test_a_cookie_survives_a_restart_and_no_other_token(self, auth: TokenAuth, time: Time) -> None:
        """It is signed, not remembered; with another token every login has ended."""
        cookie = cookie_of(auth)
        assert TokenAuth(SECRET, now=time).admit({"cookie": [cookie]}, {}) is not None
        other = TokenAuth(SECRET[::-1], now=time)
        assert other.cookie_name != auth.cookie_name
        value = cookie.partition("=")[2]
        assert other.admit({"cookie": [f"{other.cookie_name}={value}"]}, {}) is None

    def test_a_cookie_among_others(self, auth: TokenAuth) -> None:
        """One that another page put beside ours, of the same name, neither helps nor harms."""
        cookie = cookie_of(auth)
        assert auth.admit({"cookie": [f"a=b; {auth.cookie_name}=forged; {cookie}; c=d"]}, {}) is not None
        assert auth.admit({"cookie": ["a=b", cookie]}, {}) is not None

    def test_forged_cookies(self, auth: TokenAuth, time: Time) -> None:
        """A changed time, a cut signature, an empty one, one from the future, a code in its place: nobody."""
        name, _, value = cookie_of(auth).partition("=")
        issued, _, signature = value.partition(".")
        forged = [
            f"{int(issued) + 1}.{signature}",
            f"{issued}.{signature[:-1]}",
            f"{issued}.",
            f".{signature}",
            "",
            ".",
            f"{issued}.{signature}.",
            f"{issued}.{signature.upper()}",
            auth.code(),
            SECRET,
            "é.é",
        ]
        for each in forged:
            assert auth.admit({"cookie": [f"{name}={each}"]}, {}) is None, each
        time.now -= 3600
        assert auth.admit({"cookie": [f"{name}={value}"]}, {}) is None

    def test_what_the_browser_is_told(self, auth: TokenAuth) -> None:
        """No script reads it, no other site sends it."""
        told = auth.cookie(secure=True, path="/jobs/")
        assert "; HttpOnly" in told
        assert "; SameSite=Strict" in told
        assert "; Secure" in told
        assert "; Path=/jobs/" in told
        assert "Max-Age=0" in auth.no_cookie(secure=False, path="/")

    def test_a_code_gives_one_login(self, auth: TokenAuth) -> None:
        """The second time, and in another hand, it is worth nothing."""
        code = auth.code()
        assert auth.use_code(code)
        assert not auth.use_code(code)

    def test_one_of_many_at_once(self, auth: TokenAuth) -> None:
        """Eight who use a code at the same moment: one gets in."""
        code = auth.code()
        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(auth.use_code, [code] * 8)) == 1

    def test_a_code_runs_out(self, auth: TokenAuth, time: Time) -> None:
        """After ten minutes."""
        code = auth.code()
        time.now += CODE_S
        assert not auth.use_code(code)

    def test_forged_codes(self, auth: TokenAuth) -> None:
        """A changed time or number, a cookie in its place, nothing."""
        code = auth.code()
        text, _, signature = code.rpartition(".")
        value = cookie_of(auth).partition("=")[2]
        for each in (f"9{text}.{signature}", f"{text}x.{signature}", f"{text}.", "", ".", value):
            assert not auth.use_code(each), each

    def test_guesses_lock_nobody_out(self, auth: TokenAuth) -> None:
        """However many there were, the right code and the right token are good."""
        for number in range(200):
            assert not auth.is_token(f"guess {number}")
            assert not auth.use_code(f"{number}.guess")
        assert auth.is_token(SECRET)
        assert auth.use_code(auth.code())


PLACES = Places.loopback(8765, ["https://jobs.example.org"])


class TestPlaces:
    @pytest.mark.parametrize(
        "host", ["127.0.0.1:8765", "localhost:8765", "[::1]:8765", "jobs.example.org"], ids=lambda host: host
    )
    def test_names_of_ours(self, host: str) -> None:
        """Each with its port, and the host of an origin that was allowed."""
        check_places(PLACES, {"host": [host]}, navigation=False)

    @pytest.mark.parametrize("origin", ["http://127.0.0.1:8765", "http://localhost:8765", "https://jobs.example.org"])
    def test_pages_of_ours(self, origin: str) -> None:
        """And pages from there."""
        check_places(PLACES, {"host": ["localhost:8765"], "origin": [origin]}, navigation=False)

    def test_where_no_lists_are_given_a_page_speaks_to_its_own_host(self) -> None:
        """A host program that mounts the app: another site's page is refused without any list."""
        places = Places()
        check_places(places, {"host": ["any:1"], "origin": ["https://any:1"]}, navigation=False)
        for origin in ("https://any", "https://any:2", "null", "http://evil.any:1", "ftp://any:1"):
            with pytest.raises(Refusal):
                check_places(places, {"host": ["any:1"], "origin": [origin]}, navigation=False)

    def test_a_socket_of_the_home_needs_no_host_and_takes_no_page(self) -> None:
        """No browser gets there."""
        inside = PLACES.here({"server": ("/home/serve.sock", None)})
        check_places(inside, {"host": ["whatever"]}, navigation=False)
        with pytest.raises(Refusal):
            check_places(inside, {"host": ["localhost"], "origin": ["http://localhost"]}, navigation=False)
        assert PLACES.here({"server": ("127.0.0.1", 8765)}) is PLACES

    @pytest.mark.parametrize(
        "origin",
        ["jobs", "http://", "HTTP://x", "http://x/", "http://X", "http://u@x", "ftp://x", "http://*", "http://a,b"],
    )
    def test_what_is_no_origin(self, origin: str) -> None:
        """`--allow-origin` takes exactly what a browser would send."""
        with pytest.raises(InvalidConfiguration):
            check_origin(origin)
