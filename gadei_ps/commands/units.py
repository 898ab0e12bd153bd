"""The text of everything that systemd reads of gadei-ps: units, users, directories, and a job file.

Templates: gadei-ps@demo.service is the watchdog of the job in demo.toml, gadei-ps-end@demo ends
what a dead watchdog has left, and gadei-ps-learner@demo is a learner. The files in systemd/ of the
sources are those of packaged(); change them here, then write those files again.
"""

from __future__ import annotations

from enum import StrEnum
from string import Template

from gadei_ps.errors import JobStopped

NAME = "gadei-ps@.service"
END_NAME = "gadei-ps-end@.service"
LEARNER_NAME = "gadei-ps-learner@.service"
USERS = "sysusers.d/gadei-ps.conf"
DIRECTORIES = "tmpfiles.d/gadei-ps.conf"
SERVICE_USER = "gadei-ps"
PROGRAM = "gadei-ps"  # for packages: systemd looks in /usr/local/bin, then in /usr/bin


class Scope(StrEnum):
    """The service manager that runs the job."""

    SYSTEM = "system"
    USER = "user"


TEMPLATE = """\
# A gadei-ps job for each instance: gadei-ps@demo.service serves the job demo of the file
# $jobs/demo.toml. The name of a job is that of its file: leave `name` out of the file.
# Letters, digits, '-' and '_' stand for themselves in an instance's name, so that no job's name
# needs systemd-escape; %i is used everywhere, because %I would read '-' as '/'.
#
# As `gadei-ps install-unit --$scope` writes it. Put your own changes into a drop-in:
# `systemctl$flag edit gadei-ps@` for all jobs, `systemctl$flag edit gadei-ps@demo` for one.

[Unit]
Description=gadei-ps job %i
Documentation=man:gadei-ps(1) man:gadei-ps-serve(1)
# Creates the device files of GPUs; the processes of this unit have no right to do that.
After=nvidia-persistenced.service
# Ends what is left of the job when this unit is inactive, and keeps its /tmp until then. A stop of
# that unit stops this one first.
Requires=gadei-ps-end@%i.service
After=gadei-ps-end@%i.service
JoinsNamespaceOf=gadei-ps-end@%i.service
StartLimitIntervalSec=120
StartLimitBurst=10
# With the default dependencies, $target would wait until learners can attach. The lines
# below are the defaults without that one.
$base

[Service]
# Ready when learners can attach. The first start of an installation compiles for half a minute or
# longer; while it makes progress, it asks systemd for more time than this.
Type=notify
NotifyAccess=main
TimeoutStartSec=210
WatchdogSec=30
# Messages then advise commands that fit a unit, and the file for learners' units is looked after.
Environment=GADEI_PS_UNIT=%n
ExecStart=$program serve --json-log --name %i %E/gadei-ps/%i.toml
# What may change while the job runs: the rate, times of checkpoints, limits.
ExecReload=$program reload --name %i %E/gadei-ps/%i.toml

# A stop lets learners finish, applies what they have published, and writes a checkpoint. While it
# makes progress, it asks systemd for more time than this.
TimeoutStopSec=90
SuccessExitStatus=143
Restart=on-failure
RestartSec=500ms
# Exit code 2 is a mistake in the job file or in the directory of its checkpoints, or memory that
# was made with another file or by another build of gadei-ps: another start would fail as well. 3 is
# a stop without its last checkpoint: another start would undo the stop. gadei-ps-end@.service tries
# to save the job once more.
RestartPreventExitStatus=2 3

# Signals go to the watchdog only. It ends the servers and the learners that it has started. If it
# dies itself, they continue, and the next start adopts them with all their work. systemd then
# reports left-over processes, which is intended.
KillMode=process
OOMPolicy=continue

$limits

$places

$hardening

[Install]
WantedBy=$target
"""

END_TEMPLATE = """\
# Ends what gadei-ps@%i.service leaves if its watchdog is dead: servers, learners, and gradients
# that no checkpoint has. While systemd starts the watchdog again, they go on and this unit does
# nothing. When that unit is inactive, because it was stopped meanwhile or its starts have failed,
# systemd stops this one: all that was published is applied, and the last checkpoint is made.
#
# As `gadei-ps install-unit --$scope` writes it. It is started and stopped with the other unit.

[Unit]
Description=end of gadei-ps job %i
Documentation=man:gadei-ps(1) man:gadei-ps-serve(1)
StopWhenUnneeded=yes

[Service]
Type=oneshot
RemainAfterExit=yes
Environment=GADEI_PS_UNIT=%n
# The file is for gadei-ps-learner@%i.service. While the job runs, its watchdog looks after it.
ExecStart=-/bin/touch %t/gadei-ps/%i.wanted
ExecStop=-/bin/rm -f %t/gadei-ps/%i.wanted
ExecStop=$program serve --finish --json-log --name %i %E/gadei-ps/%i.toml
# Once more if it was killed itself. If that was in vain, or if it has failed: the servers are ended
# without a checkpoint, and the memory stays.
ExecStopPost=/bin/sh -c 'case $$$$SERVICE_RESULT in success) exit;; \
signal|core-dump|oom-kill) "$$$$@" && exit;; esac; \
exec "$$$$@" --keep-memory' end $program serve --finish --json-log --name %i %E/gadei-ps/%i.toml
# While it makes progress, it asks systemd for more time than this.
NotifyAccess=exec
TimeoutStopSec=210

$limits

$places

$hardening
"""

LEARNER_TEMPLATE = """\
# A learner of the job demo for the instance gadei-ps-learner@demo.service. If it is enabled
# (`systemctl$flag enable gadei-ps-learner@demo`), each start of the job starts it. It continues
# while the job's watchdog is replaced, is started again after a restart of the job, and ends with
# the job. If it has finished (exit code 0), it stays so until it is started by hand, or the job is
# stopped and started. The file $jobs/demo.learner says what it runs, and how often;
# this program needs no right to write to that file:
#
#   PROGRAM=/srv/demo/venv/bin/python /srv/demo/train.py
#   LEARNERS=2
#
# As `gadei-ps install-unit --$scope` writes it. Put your own changes into a drop-in:
# `systemctl$flag edit gadei-ps-learner@demo`.

[Unit]
Description=learner of gadei-ps job %i
Documentation=man:gadei-ps(1) man:gadei-ps-run(1)
# The job tells its learners when it ends, so nothing else stops this unit. Wants= would start the
# job again when a learner is started again during its stop. With BindsTo=, Requires= or PartOf=,
# systemd would end learners whenever the watchdog dies, and they can continue. With
# StopPropagatedFrom= on gadei-ps-end@%i.service, a learner that waits to be started again would
# prevent that unit from being stopped.
After=gadei-ps@%i.service
# While gadei-ps-end@%i.service is active, which is as long as the job is wanted.
ConditionPathExists=%t/gadei-ps/%i.wanted
StartLimitIntervalSec=120
StartLimitBurst=10
$base

[Service]
Type=exec
Environment=GADEI_PS_UNIT=%n
Environment=LEARNERS=1
# If it is not there, or wrong, the program's message says so.
EnvironmentFile=-%E/gadei-ps/%i.learner
Environment=GADEI_PS_LEARNER_FILE=%E/gadei-ps/%i.learner
# A path instead of the job's name: learners join the job, and start none if it is not there.
ExecStart=$program run %t/gadei-ps/%i.sock --learners $${LEARNERS} --restart 100 -- $$PROGRAM
KillMode=mixed
# Longer than the program has to end, and what it has pushed to be applied.
TimeoutStopSec=60
Restart=on-failure
RestartSec=2
# Exit code $stopped: the job was stopped. If it was a restart, learners continue after it.
SuccessExitStatus=143 $stopped
RestartForceExitStatus=$stopped
# Exit code 2 is a mistake in the command.
RestartPreventExitStatus=2

$limits

$learner_places

$learner_hardening

[Install]
# Not of gadei-ps@%i.service: whenever its watchdog is replaced, systemd would also start learners
# that have finished.
WantedBy=gadei-ps-end@%i.service
"""

USERS_TEXT = """\
# The user of gadei-ps's jobs, for systemd-sysusers; as `gadei-ps install-unit --system` writes it.
u gadei-ps - "gadei-ps jobs" /var/lib/gadei-ps
"""

DIRECTORIES_TEXT = """\
# Directories of gadei-ps's jobs, for systemd-tmpfiles; as `gadei-ps install-unit --system` writes
# it. Units make them as well; here they are made before the first start, for commands by hand.
d /etc/gadei-ps 0755 root root -
d /run/gadei-ps 0700 $user $group -
d /var/lib/gadei-ps 0700 $user $group -
d /var/cache/gadei-ps 0700 $user $group -
# Sockets and locks of users without a directory in /run/user. They must not be cleaned up.
x /tmp/gadei-ps-*
"""

JOB_FILE = """\
# A job of gadei-ps, named as this file. The first learner brings the model, unless [[tensors]] or
# `weights` name one here.

[optimizer]
kind = "sgd"
lr = 0.01

# Checkpoints lie in $state/ followed by the job's name.
[checkpoint]
every_s = 300
keep = 3
on_stop = true
"""

# systemd's default dependencies, except that the target does not wait for the unit.
BASE = """\
DefaultDependencies=no
{}
Conflicts=shutdown.target
Before=shutdown.target"""
BASE_OF = {
    Scope.SYSTEM: "Requires=sysinit.target\nAfter=sysinit.target basic.target",
    Scope.USER: "Requires=basic.target\nAfter=basic.target",
}

LIMITS = """\
# Enough for the threads, files and sockets of 256 learners, and for segments pinned for GPUs.
TasksMax=32768
LimitNOFILE=65536
LimitMEMLOCK=infinity"""

SYSTEM_PLACES = """\
# Learners must run as this user or as root. To see a job's status: `sudo -u $user env
# GADEI_PS_RUNTIME_DIR=/run/gadei-ps gadei-ps status demo`. logind does not remove the shared
# memory of a system user.
User=$user
UMask=0077
# Job files.
ConfigurationDirectory=gadei-ps
# All jobs share the directories, so the end of one must not remove them.
RuntimeDirectory=gadei-ps
RuntimeDirectoryMode=0700
RuntimeDirectoryPreserve=yes
Environment=GADEI_PS_RUNTIME_DIR=%t/gadei-ps
# Checkpoints.
StateDirectory=gadei-ps
StateDirectoryMode=0700
WorkingDirectory=%S/gadei-ps
Environment=GADEI_PS_STATE_DIR=%S/gadei-ps
# Compiled kernels, in the directory gadei-ps below this one.
CacheDirectory=gadei-ps
CacheDirectoryMode=0700
Environment=NUMBA_CACHE_DIR=%C"""

SYSTEM_LEARNER_PLACES = """\
# The user of the job, or root (in a drop-in: User=root and CapabilityBoundingSet=CAP_DAC_OVERRIDE).
# The directories are the job's, which makes them; StateDirectory= and the like would give them to
# the user of this unit.
User=$user
UMask=0077
Environment=GADEI_PS_RUNTIME_DIR=%t/gadei-ps
WorkingDirectory=%S/gadei-ps
Environment=GADEI_PS_STATE_DIR=%S/gadei-ps
Environment=NUMBA_CACHE_DIR=%C
ReadWritePaths=-%t/gadei-ps -%S/gadei-ps -%C/gadei-ps"""

USER_PLACES = """\
# Job files.
ConfigurationDirectory=gadei-ps
WorkingDirectory=%h
# The same runtime directory as in a shell, so that commands find the job. Checkpoints and compiled
# kernels need no setting: they lie where commands look for them.
RuntimeDirectory=gadei-ps
RuntimeDirectoryMode=0700
RuntimeDirectoryPreserve=yes
Environment=GADEI_PS_RUNTIME_DIR=%t/gadei-ps"""

# These settings need no privilege: seccomp and prctl.
COMMON_HARDENING = """\
NoNewPrivileges=yes
LockPersonality=yes
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM"""

# Of the watchdog's units and of the learner's.
SYSTEM_PROTECTION = f"""\
RemoveIPC=no
PrivateIPC=no
PrivateDevices=no
DevicePolicy=closed
DeviceAllow=char-* rw
ProtectClock=yes
PrivateTmp=yes
PrivateMounts=yes
ProtectSystem=strict
ProtectHome=read-only
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
CapabilityBoundingSet=
AmbientCapabilities=
{COMMON_HARDENING}"""

SYSTEM_HARDENING = f"""\
# Servers and learners of the job file inherit all of this. `systemd-analyze security` gives
# EXPOSURE, because these stay as they are:
#   MemoryDenyWriteExecute  Numba compiles the kernels when it loads them.
#   PrivateDevices          would hide the GPUs.
#   DeviceAllow             GPUs of all kinds are character devices. Disks are refused.
#   PrivateIPC, PrivateUsers  learners outside of this unit attach: they need the segments, and the
#                           watchdog must know whose they are.
#   ProtectProc             would hide learners that run as root from the watchdog.
#   ProcSubset              the watchdog reads /proc/meminfo before it makes memory.
#   RemoveIPC               would remove the segments of servers that still run.
#   SystemCallFilter        without @resources there are no bound shards (sched_setaffinity), and
#                           CUDA cannot place memory (mbind).
#   RestrictAddressFamilies AF_UNIX is how learners reach the watchdog.
#   ProtectHome             programs and data of learners may lie there.
#   IPAddressDeny           with a network of its own there is nothing to deny.
#   RootDirectory           the installation lies in the machine's own file system.
# /dev/shm stays writable under ProtectSystem. If a job's learners write to other directories than
# those above, name these in a drop-in: ReadWritePaths=/srv/models. If learners of the job file need
# the network: PrivateNetwork=no and RestrictAddressFamilies=AF_INET AF_INET6, there as well as in
# a drop-in of gadei-ps-end@.service. Learners of gadei-ps-learner@.service have it.
PrivateNetwork=yes
RestrictAddressFamilies=AF_UNIX
{SYSTEM_PROTECTION}
SystemCallFilter=~@privileged"""

SYSTEM_LEARNER_HARDENING = f"""\
# `systemd-analyze security` gives EXPOSURE, because these stay as they are:
#   PrivateNetwork, IPAddressDeny  your program may need the network.
#   RestrictAddressFamilies the same; AF_UNIX is how learners reach the watchdog.
#   PrivateDevices          would hide the GPUs.
#   DeviceAllow             GPUs of all kinds are character devices. Disks are refused.
#   PrivateUsers            the watchdog could not look at its learners (/proc/PID/ns).
#   PrivateIPC              learners need the job's segments.
#   RemoveIPC               would remove these.
#   MemoryDenyWriteExecute  PyTorch, CUDA and Numba compile while they run.
#   ProcSubset              PyTorch reads /proc/cpuinfo, and CUDA /proc/driver.
#   ProtectHome             your program and its data may lie there.
#   RootDirectory           the installation lies in the machine's own file system.
# In a drop-in, name directories that your program writes to: ReadWritePaths=/srv/models. Some
# programs need more there:
#   RestrictAddressFamilies=AF_NETLINK  to list network interfaces (getifaddrs, torch.distributed).
#   SystemCallFilter=@resources  to bind threads to cores (OMP_PROC_BIND, sched_setaffinity), place
#                           memory on NUMA nodes, or change priorities. With it, a learner also
#                           moves away from the core of a shard: pushes of small models return
#                           earlier. CPUAffinity= and NUMAPolicy= do not need it.
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6
ProtectProc=invisible
{SYSTEM_PROTECTION}
SystemCallFilter=~@privileged @resources"""

USER_HARDENING = f"""\
# Only settings that need no privilege. File system protection would put the job into a user
# namespace of its own, where it cannot watch learners outside. Do not set MemoryDenyWriteExecute:
# Numba compiles the kernels when it loads them.
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6
{COMMON_HARDENING}"""

USER_LEARNER_HARDENING = """\
# Nothing else is restricted: the program is your own.
NoNewPrivileges=yes"""

# What `systemd-analyze security` of systemd 252 gives for the units of the system.
EXPOSURE = {NAME: "1.1", END_NAME: "1.1", LEARNER_NAME: "1.5"}


def texts(
    scope: Scope, command: str, user: str = SERVICE_USER, group: str = SERVICE_USER
) -> dict[str, str]:
    """What is installed for this scope, by name.

    A name with a slash is relative to /etc or to lib of a package; the others are units. command:
    the beginning of a command line that runs gadei-ps, quoted for systemd. group: the user's.
    """
    system = scope == Scope.SYSTEM
    given = {
        "scope": scope.value,
        "flag": "" if system else " --user",
        "jobs": "/etc/gadei-ps" if system else "~/.config/gadei-ps",
        "program": command,
        "base": BASE.format(BASE_OF[scope]),
        "limits": LIMITS,
        "places": Template(SYSTEM_PLACES if system else USER_PLACES).substitute(user=user),
        "learner_places": Template(SYSTEM_LEARNER_PLACES if system else USER_PLACES).substitute(
            user=user
        ),
        "hardening": SYSTEM_HARDENING if system else USER_HARDENING,
        "learner_hardening": SYSTEM_LEARNER_HARDENING if system else USER_LEARNER_HARDENING,
        "target": "multi-user.target" if system else "default.target",
        "stopped": str(JobStopped.exit_code),
    }
    made = {NAME: TEMPLATE, END_NAME: END_TEMPLATE, LEARNER_NAME: LEARNER_TEMPLATE}
    found = {}
    for name, one in made.items():
        text = Template(one).substitute(given)
        found[name] = text.replace("EXPOSURE", EXPOSURE[name])
    if system:
        found[DIRECTORIES] = Template(DIRECTORIES_TEXT).substitute(user=user, group=group)
        if user == SERVICE_USER:
            found[USERS] = USERS_TEXT
    return found


def packaged() -> dict[str, str]:
    """The files in systemd/ of the sources, by their paths there. The wheel has them in lib/."""
    found = {}
    for scope in Scope:
        for name, text in texts(scope, PROGRAM).items():
            found[name if "/" in name else f"{scope.value}/{name}"] = text
    return found


def job_file(scope: Scope) -> str:
    """A job file to begin with. It has checkpoints."""
    state = "/var/lib/gadei-ps" if scope == Scope.SYSTEM else "~/.local/state/gadei-ps"
    return Template(JOB_FILE).substitute(state=state)
