"""What install-unit says of what is there: other files, strange names, directories of others."""

from __future__ import annotations

import os
import pwd
import subprocess
from pathlib import Path

import pytest

from gadei_ps import homes
from gadei_ps.cli import machine
from gadei_ps.commands import belongings, systemd, uninstall
from gadei_ps.commands.units import Scope
from gadei_ps.errors import UsageError
from gadei_ps.job import config

ELSEWHERE = '[checkpoint]\ndirectory = "{}"\n'


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Units of this user, who has had jobs; stands for the root directory."""
    monkeypatch.setattr(systemd, "places", lambda: (Path("/usr/bin/env"),))
    me = pwd.getpwuid(os.getuid()).pw_name
    systemd.install(Scope.SYSTEM, user=me, job="demo", where=tmp_path)
    for path in ("var/lib/gadei-ps/demo", "var/cache/gadei-ps", "run/gadei-ps", "elsewhere"):
        (tmp_path / path).mkdir(parents=True)
    (tmp_path / "var/cache/gadei-ps/kernel").touch()
    return tmp_path


def steps(place: Path, user: str) -> list[str]:
    return list(systemd.install(Scope.SYSTEM, user=user, force=True, where=place).next)


def test_directories_are_handed_on(place: Path) -> None:
    """With all in them, and before systemd sees them: it looks at the directories only."""
    state, cache = place / "var/lib/gadei-ps", place / "var/cache/gadei-ps"
    found = steps(place, "nobody")
    me = pwd.getpwuid(os.getuid()).pw_name
    given = f"chown -hR --from={me} nobody: {state}"
    # Compiled kernels are pickles, which nobody loads from another user.
    removed = f"rm -r {cache} {place}/run/gadei-ps"
    made = "systemd-tmpfiles --create gadei-ps.conf"
    assert found.index(given) < found.index(removed) < found.index(made)
    (place / "gadei-ps/far.toml").write_text(ELSEWHERE.format(place / "elsewhere"))
    moved = steps(place, "nobody")
    if os.getuid():  # root's other directories are not former jobs'
        assert any(str(place / "elsewhere") in one.split() for one in moved)
    assert not any("chown" in one or "rm" in one.split() for one in steps(place, me))


def test_a_drop_in_decides_who_runs_jobs(place: Path) -> None:
    me = pwd.getpwuid(os.getuid()).pw_name
    drop_in = place / "gadei-ps@.service.d/own.conf"
    drop_in.parent.mkdir()
    drop_in.write_text("[Service]\nUser = nobody\n")
    with pytest.raises(UsageError, match=r"own\.conf makes jobs run as nobody, whatever --run-as"):
        steps(place, "daemon")
    again = systemd.install(Scope.SYSTEM, where=place)
    assert f"{drop_in} makes jobs run as nobody, and not as {me}" in again.notes[-1]
    assert not any("chown" in line for line in again.next)
    (place / "gadei-ps@.service").unlink()
    assert systemd.install(Scope.SYSTEM, where=place, force=True).notes, "a drop-in outlives units"


def test_the_last_drop_in_decides(place: Path) -> None:
    """As for systemd: by the name of the file, wherever it is; one in /etc hides the others."""
    me = pwd.getpwuid(os.getuid()).pw_name
    folders = [place / one / "gadei-ps@.service.d" for one in ("", "run/systemd/system")]
    for folder in folders:
        folder.mkdir(parents=True)
    (folders[0] / "10.conf").write_text("[Service]\nUser=nobody\n")
    (folders[1] / "20.conf").write_text(f"[Service]\nUser={me}\n")
    assert not systemd.install(Scope.SYSTEM, where=place).notes
    (folders[1] / "20.conf").write_text("[Service]\nUser=daemon\n")
    (note,) = systemd.install(Scope.SYSTEM, where=place).notes
    assert "20.conf makes jobs run as daemon" in note
    (folders[0] / "20.conf").symlink_to("/dev/null")
    (note,) = systemd.install(Scope.SYSTEM, where=place).notes
    assert "10.conf makes jobs run as nobody" in note


def test_a_drop_in_of_one_job_decides_for_that_job(place: Path) -> None:
    drop_in = place / "gadei-ps@special.service.d/own.conf"
    drop_in.parent.mkdir()
    drop_in.write_text("[Service]\nUser=nobody\n")
    done = systemd.install(Scope.SYSTEM, user="daemon", force=True, where=place)
    assert f"{drop_in} makes job special run as nobody, and not as daemon" in done.notes[0]
    assert any(line.startswith("chown ") for line in done.next)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")
def test_what_lies_deeper_counts(place: Path) -> None:
    """As where systemd-tmpfiles has given only the directory itself to the new user."""
    nobody = pwd.getpwnam("nobody").pw_uid
    state = place / "var/lib/gadei-ps"
    for path in (state, place / "var/cache/gadei-ps", place / "run/gadei-ps"):
        os.chown(path, nobody, -1)
    (state / "demo/of-root").touch()
    assert not any("chown" in one for one in steps(place, "nobody")), "a learner of root may write"
    os.chown(state / "demo", 12345, -1)
    assert f"chown -hR --from=12345 nobody: {state}" in steps(place, "nobody")
    (place / "gadei-ps/far.toml").write_text(ELSEWHERE.format(place / "elsewhere"))
    os.chown(place / "elsewhere", 12345, -1)
    both = f"chown -hR --from=12345 nobody: {state} {place}/elsewhere"
    assert both in steps(place, "nobody")


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")
def test_only_checkpoints_of_the_owner_are_given(place: Path) -> None:
    """Not what a link leads to that the owner has set, nor other data, nor files of others."""
    alice, victim = 12345, 12346
    home, bob = place / "home/alice", place / "home/bob"
    kept = home / "kept/checkpoint-000000000001"
    kept.mkdir(parents=True)
    bob.mkdir()
    for path, uid in ((home, alice), (kept.parent, alice), (kept, alice), (bob, victim)):
        os.chown(path, uid, -1)
    mine = bob / "mine"
    mine.touch()
    os.chown(mine, victim, -1)
    os.link(mine, kept / "weights")  # as where fs.protected_hardlinks is 0
    (home / "last").symlink_to(bob)
    (home / "inner").symlink_to(place / "home")
    for name in ("last", "inner/bob", "kept"):
        told = ELSEWHERE.format(home / name)
        (place / f"gadei-ps/{name.replace('/', '-')}.toml").write_text(told)
    done = systemd.install(Scope.SYSTEM, user="nobody", force=True, where=place)
    assert not any("bob" in one or "last" in one for one in done.next), done.next
    assert [
        f"home/alice/{name} are reached through a link" in note
        for name, note in zip(("inner/bob", "last"), done.notes, strict=True)
    ] == [True, True]
    (line,) = [one for one in done.next if one.startswith("chown -hR --from=12345")]
    assert line.split()[4:] == [str(kept.parent)]
    subprocess.run(["sh", "-c", line], check=True)
    nobody = pwd.getpwnam("nobody").pw_uid
    assert (kept.stat().st_uid, mine.stat().st_uid) == (nobody, victim)
    for path in (kept, kept.parent):
        os.chown(path, alice, -1)
    (kept.parent / "thesis").touch()
    done = systemd.install(Scope.SYSTEM, user="nobody", force=True, where=place)
    (line,) = [one for one in done.next if one.startswith("chown -hR --from=12345")]
    assert line.split()[4:] == [str(kept)]
    said = "lie beside 'thesis': the directory itself is not given to nobody"
    assert any(said in note for note in done.notes)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")
def test_running_jobs_keep_their_runtime_directory(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = pwd.getpwuid(os.getuid()).pw_name
    for name in ("run/gadei-ps", "var/cache/gadei-ps"):
        (place / name / "strange").touch()
        os.chown(place / name / "strange", 12345, -1)
    assert any(f"{place}/run/gadei-ps" in one for one in steps(place, me))
    one = belongings.Memory("demo", os.getuid(), 5000, True, True, True, None)
    monkeypatch.setattr(belongings.Belongings, "memory", lambda *_: (one,))
    found = steps(place, me)
    assert any(f"{place}/var/cache/gadei-ps" in one for one in found)
    assert not any(f"{place}/run/gadei-ps" in one for one in found)


def test_directories_have_one_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is that of other programs, too."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    own = belongings.Belongings.of(Scope.USER, tmp_path)
    assert {one.name for one in (own.state, own.cache, own.runtime)} == {"gadei-ps"}
    theirs = belongings.Belongings.of(Scope.SYSTEM, systemd.job_directory(Scope.SYSTEM))
    assert (theirs.state, theirs.cache) == (homes.STATE, homes.CACHE)
    assert (theirs.jobs, theirs.runtime) == (homes.JOBS, homes.RUNTIME)


def test_a_strange_job_file_stops_nothing(place: Path) -> None:
    for name, directory in (("a", "~no-such-user/x"), ("b", "x" * 300), ("c", "/dev/null/x")):
        (place / f"gadei-ps/{name}.toml").write_text(ELSEWHERE.format(directory))
    me = pwd.getpwuid(os.getuid()).pw_name
    done = systemd.install(Scope.SYSTEM, user=me, force=True, where=place)
    first, second = done.notes
    assert "a.toml: checkpoint.directory: '~no-such-user/x' names no user" in first
    assert "b.toml: File name too long: its checkpoints have not been looked for" in second
    left = [why for _, why in uninstall.uninstall(Scope.SYSTEM, where=place, dry_run=True).left]
    assert {first, second} <= set(left)


def test_a_job_files_home_is_that_of_its_user(tmp_path: Path) -> None:
    (tmp_path / "demo.toml").write_text(ELSEWHERE.format("~/runs"))
    told = config.load(tmp_path / "demo.toml", Path("/home/alice")).checkpoint
    assert told is not None
    assert told.directory == Path("/home/alice/runs")
    theirs = belongings.Belongings.of(Scope.SYSTEM, tmp_path, tmp_path, "nobody")
    assert theirs.home == Path(pwd.getpwnam("nobody").pw_dir)


def test_it_is_told_what_differs(tmp_path: Path) -> None:
    """Of all files at once, in one line."""
    first, second, third = (one.path for one in systemd.install(Scope.USER, where=tmp_path).units)
    text_ = first.read_text()
    first.write_text(text_.replace("WatchdogSec=30", "WatchdogSec=60\nNice=5"))
    second.write_text("# mine\n" + second.read_text())
    with pytest.raises(UsageError) as refused:
        systemd.install(Scope.USER, where=tmp_path)
    told = str(refused.value)
    assert f"{first} exists and differs: it has WatchdogSec=60, Nice=5 instead of Watchdog" in told
    assert f"{second} exists and differs: only in comments" in told
    assert str(third) not in told
    first.write_text(text_.replace("WatchdogSec=30\n", ""))
    forced = systemd.install(Scope.USER, where=tmp_path, force=True).units[0]
    assert (forced.written, forced.differs) == (True, "it lacks WatchdogSec=30")


def test_linger_is_advised_only_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def advised() -> bool:
        done = systemd.install(Scope.USER, where=tmp_path / "units")
        return any("enable-linger" in line for line in done.next)

    monkeypatch.setattr(systemd, "ROOT", tmp_path)
    assert advised()
    folder = tmp_path / "var/lib/systemd/linger"
    folder.mkdir(parents=True)
    (folder / pwd.getpwuid(os.getuid()).pw_name).touch()
    assert not advised()


def test_files_of_jobs_that_cannot_be(tmp_path: Path) -> None:
    jobs = tmp_path / "gadei-ps"
    jobs.mkdir()
    for name in ("demo.toml", "demo.learner", "my job.learner", "a.b.toml", "other.learner"):
        (jobs / name).touch()
    told = systemd.install(Scope.USER, where=tmp_path).notes
    assert len(told) == 3
    assert "no job can be called 'a.b': rename the file" in told[0]
    assert "no job can be called 'my job': rename the file" in told[1]
    assert told[2] == f"{jobs}/other.learner: there is no job file other.toml beside it"


def test_uninstall_names_what_would_be_removed(place: Path) -> None:
    """Files of others beside checkpoints, each directory once, and what the command takes."""
    state = place / "var/lib/gadei-ps"
    for path in (state / "demo", place / "elsewhere"):
        (path / "checkpoint-000000000001").mkdir()
        (path / "checkpoint-000000000001/weights").write_bytes(bytes(3 << 20))
        (path / ".lock").touch()
    (state / "demo/notes").write_text("mine")
    (state / "two\nlines").write_text("strange")
    (state / "demo.safetensors").write_bytes(bytes(1 << 20))
    (place / "gadei-ps/demo.toml").write_text(ELSEWHERE.format(state / "demo"))
    (place / "gadei-ps/far.toml").write_text(ELSEWHERE.format(place / "elsewhere"))
    done = uninstall.uninstall(Scope.SYSTEM, where=place, dry_run=True)
    left = [str(path) for path, _ in done.left]
    assert sorted(left) == sorted(
        str(one)
        for one in (
            place / "gadei-ps",
            place / "elsewhere",
            state / "demo",
            state / "demo/notes",
            state / "two\nlines",
            state / "demo.safetensors",
        )
    )
    (line,) = [one for one in done.next if one.startswith(f"rm -r {state}  # ")]
    assert "of all jobs and 3 other files, 4.0 MiB, for ever" in line


@pytest.mark.parametrize("ends_at_failure", [True, False])
def test_steps_end_at_a_failure(
    ends_at_failure: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pasted into a shell that goes on: no job starts without memory that could not be saved."""
    one = belongings.Memory("demo", os.getuid(), 5000, True, False, False, None)
    theirs = belongings.Belongings.of(Scope.USER, tmp_path, tmp_path)
    lines = theirs.settle(["false"], [one])
    machine.print_steps([*lines, "touch started  # the job"], ends_at_failure)
    pasted = capsys.readouterr().out
    done = subprocess.run(["sh"], input=pasted + "true\n", text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0
    assert (tmp_path / "started").exists() != ends_at_failure


def test_what_ends_at_a_failure(place: Path) -> None:
    handed = systemd.install(Scope.SYSTEM, user="nobody", force=True, where=place)
    assert handed.ends_at_failure
    assert not systemd.install(Scope.USER, where=place / "own").ends_at_failure
