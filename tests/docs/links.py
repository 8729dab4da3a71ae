"""Dead links of a page: files, anchors, and the syntax of what leads out of the repository."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import unquote, urlsplit

from pages import Page


def dead_links(page: Page) -> Iterator[str]:
    """A line for each link that leads nowhere."""
    for line, target in page.links():
        reason = _why_dead(page, target)
        if reason:
            yield f"{page.name}:{line}: {target}: {reason}"


def _why_dead(page: Page, target: str) -> str | None:
    url = urlsplit(target)
    if url.scheme in ("http", "https"):
        return None if url.hostname and "." in url.hostname else "no host in it"
    if url.scheme or url.netloc:
        return f"expected a path, http or https, got {url.scheme}"
    file = (page.file.parent / unquote(url.path)).resolve() if url.path else page.file
    if not file.exists():
        return "no such file"
    if not url.fragment:
        return None
    if file.suffix != ".md":
        return "an anchor in a file that has none"
    return None if url.fragment in Page(file).anchors() else "no such heading"
