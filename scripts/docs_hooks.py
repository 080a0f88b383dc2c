"""For the documentation site: links to files of the repository that are no pages become their names."""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"(?<!!)\[([^\]]*)\]\(\.\./[^)\s]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs with the text of each page."""
    return _OUTSIDE.sub(r"\1", markdown)
