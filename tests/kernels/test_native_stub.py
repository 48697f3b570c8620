"""The stub of the compiled extension, from which alone the type checker knows what the extension takes."""

import ast
from collections.abc import Iterator
from pathlib import Path

import paged_kernels
from paged_kernels import _native

STUB = Path(paged_kernels.__file__).with_name("_native.pyi")

Parameters = list[tuple[str, bool]]  # names, and whether each may be None


def parameters_of(function: ast.FunctionDef) -> Parameters:
    return [
        (one.arg, one.annotation is not None and "None" in ast.unparse(one.annotation)) for one in function.args.args
    ]


def declared(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, Parameters]]:
    for statement in body:
        if isinstance(statement, ast.ClassDef):
            yield from declared(statement.body, f"{statement.name}.")
        elif isinstance(statement, ast.FunctionDef):
            yield prefix + statement.name, parameters_of(statement)


def compiled(owner: object, prefix: str = "") -> Iterator[tuple[str, Parameters]]:
    for name, member in vars(owner).items():
        if isinstance(member, type):
            yield from compiled(member, f"{name}.")
        elif signatures := getattr(member, "__nb_signature__", None):
            [(text, *_)] = signatures
            yield from declared(ast.parse(f"{text}: ...").body, prefix)


def test_the_stub_has_the_functions_and_parameters_of_the_extension() -> None:
    assert dict(declared(ast.parse(STUB.read_text()).body)) == dict(compiled(_native))
