"""A second version of gadei-ps beside the one of this checkout, inside a booted systemd."""

from __future__ import annotations

import shutil
import site
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
OWN = Path(sys.executable).with_name("gadei-ps")
UPGRADED = Path("/var/lib/upgraded/bin/gadei-ps")  # inside
SERVE = "serve --json-log --name %i %E/gadei-ps/%i.toml"
RELOAD = "reload --name %i %E/gadei-ps/%i.toml"


def install(root: Path, directory: Path) -> None:
    """Make UPGRADED, whose servers are of another build.

    root: the booted systemd's root directory, here. directory: an empty one, for a while.
    """
    venv.create(directory, with_pip=False)
    (packages,) = directory.glob("lib/python*/site-packages")
    others = [path for path in (*sys.path, *site.getsitepackages()) if "site-packages" in path]
    (packages / "others.pth").write_text("\n".join(others))
    package = packages / "gadei_ps"
    ignored = shutil.ignore_patterns("__pycache__")
    for room in ("gadei_ps", "learners", "watchdog"):
        into = package if room == "gadei_ps" else package / room
        shutil.copytree(ROOT / room, into, ignore=ignored, dirs_exist_ok=True)
    with (package / "server" / "driver.py").open("a") as source:
        source.write("# of another build\n")
    program = directory / "bin" / "gadei-ps"
    program.write_text(
        f"#!{UPGRADED.with_name('python')} -P\n"
        "import sys\nfrom gadei_ps.cli.app import main\nsys.exit(main())\n"
    )
    program.chmod(0o755)
    shutil.copytree(directory, root / UPGRADED.relative_to("/").parents[1], symlinks=True)


def of_unit(program: Path) -> str:
    """A drop-in of gadei-ps@, which uses this version from its next start on.

    It has no limit for starts of a version that has not compiled yet.
    """
    return (
        f"[Service]\nExecStart=\nExecStart={program} {SERVE}\n"
        f"ExecReload=\nExecReload={program} {RELOAD}\nTimeoutStartSec=600\n"
    )


def of_end(program: Path) -> str:
    """A drop-in of gadei-ps-end@, which uses this version from its next stop on."""
    unit = (ROOT / "systemd/system/gadei-ps-end@.service").read_text().replace("\\\n", " ")
    lines = [line for line in unit.splitlines() if line.startswith(("ExecStop=", "ExecStopPost="))]
    text = "\n".join(lines).replace("gadei-ps serve", f"{program} serve")
    return f"[Service]\nExecStop=\nExecStopPost=\n{text}\n"
