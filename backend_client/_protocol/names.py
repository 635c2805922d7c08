"""How names of models compare."""


def plain_name(name: str) -> str:
    """The form in which nodes compare names: lower case, without `:latest`."""
    return name.strip().lower().removesuffix(":latest")
