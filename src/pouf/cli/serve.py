"""`pouf serve`."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress
from typing import Annotated

import typer

from pouf.cli import _console as console
from pouf.cli._options import InferenceOptions, RunFolder, grouped
from pouf.errors import InputError, optional


@grouped
def serve(
    run: RunFolder,
    place: InferenceOptions,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every network of this machine.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8000,
    batch_size: Annotated[int, typer.Option(help="Samples of concurrent requests computed together.", min=1)] = 64,
    max_upload: Annotated[float, typer.Option(help="Largest request in MB.", min=0.001)] = 20.0,
    max_pixels: Annotated[
        float, typer.Option(help="Millions of pixels that are decoded at once, of one request or of all.", min=0.001)
    ] = 100.0,
    body_timeout: Annotated[float, typer.Option(help="Seconds until a request must have arrived.", min=0.1)] = 60.0,
    shutdown_timeout: Annotated[
        int, typer.Option(help="Seconds for open requests when a signal ends the server.", min=1)
    ] = 10,
    rate: Annotated[
        float,
        typer.Option(help="Requests per second and client, with bursts of five times as many; 0 sets no limit.", min=0),
    ] = 100.0,
    neighbours: Annotated[
        int, typer.Option(help="Training inputs among which the nearest are shown; 0 shows none.", min=0)
    ] = 500,
) -> None:
    """Serve a run: a page for people, a JSON API for programs."""
    uvicorn = optional("uvicorn", "serve", "serving a run")
    for package in ("fastapi", "python_multipart", "prometheus_client"):
        optional(package, "serve", "serving a run")
    from pouf.integrations.serve.app import LOCAL, make_app
    from pouf.integrations.serve.engine import Engine
    from pouf.integrations.serve.guard import Limits

    console.calm_libraries()
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise InputError(
            f"can't listen on {host}:{port}: {error.strerror or error}. Give another --port or --host"
        ) from None
    with listening:
        engine = Engine(
            run, device=place.place(), trust_model=place.trust_model, neighbours=neighbours, cache=place.features()
        )
        limits = Limits(
            upload=int(max_upload * 2**20), pixels=int(max_pixels * 1e6), body_seconds=body_timeout, rate=rate,
            batch=batch_size,
        )  # fmt: skip
        local = _is_local(host)
        app = make_app(engine, limits, (*LOCAL, host) if local else ("*",))
        console.show_verdict(engine.run.verdict, quiet=False)
        if not local:
            console.note("Whoever can reach this machine can use this: there is no password.", "yellow")
        shown = f"[{host}]" if ":" in host else host
        console.say(f"Serving at http://{shown}:{listening.getsockname()[1]} (Ctrl+C ends it)")
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=shutdown_timeout)
        server = uvicorn.Server(config)
        with suppress(KeyboardInterrupt, SystemExit):
            server.run(sockets=[listening])


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
