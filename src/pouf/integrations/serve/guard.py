"""Limits of a request and of a client, and metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi.responses import JSONResponse, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ADDRESSES = 10_000  # of clients, for counting their requests
# Nothing is loaded from other hosts, and no other page may embed this one.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
BUSY = "too many requests are waiting: try again in a second"
RETRY = {"Retry-After": "1"}
HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]


@dataclass(frozen=True)
class Limits:
    """Limits of a request and of a client."""

    upload: int = 20 * 2**20  # bytes of a request
    bodies: int = 100 * 2**20  # bytes of all open requests; beyond that, 503
    body_seconds: float = 60.0  # until a body must have arrived
    pixels: int = 100_000_000  # of the images of a request, and of all that are decoded and not yet answered
    inputs: int = 256  # of a request
    rows: int = 10_000  # of a table
    rate: float = 100.0  # requests per second and client address, with bursts of five times as many; 0 is no limit
    batch: int = 64  # samples computed together
    waiting: int = 4096  # samples that wait; beyond that, 503


class Budget:
    """A resource that all open requests share."""

    def __init__(self, total: int) -> None:
        self.free = total
        self._turn, self._returned = asyncio.Lock(), asyncio.Event()

    @asynccontextmanager
    async def reserve(self, amount: int) -> AsyncIterator[None]:
        """Wait until so much is free, first come, first served. An amount above the total would wait forever."""
        async with self._turn:
            while amount > self.free:
                self._returned.clear()
                await self._returned.wait()
            self.free -= amount
        try:
            yield
        finally:
            self.free += amount
            self._returned.set()


def _as_json(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers of a request with a JSON body; that becomes its type if none is given, or `curl -d`'s default."""
    content_type = dict(headers).get(b"content-type", b"")
    if content_type and not content_type.startswith(b"application/x-www-form-urlencoded"):
        return list(headers)
    return [*(pair for pair in headers if pair[0] != b"content-type"), (b"content-type", b"application/json")]


def error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": message}, status, headers)


class Metrics:
    """For Prometheus."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Counter(
            "pouf_requests_total", "Requests by path and status.", ["path", "status"], registry=registry
        )
        self.seconds = Histogram("pouf_request_seconds", "Time to answer, by path.", ["path"], registry=registry)
        sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256]
        self.batches = Histogram("pouf_batch_size", "Samples computed together.", buckets=sizes, registry=registry)
        self.waiting = Gauge("pouf_waiting_samples", "Samples that wait to be computed.", registry=registry)


class Guard:
    """Middleware: refuses requests that are too large, too slow or too many, counts all, adds security headers."""

    def __init__(
        self,
        app: ASGIApp,
        limits: Limits,
        metrics: Metrics,
        bodies: Budget,
        paths: Callable[[], set[str]],
        json_paths: Sequence[str] = (),
    ) -> None:
        self.app, self.limits, self.metrics, self.bodies, self.paths = app, limits, metrics, bodies, paths
        self.json_paths = json_paths
        self.allowance: dict[str, tuple[float, float]] = {}  # by address: requests left, and the time of that count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status, received, more = time.perf_counter(), 500, 0, True

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *HEADERS]
            await send(message)

        async def receive_within_limits() -> Message:
            nonlocal received, more
            left = max(start + self.limits.body_seconds - time.perf_counter(), 0.0) if more else None
            try:
                message = await asyncio.wait_for(receive(), left)
            except asyncio.TimeoutError:
                reason = f"the body had not arrived after {self.limits.body_seconds:g} seconds: send less at once"
                raise HTTPException(408, reason, {"Connection": "close"}) from None
            more, size = message.get("more_body", False), len(message.get("body", b""))
            received += size
            self.bodies.free -= size
            if received > self.limits.upload:
                raise HTTPException(413, self._too_large())
            if self.bodies.free < 0:
                raise HTTPException(503, BUSY, RETRY)
            return message

        if scope["path"] in self.json_paths:
            scope = {**scope, "headers": _as_json(scope["headers"])}
        refusal = self._refusal(scope)
        try:
            if refusal is not None:
                await refusal(scope, receive, send_with_headers)
            else:
                await self.app(scope, receive_within_limits, send_with_headers)
        finally:
            self.bodies.free += received
            path = scope["path"] if scope["path"] in self.paths() else "other"
            self.metrics.requests.labels(path, str(status)).inc()
            self.metrics.seconds.labels(path).observe(time.perf_counter() - start)

    def _refusal(self, scope: Scope) -> Response | None:
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self.limits.upload:
            return error_response(413, self._too_large())
        if scope["path"].startswith("/api/") and not self._within_rate(scope["client"][0] if scope["client"] else ""):
            rate = self.limits.rate
            return error_response(429, f"more than {rate:g} requests per second: try again in a second", RETRY)
        return None

    def _too_large(self) -> str:
        return f"a request may have at most {self.limits.upload / 2**20:g} MB: send less at once"

    def _within_rate(self, address: str) -> bool:
        """A token bucket for each address: it holds five seconds' worth of requests, and fills at the rate."""
        rate, now = self.limits.rate, time.monotonic()
        if not rate:
            return True
        left, since = self.allowance.get(address, (5 * rate, now))
        left = min(5 * rate, left + rate * (now - since))
        if len(self.allowance) > ADDRESSES:
            self.allowance.clear()
        self.allowance[address] = (left - 1, now) if left >= 1 else (left, now)
        return left >= 1
