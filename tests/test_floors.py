"""The house keeps its floors: imports run one way, and the import names stay apart from PyPI's."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    tomllib = None

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("radix", "kernels", "runtime")

# Per folder or module prefix: what of phloem it may import. The longest prefix that fits decides.
ALLOWED = {
    "phloem.radix": ("phloem.radix",),
    "phloem.kernels": ("phloem.kernels",),
    "phloem.runtime": ("phloem.radix", "phloem.kernels", "phloem.runtime"),
    "phloem.runtime.models": ("phloem.kernels", "phloem.runtime.models", "phloem.runtime.errors",
                              "phloem.runtime.tokenizer", "phloem.runtime.progress"),
    "phloem.runtime.scheduler": ("phloem.radix", "phloem.runtime.batch", "phloem.runtime.errors",
                                 "phloem.runtime.path", "phloem.runtime.path_cache",
                                 "phloem.runtime.request", "phloem.runtime.twins"),
    "phloem.runtime.path_cache": ("phloem.radix", "phloem.runtime.batch", "phloem.runtime.path",
                                  "phloem.runtime.explain", "phloem.runtime.tail_store"),
    "phloem.runtime.twins": ("phloem.runtime.batch",),
    "phloem.runtime.explain": ("phloem.radix",),
    "phloem.runtime.tail_store": ("phloem.radix",),
    "phloem.runtime.path": ("phloem.radix",),
    "phloem.runtime.model_runner": ("phloem.kernels", "phloem.runtime.batch", "phloem.runtime.models",
                                    "phloem.runtime.request", "phloem.runtime.sampler", "phloem.runtime.logprobs",
                                    "phloem.runtime.errors", "phloem.runtime.step_forward",
                                    "phloem.runtime.outputs"),
    "phloem.runtime.step_forward": ("phloem.kernels", "phloem.runtime.models"),
    "phloem.runtime.logprobs": ("phloem.runtime.outputs",),
    "phloem.runtime.request": ("phloem.radix", "phloem.runtime.grammar", "phloem.runtime.path",
                               "phloem.runtime.sampling_params"),
    "phloem.runtime.sampling_params": ("phloem.runtime.errors", "phloem.runtime.grammar"),
    "phloem.runtime.errors": (),
    # Engine and Branch, and plain data; of the tree, the names of namespaces.
    "phloem.runtime.frontend": (),
    "phloem.runtime.frontend.search": ("phloem.runtime.engine", "phloem.runtime.branch", "phloem.runtime.errors",
                                       "phloem.runtime.expand", "phloem.runtime.outputs", "phloem.runtime.prompts",
                                       "phloem.runtime.sampling_params",
                                       "phloem.runtime.frontend.search", "phloem.radix"),
    "phloem.runtime.frontend.program": ("phloem.runtime.engine", "phloem.runtime.branch", "phloem.runtime.errors",
                                        "phloem.runtime.grammar", "phloem.runtime.outputs",
                                        "phloem.runtime.sampling_params", "phloem.runtime.progress",
                                        "phloem.runtime.frontend.program", "phloem.radix"),
    "phloem.runtime.frontend.session": ("phloem.runtime.engine", "phloem.runtime.branch", "phloem.runtime.errors",
                                        "phloem.runtime.explain", "phloem.runtime.generation",
                                        "phloem.runtime.grammar", "phloem.runtime.outputs",
                                        "phloem.runtime.sampling_params",
                                        "phloem.runtime.frontend.session", "phloem.radix"),
    # It grows the same paths as a program does.
    "phloem.runtime.frontend.sglang": ("phloem.runtime.engine", "phloem.runtime.branch", "phloem.runtime.errors",
                                       "phloem.runtime.grammar", "phloem.runtime.outputs",
                                       "phloem.runtime.sampling_params", "phloem.runtime.tokenizer",
                                       "phloem.runtime.frontend.program",
                                       "phloem.runtime.frontend.sglang", "phloem.radix"),
    # What a program of a user's could import too, and no part of the engine below it.
    "phloem.runtime.server": ("phloem.runtime.chat_messages", "phloem.runtime.detokenizer", "phloem.runtime.engine", "phloem.runtime.branch", "phloem.runtime.errors",
                              "phloem.runtime.expand", "phloem.runtime.explain", "phloem.runtime.generation",
                              "phloem.runtime.grammar", "phloem.runtime.outputs", "phloem.runtime.prompts",
                              "phloem.runtime.sampling_params", "phloem.runtime.tokenizer",
                              "phloem.runtime.frontend", "phloem.runtime.server", "phloem.radix"),
    "phloem.runtime.cli": ("phloem.runtime", "phloem.radix", "phloem.kernels"),
}  # fmt: skip
ABOVE = ("phloem.runtime.cli", "phloem.runtime.server", "phloem.runtime.frontend")
"""Nothing below them imports these."""
DOORS = {("phloem.runtime.engine", "phloem.runtime.frontend.session")}
"""But for these: `Engine.session` opens a session, and imports it only then."""


@cache
def modules() -> dict[str, Path]:
    found = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(("phloem", *(part for part in parts if part != "__init__")))] = path
    return found


@cache
def statements(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """The imports of a file, in functions too; parsed once."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def imports(path: Path) -> list[tuple[int, str]]:
    found = []
    for node in statements(path):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        else:
            assert node.level == 0, f"{path}:{node.lineno} imports relatively; write the absolute name"
            found.append((node.lineno, node.module or ""))
    return found


def within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def test_imports_run_one_way() -> None:
    wrong = []
    for module, path in modules().items():
        rule = max((prefix for prefix in ALLOWED if within(module, (prefix,))), key=len)
        for line, name in imports(path):
            if not within(name, ("phloem",)):
                continue
            if (module, name) in DOORS:
                continue
            upward = within(name, ABOVE) and not within(module, ABOVE)
            if upward or not within(name, ALLOWED[rule]):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def users_of(name: str) -> set[str]:
    """Modules that import a module, or a name from it."""
    found = set()
    for module, path in modules().items():
        for node in statements(path):
            names = [alias.name for alias in node.names]
            base = node.module if isinstance(node, ast.ImportFrom) else None
            if name in names or base == name:
                found.add(module)
    return found


def test_only_the_path_cache_uses_the_tree_and_few_own_tensors() -> None:
    runtime = {module for module in users_of("RadixCache") if within(module, ("phloem.runtime",))}
    # The assembly of an engine and a benchmark make one; they hand it to a PathCache at once.
    assert runtime == {
        "phloem.runtime.path_cache",
        "phloem.runtime.assembly",
        "phloem.runtime.cli.bench_replay",
    }
    for module in ("scheduler", "path_cache", "path", "request", "batch", "branch", "fan_out", "engine_core"):
        assert f"phloem.runtime.{module}" not in users_of("torch")
        assert f"phloem.runtime.{module}" not in users_of("phloem.kernels.kv_store")
    assert not {module for module in users_of("torch") if within(module, ("phloem.radix",))}


def test_only_its_frontend_imports_sglang() -> None:
    own = "phloem.runtime.frontend.sglang"
    users = {
        module
        for module, path in modules().items()
        for _, name in imports(path)
        if within(name, ("sglang", own)) and not within(module, (own,))
    }
    assert not users


def test_kernels_has_no_init() -> None:
    # With one, anything started in the checkout would import it in place of PyPI's `kernels`.
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert (ROOT / "radix" / "__init__.py").exists()


def test_no_folder_of_ours_shadows_a_package_of_another() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import transformers, phloem.radix, phloem.runtime; print('fine')"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "fine", done.stderr


@pytest.mark.skipif(tomllib is None, reason="reads pyproject.toml with tomllib")
def test_the_list_of_packages_is_the_folders() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    listed = {name for name in config["packages"] if not name.startswith("phloem.examples")}
    folders = {
        ".".join(("phloem", *path.parent.relative_to(ROOT).parts))
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
    }
    assert listed == folders


@pytest.mark.parametrize("module", ["phloem.radix"])
def test_importing_the_tree_brings_no_torch(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'numpy', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={"PYTHONPATH": str(ROOT / ".src"), "PATH": ""},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"
