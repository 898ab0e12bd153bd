"""Access to the dashboard: hosts, token and cookie, and the origin of actions.

A page of another site must not read or do anything here, even if it points its own name to this
address (DNS rebinding): the Host header names the host that the browser believes it talks to. Other
users of this machine do not know the token.
"""

from __future__ import annotations

import hmac
import html
import secrets
import socket
from collections.abc import Iterable
from typing import Final
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.requests import cookie_parser
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gadei_ps.errors import UsageError
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


class Access:
    """Conditions that a request must meet.

    token: of the link; None: none is needed. session: value of the cookie.
    """

    def __init__(
        self, host: str, port: int, *, read_only: bool, token: bool, allow_hosts: Iterable[str] = ()
    ) -> None:
        """host, port: at which the server listens. allow_hosts: further names in the Host header.

        Raises UsageError if strangers would meet the conditions, or no request has such a name.
        """
        self._is_local = listening.is_loopback(host)
        if not token and not self._is_local:
            raise UsageError(
                f"--no-token: at {host} everyone who reaches this machine could see your jobs; "
                "leave out the option, or listen at 127.0.0.1"
            )
        names = {*listening.LOCAL, host}
        for given in allow_hosts:
            name = given if listening.is_address(given) else listening.host_of(given)
            if not name:
                raise UsageError(f"--allow-host: {given!r} is not a host name, as proxy.example is")
            names.add(name)
        if not self._is_local:
            names |= {socket.gethostname(), socket.getfqdn()}
        self._hosts = {one.lower() for one in names if one}
        self._place = host, port
        self.token = secrets.token_urlsafe(24) if token else None
        # Other users of this machine also reach the loopback address.
        self.read_only = read_only or not token
        self.cookie, self.session = f"gadei_ps_{port}", secrets.token_urlsafe(32)

    @property
    def link(self) -> str:
        """The link to the dashboard, as a browser of this machine opens it."""
        host, port = self._place
        host = socket.gethostname() if host in ("0.0.0.0", "::") else host
        more = f"?token={self.token}" if self.token else ""
        return f"http://{listening.shown(host, port)}/{more}"

    def refusal(self, method: str, headers: Headers) -> tuple[int, str] | None:
        """Return why a request is refused, with the status; None if it is not."""
        host = headers.get("host", "").lower()
        name = listening.host_of(host)
        is_known = name in self._hosts or (not self._is_local and listening.is_address(name))
        if len(headers.getlist("host")) != 1 or not is_known:
            return 421, f"this dashboard is not at {host[:100]!r}: see --allow-host"
        session = cookie_parser(headers.get("cookie", "")).get(self.cookie, "")
        if self.token is not None and not _are_equal(session, self.session):
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
        access, headers = self._access, Headers(scope=scope)
        given = QueryParams(scope["query_string"]).get("token")
        refusal = access.refusal(scope["method"], headers)
        token = access.token if scope["method"] == "GET" else None
        if given is not None and token is not None and refusal in (None, (403, NO_TOKEN)):
            if _are_equal(given, token):
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
