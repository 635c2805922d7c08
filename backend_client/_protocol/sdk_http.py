"""The HTTP library that the installed OpenAI SDK is built on: httpx2 from version 3 on, httpx before."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from openai import DefaultAsyncHttpxClient

if TYPE_CHECKING:
    import httpx2 as httpx
else:
    # The SDK takes clients and transports of its own library alone.
    httpx = importlib.import_module(DefaultAsyncHttpxClient.__base__.__module__.partition(".")[0])

__all__ = ["httpx"]
