"""The options of all engines and tasks as keys of `[[models]]`: found by name, validated as they were declared."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar, Union

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from worker_node.engines.options import (
    Declared,
    EngineOptions,
    Options,
    declarations,
    engine_name,
    engines,
    options_of,
)

O = TypeVar("O", bound=Options)  # noqa: E741


def known_options() -> dict[str, Declared]:
    """Every option by the names that are taken for it."""
    found: dict[str, Declared] = {}
    for owner in declarations():
        for declared in options_of(owner).values():
            found |= dict.fromkeys((declared.name, *declared.option.also), declared)
    return found


def validated(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of known options by their own names; None counts as not given.

    Raises ValidationError with every wrong value.
    """
    known, found, wrong = known_options(), dict[str, Any](), list[InitErrorDetails]()
    for name, value in values.items():
        declared = known[name]
        if declared.name in found:
            wrong.append(custom_error("twice", (name,), f"{declared.name} is given twice, under two names"))
        elif value is not None:
            try:
                found[declared.name] = _adapter(declared.annotation).validate_python(value)
            except ValidationError as error:
                wrong += again(error, name)
    if wrong:
        raise ValidationError.from_exception_data("options", wrong, hide_input=True)
    return found


def select(owner: type[O], values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the validated values that are options of `owner`."""
    return {name: value for name, value in values.items() if name in options_of(owner)}


def engine_options(owner: type[EngineOptions], values: Mapping[str, Any]) -> EngineOptions:
    """The options of an engine; what `values` leave open has its default. Raises ValidationError."""
    options: EngineOptions = _union(engines()).validate_python({"engine": engine_name(owner), **values})
    return options


@functools.cache
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    return TypeAdapter(annotation, config=ConfigDict(hide_input_in_errors=True))


@functools.cache
def _union(owners: tuple[Any, ...]) -> TypeAdapter[Any]:
    """One of several engines' options, told apart by `engine`."""
    union: Any = Annotated[Union[owners], Field(discriminator="engine")]  # noqa: UP007  (known only at run time)
    return TypeAdapter(union)


def custom_error(kind: str, path: tuple[str | int, ...], message: str) -> InitErrorDetails:
    """A problem at `path` for `ValidationError.from_exception_data`, with this message as it stands."""
    return InitErrorDetails(type=PydanticCustomError(kind, "{message}", {"message": message}), loc=path, input=None)


def again(error: ValidationError, *path: str | int) -> list[InitErrorDetails]:
    """The problems of an error that was raised, below `path`, to be raised with others."""
    details = error.errors(include_input=False, include_url=False)
    return [custom_error(detail["type"], (*path, *detail["loc"]), detail["msg"]) for detail in details]
