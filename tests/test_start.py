"""Help, versions and user errors are answered before anything slow is imported, and each command's function exists."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
SLOW = {"mxnet", "nvidia.dali", "numpy", "matplotlib", "psutil", "rich", "PIL", "horovod"}
PROGRAMS = ("train", "pipelines", "graph_passes")
LAUNCHERS = ("train.processes.launch", "train.processes.multi_host")


def start(module: str, *arguments: str) -> tuple[int, str, str, set[str]]:
    """Run a program as `python -m` does; returns exit code, stdout, stderr, and the slow modules that it imported."""
    script = f"""
        import runpy, sys
        try:
            runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
        finally:
            sys.stdout.flush()
            print("imported:", *({SLOW} & sys.modules.keys()))
    """
    command = [sys.executable, "-c", "\n".join(line[8:] for line in script.splitlines()), *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    out, _, imported = done.stdout.rpartition("imported:")
    return done.returncode, out, done.stderr, set(imported.split())


@pytest.mark.parametrize("line", [
    "train --help", "train train --help", "train benchmark -h", "train --config ?", "train predict --help",
    "pipelines --help", "pipelines verify --help", "graph_passes --help", "graph_passes show --help",
    "train.processes.launch --help", "train.processes.multi_host --help",
])
def test_help(line):
    module, *arguments = line.split()
    code, out, err, imported = start(module, *arguments)
    assert (code, err, imported) == (0, "", set())
    assert out.count("\n") > 5


@pytest.mark.parametrize("line, sentence", [
    ("train --epcohs 3", "there is no option --epcohs; did you mean --epochs?"),
    ("train --vresion", "there is no option --vresion; did you mean --version?"),
    ("train valdate", "there is no command 'valdate'; did you mean validate?"),
    ("train --config cpu_smaple", "there is no preset 'cpu_smaple' in train/configs/; did you mean cpu_sample?"),
    ("train --batch-size 0", "--batch-size 0 must be at least 1"),
    ("train --data --epochs 3", "--data needs a value"),
    ("train --model resnet51", "there is no model 'resnet51'; did you mean resnet50?"),
    ("train benchmark --optimizer adam", "there is no optimizer 'adam'; did you mean adamw?"),
    ("train validate --epochs 3", "--epochs is an option of train, compare-precision, sweep and language-model, "
                                    "not of validate"),
    ("train benchmark --resume auto", "--resume is an option of train and language-model, not of"),
    ("train predict --top x a.jpg", "--top needs a whole number, not 'x'"),
    ("pipelines vrify", "there is no command 'vrify'; did you mean verify?"),
    ("pipelines bench data --device tpu", "--device tpu is not one of cpu, gpu"),
    ("graph_passes show --modl x", "there is no option --modl; did you mean --model?"),
    ("train.processes.launch -n 2 --epcohs 3", "there is no option --epcohs; did you mean --epochs?"),
    ("train.processes.launch -n 2 valdate", "there is no command 'valdate'; did you mean validate?"),
    ("train.processes.launch -n x", "-n/--processes needs a whole number above 0, not 'x'"),
])
def test_mistakes(line, sentence):
    module, *arguments = line.split()
    code, out, err, imported = start(module, *arguments)
    assert (code, out, imported) == (2, "", set())
    assert err.startswith(f"error: {sentence}") and err.count("\n") == 1


@pytest.mark.parametrize("line", [*PROGRAMS, *LAUNCHERS, "train predict", "pipelines verify", "graph_passes show"])
def test_version(line):
    module, *command = line.split()
    code, out, err, imported = start(module, *command, "--version")
    assert (code, err) == (0, "") and not imported & {"mxnet", "nvidia.dali", "numpy", "horovod"}
    first, *libraries = out.splitlines()
    assert first.startswith("resnet-mxnet 1.")
    assert [line.partition(" ")[0].split("-")[0].strip(":") for line in libraries] == [
        "python", "mxnet", "nvidia", "horovod"
    ]


@pytest.mark.parametrize("module", PROGRAMS)
def test_every_command_has_its_function(module):
    for command in import_module(f"{module}.__main__").COMMANDS.values():
        assert callable(command.load())


# Modules that a command must not import before it needs them: seconds for packages, tenths for the cuda executor.
UNUSED = {"onnx", "onnxruntime", "matplotlib", "tensorboardX", "horovod", "setuptools", "pkg_resources", "IPython",
          "graph_passes.executors.cuda.executor"}


@pytest.mark.parametrize("module, unused", [
    ("train.commands.train", UNUSED | {"nvidia.dali"}),
    ("train.commands.validate", UNUSED | {"nvidia.dali"}),
    ("train.commands.export", UNUSED | {"nvidia.dali"}),
    ("train.commands.predict", UNUSED),
    ("train.commands.embed", UNUSED),
    ("train.commands.quantize", UNUSED),
    ("train.commands.runs", UNUSED | {"nvidia.dali", "mxnet"}),
])
def test_a_command_imports_what_it_needs(module, unused):
    program = f"import {module}, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert unused & set(done.stdout.split()) == set()


IN_A_LAUNCHER = [
    ("train.processes.launch -n 2", "train.config"),
    ("train.processes.launch -n 2", "horovod.runner.gloo_run"),
    ("train.processes.launch -n 2 --min-np 1", "train.processes.elastic_launch"),
    ("train.processes.multi_host -H localhost:2", "train.config"),
    ("train.processes.multi_host -H localhost:2", "horovod.runner.gloo_run"),
]


@pytest.mark.long(but=["train-train.config-2"])
@pytest.mark.parametrize("program, module, number", [
    ("train", "train.config", signal.SIGINT),
    ("train", "common.mxnet_compat", signal.SIGINT),
    ("train", "train.models.resnet", signal.SIGINT),  # to build the network
    *[(*place, number) for place in IN_A_LAUNCHER for number in (signal.SIGINT, signal.SIGTERM)],
    ("train.processes.launch -n 2", "train.errors", signal.SIGINT),  # in its processes, before their own code runs
    ("train.processes.launch -n 2", "common.mxnet_compat", signal.SIGINT),
])
def test_stopped_while_it_starts(tmp_path, program, module, number):
    """A signal just before a module is imported gives one sentence, and leaves nothing on the disk."""
    if "processes" in program:
        pytest.importorskip("horovod")
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r} and (name != 'train.errors' or 'HOROVOD_RANK' in os.environ):\n"
        f"            signal.raise_signal({number:d})\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    run = tmp_path / "run"
    command = [*program.split(), *["--device", "cpu", "--data", "synthetic", "--max-steps", "1", "--output"], str(run)]
    done = subprocess.run([sys.executable, "-m", *command], cwd=tmp_path, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}, preexec_fn=hear_ctrl_c)
    assert (done.returncode, done.stderr) == (128 + number, "stopped while it started\n")
    assert not run.exists()


def hear_ctrl_c() -> None:
    """Restore the handling of Ctrl-C as in a terminal, even if the tests run in the background, which ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("name, steps, said", [("train", 0, "stopped while it started\n"), ("train", 1, ""),
                                               ("validate", 0, "")])
def test_ctrl_c_once_all_is_imported(monkeypatch, capsys, name, steps, said):
    """Before the first step of a command that trains, Ctrl-C prints a sentence; otherwise the program ends silently."""
    from train import __main__ as program
    from train.processes.pulse import Record, pulse

    class Stopped:
        outlasts_output = program.COMMANDS[name].outlasts_output

        @staticmethod
        def load():
            raise KeyboardInterrupt

    monkeypatch.setattr(program, "understood", lambda arguments: (name, {}))
    monkeypatch.setitem(program.COMMANDS, name, Stopped)
    monkeypatch.setattr(pulse, "_record", Record(step=steps))
    assert program.main([]) == 130
    assert capsys.readouterr().err == said
