"""The console's door: who gets in, whose requests count, and what every answer says to a browser."""

from __future__ import annotations

from typing import Any

import pytest

from fumehood.core.limits import MAX_BODY_BYTES
from fumehood.web.guard import CONTENT_POLICY
from fumehood.web.logins import IDLE_S, LINK_S, LONGEST_S
from fumehood.web.view import Page, View, get
from support.approvals import approval
from support.web import ALICE, BASE, BOB, PORT, Browser, Site, make_site

pytestmark = pytest.mark.row("A6")


@pytest.fixture
def site() -> Site:
    return make_site(approval())


PATHS = [
    "/",
    "/login",
    "/inbox",
    "/inbox/list",
    "/nothing",
    "/events",
    "/static/app.css",
    "/static/../app.py",
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("credential", [None, ALICE])
def test_every_answer_of_the_console_has_the_security_headers(
    site: Site, path: str, credential: str | None
) -> None:
    browser = site.browser(credential)
    site.console.live.stop()  # a stream would not end
    headers = browser.get(path).headers
    assert headers["content-security-policy"] == CONTENT_POLICY
    assert "unsafe" not in CONTENT_POLICY
    assert "http" not in CONTENT_POLICY
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "same-origin"
    assert headers["cross-origin-opener-policy"] == "same-origin"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert headers["cache-control"] == (
        "public, max-age=31536000, immutable" if path == "/static/app.css" else "no-store"
    )


@pytest.mark.parametrize(
    "host",
    ["evil.example", f"evil.example:{PORT}", "127.0.0.1", "127.0.0.1:1", "", f"127.0.0.2:{PORT}"],
)
def test_request_with_another_host_name_is_refused(site: Site, host: str) -> None:
    browser = site.browser()
    assert browser.get("/inbox", host=host).status_code == 403
    for own in (f"localhost:{PORT}", f"127.0.0.1:{PORT}", f"LOCALHOST:{PORT}"):
        assert browser.get("/inbox", host=own).status_code == 200


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "null",
        f"https://127.0.0.1:{PORT}",
        f"http://127.0.0.1:{PORT + 1}",
        None,
    ],
)
def test_change_from_another_origin_is_refused(site: Site, origin: str | None) -> None:
    browser, one = site.browser(), approval()
    sent = {"version": "1"}
    assert browser.post(f"/inbox/{one.id}/approve", sent, origin=origin).status_code == 403
    assert site.engine.asked == []
    assert browser.post(f"/inbox/{one.id}/approve", sent).status_code == 200
    assert len(site.engine.asked) == 1


def test_form_without_csrf_token_is_refused(site: Site) -> None:
    alice, bob = site.browser(ALICE), site.browser(BOB)
    path, sent = f"/inbox/{approval().id}/approve", {"version": "1"}
    assert alice.post(path, sent, csrf=False).status_code == 403
    for wrong in (bob.csrf, "ä", ""):
        assert alice.post(path, {**sent, "csrf": wrong}, csrf=False).status_code == 403
    assert alice.post(path, sent, csrf=False, headers={"x-csrf-token": ""}).status_code == 403
    assert alice.post(path, sent, csrf=False, headers={"x-csrf-token": "a"}).status_code == 403
    assert site.engine.asked == []
    assert (
        alice.post(path, sent, csrf=False, headers={"x-csrf-token": alice.csrf}).status_code == 200
    )


@pytest.mark.parametrize(
    "path", ["/inbox", "/inbox/list", f"/inbox/{approval().id}", "/inbox/several?item=a@1"]
)
def test_nothing_is_shown_without_a_login(site: Site, path: str) -> None:
    browser = site.browser(None)
    found = browser.get(path)
    assert found.status_code == 303
    assert found.headers["location"] == "/login"
    part = browser.part(path)
    assert part.headers["hx-redirect"] == "/login"
    assert part.text == ""
    assert browser.post("/inbox/several", csrf=False).headers["location"] == "/login"


def test_login_cookie_is_strict_and_http_only(site: Site) -> None:
    cookie = Browser(site.console).log_in(ALICE).headers["set-cookie"]
    assert cookie.startswith(f"fumehood_{PORT}=")
    flags = {part.strip().lower() for part in cookie.split(";")[1:]}
    assert {"httponly", "samesite=strict", "path=/"} <= flags
    assert not any(flag.startswith("domain") for flag in flags)


@pytest.mark.parametrize("credential", ["", "fha_nobody", "ä", "x" * 10_000])
def test_wrong_credential_does_not_log_in(site: Site, credential: str) -> None:
    browser = Browser(site.console)
    found = browser.log_in(credential)
    assert found.status_code == 403
    assert "unknown" in found.text
    assert browser.get("/inbox").status_code == 303


def token_of(link: str) -> str:
    return link.partition("token=")[2]


@pytest.mark.parametrize(("after_s", "status"), [(LINK_S - 1, 303), (LINK_S + 1, 403)])
def test_login_link_expires(site: Site, after_s: float, status: int) -> None:
    token = token_of(site.console.link(ALICE))
    site.clock[0] += after_s
    assert Browser(site.console).post("/login", {"token": token}, csrf=False).status_code == status


def test_login_ends_when_it_is_not_used(site: Site) -> None:
    browser = site.browser()
    site.clock[0] += IDLE_S - 1
    assert browser.get("/inbox").status_code == 200
    site.clock[0] += IDLE_S + 1
    assert browser.get("/inbox").status_code == 303
    assert site.console.logins._logins == {}


def test_login_ends_after_a_day_even_if_it_is_used(site: Site) -> None:
    browser = site.browser()
    for _ in range(int(LONGEST_S / (IDLE_S / 2))):
        assert browser.get("/inbox").status_code == 200
        site.clock[0] += IDLE_S / 2
    site.clock[0] += 1
    assert browser.get("/inbox").status_code == 303


def test_logout_forgets_the_credential(site: Site) -> None:
    browser = site.browser()
    (login,) = site.console.logins._logins.values()
    assert browser.post("/logout").status_code == 303
    assert browser.get("/inbox").status_code == 303
    assert login.control.is_closed  # type: ignore[attr-defined]


def test_revoked_credential_ends_the_login(site: Site) -> None:
    browser = site.browser()
    site.engine.revoked.add(ALICE)
    assert browser.get("/inbox").headers["location"] == "/login"
    site.engine.revoked.clear()
    assert browser.get("/inbox").status_code == 303


def test_second_login_of_a_browser_ends_the_first(site: Site) -> None:
    browser = site.browser(ALICE)
    assert browser.log_in(BOB).status_code == 303
    (login,) = site.console.logins._logins.values()
    assert login.principal_id == "approver:bob"


def test_logins_are_bounded(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fumehood.web.logins.MAX_LOGINS", 3)
    browsers = [site.browser() for _ in range(4)]
    assert [one.get("/inbox").status_code for one in browsers] == [303, 200, 200, 200]


def test_logins_keep_only_hashes_of_cookies_and_links(site: Site) -> None:
    cookie = (
        Browser(site.console)
        .log_in(ALICE)
        .headers["set-cookie"]
        .partition("=")[2]
        .partition(";")[0]
    )
    token = token_of(site.console.link(ALICE))
    kept = repr(site.console.logins._logins) + repr(list(site.console.logins._links))
    assert cookie not in kept
    assert token not in kept
    assert ALICE not in kept


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"csrf=x", "text/plain", 415),
        (b"a" * (MAX_BODY_BYTES + 1), "application/x-www-form-urlencoded", 413),
        (b"a&" * 5_000, "application/x-www-form-urlencoded", 400),
        (b"a=%ff", "application/x-www-form-urlencoded", 400),
        ("a=ü".encode(), "application/x-www-form-urlencoded", 400),
    ],
)
def test_request_body_that_is_not_a_form_is_refused(
    site: Site, content: bytes, kind: str, status: int
) -> None:
    headers = {"origin": BASE, "content-type": kind}
    for path in ("/inbox/several", "/login"):
        found = site.browser().client.post(path, content=content, headers=headers)
        assert found.status_code == status, path
    assert site.engine.asked == []


def test_login_form_has_a_small_size_limit(site: Site) -> None:
    sent = {"credential": "a" * 20_000}
    assert site.browser(None).post("/login", sent, csrf=False).status_code == 413
    assert site.browser().post("/inbox/several", sent).status_code == 400  # a fault of its fields


@pytest.mark.parametrize(
    "path",
    [
        f"/static/{'a' * 5000}",
        "/inbox/%2e%2e",
        "/tools/%2e",
        "/inbox/several?item=..@1",
        "/inbox/several?item=apr_1@%C2%B2",
        f"/inbox/{approval().id}/remember?scope=1h&uses=%C2%B2",
        f"/inbox/{approval().id}/remember?scope=1h&uses={'9' * 5000}",
    ],
)
def test_unusual_address_is_not_a_server_fault(
    site: Site, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for credential in (ALICE, None):
        assert site.browser(credential).get(path).status_code < 500
    assert capsys.readouterr().err == ""


def test_unusual_decision_is_not_a_server_fault(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    browser, one = site.browser(), approval()
    sent = {"given:times": "on", "number:times": "9" * 5000, "version": "1"}
    assert "This is not a number." in browser.post(f"/inbox/{one.id}/edit", sent).text
    assert site.engine.asked == []
    assert capsys.readouterr().err == ""
    sent = {"version": "1", "digest": "f" * 200}
    assert browser.post(f"/inbox/{one.id}/approve", sent).status_code == 200
    assert len(site.engine.asked[0][1].decision.action_digest) == 100  # which is nobody's


def test_page_reloads_itself_when_an_absent_engine_returns(site: Site) -> None:
    browser = site.browser()
    site.engine.is_away = True
    page = browser.get("/inbox")
    assert page.status_code == 503
    assert "data-reload-when-back" in page.text
    part = browser.part("/inbox/list")
    assert part.status_code == 503
    assert part.headers["hx-retarget"] == "#notices"
    assert Browser(site.console).log_in(ALICE).status_code == 503
    site.engine.is_away = False
    assert browser.get("/inbox").status_code == 200


def test_fault_of_a_page_tells_the_browser_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    async def broken(view: View) -> Any:
        raise RuntimeError("secret path")

    site = make_site(pages=(Page("Broken", "/inbox", (get("/inbox", broken),)),))
    found = site.browser().get("/inbox")
    assert found.status_code == 500
    assert "secret path" not in found.text
    assert "secret path" in capsys.readouterr().err


def test_page_that_waits_while_its_login_ends_goes_to_the_login(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def held(view: View) -> Any:
        await view.console.logins.close(view.login)
        raise RuntimeError("its client has been closed")

    site = make_site(pages=(Page("Held", "/inbox", (get("/inbox", held),)),))
    found = site.browser().get("/inbox")
    assert (found.status_code, found.headers["location"]) == (303, "/login")
    assert not capsys.readouterr().err


def test_page_whose_login_has_ended_meanwhile_is_not_shown() -> None:
    async def slow(view: View) -> Any:
        await view.console.logins.close(view.login)
        return view.notice("for those who are logged in", 200)

    site = make_site(pages=(Page("Slow", "/inbox", (get("/inbox", slow),)),))
    found = site.browser().get("/inbox")
    assert (found.status_code, found.headers["location"]) == (303, "/login")


def test_static_files_are_those_of_the_package_alone(site: Site) -> None:
    for name in ("htmx.min.js", "app.js", "app.css", "icon.svg", "htmx.LICENSE.txt"):
        assert site.browser(None).get(f"/static/{name}").status_code == 200
    for name in ("..%2fapp.py", "%2e%2e/app.py", "nothing.js", "%00"):
        assert site.browser(None).get(f"/static/{name}").status_code == 404
