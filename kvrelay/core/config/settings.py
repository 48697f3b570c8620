"""Settings of a process: one frozen, typed object, loaded once at the start from flags, environment, file and defaults.

A process subclasses `ProcessSettings` and calls `load_settings`. No other module takes settings from `os.environ`.
Invariant: a setting that nobody knows is never passed over silently.
"""

import difflib
import inspect
import os
import re
import sys
from argparse import Action, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

from pydantic import Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliSettingsSource,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from kvrelay.core.config.fields import (
    ENV_PREFIX,
    is_list,
    is_positional,
    is_verbatim,
    items_of,
    placeholder_of,
    variable_of,
)
from kvrelay.core.config.file import read_config_file
from kvrelay.core.config.problems import explain, explain_flag, nearest, remedy
from kvrelay.core.errors import ConfigurationError

# Settings of one kvrelay process whose names are almost those of another's settings.
_ALIKE = (
    *("start_timeout", "stop_timeout", "step_timeout"),
    *("concurrency", "concurrencies", "request_rate", "request_rates", "long_output_len"),
)

# Settings that servers and clients both have, but not in the same sense: a server's file has settings that no client
# knows, and its model is a folder, which it may serve under another name.
_OF_SERVERS = ("config", "model")

_Settings = TypeVar("_Settings", bound="ProcessSettings")

_NOTHING = "\0nothing"
"""How a flag would say that it has no value. No argument can be this; pydantic-settings' own word is None, which may be
a prompt."""


class ProcessSettings(BaseSettings):
    """Base of every process's settings. The docstring of a subclass opens its `--help`.

    Every field has a description and a default. An argument that must be given is `CliPositionalArg[str]` with the
    default "", so that it may also come from the environment or the file; `load_settings` makes sure that it was given.
    Lists are written `--name a,b`, `--name a --name b`, `KVRELAY_NAME=a,b`, or as a YAML list; those marked `Verbatim`
    are not cut at commas. What must not be shown (passwords) is a `SecretStr`.
    """

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,
        enable_decoding=False,  # lists are comma separated, not JSON; see _split_lists
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_parse_none_str=_NOTHING,
        cli_exit_on_error=False,
        protected_namespaces=(),
    )

    is_client: ClassVar[bool] = False
    """Whether this is a command that talks to a server. It may be called in the server's shell or pod, so it leaves the
    variables in `_OF_SERVERS` to the server."""

    config: Path | None = Field(
        default=None,
        description="YAML file with any of these settings, written with underscores. Flags win over variables of the "
        "environment (KVRELAY_ and the name in capitals), those over the file, and the file over the defaults.",
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        # For --help: strips the docstring's indentation, and puts a class's own settings before those of its bases.
        cls.__doc__ = inspect.cleandoc(cls.__doc__ or "")
        fields = cls.__pydantic_fields__
        own_first = (name for base in cls.__mro__ for name in inspect.get_annotations(base))
        order = dict.fromkeys(("config", *own_first, *fields))
        cls.__pydantic_fields__ = {name: fields[name] for name in order if name in fields}

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Returns the sources of settings, highest priority first. pydantic-settings itself puts flags before them."""
        assert isinstance(env_settings, EnvSettingsSource)
        known = {f"{ENV_PREFIX}{name}".lower() for name in cls.names_in_environment()}
        env_settings.env_vars = {name: value for name, value in env_settings.env_vars.items() if name in known}
        return init_settings, env_settings, _ConfigFileSource(settings_cls)

    @classmethod
    def names_in_environment(cls) -> list[str]:
        """Returns the settings that variables may give."""
        return [name for name in cls.model_fields if not (cls.is_client and name in _OF_SERVERS)]

    @model_validator(mode="before")
    @classmethod
    def _split_lists(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        fields = cls.model_fields
        return {
            name: items_of(value, fields[name])
            if isinstance(value, str) and name in fields and is_list(fields[name])
            else value
            for name, value in values.items()
        }


class _ConfigFileSource(InitSettingsSource):
    """Settings from the file that `config` names. A source of higher priority (flag or environment) has set `config` by
    the time this one is read."""

    def __init__(self, settings_cls: type[BaseSettings]) -> None:
        super().__init__(settings_cls, init_kwargs={})

    def __call__(self) -> dict[str, Any]:
        path = self.current_state.get("config")
        fields = {name: field for name, field in self.settings_cls.model_fields.items() if name != "config"}
        if path == "":
            raise ConfigurationError("--config: names no file; leave it out if there is none")
        return {} if path is None else read_config_file(Path(path), fields)


_PLACEHOLDERS = {
    "Path": "FILE",
    "SecretStr": "SECRET",
    "tuple[str,...]": "A,B",
    "tuple[int,...]": "1,2",
    "tuple[float,...]": "1,2",
}


class _HelpFormatter(RawDescriptionHelpFormatter):
    """The format of `--help`: no defaults that say nothing, and none of Python's types for lists, files and secrets. It
    says which variables a client ignores."""

    def __init__(self, cls: type[ProcessSettings], prog: str) -> None:
        super().__init__(prog)
        self._placeholders = {name: placeholder_of(field) for name, field in cls.model_fields.items()}
        self._ignored = cls.model_fields.keys() - cls.names_in_environment()

    def _get_help_string(self, action: Action) -> str:
        said = re.sub(rf" \(default: ({_NOTHING}|\(\)|\**)\)$", "", action.help or "")
        if action.dest in self._ignored:
            said += f" {variable_of(action.dest)}, which is for servers, is ignored."
        return re.sub(r"\(default: \((.+)\)\)$", lambda match: f"(default: {_as_written(match[1])})", said)

    def _metavar_formatter(self, action: Action, default_metavar: str) -> Callable[[int], tuple[str, ...]]:
        if (placeholder := self._placeholders.get(action.dest)) is not None:
            return lambda count: (placeholder,) * count
        names = super()._metavar_formatter(action, default_metavar)
        return lambda count: tuple(_PLACEHOLDERS.get(name, name) for name in names(count))


def _as_written(items: str) -> str:
    """Returns the items of a tuple, as Python shows them, in the way in which a flag takes them."""
    return ",".join(item.strip(" '") for item in items.rstrip(",").split(","))


def load_settings(cls: type[_Settings], argv: Sequence[str], *, prog: str) -> _Settings:
    """Returns the settings of this process. `argv` is without the program's name; `prog` is how the user calls it.

    Ends the process with status 0 after `--help`, and with status 2 and a message that names the setting if one is
    wrong.
    """
    try:
        _check_environment(os.environ, cls.names_in_environment())
        flags = CliSettingsSource[Any](
            cls,
            cli_prog_name=prog,
            formatter_class=partial(_HelpFormatter, cls),
            parse_args_method=partial(_parse_arguments, cls.model_fields),
        )
        flags.env_ignore_empty = False  # one that is given empty wins, too
        settings = CliApp.run(cls, cli_args=list(argv), cli_settings_source=flags)
        _check_arguments(settings)
        return settings
    except ValidationError as error:
        _fail(prog, [explain(details, cls.model_fields) for details in error.errors()])
    except (SettingsError, ConfigurationError) as error:
        _fail(prog, [explain_flag(str(error), cls.model_fields)])


def _parse_arguments(fields: Mapping[str, FieldInfo], parser: ArgumentParser, argv: Sequence[str]) -> Namespace:
    """Parses flags. Verbatim items become a tuple, because pydantic-settings joins lists with commas."""
    parsed = parser.parse_args(argv)
    for name, field in fields.items():
        if is_verbatim(field) and isinstance(items := getattr(parsed, name, None), list):
            setattr(parsed, name, tuple(items))
    return parsed


def _check_environment(environment: Mapping[str, str], fields: Sequence[str]) -> None:
    """Raises ConfigurationError for a variable whose name is almost that of a setting. What is unknown otherwise, or in
    `_ALIKE`, may belong to another kvrelay process of this shell or pod, and an address with tcp:// to Kubernetes; a
    note on standard error mentions it."""
    for variable in sorted(environment):
        name = variable.removeprefix(ENV_PREFIX).lower()
        if not variable.startswith(ENV_PREFIX) or name in fields:
            continue
        is_service_link = environment[variable].startswith("tcp://")
        if not is_service_link and name not in _ALIKE and difflib.get_close_matches(name, fields, n=1, cutoff=0.8):
            names = [variable_of(field) for field in fields]
            raise ConfigurationError(f"there is no setting for the variable {variable}{nearest(variable, names)}")
        sys.stderr.write(f"note: the variable {variable} is not a setting of this process; ignored\n")


def _check_arguments(settings: ProcessSettings) -> None:
    for name, field in type(settings).model_fields.items():
        if is_positional(field) and getattr(settings, name) == "":
            raise ConfigurationError(f"{name.upper()} is missing: {field.description}\n  {remedy(name, field)}")


def _fail(prog: str, problems: Iterable[str]) -> NoReturn:
    for problem in problems:
        sys.stderr.write(f"{prog}: {problem}\n")
    sys.stderr.write(f"Try `{prog} --help`.\n")
    sys.exit(2)
