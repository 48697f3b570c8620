"""Who may import whom, a few words and calls that must not appear, and how long a file may be. Read from the sources,
nothing is imported."""

import ast
import builtins
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# A package (the longest matching prefix counts) and what of ours it may import besides itself.
MAY_IMPORT = {
    "kvrelay.core": {"kvrelay.v1"},
    "kvrelay.v1": set[str](),
    "kvrelay.engine": {"paged_kernels", "kvrelay.engine.loading.config_json", "kvrelay.core"},
    # So little that `kvrelay serve` can ask it whether a model is supported.
    "kvrelay.engine.loading.config_json": {"kvrelay.core"},
    # The node copies and digests blocks with what is compiled.
    "kvrelay.node": {
        *("kvrelay.node.settings", "kvrelay.engine", "kv_connector", "paged_kernels"),
        *("kvrelay.core", "kvrelay.v1"),
    },
    # Nothing but settings, so that `kvrelay serve` can offer them.
    "kvrelay.node.settings": {"kvrelay.core"},
    "router.settings": {"kvrelay.core"},
    "kvrelay.__main__": {"kvrelay.cli"},
    "kvrelay.cli": {
        *("kvrelay", "kvrelay.node.settings", "router.settings", "kvrelay.engine.loading.config_json"),
        *("kvrelay.bench", "kvrelay.core", "kvrelay.v1"),
    },
    "kvrelay.bench": {"kvrelay.core", "kvrelay.v1"},
    "kvrelay.text": {"kvrelay.core"},
    "kvrelay.offline": {"kvrelay.engine", "kvrelay.text", "kvrelay.core"},
    "kvrelay": {"kvrelay.offline", "kvrelay.core"},
    "router": {"kvrelay", "router.settings", "kvrelay.core", "kvrelay.text", "kvrelay.v1"},
    "prefill_node": {"kvrelay.node", "kvrelay.engine", "kvrelay.core", "kvrelay.v1"},
    "decode_node": {"kvrelay.node", "kvrelay.engine", "kvrelay.core", "kvrelay.v1"},
    "kv_connector": {"kvrelay.core"},
    "paged_kernels": set[str](),
}
TORCH_FREE = {
    *("kvrelay.core", "kvrelay.v1", "kvrelay.text", "kvrelay.cli", "kvrelay.bench", "router"),
    *("kvrelay.node.settings", "router.settings", "kvrelay.engine.loading.config_json", "kv_connector"),
}
USES_TORCH = "kv_connector.device.cuda_memory"  # which a node imports only if its pool is on a GPU
# The first takes settings from it, the second hands it on to child processes, the third sets what UCX reads there.
ENVIRONMENT_USERS = {"kvrelay.core.config.settings", "kvrelay.cli.serve", "kv_connector.ucx.environment"}
ENGINES = (["kvrelay", "engine"], ["paged_kernels"])  # what makes one, or says why it cannot
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
FORBIDDEN_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec"}
MOST_LINES = 400
BY_NAME = re.compile(r"([a-z_]\w*(?:\.\w+)+):\w+")  # what `pkgutil.resolve_name` imports


@dataclass(frozen=True, slots=True)
class Module:
    name: str
    path: Path

    @property
    def package(self) -> str:
        return package_of(self.name)

    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"), str(self.path))

    def imports(self) -> Iterator[str]:
        """Yields full names, wherever in the file; `from a import b` counts as `a.b`, since b may be a module. So does
        the string "a:b"."""
        for node in ast.walk(self.tree()):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.name}: imports are absolute"
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and BY_NAME.fullmatch(node.value):
                yield node.value.replace(":", ".")


def package_of(name: str) -> str:
    """Returns the entry of MAY_IMPORT that `name` belongs to, or its first part when it is not ours."""
    matches = [package for package in MAY_IMPORT if name == package or name.startswith(f"{package}.")]
    return max(matches, key=len) if matches else name.split(".")[0]


def find_modules(*folders: str) -> list[Module]:
    modules: list[Module] = []
    for base in folders:
        folder = ROOT / base
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            modules.append(Module(".".join(part for part in parts if part != "__init__"), path))
    return modules


MODULES = find_modules("kvrelay", "router", "prefill_node", "decode_node", "kv_connector", "kernels/paged_kernels")
TESTS = find_modules("tests")
OURS = [module for module in MODULES if module.package != "kvrelay.v1"]
SOURCES = [
    *(module.path for module in [*OURS, *TESTS, *find_modules("bench", "demo")]),
    *sorted(path for path in (ROOT / "kernels" / "csrc").rglob("*") if path.is_file()),
]


def by_name(module: Module) -> str:
    return module.name


def test_every_package_has_a_rule() -> None:
    assert {module.package for module in MODULES} == set(MAY_IMPORT)


def test_every_permission_is_used() -> None:
    used = {(module.package, package_of(name)) for module in MODULES for name in module.imports()}
    assert {(package, allowed) for package in MAY_IMPORT for allowed in MAY_IMPORT[package]} <= used


@pytest.mark.parametrize("module", MODULES, ids=by_name)
def test_imports(module: Module) -> None:
    allowed = MAY_IMPORT[module.package] | {module.package}
    for name in module.imports():
        package = package_of(name)
        assert package not in MAY_IMPORT or package in allowed, f"{module.name} must not import {name}"


@pytest.mark.parametrize("module", [one for one in MODULES if one.package in TORCH_FREE], ids=by_name)
def test_no_torch(module: Module) -> None:
    uses_torch = "torch" in {name.split(".")[0] for name in module.imports()}
    assert uses_torch == (module.name == USES_TORCH)


@pytest.mark.parametrize("module", OURS, ids=by_name)
def test_settings_come_from_the_environment_in_one_place(module: Module) -> None:
    if module.name in ENVIRONMENT_USERS:
        return
    for node in ast.walk(module.tree()):
        assert not (isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv")), (
            f"{module.name}:{node.lineno} uses the environment; settings come from kvrelay.core.config.settings"
        )


@pytest.mark.parametrize("module", [one for one in OURS if one.name.split(".")[:2] in ENGINES], ids=by_name)
def test_an_engine_names_options_as_llm_does(module: Module) -> None:
    """`max_num_seqs` is a keyword there and a line of a node's file; `--max-num-seqs` is only a node's flag."""
    assert not re.search(r"(?<![\w-])--[a-z]", module.path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("module", OURS, ids=by_name)
def test_no_code_from_data(module: Module) -> None:
    assert not [name for name in module.imports() if name.split(".")[0] in FORBIDDEN_IMPORTS]
    for node in ast.walk(module.tree()):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in FORBIDDEN_CALLS, f"{module.name}:{node.lineno} calls {node.func.id}"


@pytest.mark.parametrize("module", [one for one in OURS if one.package != "paged_kernels"], ids=by_name)
def test_errors_are_of_the_tree(module: Module) -> None:
    """A private one may be of another kind: it stays in its module."""
    for node in ast.walk(module.tree()):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name != "KVRelayError":
            kinds = [getattr(builtins, base.id, None) for base in node.bases if isinstance(base, ast.Name)]
            assert not [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseException)], (
                f"{module.name}: {node.name} is no KVRelayError"
            )


@pytest.mark.parametrize("module", OURS, ids=by_name)
def test_names_and_docstrings(module: Module) -> None:
    assert not FORBIDDEN_NAMES & set(module.name.split(".")), f"{module.name} is not named after a concept"
    assert ast.get_docstring(module.tree()), f"{module.name} does not say what it is"


@pytest.mark.parametrize("module", TESTS, ids=by_name)
def test_no_test_takes_from_another(module: Module) -> None:
    """What several need stands in a file of its own."""
    lenders = [name for name in module.imports() if name.startswith("tests.") and ".test_" in name]
    assert not lenders, f"{module.name} imports {lenders}"


def test_no_file_is_too_long() -> None:
    lengths = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8").count("\n") for path in SOURCES}
    long = {name: count for name, count in lengths.items() if count > MOST_LINES}
    assert not long, f"more than {MOST_LINES} lines: which parts of it want a file of their own?"
