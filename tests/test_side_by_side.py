"""The output of `make test` for test files, and the order in which they start side by side."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import side_by_side

SEED = 5


class File:
    """Stands in for a terminal; a line counts only once it is flushed."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._held: list[str] = []

    def write_line(self, line: str, **_: bool) -> None:
        self._held.append(line)

    def flush(self) -> None:
        self.lines += self._held
        self._held.clear()


def finish(progress: side_by_side.Progress, test_id: str, outcome: str, message: str = "") -> tuple[str, str, str]:
    """Report a finished test like pytest: call the hooks around pytest's own hook, which asks how to show the test.
    `message` is the reason of a failure."""
    longrepr = SimpleNamespace(reprcrash=SimpleNamespace(message=message)) if message else None
    report: Any = SimpleNamespace(nodeid=test_id, duration=0.5, when="teardown", longrepr=longrepr)
    around = progress.pytest_runtest_logreport(report)
    next(around)
    shown = ask(progress, report, outcome)
    with pytest.raises(StopIteration):
        next(around)
    return shown


def ask(progress: side_by_side.Progress, report: Any, outcome: str) -> tuple[str, str, str]:
    around = progress.pytest_report_teststatus(report)
    next(around)
    with pytest.raises(StopIteration) as end:
        around.send((outcome, outcome[0], outcome.upper()))
    return end.value.value


def test_a_line_for_each_file_and_each_failure():
    file = File()
    progress, lines = side_by_side.Progress(file, SEED), file.lines
    tests = ["a/test_x.py::one", "a/test_x.py::two[b::c]", "test_y.py::three", "test_y.py::four"]
    for _ in range(2):  # each process has collected the same tests
        progress.pytest_xdist_node_collection_finished(tests)
    assert finish(progress, "a/test_x.py::one", "passed") == ("passed", "", "")
    assert finish(progress, "test_y.py::three", "skipped") == ("skipped", "", "")
    assert finish(progress, "a/test_x.py::two[b::c]", "failed") == ("failed", "", "")
    assert finish(progress, "test_y.py::four", "error", "GraphError: no GPU\n  here") == ("error", "", "")
    assert lines == ["4 tests in 2 files, in an order of chance (RESNET_TEST_SEED=5)", "FAILED a/test_x.py::two[b::c]",
                     " 75% 0:00  a/test_x.py: 1 passed, 1 failed in 1.0 s", "ERROR test_y.py::four: GraphError: no GPU",
                     "100% 0:00  test_y.py: 1 skipped, 1 error in 1.0 s"]
    in_summary = SimpleNamespace(nodeid="test_y.py::three")
    assert ask(progress, in_summary, "failed") == ("failed", "f", "FAILED") and len(lines) == 5


def test_without_others_beside_it():
    file = File()
    progress, lines = side_by_side.Progress(file, SEED), file.lines
    for ids in ([], ["test_x.py::one"]):  # the process that distributes tests has none
        progress.pytest_collection_finish(SimpleNamespace(items=[SimpleNamespace(nodeid=test_id) for test_id in ids]))
    finish(progress, "test_x.py::one", "failed")
    assert lines == ["1 test in 1 file, in an order of chance (RESNET_TEST_SEED=5)", "FAILED test_x.py::one",
                     "100% 0:00  test_x.py: 1 failed in 0.5 s"]


def test_order_of_the_files():
    names = ["test_a.py::one", "tests/train/test_loop.py::z", "test_a.py::two", "x/test_elastic.py::b",
             "tests/train/test_loop.py::a"]
    items: Any = [SimpleNamespace(nodeid=name) for name in names]
    side_by_side.sort_files(items)
    assert [item.nodeid for item in items] == [names[3], names[1], names[4], names[0], names[2]]


def test_long_but_for_some_parameters() -> None:
    def item(case: str | None, **options: Any) -> Any:
        mark = pytest.mark.long(**options).mark
        found = SimpleNamespace(own_markers=[pytest.mark.gpu.mark, mark], get_closest_marker=lambda _: mark)
        return found if case is None else SimpleNamespace(**vars(found), callspec=SimpleNamespace(id=case))

    patterns = ["a-*", "b"]
    items = [*(item(case, but=patterns) for case in ("a-1", "b-1", "b")), item("a-1"), item(None)]
    side_by_side.shorten(items)
    assert [[mark.name for mark in each.own_markers] for each in items] == [
        ["gpu"], ["gpu", "long"], ["gpu"], ["gpu", "long"], ["gpu", "long"]]


def test_shuffled_by_the_seed_but_files_and_classes_stay_together():
    class First: ...

    names = [f"test_{file}.py::{what}" for file in "abc" for what in ("one", "two", "three", "First::x", "First::y")]
    orders = []
    for seed in (1, 1, 2, 3):
        items: Any = [SimpleNamespace(nodeid=name, cls=First if "First" in name else None) for name in names]
        side_by_side.shuffle(items, seed)
        orders.append([item.nodeid for item in items])
    assert orders[0] == orders[1] and all(sorted(order) == sorted(names) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    for order in orders:
        for together in ("test_a.py", "test_b.py", "test_c.py", "test_a.py::First"):
            places = [place for place, name in enumerate(order) if name.startswith(together)]
            assert places == list(range(places[0], places[0] + len(places))), together


def test_the_files_that_are_named_are_there():
    stems = {path.stem for path in Path(__file__).parent.rglob("test_*.py")}
    assert set(side_by_side.LONGEST_FIRST) <= stems


def test_files_are_handed_out_whole_unless_dist_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xdist.scheduler.LoadFileScheduling.__init__", lambda *_: None)
    by_file = {}
    for dist in ("load", "worksteal"):
        config: Any = SimpleNamespace(option=SimpleNamespace(dist=dist))
        by_file[dist] = side_by_side.make_scheduler(config, None) is not None
    assert by_file == {"load": True, "worksteal": False}
