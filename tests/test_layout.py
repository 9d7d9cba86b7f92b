"""What the layers may name, read from their code. What they may import is in pyproject.toml (make check)."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import toma_diffusion

PACKAGE = Path(toma_diffusion.__file__).parent
METHODS_AND_SETTINGS = ("methods", "config")
"""Where a configuration may be asked of which method it is."""


def modules(*, under: str = "", outside: tuple[str, ...] = ()) -> list[Path]:
    """Paths in the package."""
    paths = [path.relative_to(PACKAGE) for path in sorted((PACKAGE / under).rglob("*.py"))]
    return [path for path in paths if path.parts[0] not in outside]


def found_in(paths: list[Path], find: Callable[[str], list]) -> dict[str, list]:
    """What `find` finds, by module."""
    found = {str(path): find((PACKAGE / path).read_text(encoding="utf-8")) for path in paths}
    return {path: each for path, each in found.items() if each}


def names_in(node: ast.AST) -> list[str]:
    """Every name in an expression: of `(ToMAConfig, config.ToDoConfig)` both."""
    names = [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]
    return names + [each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)]


def asked_types(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of every type that a value is compared with."""
    for node in ast.walk(tree):
        asked: list[ast.AST] = []
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("isinstance", "issubclass")
        ):
            asked = list(node.args[1:])
        elif isinstance(node, ast.Compare) and "type" in names_in(node.left):  # type(config) is ToMAConfig
            asked = list(node.comparators)
        elif isinstance(node, ast.MatchClass):
            asked = [node.cls]
        for part in asked:
            yield from ((node.lineno, name) for name in names_in(part))


def configurations(code: str) -> list[tuple[int, str]]:
    return [(line, name) for line, name in asked_types(ast.parse(code)) if name.endswith("Config")]


def words(code: str) -> Iterator[tuple[int, str]]:
    """Line and text of every name, import and string of the code, but not of what documents it."""
    tree = ast.parse(code)
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield node.lineno, " ".join([getattr(node, "module", None) or "", *(each.name for each in node.names)])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.lineno, node.value


def naming_triton(code: str) -> list[tuple[int, str]]:
    return [(line, word) for line, word in words(code) if "triton" in word.lower()]


def test_only_methods_ask_whose_configuration_it_is():
    """A method's module turns its configuration into placements and plans; all others read what every one has."""
    assert found_in(modules(outside=METHODS_AND_SETTINGS), configurations) == {}


def test_core_does_not_name_triton():
    """`ops/` alone knows which kernels there are."""
    assert found_in(modules(under="core"), naming_triton) == {}


class TestTheChecksThemselves:
    @pytest.mark.parametrize(
        "code",
        [
            "isinstance(config, ToMAConfig)",
            "isinstance(config, (int, config.ToDoConfig))",
            "isinstance(config, ToFuConfig | None)",
            "issubclass(kind, Config)",
            "type(config) is ToMAConfig",
            "match config:\n    case ToMAConfig(ratio=0): pass",
        ],
    )
    def test_a_question_is_found(self, code):
        assert len(configurations(code)) == 1

    @pytest.mark.parametrize("code", ["isinstance(config, dict)", "ToMAConfig(ratio=0)", "config: ToMAConfig = given"])
    def test_other_uses_are_not(self, code):
        assert configurations(code) == []

    @pytest.mark.parametrize(
        "code",
        ["import triton", "from toma_diffusion.ops import triton_merge", "backend == 'triton'", "ops.triton_merge()"],
    )
    def test_triton_is_found(self, code):
        assert naming_triton(code)

    def test_documentation_may_name_it(self):
        assert naming_triton('"""Kernels in Triton."""\nvalue = 1\n"""As triton does."""') == []

    def test_there_are_modules_to_look_at(self):
        assert len(modules(outside=METHODS_AND_SETTINGS)) > 50
        assert len(modules(under="core")) > 4
