"""MkDocs hooks: links from docs to source files become plain text on the site."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replaces a link to a file outside `docs/` by its text; a missing file stops the build."""
    folder = posixpath.dirname("docs/" + page.file.src_uri)

    def replace(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        if target.startswith("docs/"):
            return link[0]
        if not (ROOT / target).exists():
            raise FileNotFoundError(f"{page.file.src_uri} links to {target}, which does not exist")
        return link[1] if target.rsplit("/", 1)[-1] in link[1] else f"{link[1]} (`{target}`)"

    return LINK.sub(replace, markdown)
