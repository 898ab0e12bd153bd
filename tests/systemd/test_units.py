"""The units under a real systemd: an inactive job has no process, and a stop has a checkpoint."""

from __future__ import annotations

import json
import re
import sys

import pytest
from service import ENVIRONMENT, JOB, LEARNER, PROGRAM, USER, Service, become
from support import PATIENCE_S, eventually
from versions import ROOT

PATIENT = "[Service]\nRestartSec=1h\n"
HASTY = "[Unit]\nStartLimitBurst=1\n[Service]\nRestartSec=1\n"


def test_a_stop(service: Service) -> None:
    service.systemctl("start")
    service.learn()
    service.learn()
    service.systemctl("stop")
    assert service.learned() == service.saved()
    service.is_gone()


def test_a_stop_while_the_watchdog_is_dead(service: Service) -> None:
    service.drop_in(PATIENT)
    service.systemctl("start")
    service.learn()
    service.kill_the_watchdog()
    eventually(lambda: service.sub_state == "auto-restart", what=service.said)
    service.systemctl("stop")
    service.is_gone()
    assert service.learned() == service.saved()


def test_starts_that_have_failed_too_often(service: Service) -> None:
    service.drop_in(HASTY)
    service.systemctl("start")
    service.learn()
    service.kill_the_watchdog()
    eventually(lambda: service.state == "failed", what=service.said)
    service.is_gone()
    assert service.learned() == service.saved()


@pytest.mark.parametrize("units", [("{end}",), ("{end}", "{unit}"), ("gadei-ps*@{name}.service",)])
def test_a_stop_of_the_ends_unit(units: tuple[str, ...], service: Service) -> None:
    """It stops the job, first: that unit has nothing to do while the job's watchdog lives."""
    service.systemctl("start")
    service.learn()
    known = {"end": service.end, "unit": service.unit, "name": service.name}
    service.manager.do("systemctl", "stop", *(one.format(**known) for one in units))
    eventually(lambda: service.state == "inactive", what=service.said)
    service.is_gone()
    assert service.learned() == service.saved()
    assert service.manager.show(service.end, "Result") == "success"
    assert "is running already" not in service.said()


def test_a_watchdog_that_dies_during_a_stop(service: Service) -> None:
    """The next start begins where the stop has ended."""
    service.drop_in(PATIENT)
    service.systemctl("start")
    service.learn()
    _, server, _ = service.pids()
    service.kill("STOP", server)  # the stop waits for it
    stopping = service.manager.start("systemctl", "stop", service.unit)
    eventually(lambda: service.sub_state == "stop-sigterm", what=service.said)
    service.kill_the_watchdog()
    stopping.wait(PATIENCE_S)
    service.systemctl("start")
    assert service.state == "active"
    assert service.learned() == service.saved() == service.status()["version"]


def test_a_watchdog_that_dies_during_the_stop_of_a_restart(service: Service) -> None:
    """The unit of the end does not run in between: the new watchdog completes the stop."""
    service.systemctl("start")
    service.learn()
    watchdog, server, _ = service.pids()
    service.kill("STOP", server)  # the stop waits for it
    restarting = service.manager.start("systemctl", "restart", service.unit)
    eventually(lambda: service.sub_state == "stop-sigterm", what=service.said)
    service.kill("KILL", watchdog)
    assert restarting.wait(PATIENCE_S) == 0, service.said()
    assert service.state == "active"
    assert service.learned() == service.saved() == service.status()["version"]
    assert service.state == "active", service.said()


def test_a_mistake_in_the_job_file(service: Service) -> None:
    """The watchdog dies, and cannot be started again: the job ends as it would have ended."""
    service.drop_in("[Service]\nRestartSec=1\n")
    service.systemctl("start")
    service.learn()
    service.manager.write(f"/etc/gadei-ps/{service.name}.toml", "slots = \n")
    service.kill_the_watchdog()
    eventually(lambda: service.state == "failed", what=service.said)
    service.is_gone()
    assert service.manager.show(service.end, "ActiveState") == "inactive", service.said()
    assert service.learned() == service.saved()


def test_an_end_that_fails(service: Service) -> None:
    """It ends servers and learners all the same, and the next start continues from memory."""
    end = f"/etc/systemd/system/{service.end}.d/test.conf"
    service.manager.write(end, "[Service]\nExecStop=\nExecStop=/bin/false\n")
    service.drop_in(PATIENT)
    service.systemctl("start")
    service.learn()
    _, *servers = service.pids()
    service.kill_the_watchdog()
    eventually(lambda: service.sub_state == "auto-restart", what=service.said)
    service.systemctl("stop")
    eventually(lambda: service.manager.show(service.end, "ActiveState") == "failed")
    for pid in servers:
        assert service.manager.run("nsenter", "-t", "1", "-p", "kill", "-0", pid).returncode
    (file, process), service.learners = service.learners[0], []
    process.wait(PATIENCE_S)
    word, count, *_ = service.manager.do("tail", "-n", "1", file).split()
    assert word == "failed"
    service.manager.do("rm", end)
    service.drop_in("")
    service.systemctl("start")
    assert service.status()["version"] == int(count)


@pytest.mark.parametrize("by", ["gadei-ps", "systemctl"])
def test_a_stop_without_its_last_checkpoint(service: Service, by: str) -> None:
    """It stays a stop. The unit of the end tries once more, and the memory waits."""
    manager, directory = service.manager, f"/var/lib/gadei-ps/{service.name}"
    service.systemctl("start")
    service.learn()
    manager.do("bash", "-c", f"rm -rf {directory}; touch {directory}")
    if by == "gadei-ps":
        result = service.gadei_ps("stop", service.name)
        assert (result.returncode, service.end[:-8] in result.stderr) == (3, True), result
    else:  # systemctl reports only whether the unit is stopped
        service.systemctl("stop")
        assert service.manager.do("systemctl", "is-failed", service.unit) == "failed\n"
    over = "failed"
    eventually(lambda: manager.show(service.end, "ActiveState") == over, what=service.said)
    assert service.state == over
    assert manager.show(service.unit, "ExecMainStatus") == "3"
    assert manager.show(service.unit, "NRestarts") == "0"
    status = manager.show(service.unit, "StatusText")
    assert f"systemctl status {service.end[:-8]}" in status
    assert "gadei-ps serve" not in status
    status = manager.show(service.end, "StatusText")
    assert "stays in memory" in status
    assert f"systemctl start {service.unit[:-8]}" in status
    (drop,) = re.findall(r"drop it with (sudo .*)", status)
    dry = drop.replace("gadei-ps gc", f"{PROGRAM} gc --dry-run").split()
    assert service.name in manager.do(*become(dry[2]), *dry[3:])
    assert service.name in manager.do("ls", "/dev/shm")
    learned = service.learned()
    if by == "gadei-ps":  # a start notices that no checkpoint can be made, and is not repeated
        assert manager.run("systemctl", "start", service.unit).returncode
        assert manager.show(service.unit, "ExecMainStatus") == "2", service.said()
        assert manager.show(service.unit, "NRestarts") == "0"
        assert "cannot be written" in manager.show(service.unit, "StatusText")
        eventually(lambda: manager.show(service.end, "ActiveState") == over, what=service.said)
    manager.do("rm", directory)
    service.systemctl("start")
    assert service.status()["version"] == learned
    service.systemctl("stop")
    assert service.saved() == learned
    service.is_gone()


def test_a_newer_checkpoint_than_memory(service: Service) -> None:
    """The status shows how an administrator continues the job from it, and that works."""
    manager, directory = service.manager, f"/var/lib/gadei-ps/{service.name}"
    service.systemctl("start")
    service.learn()
    service.systemctl("stop")
    learned = service.learned()
    manager.do("mv", directory, f"{directory}.kept")
    service.drop_in("[Service]\nRestartSec=3\n")
    service.systemctl("start")
    service.kill_the_watchdog()
    manager.do("bash", "-c", f"rm -rf {directory}; mv {directory}.kept {directory}")
    pattern = "to take it: (sudo .*), and start the job again [(](systemctl .*)[)]"
    (stop, start), *_ = eventually(
        lambda: re.findall(pattern, manager.show(service.unit, "StatusText")), what=service.said
    )
    assert service.status()["version"] == 0
    words = stop.replace("gadei-ps stop", f"{PROGRAM} stop").split()
    manager.do(*become(words[2]), *words[3:])
    eventually(lambda: service.state == "inactive", what=service.said)
    manager.do(*start.split())
    assert service.status()["version"] == learned
    # A command that has only the runtime directory uses the unit's compiled kernels.
    shown = manager.run(*become(USER), "env", ENVIRONMENT[0], PROGRAM, "doctor").stdout
    assert re.search("/var/cache/gadei-ps/[0-9a-f]+, *filled", " ".join(shown.split())), shown
    service.systemctl("stop")
    service.is_gone()


def test_a_crash_keeps_servers_learners_and_tmp(service: Service) -> None:
    service.drop_in("[Service]\nRestartSec=1\n")
    service.systemctl("start")
    service.learn()
    watchdog, server, _ = service.pids()
    inode = service.manager.do("stat", "-c", "%i", f"/proc/{watchdog}/root/tmp")
    service.manager.do("touch", f"/proc/{server}/root/tmp/mine")
    service.kill_the_watchdog()
    service.replaced(watchdog)
    after = service.pids()
    assert after[1] == server
    assert service.manager.do("stat", "-c", "%i", f"/proc/{after[0]}/root/tmp") == inode
    service.manager.do("test", "-e", f"/proc/{after[0]}/root/tmp/mine")
    service.systemctl("restart")
    assert service.learned() == service.saved() == service.status()["version"]


def test_a_stop_by_the_command(service: Service) -> None:
    service.systemctl("start")
    service.learn()
    report = json.loads(service.gadei_ps("stop", service.name, "--json").stdout)
    eventually(lambda: service.state == "inactive", what=service.said)
    assert service.learned() == service.saved() == report["version"]
    service.is_gone()


@pytest.mark.parametrize("user", [USER, "root"])
def test_a_learners_unit(service: Service, user: str) -> None:
    """It begins and ends with its job, and continues when the job's watchdog dies."""
    manager, name = service.manager, service.name
    learner = f"gadei-ps-learner@{name}.service"
    if user == "root":  # as documented
        text = "[Service]\nUser=root\nCapabilityBoundingSet=CAP_DAC_OVERRIDE\n"
        manager.write(f"/etc/systemd/system/{learner}.d/test.conf", text)
    file = f"/var/lib/gadei-ps/{name}.count"
    program = f"PROGRAM={sys.executable} {LEARNER} {name} {file}\n"
    manager.write(f"/etc/gadei-ps/{name}.learner", program)
    manager.do("systemctl", "enable", learner)
    service.drop_in("[Service]\nRestartSec=1\n")
    service.systemctl("start")
    eventually(lambda: "pushed" in manager.run("cat", file).stdout, what=service.said)
    pid = manager.show(learner, "MainPID")
    before = service.pids()[0]
    service.kill_the_watchdog()
    service.replaced(before)
    assert manager.show(learner, "MainPID") == pid
    manager.do("systemctl", "is-active", learner)
    service.systemctl("stop")
    eventually(lambda: manager.show(learner, "ActiveState") == "inactive", what=service.said)
    word, count = manager.do("tail", "-n", "1", file).split()
    assert (word, int(count)) == ("stopped", service.saved())
    service.is_gone()
    manager.do("systemctl", "disable", learner)


def test_boot_does_not_wait(service: Service) -> None:
    manager = service.manager
    manager.do("systemctl", "enable", service.unit)
    manager.do("systemctl", "daemon-reload")
    assert service.unit in manager.show("multi-user.target", "Wants").split()
    assert service.unit not in manager.show("multi-user.target", "After").split()
    with_defaults = "systemd-journald.service"
    assert with_defaults in manager.show("sysinit.target", "After").split()
    manager.do("systemctl", "disable", service.unit)


def test_units_are_removed_when_no_job_runs(service: Service) -> None:
    service.systemctl("start")
    refused = service.gadei_ps("uninstall-unit", "--dry-run", user="root")
    assert (refused.returncode, service.unit in refused.stderr) == (2, True), refused
    go = f"/run/{service.name}.go"
    slow = f"[Service]\nExecStop=/bin/sh -c 'until [ -e {go} ]; do sleep 0.1; done'\n"
    service.manager.write(f"/etc/systemd/system/{service.end}.d/test.conf", slow)
    service.manager.do("systemctl", "daemon-reload")
    service.systemctl("stop")
    done = service.gadei_ps("uninstall-unit", "--dry-run", "--json", user="root")
    assert len(json.loads(done.stdout)["removed"]) == 5, done
    file = f"/run/{service.name}.said"
    removing = service.manager.start("sh", "-c", f"{PROGRAM} uninstall-unit 2> {file}")
    eventually(lambda: f"for {service.end} to end" in service.manager.run("cat", file).stdout)
    service.manager.do("touch", go)
    assert removing.wait(PATIENCE_S) == 0
    service.manager.do(PROGRAM, "install-unit", "--system")
    service.manager.do("systemctl", "daemon-reload")
    service.is_gone()


def test_a_failure_is_told(service: Service) -> None:
    """Show it in the state of the unit, and in the journal as an object of its priority."""
    manager = service.manager
    manager.write(f"/etc/gadei-ps/{service.name}.toml", "slots = 0\n")
    assert manager.run("systemctl", "start", service.unit).returncode
    why = f"/etc/gadei-ps/{service.name}.toml: slots: "
    assert manager.show(service.unit, "StatusText").startswith(f"failed: {why}")
    output = manager.do(
        *("journalctl", "--no-pager", "-o", "cat", "-p", "warning", "-u", service.unit),
        "_COMM=gadei-ps",
    )
    (line,) = output.splitlines()
    assert json.loads(line)["event"].startswith(why)


def test_a_reload(service: Service) -> None:
    service.systemctl("start")
    path = f"/etc/gadei-ps/{service.name}.toml"
    service.manager.write(path, JOB.replace("lr = 1.0", "lr = 0.5"))
    service.systemctl("reload")
    assert '"optimizer.lr": 0.5' in service.said()
    service.manager.write(path, "slots = 7\n" + JOB)
    assert service.manager.run("systemctl", "reload", service.unit).returncode
    assert "slots cannot change while job" in service.said()
    service.systemctl("is-active")
    service.systemctl("stop")
    service.is_gone()


def test_the_documented_commands(service: Service) -> None:
    """Run them with the runtime directory of the unit, or without one."""
    manager, program = service.manager, PROGRAM
    service.systemctl("start")
    service.learn()
    clean = ("env", "-u", "GADEI_PS_STATE_DIR", "-u", "GADEI_PS_RUNTIME_DIR")
    output = manager.run(*clean, program, "status", service.name).stderr
    assert "set GADEI_PS_RUNTIME_DIR=/run/gadei-ps" in output
    for command in (("kill", service.name, "--standby"), ("export", service.name, "/tmp/w.npz")):
        output = manager.run(*clean, program, *command).stderr
        assert "set GADEI_PS_RUNTIME_DIR=/run/gadei-ps" in output, output
    shows = f"user {USER} has jobs elsewhere ({service.name}): GADEI_PS_RUNTIME_DIR=/run/gadei-ps"
    for command in (("ls",), ("status",), ("gc", "--dry-run")):
        output = manager.run(*clean, "-u", "XDG_RUNTIME_DIR", program, *command).stderr
        assert "looked in /run/gadei-ps-root, for user root" in output
        assert shows in output
    service.systemctl("stop")
    service.is_gone()
    given = (*clean, "GADEI_PS_RUNTIME_DIR=/run/gadei-ps", program, "export", service.name)
    learned = service.learned()
    for user in (USER, "root"):
        done = manager.do(*become(user), *given, f"/tmp/{service.name}.{user}.npz", "--json")
        assert json.loads(done)["version"] == service.saved() == learned


def test_the_administrators_page(service: Service) -> None:
    """Run its commands: they see the job, with the variable that it begins with."""
    page = (ROOT / "docs/administration.md").read_text()
    (variable,) = re.findall(r"^export (\w+=\S+)$", page, re.M)
    (tidy,) = re.findall(r"`(sudo -u gadei-ps env [^`]* gc)`", page)
    commands = re.findall(r"`gadei-ps ((?:status demo|ls|checkpoint demo)[^`]*)`", page)
    assert len(set(commands)) == 3
    service.systemctl("start")
    for command in commands:
        words = command.replace("demo", service.name).split()
        done = service.manager.do("env", "-u", "XDG_RUNTIME_DIR", variable, PROGRAM, *words)
        assert service.name in done, command
    words = tidy.replace("gadei-ps gc", f"{PROGRAM} gc --dry-run").split()
    assert words[:3] == ["sudo", "-u", USER]
    service.manager.do(*become(USER), *words[3:])
    service.systemctl("stop")
    assert service.saved() == 0


def test_users_and_their_directories(service: Service) -> None:
    """Check that the job's files are its user's alone; another user can show root nothing else."""
    manager = service.manager
    service.systemctl("start")
    for path in ("/run", "/var/lib", "/var/cache"):
        rights = manager.do("stat", "-c", "%U %G %a", f"{path}/gadei-ps").strip()
        assert rights == f"{USER} {USER} 700", path
    main = manager.show(service.unit, "MainPID")
    assert manager.do("stat", "-c", "%U", f"/proc/{main}").strip() == USER
    assert service.name in service.gadei_ps("ls").stdout
    assert service.name in service.gadei_ps("ls", user="root").stdout
    stranger = service.gadei_ps("status", service.name, user="nobody")
    assert "run the command as its owner" in stranger.stderr, stranger
    clean = ("env", "-u", "GADEI_PS_RUNTIME_DIR", "-u", "XDG_RUNTIME_DIR", "HOME=/tmp")
    manager.do(*become("nobody"), "mkdir", "-m", "700", "/tmp/gadei-ps-0")
    manager.write("/tmp/theirs.toml", JOB)
    occupying = ("GADEI_PS_RUNTIME_DIR=/tmp/gadei-ps-0", "NUMBA_CACHE_DIR=/tmp/nobodys")
    manager.do("mkdir", "/tmp/nobodys")
    manager.do("cp", "-r", "/var/cache/gadei-ps", "/tmp/nobodys")
    manager.do("chown", "-R", "nobody", "/tmp/nobodys")
    theirs = manager.start(
        *become("nobody"), *clean, *occupying, PROGRAM, "serve", "/tmp/theirs.toml"
    )
    ready = (*become("nobody"), *clean, *occupying, PROGRAM, "status", "theirs")
    eventually(lambda: manager.run(*ready).returncode == 0)
    assert "theirs" not in manager.do(*clean, PROGRAM, "ls", "--json")
    for verb in ("status", "stop", "checkpoint"):
        refused = manager.run(*clean, PROGRAM, verb, "theirs")
        assert (refused.returncode, "user nobody has one" in refused.stderr) == (1, True), refused
    manager.do(*ready)
    manager.do(*clean, occupying[0], PROGRAM, "stop", "theirs")
    theirs.wait(PATIENCE_S)


@pytest.mark.timeout(300)
def test_names_that_are_lost(service: Service) -> None:
    """They are notified, and the next watchdog ends what runs on: there is one job."""
    manager = service.manager
    service.drop_in("[Service]\nRestartSec=1\n")
    service.systemctl("start")
    service.learn()
    watchdog, *servers = eventually(lambda: all(found := service.pids()) and found)
    manager.do("bash", "-c", f"rm /dev/shm/gadei-ps.*.{service.name}.*")
    eventually(lambda: "lost their names" in manager.show(service.unit, "StatusText"))
    service.kill_the_watchdog()
    service.replaced(watchdog)
    for pid in servers:
        assert manager.run("nsenter", "-t", "1", "-p", "kill", "-0", pid).returncode
    for _, process in service.learners:
        process.kill()
        process.wait()
    service.learners.clear()
    service.systemctl("stop")
    service.is_gone()


@pytest.mark.timeout(300)
def test_a_stop_without_progress(service: Service) -> None:
    """Block a disk, and start systemd itself again: the stop ends in its time."""
    manager = service.manager
    service.systemctl("start")
    service.learn()
    checkpoint_writer = "gadei_ps.watchdog.checkpoint_writer"
    catching = manager.start(
        "bash", "-c", f"until pkill -STOP -f '[ ]{checkpoint_writer}'; do :; done"
    )
    stopping = manager.start("systemctl", "stop", service.unit)
    assert catching.wait(PATIENCE_S) == 0
    manager.do("systemctl", "daemon-reexec")
    stopping.wait(PATIENCE_S)  # it has lost the manager that it spoke with
    eventually(lambda: service.state != "deactivating", 120, what=service.said)
    assert manager.show(service.unit, "Result") == "exit-code", "and not a time-out"
    assert "the disk has made no progress" in service.said()
    service.is_gone()
    learned = service.learned()
    assert learned == service.saved(), "the other unit has tried again"
    saved = f"the newest checkpoint has version {learned}"
    assert manager.show(service.end, "StatusText").endswith(saved)
    assert f"systemctl status {service.end[:-8]}" in manager.show(service.unit, "StatusText")
