"""What a user is told about a setting that is wrong: its name, what is wrong with it, and how to set it."""

import difflib
import re
from collections.abc import Iterable, Mapping

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from kvrelay.core.config.fields import argument_of, flag_of, is_positional, is_secret, variable_of

_USER_OF_URL = re.compile(r"//[^/]*@")
_SERVICE_LINK = (
    "Kubernetes gives every pod such a variable, KVRELAY_PORT for a Service called kvrelay, KVRELAY_GRPC_PORT for "
    "kvrelay-grpc: set `enableServiceLinks: false` in the pod, or call the Service otherwise"
)


def explain(details: ErrorDetails, fields: Mapping[str, FieldInfo]) -> str:
    """Returns what pydantic has found, in our words and with the remedy. A secret, or the user and
    password of an address, is not shown."""
    name = str(details["loc"][0]) if details["loc"] else ""
    problem = details["msg"].removeprefix("Value error, ").replace("valid tuple", "valid list")
    if details["type"] == "string_type":  # only a file has anything else: 007, on and 1e5 are no texts in YAML
        is_nested = isinstance(details["input"], list | dict)
        problem = "must be one text, without brackets" if is_nested else "must be a text: write it in quotes"
    if name not in fields:
        return problem
    got = "" if is_secret(fields[name]) else f", got {_USER_OF_URL.sub('//***@', repr(details['input']))}"
    is_service_link = fields[name].annotation is int and str(details["input"]).startswith("tcp://")
    return f"{argument_of(name, fields[name])}: {problem}{got}\n  " + (
        _SERVICE_LINK if is_service_link else remedy(name, fields[name])
    )


def explain_flag(message: str, fields: Mapping[str, FieldInfo]) -> str:
    """Returns argparse's message without what pydantic-settings adds, and for an unknown flag with the nearest known
    one."""
    problem = message.removeprefix("error parsing CLI: ")
    if problem.endswith("expected one argument"):
        problem += ", written --name=VALUE if it begins with a dash"
    marker = "unrecognized arguments: "
    if marker not in problem:
        return problem
    unknown = problem.split(marker, 1)[1]
    first = unknown.split()[0].split("=")[0]
    if not first.startswith("-"):
        return f"there is one argument too many: {unknown!r}"
    flags = {flag_of(name): argument_of(name, field) for name, field in fields.items()}
    if first in flags:
        return f"{flags[first]} is given without {first}"
    meant = nearest(first, [flag for flag in flags if flag == flags[flag]])
    positional = next((argument_of(name, field) for name, field in fields.items() if is_positional(field)), None)
    hint = f"; write -- before a {positional} that begins with a dash" if positional else ""
    return f"there is no setting {unknown!r}{meant or ('' if first.startswith('--') else hint)}"


def remedy(name: str, field: FieldInfo) -> str:
    """Returns the three ways to set a setting."""
    return f"set it with {argument_of(name, field)}, {variable_of(name)} or `{name}:` in the --config file"


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Returns a question after the candidates that may be meant, or nothing: those of which it is the beginning, those
    with all of its words, or those all of whose words it has, if they are one or two; otherwise the most similar."""
    known = list(candidates)
    words = _words(name)
    for matches in (
        [candidate for candidate in known if candidate.startswith(name)],
        [candidate for candidate in known if words <= _words(candidate)],
        [candidate for candidate in known if words >= _words(candidate)],
    ):
        if len(matches) in (1, 2):
            break
    else:
        matches = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {' or '.join(matches)}?" if matches else ""


def _words(name: str) -> set[str]:
    return set(re.split("[-_]+", name.strip("-")))
