"""Every documented way to install gadei-ps, used within a checkout that lies beside it.

The checkout is a copy, without anything built in it: what finds its sources fails. Needed packages
are those of the environment that runs the tests, so that nothing is fetched.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from gadei_ps.kernels import cache
from gadei_ps.machine import process

ROOT = Path(__file__).parents[2]
PARTS = ("gadei_ps", "learners", "watchdog", "benchmarks", "native", "systemd", "docs")
ROOT_PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
FILES = ("pyproject.toml", "setup.py", *ROOT_PAGES, "LICENSE")
LIMIT_S = 900  # for a build and for compiled kernels, on a busy machine
NEVER = 1_000_000_000  # a time of files; compiled code is found again where it is the same
# Several units that are soon compiled.
MISSING = ("assign-*", "check.*", "move-0-1.*")


class Environment:
    """A new environment beside a checkout."""

    def __init__(self, directory: Path, checkout: Path, cache: Path) -> None:
        self.directory, self.checkout, self.cache = directory, checkout, cache
        self._env = os.environ | {"NUMBA_CACHE_DIR": str(cache)}
        venv.create(directory, with_pip=False)
        (self.site,) = directory.glob("lib/python*/site-packages")
        others = [path for path in sys.path if path.endswith("site-packages")]
        (self.site / "others.pth").write_text("\n".join(others))

    def pip(self, *arguments: str) -> str:
        """Run pip and return its output."""
        command = [sys.executable, "-m", "pip", "--python", str(self.directory / "bin" / "python")]
        done = subprocess.run(
            [*command, *arguments],
            cwd=self.checkout,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def install(self, what: str, *flags: str) -> str:
        """Install without anything that another installation has left."""
        shutil.rmtree(self.site / "gadei_ps", ignore_errors=True)
        for left in self.site.glob("*gadei_ps*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        alone = ("--no-deps", "--no-build-isolation", "--ignore-installed")
        output = self.pip("install", *alone, *flags, what)
        for path in (self.site / "gadei_ps").rglob("*.py"):
            os.utime(path, (NEVER, NEVER))
        return output

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """gadei-ps within the checkout."""
        return subprocess.run(
            [str(self.directory / "bin" / "gadei-ps"), *arguments],
            cwd=self.checkout,
            env=self._env,
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Not installed yet. Of the server's code a part is compiled."""
    directory = tmp_path_factory.mktemp("installed")
    checkout = directory / "checkout"
    built = shutil.ignore_patterns("*.so", "__pycache__", "results", "_build")
    for part in PARTS:
        shutil.copytree(ROOT / part, checkout / part, ignore=built)
    for name in FILES:
        shutil.copy(ROOT / name, checkout / name)
    setup = checkout / "setup.py"
    setup.write_text(setup.read_text().replace("-O3", "-O0"))  # it is built three times
    kept = cache.directory()
    some = directory / "cache" / "gadei-ps" / kept.name
    shutil.copytree(kept, some, ignore=shutil.ignore_patterns(*MISSING))
    assert codes(some) < codes(kept)
    return Environment(directory / "environment", checkout, directory / "cache")


def codes(directory: Path) -> set[str]:
    """Return the units with code."""
    return {path.name for path in directory.rglob("*.code")}


def check_that_jobs_run(environment: Environment, job: str) -> None:
    """A job, whose only learner asks for its status."""
    command = (str(environment.directory / "bin" / "gadei-ps"), "status", job, "--json")
    done = environment("run", job, "--device", "host", "--", *command)
    assert "no learner joined" in done.stderr, done
    assert json.loads(done.stdout.splitlines()[0])["job"] == job


@pytest.mark.timeout(LIMIT_S)
def test_installed(environment: Environment, job_name: str) -> None:
    """Install a wheel, which compiles what is missing; then plainly, with what that compiled."""
    environment.pip("wheel", "--no-deps", "--no-build-isolation", "-w", "dist", ".")
    (wheel,) = (environment.checkout / "dist").glob("*.whl")
    environment.install(str(wheel))
    for name in (
        "lib/systemd/system/gadei-ps@.service",
        "lib/systemd/user/gadei-ps-learner@.service",
        "lib/sysusers.d/gadei-ps.conf",
        "lib/tmpfiles.d/gadei-ps.conf",
        "share/man/man1/gadei-ps-serve.1",
        "share/doc/gadei-ps/scripts/data.md",
        "share/bash-completion/completions/gadei-ps",
        "share/zsh/site-functions/_gadei-ps",
        "share/fish/vendor_completions.d/gadei-ps.fish",
    ):
        assert (environment.directory / name).is_file(), name
    check_that_jobs_run(environment, job_name)
    for page in ("exit-codes", "README", "contributing", "changelog", "reference/client"):
        assert environment("docs", page).stdout.startswith("# "), page
    printed = environment("install-unit", "--user", "--print")
    assert f"ExecStart={environment.directory}/bin/gadei-ps serve " in printed.stdout, printed
    assert codes(environment.cache) == codes(cache.directory())
    assert "arning" not in environment.install(".")
    check_that_jobs_run(environment, job_name)


@pytest.mark.timeout(LIMIT_S)
def test_an_editable_installation(environment: Environment, job_name: str) -> None:
    """Use what was compiled in the checkout; the environment of the tests is another one."""
    assert "arning" not in environment.install(".", "-e")
    assert list((environment.checkout / "gadei_ps").glob("_native*.so"))
    done = environment("ls", "--json")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_environment_of_the_tests(job_name: str) -> None:
    """`make` has installed it editable, and what it needs is compiled."""
    gadei_ps = process.module_command("gadei_ps")
    status = (*gadei_ps, "status", job_name, "--json")
    result = subprocess.run(
        [*gadei_ps, "run", job_name, "--device", "host", "--", *status],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    assert json.loads(result.stdout.splitlines()[0])["job"] == job_name
