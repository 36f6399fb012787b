"""Where settings come from besides flags: `ROSTER_*` variables, and the JSON file that `ROSTER_SETTINGS` names.

Whatever can't be read is told in one line that names the file, the variable or the flag.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsError,
)

from roster_common.wrong_values import wrong_values

FILE_VARIABLE = "ROSTER_SETTINGS"
_EXAMPLE = '{"log_level": "info"}'


class UnusableSettings(ValueError):
    """Settings that can't be read or served, or are at odds with each other; one line says what to change."""


class ServiceSettings(BaseSettings):
    """What both services' settings have in common: their sources, and that they are text."""

    @classmethod
    def read(cls, **given: Any) -> Self:
        """What is `given`, and the rest from where settings come from; `_cli_parse_args=True` reads the flags too.

        Raises UnusableSettings.
        """
        try:
            return cls(**given)
        except ValidationError as error:
            raise UnusableSettings(wrong_values(error, "setting ")) from error
        except SettingsError as error:
            raise UnusableSettings(_unreadable(error)) from error

    @field_validator("*", mode="before")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        """Python takes what is not UTF-8 in flags and variables as lone surrogates, which nothing can send or print."""
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
        """Flags and arguments win over the environment, which wins over the file."""
        return init_settings, Environment(settings_cls), SettingsFile(settings_cls)


def _texts(value: Any) -> Iterator[str]:
    """All strings of a value that a source gives: objects may be as deep as JSON is, so it does not call itself."""
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
    """The variables; some are JSON."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        """Raises UnusableSettings."""
        try:
            return super().decode_complex_value(field_name, field, value)
        except (ValueError, RecursionError) as error:
            name = f"{self.env_prefix}{field_name}".upper()
            raise UnusableSettings(f"{name} is not JSON ({_fault(error)}): correct it, or unset it") from error


class SettingsFile(PydanticBaseSettingsSource):
    """The file, read when it is asked: `--help` works beside one that is broken."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Never asked: all values come at once."""
        return None, field_name, False

    def __call__(self) -> dict[str, Any]:
        """Its values. Raises UnusableSettings."""
        name = os.environ.get(FILE_VARIABLE)
        return InitSettingsSource(self.settings_cls, file_values(name))() if name else {}


def file_values(name: str) -> dict[str, Any]:
    """Of the JSON object in the file of this name. Raises UnusableSettings."""
    file = f"{FILE_VARIABLE} names {name!r}, which"
    try:
        values = json.loads(Path(name).expanduser().read_text("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UnusableSettings(f"{file} is not UTF-8 (byte {error.start}): save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise UnusableSettings(f"{file} is not JSON ({_fault(error)}): correct the file") from error
    except (OSError, RuntimeError) as error:  # the latter: no home folder for a ~
        reason = getattr(error, "strerror", None) or str(error)
        hint = f"name a JSON file that can be, or unset {FILE_VARIABLE}"
        raise UnusableSettings(f"{file} can't be read ({reason}): {hint}") from error
    if not isinstance(values, dict):
        raise UnusableSettings(f"{file} is JSON but not an object: write settings by their names, such as {_EXAMPLE}")
    return values


def _fault(error: Exception) -> str:
    """What a JSON parser found; its sentences hold nothing of what was parsed."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg}, line {error.lineno} column {error.colno}"
    return "too deep" if isinstance(error, RecursionError) else str(error)


def _unreadable(error: SettingsError) -> str:
    """What a source says; pydantic's words for a flag that is JSON don't name it, nor always say what is wrong."""
    cause = error.__cause__
    if isinstance(cause, UnusableSettings):
        return str(cause)
    flag = re.match(r"Parsing error encountered for (\w+): ", str(error))
    if flag is None:
        return str(error)
    fault = f" ({_fault(cause)})" if isinstance(cause, json.JSONDecodeError | SettingsError) else ""
    return f"--{flag[1].replace('_', '-')} is neither a JSON object nor NAME=VALUE{fault}: correct it"
