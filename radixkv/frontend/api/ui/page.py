"""The page ``/ui``: one HTML document with its style and script inside, which loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from starlette.responses import HTMLResponse, Response


class Page:
    """The document, put together of its files, with the policy that lets a browser run these only."""

    def __init__(self) -> None:
        folder = files(__package__)
        style = folder.joinpath("page.css").read_text("utf-8")
        script = "\n".join(folder.joinpath(name).read_text("utf-8") for name in ("explain.js", "page.js"))
        document = folder.joinpath("page.html").read_text("utf-8")
        for place, content in (("<style></style>", style), ("<script></script>", script)):
            assert document.count(place) == 1, place
            document = document.replace(place, place.replace("><", f">{content}<"))
        self._document = document
        policy = (
            "default-src 'none'",
            f"script-src '{_hash(script)}'",
            f"style-src '{_hash(style)}'",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
        self._headers = {
            "Content-Security-Policy": "; ".join(policy),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        }

    def response(self) -> Response:
        """Returns the document, which has no data of the server."""
        return HTMLResponse(self._document, headers=self._headers)


def _hash(content: str) -> str:
    """Returns the source expression that allows an inline element with this content."""
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"
