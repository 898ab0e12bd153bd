"""Detection of GPUs and their assignment to learners; no GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import support
from shell import program

from gadei_ps.commands import run
from gadei_ps.commands.run import RunOptions
from gadei_ps.errors import DeviceError, UsageError
from gadei_ps.machine import gpus, launch, process
from gadei_ps.machine.cuda import has_cupy
from gadei_ps.machine.gpus import ORDER, VISIBLE, Gpu
from gadei_ps.machine.launch import DEVICE_VARIABLE, DEVICES_VARIABLE, Compute

TWO = """GPU 0: NVIDIA H200 (UUID: GPU-8d6c)
GPU 1: NVIDIA GeForce RTX 3060 (Ti) (UUID: GPU-77aa)
"""
DIVIDED = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5a)
  MIG 3g.20gb     Device  0: (UUID: MIG-c1)
  MIG 1c.3g.20gb  Device  1: (UUID: MIG-c2)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-5b)
"""
PATIENCE_S = support.PATIENCE_S


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide the GPUs of the machine: tests see only those that they make."""
    for name in (VISIBLE, ORDER, DEVICE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


def tool(tmp_path: Path, code: str) -> None:
    """Install a stand-in for nvidia-smi."""
    program(tmp_path / "bin/nvidia-smi", code)


@pytest.mark.parametrize(
    ("output", "found"),
    [
        ("", []),
        (TWO, [Gpu("0", "NVIDIA H200"), Gpu("1", "NVIDIA GeForce RTX 3060 (Ti)")]),
        (
            DIVIDED,
            [
                Gpu("MIG-c1", "NVIDIA A100-SXM4-40GB MIG 3g.20gb"),
                Gpu("MIG-c2", "NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb"),
                Gpu("1", "NVIDIA A100-SXM4-40GB"),
            ],
        ),
        ("No devices were found\n", []),
    ],
    ids=["none", "two", "divided", "refused"],
)
def test_listed(tmp_path: Path, output: str, found: list[Gpu]) -> None:
    tool(tmp_path, f"import sys\nassert sys.argv[1:] == ['-L']\nprint({output!r}, end='')")
    assert gpus.listed() == found
    assert gpus.visible() == tuple(one.entry for one in found)


def test_an_answer_that_is_none(tmp_path: Path) -> None:
    output = "Unable to determine the device handle for gpu 0000:01:00.0: Unknown Error"
    tool(tmp_path, f"print({output!r})")
    with pytest.raises(DeviceError, match=f"nvidia-smi shows no GPU, but: {output}"):
        gpus.listed()


def test_no_gpu_but_its_tool(tmp_path: Path) -> None:
    tool(tmp_path, "print('No devices were found')\nraise SystemExit(6)")
    assert gpus.listed() == []


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "print('NVIDIA-SMI has failed.\\nMake sure.\\n')\nraise SystemExit(9)",
            "failed. Make sure.",
        ),
        ("raise SystemExit(3)", "nvidia-smi fails: exit code 3"),
        ("import os\nos.kill(os.getpid(), 11)", "nvidia-smi was killed by SIGSEGV"),
    ],
)
def test_broken_driver(tmp_path: Path, code: str, message: str) -> None:
    tool(tmp_path, code)
    with pytest.raises(DeviceError, match=message):
        gpus.visible()
    assert gpus.driver() == ""


def test_hanging_driver(tmp_path: Path) -> None:
    """It and what it has started are gone afterwards, which `nothing_left` checks."""
    sleep = f"[{sys.executable!r}, '-c', 'import time; time.sleep(1000)']"
    tool(tmp_path, f"import subprocess\nsubprocess.run({sleep})")
    with pytest.raises(DeviceError, match=r"nvidia-smi gives no answer within 0.1 s"):
        gpus.listed(0.1)


def test_tool_that_cannot_be_started(tmp_path: Path) -> None:
    tool(tmp_path, "")
    (tmp_path / "bin/nvidia-smi").write_text("#!/no/such/interpreter\n")
    with pytest.raises(DeviceError, match="nvidia-smi cannot be started: No such file"):
        gpus.listed()


def test_without_the_tool(tmp_path: Path) -> None:
    for bus, text in (("0000:41:00.0", "Model: \t NVIDIA L4\nIRQ: 1\n"), ("0000:05:00.0", "")):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(text)
    assert gpus.listed(proc=tmp_path) == [Gpu("0", "GPU"), Gpu("1", "NVIDIA L4")]
    assert gpus.listed(proc=tmp_path / "missing") == []
    assert gpus.driver() == ""


def test_driver(tmp_path: Path) -> None:
    tool(tmp_path, "print('580.65.06\\n580.65.06')")
    assert gpus.driver() == "580.65.06"


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        ("", ()),
        ("-1", ()),
        ("2, 3", ("2", "3")),
        ("0,2,-1,1", ("0", "2")),
        ("GPU-8d6c,MIG-c1,NoDevFiles,1", ("GPU-8d6c", "MIG-c1")),
    ],
)
def test_visible_is_what_cuda_would_see(
    monkeypatch: pytest.MonkeyPatch, value: str, seen: tuple[str, ...]
) -> None:
    monkeypatch.setenv(VISIBLE, value)
    assert gpus.visible() == seen


def test_choose_counts_among_the_visible() -> None:
    here = {VISIBLE: "what it holds"}
    assert gpus.choose("1,0", ["2", "3"], here) == ("3", "2")
    assert gpus.choose(" 0, 0,1", ["GPU-a", "GPU-b"], here) == ("GPU-a", "GPU-a", "GPU-b")
    assert gpus.choose("GPU-b", ["GPU-a", "GPU-b"], here) == ("GPU-b",)
    # Else by nvidia-smi's numbers: one GPU may be lost, another divided.
    assert gpus.choose("2,0", ["0", "2", "MIG-a"], {}) == ("2", "0")
    assert gpus.choose("MIG-a", ["0", "2", "MIG-a"], {}) == ("MIG-a",)


@pytest.mark.parametrize(
    "asked", ["", "x", "0,", "-1", "1.0", "0 1", "\N{SUPERSCRIPT TWO}", "9" * 5000]
)
def test_choose_wants_numbers(asked: str) -> None:
    with pytest.raises(UsageError, match="give numbers of GPUs"):
        gpus.choose(asked, ["0", "1", "2"])


def test_choose_says_what_there_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="there is no GPU 0; /proc/driver/nvidia/gpus shows none"):
        gpus.choose("0", [])
    tool(tmp_path, "")
    with pytest.raises(DeviceError, match="no GPU 7; nvidia-smi shows 0, 1"):
        gpus.choose("1,7", ["0", "1"])
    monkeypatch.setenv(VISIBLE, "2")
    with pytest.raises(DeviceError, match="no GPU 2; CUDA_VISIBLE_DEVICES=2 shows 1, numbered"):
        gpus.choose("2", ["2"])


def test_assign_goes_round() -> None:
    given = [gpus.assign(["0", "1"], index, {}) for index in range(3)]
    assert [one[VISIBLE] for one in given] == ["0", "1", "0"]
    assert all(one[ORDER] == "PCI_BUS_ID" for one in given)
    assert gpus.assign([], 0, {}) == {}


@pytest.mark.parametrize(
    ("there", "each", "dealt"),
    [
        (["0", "1", "2", "3"], 2, ["0,1", "2,3", "0,1"]),
        (["0", "1", "2"], 2, ["0,1", "2,0", "1,2"]),
        (["0", "0", "1"], 2, ["0,1", "1,0", "0,1"]),
        (["0", "1"], 2, ["0,1", "0,1", "0,1"]),
    ],
)
def test_assign_several(there: list[str], each: int, dealt: list[str]) -> None:
    """Assign in turn too, and no GPU twice to one learner."""
    given = [gpus.assign(there, index, {}, each)[VISIBLE] for index in range(3)]
    assert given == dealt


@pytest.mark.parametrize("name", [VISIBLE, ORDER])
def test_assign_keeps_the_callers_order(name: str) -> None:
    assert gpus.assign(["3"], 0, {name: "..."}) == {VISIBLE: "3"}


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("print()", "python[0-9.]* has printed no result"),
        ("print('[1]')", "has printed no result"),
        ("raise ValueError('first\\n\\nlast')", "python[0-9.]* fails: last"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
    ],
)
def test_failing_probe(code: str, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        gpus.probe([sys.executable, "-c", code], PATIENCE_S)


def test_probe() -> None:
    code = "import os; print('some noise'); print('{\"at\": \"%s\"}' % os.environ['WHERE'])"
    command = [sys.executable, "-c", code]
    assert gpus.probe(command, PATIENCE_S, {"WHERE": "here"}) == {"at": "here"}
    with pytest.raises(DeviceError, match=r"no answer within 0.1 s"):
        gpus.probe([sys.executable, "-c", "import time; time.sleep(1000)"], 0.1)


@pytest.fixture
def broken_cupy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy is installed, for this process and for the probe, and cannot be loaded."""
    (tmp_path / "lib/cupy").mkdir(parents=True)
    (tmp_path / "lib/cupy/__init__.py").write_text("raise ImportError('libcudart is gone')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"))
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))


def test_missing(broken_cupy: None) -> None:
    assert "libcudart is gone" in gpus.missing(["0"])
    command = [sys.executable, "-c", f"print('{json.dumps({'missing': ''})}')"]
    assert gpus.missing(["0"], os.environ, command) == ""
    command[2] = "raise SystemExit('no')"
    assert gpus.missing(["0"], os.environ, command).endswith("fails: no")


def test_the_whole_probe_survives_a_broken_cupy(broken_cupy: None) -> None:
    found = gpus.probe(gpus.PROBE, PATIENCE_S)
    assert found["cupy"] is None
    assert "libcudart is gone" in found["errors"]["cupy"]
    assert "libcudart is gone" in found["missing"]


def test_what_cannot_be_measured_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of which nothing is known but that it is there."""
    lib = tmp_path / "lib/cupy/cuda"
    lib.mkdir(parents=True)
    (lib.parent / "__init__.py").write_text("__version__ = '13.0'\nfrom cupy import cuda")
    (lib / "__init__.py").write_text("from cupy.cuda import runtime")
    (lib / "runtime.py").write_text(
        "def getDeviceCount(): return 1\ndef driverGetVersion(): return 12040"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"))
    found = gpus.probe(gpus.PROBE, PATIENCE_S)
    assert (found["cupy"], found["driver"]) == ("13.0", "12.4")
    assert "get_local_runtime_version" in found["errors"]["runtime"]
    (one,) = found["devices"]
    assert one.keys() == {"index", "errors", "peers"}
    unknown = {"name", "compute_capability", "registers_read_only", "device"}
    assert one["errors"].keys() == unknown


@pytest.mark.skipif(has_cupy(), reason="CuPy is installed")
def test_missing_cupy() -> None:
    assert gpus.missing([]) == "no GPU was found, and CuPy is not installed"
    assert "pip install" in gpus.missing(["0"])


def test_cuda_is_refused_where_it_cannot_be_used(broken_cupy: None, tmp_path: Path) -> None:
    tool(tmp_path, f"print({TWO!r})")
    for asked in (None, "1"):
        with pytest.raises(DeviceError, match=r"device cuda: .*libcudart is gone"):
            Compute.choose("cuda", asked)


def test_auto_settles_for_the_host(broken_cupy: None, tmp_path: Path) -> None:
    tool(tmp_path, f"print({TWO!r})")
    compute = Compute.choose("auto", None)
    assert compute == Compute("auto", ("0", "1"))
    settled = compute.settled()
    assert settled.device == "host"
    assert "libcudart is gone" in settled.why
    tool(tmp_path, "raise SystemExit('driver and library differ')")
    settled = Compute.choose("auto", None).settled()
    assert settled == Compute("host", why="nvidia-smi fails: driver and library differ")


def test_run_names_the_gpus_of_its_learners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool(tmp_path, f"print({TWO!r})")
    monkeypatch.setattr(launch, "has_cupy", lambda: True)
    monkeypatch.setattr(gpus, "missing", lambda *_: "")
    for given, named in ((None, "2 GPUs: 0, 1"), ("1,1", "1 GPU: 1")):
        run._compute(RunOptions(gpus=given, device="cuda"))
        assert capsys.readouterr().err == f"gadei-ps: learners can use CUDA on {named}\n"
    for device in ("auto", "host"):
        run._compute(RunOptions(device=device))
    assert not capsys.readouterr().err


def test_environment_of_learners() -> None:
    assert Compute().environment(0) == {}
    host = Compute.choose("host", None)
    assert host.environment(1) == {DEVICE_VARIABLE: "host", VISIBLE: ""}
    assert host.settled() == host
    auto = Compute("auto", ("0", "1", "3"))
    assert [auto.environment(index)[VISIBLE] for index in range(4)] == ["0", "1", "3", "0"]
    assert auto.environment(0)[DEVICE_VARIABLE] == "auto"
    assert Compute("cuda").beside([os.getpid()]).environment(1) == {DEVICE_VARIABLE: "cuda"}
    environment = {DEVICE_VARIABLE: "cuda", DEVICES_VARIABLE: "1"}
    assert Compute("cuda", each=1).environment(1) == environment


def test_several_devices_of_a_learner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path, f"print({TWO!r})")
    compute = Compute.choose("auto", None, 2)
    environment = compute.beside([os.getpid()]).environment(0)
    assert (environment[VISIBLE], environment[DEVICES_VARIABLE]) == ("0,1", "2")
    assert compute.shared(1) == ""
    assert compute.shared(2) == "2 x 2 devices on 2 GPUs: some are shared"
    with pytest.raises(DeviceError, match="r 3: GPUs that a learner can get are 0, 1; give at mos"):
        Compute.choose("auto", None, 3)
    with pytest.raises(DeviceError, match="r 2: GPUs that a learner can get are 1; give at most 1"):
        Compute.choose("auto", "1,1", 2)
    monkeypatch.setattr(process, "cores", lambda: 4)
    assert Compute("host", each=2).shared(2) == ""
    assert Compute("auto", each=2).shared(3) == "3 x 2 devices on 4 cores: some are shared"
    assert Compute("auto", each=1).shared(9) == "", "as ever"


def test_those_who_join_get_what_few_have() -> None:
    learners = [
        subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)"], env=os.environ | {VISIBLE: gpu}
        )
        for gpu in ("0,1", "3", "0")
    ]
    pids = [one.pid for one in learners]
    try:
        for pid in pids:  # which is empty for a moment after a program has been loaded
            support.eventually(lambda pid=pid: Path(f"/proc/{pid}/environ").read_bytes())
        assert gpus.least_used(("0", "1", "2", "3"), [*pids, 2**30]) == ("2", "1", "3", "0")
        assert gpus.least_used(("0", "0", "3"), pids[:2]) == ("0", "0", "3")
        assert gpus.least_used((), pids) == ()
    finally:
        for one in learners:
            one.kill()
            one.wait()
