"""Refuses source that could run what it was only meant to read: pickles, eval, unsandboxed templates. Reads syntax trees, not text.

Also holds the engine to its list of imports, which import-linter can only forbid one by one.
Usage: python tools/source_gate.py [FOLDER...]; prints one line per finding, exit code 1 if there is any.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNPICKLERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
_CODE_RUNNERS = {"eval", "exec", "compile", "__import__"}
_UNSANDBOXED = {"Environment", "Template", "NativeEnvironment"}
_SHELLS = {"os.system", "os.popen"}
_ENGINE = Path("services/worker/engine")
_ENGINE_IMPORTS = {"torch", "numpy"}
# These read model files, so they may use the two libraries that know the formats.
_LOADER_FILES = {"loader.py", "gguf_file.py", "gguf_blocks.py", "safetensors_folder.py"}
_LOADER_IMPORTS = {"safetensors", "gguf"}
# In the standard library, but an engine that waits or serves has left its job.
_ENGINE_REFUSED = {"asyncio", "socket", "http", "urllib", "ssl", "multiprocessing", "subprocess"}


@dataclass(frozen=True)
class Finding:
    """One refused line."""

    path: Path
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


def check(path: Path, source: str) -> list[Finding]:
    """The findings in one file; `path` is relative to the repository."""
    tree = ast.parse(source, str(path))
    names = _imported_names(tree)
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.stmt | ast.expr)]
    found = [Finding(path, node.lineno, what) for node in nodes for what in _dangers(node, names)]
    if path.is_relative_to(_ENGINE):
        found += _engine_imports(path, tree)
    return sorted(found, key=lambda finding: finding.line)


def _imported_names(tree: ast.Module) -> dict[str, str]:
    """Local name -> dotted origin, for imports anywhere in the file: `import torch as t` gives t -> torch."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = alias.name if alias.asname else alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def _dangers(node: ast.stmt | ast.expr, names: dict[str, str]) -> Iterator[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        for module in _modules(node):
            if module.partition(".")[0] in _UNPICKLERS:
                yield f"imports {module}: unpickling runs code"
        yield from (f"uses {name}" for name in _dotted_imports(node) if _is_refused(name))
    elif isinstance(node, ast.Name) and node.id in _CODE_RUNNERS and node.id not in names:
        yield f"uses {node.id}: it runs text as code"
    elif isinstance(node, ast.Attribute):
        dotted = _dotted(node, names)
        if dotted is not None and _is_refused(dotted):
            yield f"uses {dotted}"
    elif isinstance(node, ast.Call):
        for keyword in node.keywords:
            truth = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
            if keyword.arg in ("allow_pickle", "shell", "trust_remote_code") and truth:
                yield f"passes {keyword.arg}=True"


def _is_refused(dotted: str) -> bool:
    root, _, name = dotted.rpartition(".")
    if root in ("jinja2", "jinja2.environment", "jinja2.nativetypes"):
        return name in _UNSANDBOXED
    if root == "builtins":
        return name in _CODE_RUNNERS
    return dotted in _SHELLS or dotted in ("torch.load", "torch.serialization.load", "torch.jit.load", "yaml.load", "yaml.unsafe_load")


def _modules(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if node.module and not node.level else []


def _dotted_imports(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def _dotted(node: ast.expr, names: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        root = _dotted(node.value, names)
        return None if root is None else f"{root}.{node.attr}"
    return None


def _engine_imports(path: Path, tree: ast.Module) -> list[Finding]:
    allowed = _ENGINE_IMPORTS | (sys.stdlib_module_names - _ENGINE_REFUSED)
    if path.name in _LOADER_FILES or "loader" in path.parts:
        allowed |= _LOADER_IMPORTS
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return [
        Finding(path, node.lineno, f"imports {module}: the engine knows torch, numpy and the standard library")
        for node in imports
        for module in _modules(node)
        if module.partition(".")[0] not in allowed and not module.startswith("services.worker.engine")
    ]


def main(folders: list[str]) -> int:
    """Checks every Python file under the folders (default: services); returns the exit code."""
    paths = sorted(path for folder in folders or ["services"] for path in Path(folder).rglob("*.py"))
    findings = [finding for path in paths for finding in check(path, path.read_text(encoding="utf-8"))]
    for finding in findings:
        print(finding)
    if not findings:
        print(f"source gate: {len(paths)} files, nothing refused")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
