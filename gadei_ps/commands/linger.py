"""Whether a unit's jobs and their memory outlive the logins of their user."""

from __future__ import annotations

import pwd
from pathlib import Path

from gadei_ps.commands.doctor.memory import lingers, removes_ipc, system_uid_max


def warning(user: str, *, own_manager: bool, root: Path = Path("/")) -> str | None:
    """What must be done before a job of this user is safe, in one line; None if nothing must.

    own_manager: the unit belongs to the user's own manager, which ends with the last session.
    root: of the system that is looked at.
    """
    if not (root / "run/systemd/seats").is_dir():  # there is no logind
        return None
    try:
        uid = pwd.getpwnam(user).pw_uid
    except KeyError:  # it will be made as a system user
        return None
    if lingers(root, user):
        return None
    linger = f"loginctl enable-linger {user}"
    if own_manager:
        return f"{user} does not linger: jobs end with the last session of {user}; run {linger}"
    if uid <= system_uid_max(root) or not removes_ipc(root):
        return None
    return (
        f"logind removes the memory of running jobs when the last session of {user} ends "
        f"(RemoveIPC): run {linger}, or set RemoveIPC=no in /etc/systemd/logind.conf and restart "
        "systemd-logind, or leave out --run-as"
    )
