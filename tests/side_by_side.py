"""The order and the output of tests. Tests are shuffled, so that none depends on an earlier one. With `pytest -n 2`,
this chooses which files go first and which must not run at the same time. It prints one line per finished file, also
without -n."""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from fnmatch import fnmatchcase
from typing import Any

import pytest

# Every test of these files starts two or three processes that train together: on two cores, one such file at a time.
SEVERAL_PROCESSES = ("test_elastic", "test_dgx1_8gpu", "test_distributed", "test_allreduce", "test_launch")
# The longest files start first, so that the last ones are short and no core is idle at the end.
LONGEST_FIRST = (*SEVERAL_PROCESSES, "test_hang", "test_resume", "test_compile", "test_operations",
                 "test_quantize", "test_gpu_report", "test_predict_to_file", "test_loop", "test_extending",
                 "test_classifier", "test_export", "test_fine_tuning", "test_fused_step", "test_weights",
                 "test_without_gpu", "test_quantised_without_gpu", "test_augment", "test_loader", "test_bad_input")

MOST_SHOWN = 200  # characters shown of a failure's reason


def file_of(test_id: str) -> str:
    return test_id.partition("::")[0]


def stem_of(test_id: str) -> str:
    return file_of(test_id).rpartition("/")[2].removesuffix(".py")


def shorten(items: list[pytest.Item]) -> None:
    """Remove the mark `long` from tests whose parameters match one of the patterns in `long(but=PATTERNS)`."""
    for item in items:
        mark, case = item.get_closest_marker("long"), getattr(item, "callspec", None)
        if mark and case and any(fnmatchcase(case.id, pattern) for pattern in mark.kwargs.get("but", ())):
            item.own_markers = [own for own in item.own_markers if own is not mark]


def shuffle(items: list[pytest.Item], seed: int) -> None:
    """Shuffle in place: the files, the classes and functions of a file, and the tests of a class. Each of these groups
    stays together, since fixtures may be made once for a file or a class."""
    chance = random.Random(seed)
    items[:] = [item for file in _shuffled_groups(items, lambda item: file_of(item.nodeid), chance)
                for group in _shuffled_groups(file, lambda item: getattr(item, "cls", None) or item.nodeid, chance)
                for item in chance.sample(group, len(group))]


def _shuffled_groups(
    items: list[pytest.Item], key: Callable[[pytest.Item], Hashable], chance: random.Random
) -> list[list[pytest.Item]]:
    groups: defaultdict[Hashable, list[pytest.Item]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return chance.sample(list(groups.values()), len(groups))


def sort_files(items: list[pytest.Item]) -> None:
    """Sort the files in place; the tests of a file keep their order."""
    ranks = {stem: rank for rank, stem in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: ranks.get(stem_of(item.nodeid), len(ranks)))


def make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each process whole files, in the order of `sort_files`. With `--dist`, pytest-xdist's own scheduler gives
    single tests instead: on a GPU, a few files have most of the tests."""
    from xdist.scheduler import LoadFileScheduling

    if config.option.dist != "load":  # the default of `-n`
        return None

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "several processes" if stem_of(nodeid) in SEVERAL_PROCESSES else file_of(nodeid)

    config.option.loadscopereorder = False  # do not sort files by their numbers of tests
    return Files(config, log)


def _reason(report: pytest.TestReport) -> str:
    """The first line of a failure's reason; a user who stops the run does not see pytest's summary."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return f": {crash.message.splitlines()[0][:MOST_SHOWN]}" if crash and crash.message else ""


class Progress:
    """Prints a line for each finished file, and each failing test at once, instead of pytest's dots."""

    def __init__(self, terminal: Any, seed: int) -> None:
        self._terminal = terminal
        self._seed = seed
        self._left: Counter[str] = Counter()  # tests by file
        self._total = 0
        self._ended: defaultdict[str, Counter[str]] = defaultdict(Counter)  # file -> outcomes of its tests
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._reporting = False  # a test has just ended; False in the summary
        self._start = time.monotonic()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.pytest_xdist_node_collection_finished([item.nodeid for item in session.items])

    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        if self._total or not ids:  # every process reports it, and the main process has none
            return
        self._left.update(file_of(test_id) for test_id in ids)
        self._total = len(ids)
        counted = [f"{count:,} {what}{'s' * (count > 1)}"
                   for count, what in ((self._total, "test"), (len(self._left), "file"))]
        self._say(f"{' in '.join(counted)}, in an order of chance (RESNET_TEST_SEED={self._seed})")

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> Any:
        category, letter, word = yield
        if not self._reporting:
            return category, letter, word
        if category:
            self._ended[file_of(report.nodeid)][category] += 1
        if category in ("failed", "error"):
            self._say(f"{category.upper()} {report.nodeid}{_reason(report)}", red=True)
        return category, "", ""  # nothing for pytest itself to print

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> Any:
        self._reporting = True
        yield
        self._reporting = False
        file = file_of(report.nodeid)
        self._seconds[file] += report.duration
        if report.when in ("setup", "call"):
            return
        self._left[file] -= 1
        if not self._left[file]:
            self._say_how_it_ended(file)

    def _say_how_it_ended(self, file: str) -> None:
        done = 1 - sum(self._left.values()) / self._total
        ended = ", ".join(f"{count} {category}" for category, count in self._ended[file].items())
        minutes, seconds = divmod(int(time.monotonic() - self._start), 60)
        self._say(f"{done:4.0%} {minutes}:{seconds:02}  {file}: {ended} in {self._seconds[file]:.1f} s")

    def _say(self, line: str, **markup: bool) -> None:
        """Print at once, also into a file."""
        self._terminal.write_line(line, **markup)
        self._terminal.flush()
