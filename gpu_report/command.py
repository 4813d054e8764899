"""The command gpu-report: measure this GPU by the figures that buyers compare, or set reports side by side.

Each figure is written to report.json as soon as it is measured, so after a stop or a kill the same command resumes.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from common import environment, files
from common.command_line import option_name, part_of
from gpu_report import comparison, cost
from gpu_report.figures import FILE, Report, Section, shown
from gpu_report.page import check_page, write_page
from gpu_report.section import Bench
from graph_passes.executors.base import parse_device
from graph_passes.executors.cuda.device import Gpu
from train import devices
from train.config import Config
from train.devices import Placement
from train.errors import TrainError
from train.options.commands import GpuReportOptions
from train.processes.invocation import command_line
from train.processes.signals import ending_with
from train.recording.gpu_monitor import GpuMonitor

# Section (a module of gpu_report) -> the section's share of --minutes. Inference chooses kernels for each batch size
# and precision, which takes more than ten minutes in all, so inference also gets the time that the other sections leave
# unused.
SECTIONS = {"kernels": 0.2, "recurrent": 0.1, "cost": 0.1, "training": 0.45, "inference": 0.15}
OF_COST = ("data", *cost.COUNTED_BY)  # options that only the section cost reads
# seconds for which the machine's load is measured; share of the machine in use below which it counts as idle
LOOK_SECONDS, LITTLE = 0.3, 0.25
FOLDER, COMPARISON_FOLDER = Path("runs/gpu_report"), Path("runs/gpu_comparison")


def main(values: Mapping[str, Any]) -> None:
    """Run the command: measure and write a report, or compare reports. Raises UserError and StoppedBySignal."""
    wanted = part_of(GpuReportOptions, values)
    wanted = replace(wanted, sections=tuple(dict.fromkeys(wanted.sections)))  # without duplicates
    with ending_with("stopped: repeat the command to resume"):
        if wanted.compare:
            _compare(wanted, values)
        else:
            _report(wanted, values)


def _report(wanted: GpuReportOptions, values: Mapping[str, Any]) -> None:
    for name in OF_COST:
        if name in values and "cost" not in wanted.sections:
            raise TrainError(f"{option_name(name)} belongs to the section cost, which is not in --sections: leave it "
                             "out, or add cost to --sections")
    if wanted.data:
        cost.check_data(wanted.data)  # checked before the measurements, which take minutes
    placement = devices.choose(Config(device=wanted.device), local_rank=0)
    if placement.note:
        print(placement.note, flush=True)
    folder = Path(wanted.output or FOLDER)
    taken = TrainError(f"another process is measuring into {folder}: wait until it ends; two at once would only slow "
                       "each other down")
    with files.alone_in(folder, taken):
        busy = _busy(placement)
        if busy:
            print(f"other programs use {busy}, so the figures will be too slow: end them, and begin anew with "
                  "another --output", flush=True)
        _measure(wanted, values, placement, folder, busy)


def _busy(placement: Placement) -> str:
    """A sentence with the share of this machine that other programs use before the measurements; "" if the share is
    small.
    """
    monitor = None
    if placement.executor == "cuda":
        monitor = GpuMonitor(Gpu(parse_device(placement.device)[1]).device.pci_bus_id)
        monitor.sample()
    processor = psutil.cpu_percent(interval=LOOK_SECONDS) / 100
    used = {"processor": processor}
    if monitor:
        monitor.sample()
        used["GPU"] = monitor.take().utilization
    return " and ".join(f"{share:.0%} of the {what}" for what, share in used.items() if share > LITTLE)


def _measure(wanted: GpuReportOptions, values: Mapping[str, Any], placement: Placement, folder: Path,
             busy: str) -> None:
    """Resume the report in the folder, or begin a new one. `busy`: a sentence about other programs' use of the machine;
    see `_busy`.
    """
    # If an option of the section cost is given, time and cost are computed again from the existing run. Options of an
    # earlier start that are not given now keep their values.
    counts_cost_again = not values.keys().isdisjoint(OF_COST)
    report, done = _begun(folder, placement, set(wanted.sections), counts_cost_again)
    if counts_cost_again and "cost" in report.sections:
        before = cost.given_before(folder, report.sections["cost"])
        wanted = replace(wanted, **{name: value for name, value in before.items() if name not in values})
    if busy and not set(wanted.sections) <= done:
        sentence = (f"Other programs used {busy} at the start on {shown(_now())}: figures measured then may be too "
                    "slow.")
        report = replace(report, about={**report.about, "beside": [*report.beside, sentence]})
    report.write(folder / FILE)  # an unwritable folder fails here, not after minutes of measuring
    ends_at = time.monotonic() + 60 * wanted.minutes
    for number, name in enumerate(wanted.sections, start=1):
        if name in done:
            print(f"== {name}: already complete, skipped", flush=True)
            continue
        print(f"== {name} ({number} of {len(wanted.sections)})", flush=True)
        ahead = sum(SECTIONS[each] for each in wanted.sections[number - 1 :] if each not in done)
        left = max(0.0, ends_at - time.monotonic())
        seconds = left * SECTIONS[name] / ahead  # the remaining sections share the unused time of earlier ones
        bench = Bench(placement, report.device, folder, seconds, wanted.data, wanted.target_accuracy,
                      wanted.price_per_hour, report.sections.get(name, Section(())),
                      save=partial(_write, report, folder, name))
        try:
            section = importlib.import_module(f"gpu_report.{name}").measure(bench)
        except BaseException:  # BaseException includes signals
            bench.keep()  # writes the list of missing figures, with reasons
            raise
        earlier = bench.begun.seconds
        print(f"== {name}: {section.seconds - earlier:.0f} s{f', {earlier:.0f} s before' * bool(earlier)}", flush=True)
        report = _write(report, folder, name, section)
    write_page(folder, report)
    print(f"report: {folder / 'report.md'}, {folder / 'report.html'}, {folder / FILE}")


def _write(report: Report, folder: Path, name: str, section: Section) -> Report:
    """Add the section to the report and write the report into the folder. Raises UserError if it cannot be written."""
    report = report.with_section(name, section)
    report.write(folder / FILE)
    return report


def _done(report: Report) -> set[str]:
    """The sections that are complete: another start would measure nothing more in them."""
    return {name for name, section in report.sections.items() if section.figures and section.complete}


def _begun(folder: Path, placement: Placement, sections: set[str], counts_cost_again: bool) -> tuple[Report, set[str]]:
    """The report in the folder, or a new empty one, and the names of its complete sections.

    If this start will add figures, its command is added to the report's commands (one per line), and its date becomes
    the report's date. Raises UserError if the report cannot be resumed, or if figures are missing and the report
    belongs to another device or commit, or to other library versions.
    """
    hardware = environment.hardware()
    device = hardware["gpus"][0] if placement.device.startswith("gpu") else hardware["cpu"]
    commit = environment.git_commit()
    about: dict[str, Any] = {
        "hardware": hardware, "executor": placement.executor, "versions": environment.versions(), "commit": commit,
        "command": command_line(), "date": _now()}
    if not (folder / FILE).exists():
        _check_pages(folder, "report")
        return Report(device, {}, about), set()
    report = Report.read(folder / FILE, way_out="to measure anew, give another --output")
    done = _done(report)
    if counts_cost_again and not (folder / cost.RUN_FOLDER).exists():
        done -= {"cost"}
    measures = not sections <= done
    for what, there, here in (("device", report.device, device), ("commit", report.about.get("commit"), commit)):
        if there != here and measures:
            raise TrainError(f"the report in {folder} was measured with the {what} {there}, not {here}: give another "
                             "--output")
    try:
        check_page(report)
    except ValueError as error:
        raise TrainError(f"the report in {folder} was not measured by this command ({error}): give another "
                         "--output") from None
    versions, here = report.about.get("versions", {}), about["versions"]
    others = sorted(name for name in {*versions, *here} if versions.get(name) != here.get(name))
    if measures and versions and others:
        raise TrainError(f"the report in {folder} was measured with another version of {' and '.join(others)}: give "
                         "another --output")
    if counts_cost_again:
        done -= {"cost"}
    if not sections <= done:
        commands = [*str(report.about.get("command", "")).splitlines(), about["command"]]
        about["command"] = "\n".join(dict.fromkeys(commands))
        latest = ("command", "date") if measures else ("command",)
        report = replace(report, about={**report.about, **{name: about[name] for name in latest}})
    return report, done


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _check_pages(folder: Path, name: str) -> None:
    """Raise TrainError if the folder has pages of this name that another program wrote: they would be overwritten."""
    for page in (f"{name}.md", f"{name}.html"):
        if (folder / page).exists() and not (folder / f"{name}.json").exists():
            raise TrainError(f"{folder} has a {page} that this command did not write (there is no {name}.json beside "
                             "it): give another --output, or move it away")


def _compare(wanted: GpuReportOptions, values: Mapping[str, Any]) -> None:
    for name in values.keys() - {"compare", "output"}:
        raise TrainError(f"{option_name(name)} has no effect with --compare, which measures nothing: leave it out")
    if len(wanted.compare) < 2:
        raise TrainError(f"--compare {wanted.compare[0]} is a single report: give two or more")
    folder = Path(wanted.output or COMPARISON_FOLDER)
    _check_pages(folder, "comparison")
    comparison.write(folder, [Report.read(path) for path in wanted.compare])
    print(f"comparison: {folder / 'comparison.md'}, {folder / 'comparison.html'}")
