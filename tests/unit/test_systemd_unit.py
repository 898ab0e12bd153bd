"""The systemd units: what systemd itself reports of them, and how they are installed."""

from __future__ import annotations

import grp
import json
import os
import pwd
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import PATIENCE_S

from gadei_ps.commands import durations, unit_files
from gadei_ps.commands.service_manager import Scope
from gadei_ps.commands.unit_files import END_NAME, LEARNER_NAME, NAME, Found
from gadei_ps.errors import JobStopped, UsageError
from gadei_ps.job import config

ROOT = Path(__file__).parents[2]
ANALYZE = shutil.which("systemd-analyze")
needs_systemd = pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")


def directives(text: str) -> dict[str, list[str]]:
    """Every setting with its values, in order."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and line[0] not in "#[":
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def analyze(*arguments: object, runtime: Path) -> subprocess.CompletedProcess[str]:
    assert ANALYZE is not None
    return subprocess.run(
        [ANALYZE, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"XDG_RUNTIME_DIR": str(runtime), "SYSTEMD_COLORS": "0"},
        timeout=PATIENCE_S,
    )


@pytest.fixture
def reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Yield it like an installation for all users."""
    monkeypatch.setattr(unit_files, "places", lambda: (Path("/usr/bin/env"),))


def text(scope: Scope, program: str = unit_files.PROGRAM, **how: str) -> str:
    """The watchdog's unit."""
    return unit_files.texts(scope, program, **how)[NAME]


def test_the_shipped_files_are_written() -> None:
    """Unchanged for the usual user, but for the program and the last line."""
    shipped = {
        path.name for path in (ROOT / "systemd").rglob("*.[sc]*") if ".py" not in path.suffix
    }
    written = set[str]()
    for scope in Scope:
        for name, made in unit_files.texts(scope, "/x/gadei-ps").items():
            path = ROOT / "systemd" / (name if "/" in name else f"{scope.value}/{name}")
            *lines, last = made.splitlines()
            assert last.startswith(unit_files.MARK)
            commands = [line for line in lines if line.startswith("Exec")]
            ours = [one for one in commands if "/bin/touch" not in one and "/bin/rm" not in one]
            assert all(one.count("/x/gadei-ps ") == 1 for one in ours), ours
            assert "\n".join(lines).replace("/x/gadei-ps ", "gadei-ps ") + "\n" == path.read_text()
            written.add(path.name)
    assert written == shipped


@pytest.mark.parametrize("scope", list(Scope))
def test_the_end_of_a_job_has_the_rights_of_the_job(scope: Scope) -> None:
    made = unit_files.texts(scope, unit_files.PROGRAM)
    job, end = directives(made[NAME]), directives(made[END_NAME])
    of_job = {"Type", "ExecStart", "NotifyAccess", "TimeoutStopSec", "Description"}
    both = (job.keys() & end.keys()) - of_job
    assert both > {"RestrictAddressFamilies", "SystemCallFilter", "LimitMEMLOCK", "Environment"}
    assert [name for name in sorted(both) if job[name] != end[name]] == []
    rights = {name for name in job if name.startswith(("Protect", "Private", "Restrict", "State"))}
    assert rights - {"RestartPreventExitStatus"} <= end.keys()


def test_exit_codes_of_the_units() -> None:
    for scope in Scope:
        unit = directives(unit_files.texts(scope, unit_files.PROGRAM)[LEARNER_NAME])
        assert unit["RestartForceExitStatus"] == [str(JobStopped.exit_code)]
        assert str(JobStopped.exit_code) in unit["SuccessExitStatus"][0].split()


@needs_systemd
@pytest.mark.parametrize("scope", list(Scope))
def test_systemd_accepts_it(scope: Scope, tmp_path: Path, reachable: None) -> None:
    made = unit_files.install(scope, where=tmp_path).units
    services = [path for one in made if (path := Path(one.path)).parent == tmp_path]
    assert [path.name for path in services] == [NAME, END_NAME, LEARNER_NAME]
    # The manual may not be installed where the tests run.
    verify = (f"--{scope}", "--man=no", "verify")
    checked = analyze(*verify, *services, runtime=tmp_path)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
    written = services[0]
    # The check sees mistakes.
    written.write_text(written.read_text().replace("WatchdogSec=30", "WatchdogSec=soon"))
    assert "soon" in analyze(*verify, written, runtime=tmp_path).stderr


@needs_systemd
@pytest.mark.parametrize(("name", "exposure"), [(NAME, 1.1), (END_NAME, 1.1), (LEARNER_NAME, 1.5)])
def test_the_system_units_are_not_exposed(name: str, exposure: float, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(unit_files.texts(Scope.SYSTEM, unit_files.PROGRAM)[name])
    assert name == END_NAME or f" {exposure}, because" in path.read_text()
    security = ("security", "--offline=yes", "--no-pager", f"--threshold={round(exposure * 10)}")
    checked = analyze(*security, path, runtime=tmp_path)
    if "unrecognized option" in checked.stderr:
        pytest.skip("this systemd-analyze cannot judge a file")
    assert checked.returncode == 0, checked.stdout.splitlines()[-1]
    path.write_text(path.read_text().replace("CapabilityBoundingSet=", ""))
    assert analyze(*security, path, runtime=tmp_path).returncode


@needs_systemd
@pytest.mark.parametrize("name", [NAME, LEARNER_NAME])
def test_what_is_exposed_has_its_reason(name: str, tmp_path: Path) -> None:
    text_ = unit_files.texts(Scope.SYSTEM, unit_files.PROGRAM)[name]
    path = tmp_path / name
    path.write_text(text_)
    output = analyze("security", "--offline=yes", "--no-pager", path, runtime=tmp_path).stdout
    names = set(re.findall(r"^✗ (\w+)=", output, re.M))
    assert "MemoryDenyWriteExecute" in names or not output
    comments = "\n".join(line for line in text_.splitlines() if line.startswith("#"))
    assert [name for name in sorted(names) if name not in comments] == []


def test_a_learner_of_another_user_is_not_given_the_jobs_directories() -> None:
    """systemd gives these directories, with all in them, to the user of the unit."""
    unit = directives(unit_files.texts(Scope.SYSTEM, unit_files.PROGRAM)[LEARNER_NAME])
    assert not {"RuntimeDirectory", "StateDirectory", "CacheDirectory"} & unit.keys()
    assert unit["ReadWritePaths"] == ["-%t/gadei-ps -%S/gadei-ps -%C/gadei-ps"]


@pytest.mark.parametrize("scope", list(Scope))
def test_boot_does_not_wait_until_learners_can_attach(scope: Scope) -> None:
    """A target waits for the units that it wants, unless they are without defaults."""
    unit = directives(text(scope))
    assert unit["DefaultDependencies"] == ["no"]
    assert unit["Conflicts"] == unit["Before"] == ["shutdown.target"]
    assert unit["WantedBy"][0] not in " ".join(unit["Before"] + unit["After"])


@needs_systemd
def test_a_program_may_lie_anywhere(tmp_path: Path) -> None:
    folder = tmp_path / "with blanks, 100%i"
    folder.mkdir()
    program = folder / "gadei-ps"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    path = tmp_path / NAME
    made = unit_files.texts(Scope.USER, unit_files.quoted(str(program)))
    for name in (NAME, END_NAME):
        (tmp_path / name).write_text(made[name])
    checked = analyze("--user", "--man=no", "verify", path, runtime=tmp_path)
    assert (checked.returncode, checked.stderr) == (0, "")
    program.unlink()
    assert str(program) in analyze("--user", "--man=no", "verify", path, runtime=tmp_path).stderr


def test_time_limits_are_beyond_the_watchdogs_own() -> None:
    unit = directives(text(Scope.SYSTEM))
    assert int(unit["TimeoutStartSec"][0]) > durations.START_SILENT_S
    assert int(unit["TimeoutStopSec"][0]) > durations.END_TIMEOUT_S
    learner = directives(unit_files.texts(Scope.SYSTEM, "/usr/bin/gadei-ps")[LEARNER_NAME])
    assert int(learner["TimeoutStopSec"][0]) > durations.GRACE_S + durations.APPLY_S + 10


@pytest.mark.parametrize("scope", list(Scope))
def test_what_a_job_needs_is_left_to_it(scope: Scope) -> None:
    unit = directives(text(scope))
    # Compiled kernels, GPUs, learners outside of the unit.
    for name in ("MemoryDenyWriteExecute", "PrivateUsers", "ProtectProc", "ProcSubset"):
        assert name not in unit, name
    # With ProtectClock or DevicePolicy alone, there would be no GPUs.
    assert unit.get("DeviceAllow", []) == ["char-* rw"] * (scope == Scope.SYSTEM)
    for name in ("PrivateDevices", "PrivateIPC", "RemoveIPC"):
        assert unit.get(name, ["no"]) == ["no"], name
    assert unit["KillMode"] == ["process"]
    assert unit["RuntimeDirectoryPreserve"] == ["yes"]


def test_the_user_of_the_system_unit() -> None:
    made = unit_files.texts(Scope.SYSTEM, unit_files.PROGRAM, "learner", "team")
    assert all("User=learner\n" in made[name] for name in (NAME, END_NAME, LEARNER_NAME))
    assert "d /run/gadei-ps 0700 learner team -\n" in made[unit_files.DIRECTORIES]
    assert unit_files.USERS not in made, "that user is somebody else's matter"
    assert "User=" not in text(Scope.USER)


def test_learners_cannot_start_or_hold_their_job() -> None:
    """A learner's unit that waits to be started again must not be in a stop of another unit."""
    for scope in Scope:
        made = unit_files.texts(scope, unit_files.PROGRAM)
        unit = directives(made[LEARNER_NAME])
        assert [one for one in unit["After"] if "gadei-ps" in one] == ["gadei-ps@%i.service"]
        for name in ("Wants", "BindsTo", "PartOf", "StopPropagatedFrom"):
            assert name not in unit, name
        assert "gadei-ps" not in unit["Requires"][0]
        assert unit["WantedBy"] == [END_NAME.replace("@", "@%i")]
        assert "gadei-ps-learner" not in made[NAME].partition("[Service]")[0]


def test_the_program_is_this_installations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "gadei-ps"
    script.write_text("")
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    assert unit_files.unit_program() == f"{sys.executable} -P -m gadei_ps"
    script.chmod(0o755)
    assert unit_files.unit_program() == str(script)
    monkeypatch.setattr(sys, "argv", ["-c"])
    assert unit_files.program() == [str(script)]


@pytest.mark.parametrize(
    "path", ['/a"b/gadei-ps', "/a$b/gadei-ps", "/a\\b/x", "/a\nb/x", "/a'b/x", "/a\udcffb/x"]
)
def test_paths_that_systemd_cannot_be_told(path: str) -> None:
    with pytest.raises(UsageError, match="systemd cannot start"):
        unit_files.quoted(path)


# -- install --------------------------------------------------------------------------------------


def test_install(tmp_path: Path) -> None:
    where = tmp_path / "systemd/user"
    done = unit_files.install(Scope.USER, where=where)
    first, path = done.units[0], where / NAME
    assert (first.found, first.written, first.path) == (Found.NOTHING, True, str(path))
    assert path.read_text() == first.unit
    assert path.stat().st_mode & 0o777 == 0o644
    assert "systemctl --user enable --now gadei-ps@demo" in done.next
    again = unit_files.install(Scope.USER, where=where).units[0]
    assert (again.found, again.written) == (Found.SAME, False)
    assert {path.name for path in where.iterdir()} == {NAME, END_NAME, LEARNER_NAME, "gadei-ps"}
    assert done.job_file is not None
    assert done.job_file.written
    assert done.job_file.path == str(where / "gadei-ps" / "demo.toml")
    assert config.load(Path(done.job_file.path)).checkpoint is not None
    assert unit_files.install(Scope.USER, where=where).job_file is None, "there is one"


def test_a_job_file_is_never_replaced(tmp_path: Path) -> None:
    mine = tmp_path / "gadei-ps" / "mine.toml"
    mine.parent.mkdir()
    mine.write_text("# mine\n")
    done = unit_files.install(Scope.USER, job="mine", force=True, where=tmp_path)
    assert done.job_file is not None
    assert (done.job_file.found, done.job_file.written) == (Found.ANOTHER, False)
    assert mine.read_text() == "# mine\n"
    assert "systemctl --user enable --now gadei-ps@mine" in done.next
    unit_files.install(Scope.USER, job="other", where=tmp_path)
    assert config.load(mine.with_name("other.toml")).name == "other"
    for name in ("a/b", "a b", "a\nExecStart=x", "%i"):
        with pytest.raises(UsageError):
            unit_files.install(Scope.USER, job=name, where=tmp_path)


def test_uninstall(tmp_path: Path, reachable: None) -> None:
    unit_files.install(Scope.SYSTEM, where=tmp_path)
    drop_in = tmp_path / "gadei-ps@demo.service.d"
    drop_in.mkdir()
    (tmp_path / "gadei-ps@mine.service").write_text("# my copy\n")
    (tmp_path / END_NAME).unlink()
    (tmp_path / END_NAME).symlink_to("/dev/null")
    with (tmp_path / LEARNER_NAME).open("a") as file:
        file.write("# mine\n")
    wants = tmp_path / "multi-user.target.wants"
    wants.mkdir()
    (wants / "gadei-ps@demo.service").symlink_to(tmp_path / NAME)
    with pytest.raises(UsageError, match=r"disable --now gadei-ps@demo\.service"):
        unit_files.uninstall(Scope.SYSTEM, where=tmp_path)
    (wants / "gadei-ps@demo.service").unlink()
    strange = wants / "gadei-ps@my\\x20job.service"  # as systemd writes a name with a blank
    strange.symlink_to(tmp_path / NAME)
    with pytest.raises(UsageError, match=r"disable --now 'gadei-ps@my\\x20job\.service'"):
        unit_files.uninstall(Scope.SYSTEM, where=tmp_path)
    forced = unit_files.uninstall(Scope.SYSTEM, where=tmp_path, force=True, dry_run=True)
    assert forced.next[:2] == (f"rm '{strange}'", "systemctl daemon-reload")
    strange.unlink()
    before = set(tmp_path.rglob("*"))
    would = unit_files.uninstall(Scope.SYSTEM, where=tmp_path, dry_run=True)
    assert set(tmp_path.rglob("*")) == before
    seen = unit_files.uninstall(Scope.SYSTEM, where=tmp_path)
    assert would.removed == seen.removed
    ours = {tmp_path / name for name in (NAME, unit_files.USERS, unit_files.DIRECTORIES)}
    assert set(map(Path, seen.removed)) == ours == before - set(tmp_path.rglob("*"))
    others = {END_NAME, LEARNER_NAME, drop_in.name, "gadei-ps@mine.service", "gadei-ps"}
    assert others <= {Path(path).name for path, _ in seen.left}
    assert (tmp_path / "gadei-ps" / "demo.toml").exists()
    assert unit_files.uninstall(Scope.SYSTEM, where=tmp_path).removed == ()


def test_files_of_earlier_releases(tmp_path: Path) -> None:
    """They have no digest: they are replaced and removed only with force."""
    path = tmp_path / NAME
    old = "# As `gadei-ps install-unit --user` writes it.\n[Unit]\n"
    path.write_text(old)
    with pytest.raises(UsageError, match="edited, or not written by"):
        unit_files.install(Scope.USER, where=tmp_path)
    assert unit_files.install(Scope.USER, where=tmp_path, force=True).units[0].written
    path.write_text(old)
    assert str(path) in dict(unit_files.uninstall(Scope.USER, where=tmp_path).left)
    assert str(path) in unit_files.uninstall(Scope.USER, where=tmp_path, force=True).removed


def test_the_units_keep_their_user(tmp_path: Path, reachable: None) -> None:
    nobody = pwd.getpwuid(65534)
    first = unit_files.install(Scope.SYSTEM, user=nobody.pw_name, where=tmp_path)
    own = grp.getgrgid(nobody.pw_gid).gr_name
    directory = f"d /run/gadei-ps 0700 {nobody.pw_name} {own} -\n"
    assert directory in (tmp_path / unit_files.DIRECTORIES).read_text()
    assert not any("chown" in line for line in first.next)
    again = unit_files.install(Scope.SYSTEM, where=tmp_path)
    assert again.user == nobody.pw_name
    assert [one.found for one in again.units] == [Found.SAME] * len(first.units)
    assert not (tmp_path / unit_files.USERS).exists()
    (tmp_path / NAME).write_text("[Service]\nUser=a;reboot\n")
    with pytest.raises(UsageError, match="'a;reboot' is not a valid user name"):
        unit_files.install(Scope.SYSTEM, force=True, where=tmp_path)


def test_another_user_is_given_the_directories(tmp_path: Path, reachable: None) -> None:
    """Do so before systemd-tmpfiles, after which systemd would not look at what is in them."""
    unit_files.install(Scope.SYSTEM, where=tmp_path)
    done = unit_files.install(Scope.SYSTEM, user="nobody", where=tmp_path)
    assert {one.found for one in done.units} == {Found.UNEDITED}
    given, removed, *_ = done.next
    assert given == "chown -hR --from=gadei-ps nobody: /var/lib/gadei-ps"
    assert removed == "rm -rf /var/cache/gadei-ps /run/gadei-ps", "no user loads another's pickles"
    assert done.next.index("systemd-tmpfiles --create gadei-ps.conf") == 2


def test_linger_is_advised_only_without_it(
    tmp_path: Path, reachable: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Advise it for a user's own units, and for those of an ordinary user (RemoveIPC)."""
    me = pwd.getpwuid(os.getuid()).pw_name
    nobody = pwd.getpwuid(65534).pw_name

    def advised(scope: Scope, user: str | None = None) -> bool:
        done = unit_files.install(scope, user=user, where=tmp_path / "units")
        return any("enable-linger" in line for line in done.next)

    monkeypatch.setattr(unit_files, "ROOT", tmp_path)
    assert advised(Scope.USER)
    assert advised(Scope.SYSTEM, nobody)
    assert not advised(Scope.SYSTEM, "root")
    folder = tmp_path / "var/lib/systemd/linger"
    folder.mkdir(parents=True)
    for user in (me, nobody):
        (folder / user).touch()
    assert not advised(Scope.USER)
    assert not advised(Scope.SYSTEM, nobody)


@pytest.mark.parametrize("which", [0, 1])
def test_an_edited_unit_is_not_replaced_unasked(which: int, tmp_path: Path) -> None:
    first = unit_files.install(Scope.USER, where=tmp_path)
    path = Path(first.units[which].path)
    path.write_text(first.units[which].unit.replace("LimitNOFILE=65536", "LimitNOFILE=1024"))
    with pytest.raises(UsageError) as refused:
        unit_files.install(Scope.USER, where=tmp_path)
    result = str(refused.value)
    assert "\n" not in result
    assert result.startswith(f"{path}: edited, or not written by this command")
    assert "systemctl --user edit gadei-ps@" in result
    seen = unit_files.install(Scope.USER, where=tmp_path, dry_run=True).units[which]
    assert (seen.found, seen.written) == (Found.ANOTHER, False)
    assert "LimitNOFILE=1024" in path.read_text()
    assert unit_files.install(Scope.USER, where=tmp_path, force=True).units[which].written
    assert path.read_text() == seen.unit


def test_an_unedited_unit_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace it after an upgrade, or from another installation."""
    first = unit_files.install(Scope.USER, where=tmp_path).units[0]
    monkeypatch.setattr(unit_files, "program", lambda: ["/opt/new release/gadei-ps"])
    second = unit_files.install(Scope.USER, where=tmp_path).units[0]
    assert (second.found, second.written) == (Found.UNEDITED, True)
    text_ = Path(first.path).read_text()
    assert '\nExecStart="/opt/new release/gadei-ps" serve ' in text_
    assert unit_files.is_unedited(text_)
    assert not unit_files.is_unedited(text_ + "\n")


def test_a_masked_unit_stays_masked(tmp_path: Path) -> None:
    path = tmp_path / NAME
    path.symlink_to("/dev/null")
    with pytest.raises(UsageError, match="edited, or not written by"):
        unit_files.install(Scope.USER, where=tmp_path)
    assert unit_files.install(Scope.USER, where=tmp_path, force=True).units[0].written
    assert not path.is_symlink()


def test_what_cannot_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="--run-as needs --system"):
        unit_files.install(Scope.USER, user="root", where=tmp_path)
    for user in ("", "a\nExecStart=x", "a b", "%u", "1000", "-x", "\u212a"):
        with pytest.raises(UsageError, match="is not a valid user name"):
            unit_files.install(Scope.SYSTEM, user=user, where=tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UsageError, match="needs root"):
        unit_files.install(Scope.SYSTEM)
    with pytest.raises(UsageError, match="needs root"):
        unit_files.uninstall(Scope.SYSTEM)
    for one in unit_files.install(Scope.SYSTEM, dry_run=True).units:
        assert Path(one.path).parent in (
            Path("/etc/systemd/system"),
            Path("/etc/sysusers.d"),
            Path("/etc/tmpfiles.d"),
        )
    assert list(tmp_path.iterdir()) == []


def test_the_system_units_user_must_reach_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unit_files, "HIDDEN", ())
    monkeypatch.setattr(unit_files, "places", lambda: (tmp_path / "closed/gadei-ps",))
    (tmp_path / "closed").mkdir(mode=0o700)
    me = pwd.getpwuid(os.getuid()).pw_name
    where = tmp_path / "units"
    with pytest.raises(UsageError, match="cannot be reached by the user nobody"):
        unit_files.install(Scope.SYSTEM, user="nobody", where=where)
    with pytest.raises(UsageError, match="cannot be reached by the user no-such-user"):
        unit_files.install(Scope.SYSTEM, user="no-such-user", where=where)
    assert not where.exists()
    done = unit_files.install(Scope.SYSTEM, user=me, where=where)
    assert all(f"User={me}\n" in one.unit for one in done.units[:3])


def test_the_system_unit_does_not_see_tmp() -> None:
    with pytest.raises(UsageError, match="hidden from the unit by PrivateTmp"):
        unit_files.check_reach("root", [Path("/var/tmp/venv/bin/python")])


def test_a_service_user_that_is_not_there_is_to_be_made(tmp_path: Path, reachable: None) -> None:
    done = unit_files.install(Scope.SYSTEM, user="no-such-user", where=tmp_path)
    assert done.next[0].startswith("useradd --system")
    assert done.next[0].endswith(" no-such-user")
    usual = unit_files.install(Scope.SYSTEM, where=tmp_path / "usual")
    assert "systemd-sysusers gadei-ps.conf" in usual.next
    done = unit_files.install(Scope.SYSTEM, user="root", where=tmp_path / "other")
    assert not any("useradd" in line for line in done.next)


# -- the command ----------------------------------------------------------------------------------


def command(
    config_home: Path, *arguments: str, what: str = "install-unit"
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gadei_ps", what, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"XDG_CONFIG_HOME": str(config_home)},
    )


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "systemd/user" / NAME
    printed = command(tmp_path, "--user", "--print")
    assert printed.returncode == 0, printed
    assert not path.exists()
    report = json.loads(command(tmp_path, "--user", "--json").stdout)
    first, end, learner = report["units"]
    assert (first["path"], first["written"], report["scope"]) == (str(path), True, "user")
    assert path.read_text() == first["unit"]
    shown = "\n".join(f"# {one['path']}\n{one['unit']}" for one in (first, end, learner))
    assert printed.stdout == shown
    assert f"is up to date: {path}" in command(tmp_path, "--user").stdout
    path.write_text("# mine\n")
    refused = command(tmp_path, "--user")
    assert refused.returncode == 2
    assert "--force" in refused.stderr
    forced = command(tmp_path, "--user", "--force")
    assert forced.stdout.startswith(f"wrote {path}\n")
    assert "  systemctl --user daemon-reload\n" in forced.stdout
    assert command(tmp_path, "--user", "--system").returncode == 2
    for what, advice in (("install-unit", "--job JOB"), ("uninstall-unit", "disable --now")):
        refused = command(tmp_path, "--user", "demo", what=what)
        assert (refused.returncode, advice in refused.stderr) == (2, True), refused
        assert "'demo' is one too many" in refused.stderr
    removed = command(tmp_path, "--user", "--json", what="uninstall-unit")
    assert removed.returncode == 0, removed
    assert str(path) in json.loads(removed.stdout)["removed"]
    assert not path.exists()
