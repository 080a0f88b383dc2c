"""A machine on which these packages, and no others, are installed."""

from __future__ import annotations

import importlib.metadata


def lookup(**installed: str):
    """In place of ``importlib.metadata.version``."""

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    return version
