"""HTTP/1.1 on a connection, where uvicorn answers by itself: those errors, too, are JSON (docs/server.md)."""

from __future__ import annotations

import h11
import orjson
from uvicorn.protocols.http.h11_impl import H11Protocol

from .app import HEADERS
from .security import Refusal


class Protocol(H11Protocol):
    """As uvicorn's, but for the answer to what is no request, which no app is asked about."""

    def send_400_response(self, msg: str) -> None:
        refusal = Refusal(400, "invalid_input", "this is no valid HTTP/1.1 request (each has one Host header, for one)")
        body = orjson.dumps({"error": refusal.as_fields()})
        headers = [
            *HEADERS,
            (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
            (b"cache-control", b"no-store"),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        response = h11.Response(status_code=refusal.status, headers=headers, reason=b"Bad Request")
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
