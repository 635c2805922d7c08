"""Imports the packages of the extra `bulk` when a job runs, so that the base of the client works without them."""

from __future__ import annotations

import importlib
from typing import Any

from backend_client.errors import INSTALL_EXTRA, ConfigurationError


def need(module: str, extra: str = "bulk") -> Any:
    """The module. Raises ConfigurationError, which names the extra, when it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = error.name or module
    raise ConfigurationError(f"{missing} is missing: {INSTALL_EXTRA.format(extra)}")


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system for a path or URL, and the path in it.

    Raises ConfigurationError for a scheme that fsspec does not know, or whose package is not installed.
    """
    fsspec = need("fsspec")
    try:
        found, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        problem = str(error)
    else:
        # Listings are cached by default: a run must see what other runs commit.
        found.use_listings_cache = False
        found.invalidate_cache()
        return found, path
    raise ConfigurationError(f"{url.partition('://')[0]} cannot be opened: {problem}")


def schema_validator(schema: Any) -> Any:
    """What checks values against a JSON Schema. Raises ConfigurationError for what is not one, or refers to others."""
    try:
        return need("jsonschema_rs").validator_for(schema, retriever=_retrieve_nothing)
    except ValueError as error:
        problem = str(error).partition("\n")[0]
    raise ConfigurationError(f"response_schema is not a valid JSON Schema: {problem}")


def _retrieve_nothing(_: str) -> Any:
    raise ValueError("a schema must be complete in itself")
