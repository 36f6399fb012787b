"""Sources of settings besides flags: `ROSTER_*` variables, and the JSON file that `ROSTER_SETTINGS` names.

An unreadable source is reported in one line that names the file, the variable or the flag.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsError,
)

from roster_common.unknown_settings import refused_key, refused_variable
from roster_common.wrong_values import wrong_values

FILE_VARIABLE = "ROSTER_SETTINGS"
_EXAMPLE = '{"log_level": "info"}'


class UnusableSettings(ValueError):
    """Settings that are unreadable, invalid or contradictory; the message is one line that says what to change."""


class ServiceSettings(BaseSettings):
    """Base of both services' settings: their sources, and the check that strings are valid UTF-8."""

    retired: ClassVar[frozenset[str]] = frozenset()
    """Names of former settings, which the class refuses itself."""

    @classmethod
    def read(cls, **given: Any) -> Self:
        """Returns settings from `given` and, for fields not given, from their sources. Raises UnusableSettings.

        A misspelled `ROSTER_*` variable is refused; see unknown_settings.
        """
        if refused := refused_variable(os.environ, cls.model_fields):
            raise UnusableSettings(refused)
        try:
            return cls(**given)
        except ValidationError as error:
            raise UnusableSettings(wrong_values(error, "setting ")) from error
        except SettingsError as error:
            raise UnusableSettings(_unreadable(error)) from error

    @classmethod
    def refuse_flags(cls, arguments: Sequence[str]) -> None:
        """Raises UnusableSettings for a flag that once existed, so that the message names its successor."""

    @field_validator("*", mode="before")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        # Python decodes bytes that are not UTF-8 in flags and variables to lone surrogates, which can't be encoded to
        # be sent or printed.
        for text in _texts(value):
            try:
                text.encode()
            except UnicodeEncodeError:
                raise ValueError(f"{text!r} is not UTF-8: write it as UTF-8") from None
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Returns the sources: flags and arguments take precedence over the environment, and that over the file."""
        return init_settings, Environment(settings_cls), SettingsFile(settings_cls)


def _texts(value: Any) -> Iterator[str]:
    """Yields all strings in a value. It is iterative, because JSON may be nested deeper than Python's recursion
    limit."""
    rest = [value]
    while rest:
        match rest.pop():
            case str() as text:
                yield text
            case Path() as path:
                yield str(path)
            case dict() as values:
                rest += [*values, *values.values()]
            case list() | tuple() as values:
                rest += values


class Environment(EnvSettingsSource):
    """Environment variables, some of them JSON."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        """Parses a variable's JSON. Raises UnusableSettings."""
        try:
            return super().decode_complex_value(field_name, field, value)
        except (ValueError, RecursionError) as error:
            name = f"{self.env_prefix}{field_name}".upper()
            raise UnusableSettings(f"{name} is not JSON ({fault(error)}): correct it, or unset it") from error


class SettingsFile(PydanticBaseSettingsSource):
    """The settings file, read only when its values are needed, so that `--help` works with a broken file."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Required by the base class but never called, because `__call__` returns all values."""
        return None, field_name, False

    def __call__(self) -> dict[str, Any]:
        """Returns the file's values, or none if `ROSTER_SETTINGS` is unset. Raises UnusableSettings."""
        name = os.environ.get(FILE_VARIABLE)
        if not name:
            return {}
        values = file_values(name)
        if refused := refused_key(
            values, [*self.settings_cls.model_fields, *getattr(self.settings_cls, "retired", ())]
        ):
            raise UnusableSettings(f"{FILE_VARIABLE} names {name!r}, which {refused}")
        return InitSettingsSource(self.settings_cls, values)()


def file_values(name: str) -> dict[str, Any]:
    """Returns the JSON object in the file of this name. Raises UnusableSettings."""
    file = f"{FILE_VARIABLE} names {name!r}, which"
    try:
        values = json.loads(Path(name).expanduser().read_text("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UnusableSettings(f"{file} is not UTF-8 (byte {error.start}): save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise UnusableSettings(f"{file} is not JSON ({fault(error)}): correct the file") from error
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder to expand a ~
        reason = getattr(error, "strerror", None) or str(error)
        hint = f"name a readable JSON file, or unset {FILE_VARIABLE}"
        raise UnusableSettings(f"{file} can't be read ({reason}): {hint}") from error
    if not isinstance(values, dict):
        raise UnusableSettings(f"{file} is JSON but not an object: write settings by name, for example {_EXAMPLE}")
    return values


def fault(error: Exception) -> str:
    """Returns the JSON parser's error. It quotes nothing of the parsed text, which may be secret."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg}, line {error.lineno} column {error.colno}"
    return "too deep" if isinstance(error, RecursionError) else str(error)


def _unreadable(error: SettingsError) -> str:
    """Returns a source's error: the cause, where it is one of these sources'."""
    cause = error.__cause__
    return str(cause if isinstance(cause, UnusableSettings) else error)
