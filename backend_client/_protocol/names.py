"""How names of models compare."""

from functools import lru_cache


@lru_cache(1024)
def plain_name(name: str) -> str:
    """The form in which nodes compare names: lower case, without `:latest`."""
    return name.strip().lower().removesuffix(":latest")
