"""Access to the dashboard: hosts, token and cookie, and the origin of actions.

A page of another site must not read or do anything here, even if it points its own name to this
address (DNS rebinding): the Host header names the host that the browser believes it talks to. Other
users of this machine do not know the token.
"""

from __future__ import annotations

import hmac
import html
import secrets
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.requests import cookie_parser
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gadei_ps.machine import listening

MOST_BODY: Final = 16 << 10  # bytes of an action's form
SAFE: Final = ("GET", "HEAD")
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
NO_TOKEN: Final = (
    "open the link that gadei-ps dashboard has printed: it has the token that this page needs"
)


@dataclass(frozen=True)
class Access:
    """Conditions that a request must meet.

    hosts: names in the Host header, in lower case. any_address: also every IP address there.
    token: of the link; None: no token is needed.
    """

    hosts: frozenset[str]
    any_address: bool
    token: str | None
    read_only: bool
    cookie: str = "gadei_ps"
    session: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    """Value of the cookie."""

    def refusal(self, method: str, headers: Headers) -> tuple[int, str] | None:
        """Return why a request is refused, with the status; None if it is not."""
        host = headers.get("host", "").lower()
        name = listening.host_of(host)
        is_known = name in self.hosts or (self.any_address and listening.is_address(name))
        if len(headers.getlist("host")) != 1 or not is_known:
            return 421, f"this dashboard is not at {host[:100]!r}: see --allow-host"
        if self.token is not None and not self.has_session(headers):
            return 403, NO_TOKEN
        if method in SAFE:
            return None
        if self.read_only:
            return 403, "this dashboard is read-only"
        if headers.get("origin", "").lower() not in (f"http://{host}", f"https://{host}"):
            return 403, "actions are accepted from the dashboard's own pages only"
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > MOST_BODY:
            return 413, "the request is too long"
        return None

    def has_session(self, headers: Headers) -> bool:
        """Return whether the request has the cookie."""
        given = cookie_parser(headers.get("cookie", "")).get(self.cookie, "")
        return _are_equal(given, self.session)

    def is_token(self, given: str) -> bool:
        """Return whether it is the token of the link."""
        return self.token is not None and _are_equal(given, self.token)


def _are_equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())


class Guard:
    """Lets those requests through that Access accepts, and adds headers to all replies."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return

        async def protected(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                # Only static files have an ETag, by which a browser asks whether they have changed.
                headers["Cache-Control"] = "no-cache" if "etag" in headers else "no-store"
            await send(message)

        reply = self._reply(scope)
        await (reply or self._app)(scope, receive, protected)

    def _reply(self, scope: Scope) -> Response | None:
        """Return the reply to a request that goes no further."""
        headers, method = Headers(scope=scope), str(scope["method"])
        given = QueryParams(scope["query_string"]).get("token")
        refusal = self._access.refusal(method, headers)
        if given is not None and method == "GET" and (refusal is None or refusal[1] == NO_TOKEN):
            if self._access.is_token(given):
                return self._signed_in(str(scope["path"]))
            refusal = 403, NO_TOKEN
        if refusal is None:
            return None
        # What is left of the body is not read: the connection ends.
        status, why = refusal
        return PlainTextResponse(f"{why}\n", status, {"Connection": "close"})

    def _signed_in(self, path: str) -> Response:
        """Set the cookie; the page itself leads on.

        After a redirect, a browser that came from another site would not send a strict cookie.
        """
        where = html.escape(quote("/" + path.lstrip("/\\")))
        reply = HTMLResponse(
            f'<!doctype html><meta http-equiv="refresh" content="0;url={where}">'
            '<link rel="icon" href="data:,"><title>gadei-ps</title>'
            f'<p><a href="{where}">Continue to the dashboard</a>'
        )
        reply.set_cookie(
            self._access.cookie, self._access.session, httponly=True, samesite="strict", path="/"
        )
        return reply
