"""`make check`, for use while working: ruff, mypy and the tests of the files changed since a commit, in a minute.

    python tests/changed.py [--since COMMIT] [OPTIONS OF PYTEST]

A file counts as changed if it differs from that commit (default: the commit where this branch left main), or is not
committed. The tests of a changed file are the file itself, if it is a test; the tests at its place under tests/; tests
that import it directly or through other files; and if there are none, tests that name it. If there are many, only the
nearest are run; `make test` runs all.
"""

from __future__ import annotations

import argparse
import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("common", "train", "gpu_report", "pipelines", "graph_passes", "resnet_mxnet", "benchmarks", "scripts",
           "tests")
MOST_FILES = 6  # test files, each of about ten seconds on one core
MAIN = ("origin/main", "main")


def git(*arguments: str) -> list[str]:
    """Run git and return its output by lines, or by names with -z; empty if git fails or is not installed."""
    if not shutil.which("git"):
        return []
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return [line for line in re.split("[\\0\n]", done.stdout) if line] if done.returncode == 0 else []


def start_of_branch() -> str:
    return next((line for main in MAIN for line in git("merge-base", "HEAD", main)), "HEAD")


def changed_since(commit: str) -> list[str]:
    """The paths of files that were changed, added or deleted, and of files that git does not track."""
    return sorted({*git("diff", "--name-only", "--no-renames", "--relative", "-z", commit),
                   *git("ls-files", "--others", "--exclude-standard", "-z")})


def module_of(path: str) -> str:
    """The name by which a file is imported: files of tests/ and benchmarks/ by their names alone."""
    parts = Path(path).with_suffix("").parts
    return parts[-1] if parts[0] in ("tests", "benchmarks", "scripts") else ".".join(parts).removesuffix(".__init__")


def imported(source: str) -> Iterator[str]:
    """The names of all modules that a file may import; `from a import b` counts as a and a.b, since b may be a module.
    Empty for a file that is not valid Python, which ruff reports."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


class Project:
    """The import graph of the project.

    Args:
        sources: text of each Python file, by its path.
    """

    def __init__(self, sources: dict[str, str]) -> None:
        self._sources = sources
        self._tests = [path for path in sources if Path(path).name.startswith("test_")]
        self._imports = {path: set(imported(source)) for path, source in sources.items()}
        self._importers: dict[str, set[str]] = {}
        for path, names in self._imports.items():
            for name in names:
                self._importers.setdefault(name, set()).add(path)

    def tests_of(self, path: str) -> list[str]:
        """The test files for a changed file, nearest first."""
        if path in self._tests:
            return [path]
        if path not in self._sources and not path.endswith(".py"):
            return self._that_name(path)
        near = [*self._at_the_same_place(path), *self._that_import(path)]
        return list(dict.fromkeys(near or self._that_name(path, Path(path).stem) or self._in_the_folder(path)))

    def _at_the_same_place(self, path: str) -> list[str]:
        folder, name = Path(path).parent, f"test_{Path(path).name}"
        return [test for test in (str("tests" / folder / name), f"tests/{name}") if test in self._tests]

    def _that_import(self, path: str) -> list[str]:
        """Tests that import the file directly or, if there are none, through the fewest other files."""
        seen, now = {path}, {path}
        while now:
            now = {importer for each in now for importer in self._importers.get(module_of(each), ())} - seen
            if tests := sorted(now.intersection(self._tests), key=self._number_of_imports):
                return tests
            seen |= now
        return []

    def _number_of_imports(self, test: str) -> tuple[int, str]:
        """The number of a test's imports: few, if it tests little else."""
        return len(self._imports[test]), test

    def _that_name(self, path: str, word: str = "") -> list[str]:
        """Tests that contain the file's name (or `word`), those in its folder first."""
        name = Path(path).name
        pattern = re.compile(rf"(?<!\w){re.escape(word or (name if '.' in name else path))}\b")
        tests = [test for test in self._tests if pattern.search(self._sources[test])]
        tests.sort(key=lambda test: Path(test).parent != "tests" / Path(path).parent)
        if name.endswith(".md"):
            tests.insert(0, "tests/test_docs.py")
        elif name.endswith((".cu", ".cuh")):
            tests.insert(0, "tests/graph_passes/cuda/test_compile.py")
        return list(dict.fromkeys(tests))

    def _in_the_folder(self, path: str) -> list[str]:
        """Tests that name the file's folder or the folder above it, as tests of all presets do."""
        folder = "tests" / Path(path).parent
        return [test for place in (folder, folder.parent) for test in self._tests if Path(test).parent == place]


def nearest(tests: Iterable[list[str]]) -> list[str]:
    """Interleave: the first test of each changed file, then the second of each, and so on."""
    lists = list(tests)
    turns = [each[place] for place in range(max(map(len, lists), default=0)) for each in lists if place < len(each)]
    return list(dict.fromkeys(turns))


def choose(changed: list[str], project: Project) -> list[str]:
    """Choose the tests to run, and print which, and why not others."""
    found = {path: project.tests_of(path) for path in changed}
    tests = nearest(found.values())
    for path, of_path in found.items():
        chosen = [test for test in of_path if test in tests[:MOST_FILES]]
        print(f"{path}: {', '.join(chosen) or ('left to make test' if of_path else 'no tests')}", flush=True)
    if left := tests[MOST_FILES:]:
        print(f"left to make test: {len(left)} more files of tests, such as {left[0]}", flush=True)
    if not changed:
        print("no tests: nothing has changed")
    return tests[:MOST_FILES]


def check(tests: list[str], options: list[str]) -> bool:
    """Run all checks; returns whether all succeeded. mypy and the tests take a core each."""
    mypy = subprocess.Popen([sys.executable, "-m", "mypy"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    ruff = subprocess.run([sys.executable, "-m", "ruff", "check"], cwd=ROOT)
    marks = "not gpu and not slow and not long"
    code = 0
    if tests:
        code = subprocess.run([sys.executable, "-m", "pytest", "-m", marks, *tests, *options], cwd=ROOT).returncode
    print("mypy:", mypy.communicate()[0].strip())
    return not (ruff.returncode or mypy.returncode or code not in (0, 5))  # 5: no test was run (all are long)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", metavar="COMMIT", default="")
    known, options = parser.parse_known_args()
    since = known.since or start_of_branch()
    if not git("rev-parse", "--git-dir"):
        print("error: there is no git, or no checkout of yours here, so what has changed is not known: run make test",
              file=sys.stderr)
        return 2
    if not git("rev-parse", "--verify", "--quiet", f"{since}^{{commit}}"):
        print(f"error: there is no commit {since}: give another one with SINCE=COMMIT", file=sys.stderr)
        return 2
    paths = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]
    project = Project({str(path.relative_to(ROOT)): path.read_text() for path in paths})
    return 0 if check(choose(changed_since(since), project), options) else 1


if __name__ == "__main__":
    sys.exit(main())
