"""Waiting for servers that tests start."""

import urllib.request
from http.client import HTTPException


def answers(url: str) -> bool:
    """Whether a server answers ``url`` with status 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, HTTPException):
        return False
