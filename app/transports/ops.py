"""Health, readiness and metrics."""

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from app.service import Service


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/healthz", include_in_schema=False)
    async def healthz() -> dict[str, str]:
        """The process lives and its event loop turns."""
        return {"status": "ok"}

    @router.get("/readyz", include_in_schema=False)
    async def readyz() -> JSONResponse:
        """200 when the engine has proved itself with a real decode and new streams are let in, else 503."""
        if service.sessions.is_draining:
            return JSONResponse({"status": "draining"}, 503)
        if not service.engine.ready:
            return JSONResponse({"status": "starting"}, 503, headers={"Retry-After": "3"})
        return JSONResponse({"status": "ready", "model": service.info.model, "sessions": service.sessions.open})

    @router.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return router
