"""``POST /v1/tokens``: a token for a browser, which should not be given the key itself."""

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from app.access import Access
from app.tokens import DEFAULT_TTL_S, MAX_TTL_S, MIN_TTL_S


class TokenWish(BaseModel):
    """What may be asked of a token."""

    model_config = ConfigDict(extra="forbid")

    expires_in_s: int = Field(default=DEFAULT_TTL_S, ge=MIN_TTL_S, le=MAX_TTL_S)


def routes(access: Access) -> APIRouter:
    router = APIRouter(tags=["access"])

    @router.post("/v1/tokens")
    async def make_token(request: Request, wish: TokenWish | None = None) -> JSONResponse:
        """A token that may be used wherever the key may, until it expires. A stream that is open then goes on."""
        ttl_s = (wish or TokenWish()).expires_in_s
        token, expires_at = access.issue(access.check(request), ttl_s)
        answer = {"token": token, "expires_at": expires_at, "expires_in_s": ttl_s}
        return JSONResponse(answer, headers={"Cache-Control": "no-store"})

    return router
