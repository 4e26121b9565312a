"""A sandbox for a command that runs untrusted code: no network, one writable folder, a limit on wall time.

bubblewrap exposes only what the command needs, and root becomes nobody inside. Without it, `unshare` gives non-root
users namespaces in which everything but that folder is read-only; files of the host stay readable. Where neither works
(most containers forbid it), nothing runs unless the caller insists. The limits on processes, memory, CPU time and file
size apply to each piece of untrusted code, so they are set inside, in evals/code/jail.py.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/localtime")
NOBODY = 65534
HOW = (
    "install bubblewrap (Debian: apt-get install bubblewrap) or allow user namespaces; in a container, run it with "
    "the rights to make namespaces (docker run --security-opt seccomp=unconfined); --unsafe-no-sandbox runs the "
    "model's code with all your rights"
)
KINDS = ("bubblewrap", "unshare")


def prefix_of(kind: str, folder: Path, readable: Sequence[Path]) -> list[str]:
    """The command that starts another one in a kind of sandbox; empty for "none"."""
    if kind == "none":
        return []
    if kind == "unshare":  # the namespaces only: the command makes the file system read-only (jail.make_read_only)
        names = ["--user", "--map-current-user", "--keep-caps", "--net", "--mount", "--pid", "--ipc", "--uts"]
        return ["unshare", *names, "--fork", "--kill-child", "--mount-proc"]
    command = ["bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--die-with-parent"]
    command += ["--new-session", "--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--tmpfs", "/dev/shm"]
    command += ["--dir", "/tmp"]
    for path in SYSTEM:
        if os.path.islink(path) and os.path.isdir(path):
            command += ["--symlink", os.readlink(path), path]
        else:
            command += ["--ro-bind-try", path, path]
    for parent in sorted({parent for path in (folder, *readable) for parent in path.parents} - {Path("/")}):
        command += ["--perms", "0755", "--dir", str(parent)]  # else only root may pass
    for readable_path in readable:
        command += ["--ro-bind", str(readable_path), str(readable_path)]
    command += ["--bind", str(folder), str(folder), "--chdir", str(folder)]
    if os.geteuid() == 0:  # another user by its own hand: limits on a user's processes do not hold for root
        return [*command, "--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    return [*command, "--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]


def why_not(kind: str) -> str:
    """What is missing for a kind of sandbox on this machine; empty when it works."""
    command = [*prefix_of(kind, Path("/usr/bin"), []), "true"]
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not installed"
    if kind == "unshare" and os.geteuid() == 0:
        return "unshare alone does not keep root within limits"
    trial = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return f"{' '.join(command)}: {trial.stderr.strip()}" if trial.returncode else ""


def find_sandbox(unsafe: bool = False) -> str:
    """ "bubblewrap" or "unshare", the first that works here; "none" when `unsafe`; else ValueError with the way out."""
    if unsafe:
        return "none"
    reasons = {kind: why_not(kind) for kind in KINDS}
    for kind, reason in reasons.items():
        if not reason:
            return kind
    raise ValueError(f"no sandbox here for the code that a model writes ({'; '.join(reasons.values())}); {HOW}")


def run_sandboxed(
    kind: str,
    command: Sequence[str],
    folder: Path,
    readable: Sequence[Path],
    env: Mapping[str, str],
    log: Path,
    timeout_s: float,
) -> None:
    """Run a command that may write in `folder` only and read `readable`; its output is appended to `log`.

    The environment holds `env` alone. ValueError with the end of the log when it fails or outlives timeout_s.
    """
    if kind == "bubblewrap" and os.geteuid() == 0:
        for path in (folder, *folder.rglob("*")):  # to nobody, whom the command becomes
            os.chown(path, NOBODY, NOBODY)
            path.chmod(0o755 if path.is_dir() else 0o644)  # it is still root, without rights, when it starts
    with open(log, "ab") as output:
        process = subprocess.Popen(
            [*prefix_of(kind, folder, readable), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(env),
            cwd=folder,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a sandbox ends with its first process
            process.wait()
    if status != 0:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        what = f"did not end within {timeout_s:.0f} s" if status is None else f"ended with exit status {status}"
        raise ValueError(f"{' '.join(command)} {what} in the sandbox ({kind}); the end of {log}:\n{end}")
