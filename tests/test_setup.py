"""scripts/setup.sh and the launchers: what they install and print on various machines, with stand-ins for all tools;
nothing is installed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "setup.sh"
TOOLS = ("awk", "bash", "cat", "cksum", "cut", "dirname", "df", "du", "flock", "grep", "head", "mkdir", "mv",
         "realpath", "rm", "rmdir", "sed", "sort", "tail", "touch")  # of any Linux
INSTALL = "pip install --disable-pip-version-check --retries 3 --no-compile --no-warn-conflicts"
PIP = f"{INSTALL} -e"
LIMIT = 300  # seconds; longer than any command here takes, even on a busy machine
GPU = 'echo "580.65.06, 9.0, NVIDIA H200"'


class Done(NamedTuple):
    code: int
    said: str
    error: str
    calls: list[str]  # of pip and of our own scripts


def write_program(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{shutil.which('bash')}\n{body}\n")
    path.chmod(0o755)


def make_python(venv: Path, version: str) -> None:
    """A Python in `venv` that only prints its version and records the files that it is called with."""
    write_program(venv / "bin" / "python", f"""case $1 in
        -c) echo {version} ;;
        --version) echo Python {version}.9 ;;
        -m) ;;
        *) echo "$*" >>{venv.parent}/calls ;;
    esac""")


def a_python(version: str, *, has_venv: bool = True, make: str = "exit 1") -> str:
    """A script that behaves like a Python on PATH, with or (like Debian's) without the module venv. `make` makes an
    environment."""
    return f"""case "$*" in
        --version) echo Python {version}.1 ;;
        *ensurepip*) exit {0 if has_venv else 1} ;;
        "-m venv "*) {make} ;;
        -c*) echo {version} ;;
    esac"""


def until(condition: str) -> str:
    """Shell lines that wait until the condition holds; they give up at last."""
    return f"for _ in {{1..3000}}; do if {condition}; then break; fi; sleep 0.1; done"


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An environment whose pip and Python only record their calls."""
    folder = tmp_path / "venv"
    write_program(folder / "bin" / "pip", f'echo "pip $*" >>{tmp_path}/calls')
    make_python(folder, "3.11")
    return folder


@pytest.fixture
def run_setup(tmp_path: Path, venv: Path) -> Callable[..., Done]:
    """Run setup.sh on a machine that has only the given tools (name -> script)."""

    def run(part: str = "run", *, into: Path = venv, system: str = "", shell: str = "bash", **tools: str) -> Done:
        tools = {"df": "echo Avail; echo 100000000000"} | tools  # no test depends on the disk of this machine
        path = tmp_path / "path"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        for name in TOOLS:
            if name.replace("-", "_") not in tools:
                (path / name).symlink_to(shutil.which(name) or name)
        for name, body in tools.items():
            write_program(path / name.replace("_", "-"), body)
        calls = tmp_path / "calls"
        calls.write_text("")
        (tmp_path / "os-release").write_text(system)
        environment = {"PATH": str(path), "HOME": str(tmp_path), "OS_RELEASE": str(tmp_path / "os-release")}
        program = shutil.which(shell) or shell
        done = subprocess.run([program, SCRIPT, part, into], capture_output=True, text=True, env=environment)
        return Done(done.returncode, done.stdout, done.stderr, calls.read_text().splitlines())

    return run


def test_one_process_compiles_nothing(run_setup, venv):
    done = run_setup("run")
    assert done.code == 0
    assert "setup: packages for a machine with no GPU" in done.said
    assert done.calls == [f"{PIP} .[cpu]"]
    assert (venv / ".ready").exists() and not (venv / ".ready-horovod").exists()
    assert run_setup("run").calls == []  # all done


def test_each_part_adds_what_is_missing(run_setup, venv):
    run_setup("run")
    done = run_setup("horovod")
    assert done.calls == [f"scripts/build_horovod.py {venv}/horovod"]
    assert "setup: Horovod for several processes, compiled once" in done.said
    assert run_setup("test").calls == [f"{PIP} .[cpu,onnx,dev]"]
    assert run_setup("all").calls == []
    assert (venv / ".ready-horovod").exists() and (venv / ".ready-test").exists()


def test_all_at_once_installs_packages_once(run_setup):
    assert [call.split()[0] for call in run_setup("all").calls] == ["pip", "scripts/build_horovod.py"]


def test_gpu(run_setup):
    """A machine with a driver, but without nvcc or a CUDA toolkit."""
    done = run_setup("horovod", nvidia_smi=GPU)
    assert "setup: packages for a machine with an NVIDIA GPU" in done.said
    assert [call.split("/")[0] for call in done.calls] == [
        f"{PIP} .[gpu]", "scripts", "scripts",
    ]
    assert done.calls[1] == "scripts/link_cuda11.py"


def test_a_gpu_that_comes_later(run_setup, venv):
    """MXNet's CPU wheel is removed, and Horovod is built again."""
    run_setup("all")
    (venv / "lib" / "python3.11" / "site-packages" / "mxnet-1.9.1.dist-info").mkdir(parents=True)
    done = run_setup("all", nvidia_smi=GPU)
    assert done.calls[0] == "pip uninstall -q -y mxnet"
    assert [call.split()[0] for call in done.calls[1:]] == ["pip", "scripts/link_cuda11.py", "scripts/build_horovod.py"]


@pytest.mark.parametrize(("nvidia_smi", "sentence"), [
    ('echo "No devices were found"; exit 6', "nvidia-smi finds no GPU (No devices were found): packages for the CPU"),
    ('echo "470.57.02, 8.0, NVIDIA A100"',
     "the NVIDIA driver 470.57.02 is too old for CUDA 12: update it to 525.60 or newer and run make again for the "
     "NVIDIA A100; until then packages for the CPU"),
    ('echo "535.1.2, 6.1, NVIDIA GeForce GTX 1080"',
     "the NVIDIA GeForce GTX 1080 (compute capability 6.1) is older than 7.5, which cuDNN 9 needs: packages for the "
     "CPU"),
])
def test_a_gpu_that_cannot_be_used(run_setup, nvidia_smi, sentence):
    done = run_setup(nvidia_smi=nvidia_smi)
    assert f"setup: {sentence}\n" in done.said
    assert done.calls[0].endswith(".[cpu]")


def test_the_best_gpu_counts(run_setup):
    done = run_setup(nvidia_smi='echo "580.1, 6.1, Quadro P400"; echo "580.1, 12.0, RTX 5090"')
    assert done.calls[0].endswith(".[gpu]")


NO_NETWORK = ("WARNING: Retrying after connection broken by 'NewConnectionError(failure in name resolution)'\n"
              "ERROR: Could not find a version that satisfies the requirement numpy==1.26.4 (from versions: none)")


@pytest.mark.parametrize(("output", "sentence"), [
    (NO_NETWORK, "the package index cannot be reached; connect to the network (through a proxy: HTTPS"),
    ("Retrying after 'ProxyError(\"Cannot connect to proxy.\")'\nERROR: Could not find", "the proxy of the settings"),
    ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "the disk became full"),
    ("  error: subprocess-exited-with-error\nERROR: No matching distribution found for mxnet==1.9.1",
     "ERROR: No matching distribution found for mxnet==1.9.1"),
])
def test_packages_that_cannot_be_had(run_setup, venv, output, sentence):
    """Setup prints one sentence; nothing counts as done, and the next call continues."""
    working = (venv / "bin" / "pip").read_text()
    write_program(venv / "bin" / "pip", f"cat <<'end'\n{output}\nend\nexit 1")
    done = run_setup()
    assert done.code == 2
    assert done.error.startswith(f"error: the packages could not be installed: {sentence}")
    assert len(done.error.splitlines()) == 1
    assert done.error.endswith(f"(log: {venv}/setup-packages.log)\n")
    assert not (venv / ".ready").exists()
    (venv / "bin" / "pip").write_text(working)
    done = run_setup()
    assert done.code == 0 and len(done.calls) == 1


def test_horovod_that_does_not_compile(run_setup, venv):
    with (venv / "bin" / "python").open("a") as python:
        python.write("""[[ $1 != scripts/build_horovod.py ]] || {
            echo "error: common.h:343:18: error: 'logic_error' is not a member of 'std'"
            exit 2
        }""")
    done = run_setup("all")
    assert done.code == 2
    assert done.error == ("error: Horovod could not be built: common.h:343:18: error: 'logic_error' is not a member of "
                          f"'std' (log: {venv}/setup-horovod.log); everything but several processes works without\n")
    assert (venv / ".ready").exists() and (venv / ".ready-test").exists() and not (venv / ".ready-horovod").exists()


def test_a_compiler_runtime_that_is_missing(run_setup, venv):
    """setup does not install this one, although MXNet's library needs it."""
    done = run_setup(ldd="""printf '\\t%s\\n' 'libcuda.so.1 => not found' 'libc.so.6 => /lib/libc.so.6 (0x7f)' \\
        'libquadmath.so.0 => not found' 'libgomp.so.1 => not found'""")
    assert done.code == 2 and not (venv / ".ready").exists()
    assert done.error.startswith("error: MXNet needs libgomp.so.1 and libquadmath.so.0, which this machine lacks: ")
    assert run_setup().code == 0


def test_too_little_disk(run_setup):
    done = run_setup(df="echo Avail; echo 700000000")
    assert done.code == 2
    assert "has 700 MB free, the packages need 2 GB: free some space and run make again" in done.error
    assert done.calls == []


def test_a_disk_that_becomes_full(run_setup, venv):
    write_program(venv / "bin" / "pip", "exit 1")  # and prints nothing, because its log is on that disk
    seen = venv.parent / "seen"
    done = run_setup(df=f"echo Avail; if [ -e {seen} ]; then echo 0; else echo 9000000000; touch {seen}; fi")
    assert done.code == 2
    assert f"could not be installed: the disk with {venv} is full; free some space and run make again" in done.error


# --- Python, and the system under it ---

DEBIAN_12 = 'ID=debian\nVERSION_ID="12"\n'
DEBIAN_13 = 'ID=debian\nVERSION_ID="13"\n'
UBUNTU_26 = 'ID=ubuntu\nID_LIKE=debian\nVERSION_ID="26.04"\n'
MINT = 'ID=linuxmint\nID_LIKE="ubuntu debian"\nVERSION_ID="23"\n'
FEDORA = "ID=fedora\nVERSION_ID=45\n"
ROCKY = 'ID="rocky"\nID_LIKE="rhel centos fedora"\nVERSION_ID="9.6"\n'
APT = "run as root 'apt update && apt install python3-venv'"
UV = "run 'uv python install 3.12' (https://docs.astral.sh/uv has uv, for any Linux)"


@pytest.mark.parametrize(("system", "python", "found", "way"), [
    (DEBIAN_12, None, "", APT),
    # a user's own environment: Debian's is python3.11 beside it
    (DEBIAN_12, a_python("3.9"), ", only Python 3.9.1", APT),
    (DEBIAN_12, a_python("3.11", has_venv=False), ", only Python 3.11.1 without them", APT),
    (DEBIAN_13, a_python("3.13", has_venv=False), ", only Python 3.13.1 without them", APT),
    (UBUNTU_26, a_python("3.14", has_venv=False), ", only Python 3.14.1 without them", APT),
    (UBUNTU_26.replace("26", "22"), None, "", APT),
    (UBUNTU_26.replace("26.04", "20.04"), a_python("3.8"), ", only Python 3.8.1", UV),
    ("ID=debian\n", a_python("3.15"), ", only Python 3.15.1", UV),  # version of the next release
    (MINT, a_python("3.14", has_venv=False), ", only Python 3.14.1 without them", APT),
    (FEDORA, a_python("3.15"), ", only Python 3.15.1", "run as root 'dnf install python3.14'"),
    (ROCKY, a_python("3.9"), ", only Python 3.9.1", "run as root 'dnf install python3.12'"),
    ("ID=arch\n", a_python("3.15"), ", only Python 3.15.1", UV),
    ("", 'echo "pyenv: python3: command not found" >&2; exit 127', "", UV),
])
def test_no_python_that_serves(run_setup, tmp_path, system, python, found, way):
    done = run_setup(into=tmp_path / "new", system=system, **({"python3": python} if python else {}))
    assert done.code == 2
    assert done.error == (f"error: no Python 3.10 to 3.14 with venv and pip on PATH{found}: {way}, then make again\n")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("pythons", "chosen"), [
    ({"python3": "3.14", "python3.13": "3.13", "python3.11": "3.11"}, "3.11"),
    ({"python3": "3.14", "python3.13": "3.13"}, "3.13"),
    ({"python3": "3.15", "python3.14": "3.14"}, "3.14"),
    ({"python3": "3.13"}, "3.13"),
])
def test_the_python_that_is_tested_most(run_setup, tmp_path, pythons, chosen):
    """A shim of pyenv, which fails when it is called, is passed over."""
    tools = {name: a_python(version) for name, version in pythons.items()}
    done = run_setup(into=tmp_path / "new", **{"python3.12": "exit 127", **tools})
    assert f" from Python {chosen}.1\n" in done.said


@pytest.mark.parametrize(("version", "separately"), [("3.12", []), ("3.13", ["mxnet==1.9.1"]),
                                                     ("3.14", ["mxnet==1.9.1"])])
def test_mxnet_where_only_numpy_2_is(run_setup, venv, version, separately):
    """MXNet is installed without its declared dependencies, because pip would insist on numpy<2."""
    make_python(venv, version)
    assert run_setup().calls == [f"{PIP} .[cpu]", *(f"{INSTALL} --no-deps {name}" for name in separately)]
    assert run_setup(nvidia_smi=GPU).calls[-2:] == [
        f"{INSTALL} --no-deps mxnet-cu117==1.9.1" if separately else f"{PIP} .[gpu]", "scripts/link_cuda11.py"]


def test_mxnet_of_the_same_version_everywhere():
    """pip's version below Python 3.13 equals setup.sh's version from 3.13 on."""
    pinned = re.findall(r'"(mxnet[^;"]*); python_version < \'3\.13\'"', (ROOT / "pyproject.toml").read_text())
    assert pinned == ["mxnet==1.9.1", "mxnet-cu117==1.9.1"] and '"$mxnet==1.9.1"' in SCRIPT.read_text()


def test_a_python_that_was_replaced_under_the_environment(run_setup, venv):
    """After a system upgrade, pip is not found any more, and everything is set up again."""
    run_setup("all")
    write_program(venv / "bin" / "python", 'echo "No module named pip" >&2; exit 1')
    (venv / "pyvenv.cfg").touch()
    ready = venv.parent / "ready"
    make_python(ready, "3.13")
    write_program(ready / "bin" / "pip", f'echo "pip $*" >>{venv.parent}/calls')
    done = run_setup("all", python3=a_python("3.13", make=f'mkdir -p "$3"; cp -r {ready}/. "$3"'),
                     cp=f'exec {shutil.which("cp")} "$@"')
    assert done.code == 0, done.error
    assert f"setup: the Python of {venv} was removed or replaced since it was made\n" in done.said
    assert [call.split()[0] for call in done.calls] == ["pip", "pip", "scripts/build_horovod.py"]


def test_an_environment_of_another_python(run_setup, venv):
    """An environment of another Python may belong to the user, so setup does not touch it."""
    make_python(venv, "3.15")
    done = run_setup()
    assert done.code == 2 and done.calls == []
    assert done.error == (f"error: {venv} is of Python 3.15.9, the packages need Python 3.10 to 3.14: remove it, or "
                          "name another place, and run make again\n")


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_musl(run_setup, shell):
    """Alpine has no bash, so the message must work in any shell."""
    done = run_setup(shell=shell, ldd='printf "%s\\n" "musl libc (x86_64)" "Version 1.2.5" >&2; exit 1')
    assert (done.code, done.said, done.calls) == (2, "", [])
    assert done.error.startswith("error: this system's C library is musl (Alpine), for which MXNet and DALI have no ")
    assert len(done.error.splitlines()) == 1


@pytest.mark.parametrize(("line", "code"), [("ldd (GNU libc) 2.17", 2), ("ldd (Ubuntu GLIBC 2.27-3ubuntu1) 2.27", 2),
                                            ("ldd (GNU libc) 2.28", 0), ("ldd (Debian GLIBC 2.41-12) 2.41", 0)])
def test_an_old_c_library(run_setup, line, code):
    done = run_setup(ldd=f'[ "$1" != --version ] || echo "{line}"')
    assert done.code == code
    if code:
        assert f"error: this system's C library is glibc {line[-4:]}, the packages need 2.28 or newer: " in done.error


def test_any_shell_may_start_it(run_setup):
    assert run_setup(shell="sh").code == 0


def test_an_environment_that_cannot_be_made(run_setup, tmp_path):
    """The next call makes the unfinished environment anew."""
    new = tmp_path / "new"
    python = a_python("3.12", make='mkdir -p "$3"; touch "$3/pyvenv.cfg"; echo "Error: no pip in here" >&2; exit 1')
    for _ in range(2):
        done = run_setup(into=new, python3=python)
        assert done.code == 2
        assert done.error.endswith(f"python3 -m venv {new} failed: Error: no pip in here\n")
        assert not (new / ".ready").exists()


def test_a_checkout_that_cannot_be_written(run_setup, tmp_path):
    (tmp_path / "file").touch()
    done = run_setup(into=tmp_path / "file" / "venv", python3=f"exec {sys.executable} \"$@\"")
    assert done.code == 2
    assert f"error: {tmp_path}/file/venv cannot be written: clone the project into" in done.error
    assert len(done.error.splitlines()) == 1


def test_interrupted(venv):
    """Ctrl-C ends the script and the processes that it started, at once; the next call continues."""
    write_program(venv / "bin" / "pip", "echo installing; exec sleep 1000")
    command = ["bash", SCRIPT, "run", venv]
    # If a shell runs the tests in its background, the signal is ignored, and a script cannot undo that.
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    log = venv / "setup-packages.log"
    deadline = time.monotonic() + LIMIT
    while not (log.exists() and log.read_text()):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=LIMIT)
    assert process.returncode == 130 and error.endswith("error: interrupted; make resumes where it was\n")
    assert not (venv / ".ready").exists()
    write_program(venv / "bin" / "pip", "")
    assert subprocess.run(command).returncode == 0


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "work" / "thesis.tex"
    precious.parent.mkdir()
    precious.write_text("years")
    found = subprocess.run(["bash", str(SCRIPT), "run", str(precious.parent)], capture_output=True, text=True)
    assert found.returncode == 2 and precious.read_text() == "years"
    assert found.stderr == (f"error: {precious.parent} exists and is not a virtual environment: remove it, or name "
                            "another place\n")


def test_two_at_a_time(run_setup, venv, tmp_path):
    """The second call waits for the first, and finds everything done."""
    outputs = [tmp_path / f"{number}.out" for number in range(2)]
    wait = until(f"grep -q 'waiting for another set-up' {tmp_path}/[01].out")
    write_program(venv / "bin" / "pip", f'echo "pip $*" >>{tmp_path}/calls; {wait}')
    command = ["bash", SCRIPT, "run", venv]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    write_program(tmp_path / "nvidia-smi", "exit 9")
    with outputs[0].open("w") as first, outputs[1].open("w") as second:
        both = [subprocess.Popen(command, env=environment, stdout=output) for output in (first, second)]
    assert [process.wait(LIMIT) for process in both] == [0, 0]
    assert sum("waiting for another set-up" in output.read_text() for output in outputs) == 1
    assert len((tmp_path / "calls").read_text().splitlines()) == 1


def test_two_at_a_time_from_nothing(tmp_path):
    """The second call must not remove the environment that the first one is making."""
    new, ready = tmp_path / "new", tmp_path / "ready"
    make_python(ready, "3.12")
    write_program(ready / "bin" / "pip", "")
    (ready / "pyvenv.cfg").touch()
    wait = until(f"grep -q 'waiting for another set-up' {tmp_path}/[01].out")
    make = f'echo made >>{tmp_path}/calls; mkdir -p "$3"; touch "$3/pyvenv.cfg"; {wait}; cp -r {ready}/. "$3"'
    write_program(tmp_path / "path" / "python3.12", a_python("3.12", make=make))
    write_program(tmp_path / "path" / "nvidia-smi", "exit 9")
    environment = {**os.environ, "PATH": f"{tmp_path}/path:{os.environ['PATH']}"}
    with (tmp_path / "0.out").open("w") as first, (tmp_path / "1.out").open("w") as second:
        both = [subprocess.Popen(["bash", SCRIPT, "run", new], env=environment, stdout=output)
                for output in (first, second)]
    assert [process.wait(LIMIT) for process in both] == [0, 0]
    assert (tmp_path / "calls").read_text() == "made\n" and (new / ".ready").exists()


def test_it_says_that_it_is_alive(venv):
    """setup.sh updates one line on a terminal, and leaves no background process that would keep the terminal open."""
    if not shutil.which("script"):
        pytest.skip("there is no program 'script' here, which gives a terminal")
    seen = venv.parent / "seen"
    downloading = 'echo "  Downloading mxnet-1.9.1-py3-none-any.whl (49.1 MB)"'
    write_program(venv / "bin" / "pip", f"{downloading}; {until(f'grep -q Downloading {seen}')}")
    command = ["script", "-qfec", f"bash {SCRIPT} run {venv}", seen]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True, timeout=LIMIT, env={**os.environ, "MARK": str(seen)})
    assert re.search(rb"\r\x1b\[Ksetup: packages \d+:\d\d  Downloading mxnet-1\.9\.1 \(49\.1 MB\)", seen.read_bytes())
    assert not [folder for folder in Path("/proc").glob("[0-9]*") if f"MARK={seen}".encode() in environment_of(folder)]


def environment_of(process: Path) -> bytes:
    """The environment of a process, given its folder in /proc."""
    try:
        return (process / "environ").read_bytes()
    except OSError:  # it has ended meanwhile, or is another user's
        return b""


# --- the launchers ---


def without_make() -> dict[str, str]:
    """The environment without the variables that `make test PYTHON=...` passes to the tests, and so to any make that
    they run."""
    return {name: value for name, value in os.environ.items()
            if name not in ("PYTHON", "MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL")}



@pytest.mark.parametrize("script", ["dgx1_8gpu.sh", "multi_host.sh"])
def test_launchers_set_up_first(tmp_path, script):
    """The launchers run the set-up if it has not run yet, unless PYTHON names an interpreter."""
    for name in (script, "environment.sh"):
        (tmp_path / "scripts").mkdir(exist_ok=True)
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    write_program(tmp_path / "scripts" / "setup.sh", f'echo "setup $*"; mkdir -p {tmp_path}/.venv/bin; '
                  f"ln -s {shutil.which('echo')} {tmp_path}/.venv/bin/python; touch {tmp_path}/.venv/.ready")
    environment = without_make()

    def run(**more: str) -> list[str]:
        command = ["bash", tmp_path / "scripts" / script, "-n", "2"]
        done = subprocess.run(command, env={**environment, **more}, stdout=subprocess.PIPE, text=True)
        return done.stdout.splitlines()

    module = "train.processes.launch" if script == "dgx1_8gpu.sh" else "train.processes.multi_host"
    assert run(PYTHON="echo") == [f"-m {module} -n 2"]
    assert run() == ["setup run", f"-m {module} -n 2"]
    assert run() == [f"-m {module} -n 2"]


def test_make_sets_up_what_a_target_needs(tmp_path):
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "common/mxnet_hook.pth", "common/mxnet_hook.py", "scripts/link_cuda11.py",
                 "scripts/build_horovod.py", "train/processes/allreduce.cc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    write_program(tmp_path / "scripts" / "setup.sh", "")

    def parts(target: str, *variables: str) -> list[str]:
        command = ["make", "-n", target, *variables]
        done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True,
                              env=without_make())
        return [line.split()[-1] for line in done.stdout.splitlines() if "setup.sh" in line]

    assert parts("train-1gpu") == parts("compare-precision") == parts("gpu-report") == ["run"]
    assert parts("lint") == parts("sanitize") == ["test"]
    assert parts("test") == parts("test-gpu") == ["test", "horovod"]
    assert parts("bench-scaling") == ["run", "horovod"]
    assert parts("test", "PYTHON=python3") == []


def test_make_sees_a_python_that_was_replaced(tmp_path):
    """make sets up again, although everything in the environment is marked as done."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    make_python(tmp_path / ".venv", "3.12")
    mark = tmp_path / ".venv" / ".ready"
    for whole in (True, False):
        mark.touch()
        if not whole:
            write_program(tmp_path / ".venv" / "bin" / "python", "exit 1")
        subprocess.run(["make", "help"], cwd=tmp_path, stdout=subprocess.DEVNULL, check=True,
                       env=without_make())
        assert mark.exists() == whole
