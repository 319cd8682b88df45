"""The page at `/`.

Promises: one document that loads nothing else, under a content security policy that allows no other
script. Must not: know what the page shows.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from starlette.responses import Response

SCRIPTS = ("page.js", "score.js", "chat.js")


def make_page() -> Response:
    here = files(__name__)
    html, style, *scripts = (
        (here / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", *SCRIPTS)
    )
    script = "\n".join(scripts)
    body = html.replace("{{style}}", style).replace("{{script}}", script)
    policy = (
        f"default-src 'none'; style-src {source_hash(style)}; script-src {source_hash(script)}; "
        "connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "content-security-policy": policy,
        "cache-control": "no-cache",
        "x-content-type-options": "nosniff",
    }
    return Response(body, media_type="text/html", headers=headers)


def source_hash(source: str) -> str:
    """As a policy names an inline source (Content Security Policy Level 3, section 2.3.1)."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
