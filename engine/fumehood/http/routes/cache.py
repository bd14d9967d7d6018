"""`/v1/cache`, on the control socket: the figures of the result cache, and clearing it."""

from __future__ import annotations

from fumehood.cache.model import CacheStatus, ClearedCache
from fumehood.core.identity import Principal
from fumehood.engine import Engine
from fumehood.http.endpoint import Needs, endpoint


@endpoint("GET", "/v1/cache", Needs.ADMIN, client="cache.show")
async def show_cache(engine: Engine) -> CacheStatus:
    """Show how much the result cache holds, and its hits and misses since the start."""
    return engine.cache.status()


@endpoint("DELETE", "/v1/cache", Needs.ADMIN, client="cache.clear")
async def clear_cache(engine: Engine, caller: Principal) -> ClearedCache:
    """Drop every answer of the result cache, of all principals.

    Runs that have begun answer the calls that wait for them already, and no later ones.
    """
    done = engine.cache.clear()
    engine.log.info("cache.cleared", by=caller.id, entries=done.cleared)
    return done


OPERATIONS = [show_cache, clear_cache]
