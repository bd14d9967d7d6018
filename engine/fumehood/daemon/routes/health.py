"""`/v1/health` (the process answers) and `/v1/ready` (calls would be served, and how)."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from fumehood.engine import Engine


async def health(request: Request) -> Response:
    """Alive."""
    return JSONResponse({"status": "ok"})


async def ready(request: Request) -> Response:
    """200 where calls are served, 503 where not; what each wall in use enforces either way.

    A state that cannot be written keeps no harmless call from being served, but it is said.
    """
    engine: Engine = request.app.state.engine
    walls = engine.walls
    serves = not engine.is_draining and all(
        wall["ready"] for wall in walls.values() if wall["essential"]
    )
    public = {name: {k: wall[k] for k in ("ready", "enforced")} for name, wall in walls.items()}
    state = {"failing": engine.database.is_failing, "lost_rows": engine.database.lost_posts}
    return JSONResponse(
        {"status": "ready" if serves else "not_ready", "walls": public, "state": state},
        status_code=200 if serves else 503,
    )
