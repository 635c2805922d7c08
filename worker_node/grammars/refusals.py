"""What of a schema is not enforced: told apart, so that a keyword can be dropped where the request allows it."""

from __future__ import annotations

from worker_node.errors import BadRequest, UnsupportedParameter


class NothingAdmitted(BadRequest):
    """No value matches the schema, or this part of it."""

    def __init__(self, path: str, why: str = "no value is admitted") -> None:
        super().__init__(f"{path}: {why}", param=path)


class CannotEnforce(UnsupportedParameter):
    """A keyword cannot be turned into a grammar."""

    def __init__(self, path: str, keyword: str, why: str = "cannot be enforced") -> None:
        super().__init__(f"{path}.{keyword[:100]}: {why}", param=f"{path}.{keyword[:100]}")
        self.keyword = keyword
