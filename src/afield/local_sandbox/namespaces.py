"""Linux namespaces of a sandbox: mounts, /proc, and a restricted network.

For each allowed address, a socket listens in the sandbox's network; the supervisor accepts its connections
outside and forwards them. The network has no other interface than loopback.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
from collections.abc import Sequence
from pathlib import Path

from afield.local_sandbox import syscalls
from afield.local_sandbox.bwrap import (
    GROUP,
    HOSTS,
    IMAGE,
    LAYERS,
    LINKED,
    PASSWD,
    SCRATCH,
    STAGE,
    sensitive,
)
from afield.local_sandbox.messages import Address, StartSandbox

USER = 1000
INODES_PER_MB = 128
BACKLOG = 128
# Kernel limits per user. All sandboxes have the same user, so none may use up the total.
TERMINALS = 64
USER_LIMITS = {"max_inotify_instances": 16, "max_inotify_watches": 16_384, "max_user_namespaces": 0}
NO_SUID_NO_DEV = syscalls.NO_SUID | syscalls.NO_DEV
CHANGES = "/.changes"
"""Directory that shows the files a sandbox adds to its layer: those of `/usr` in `usr`, others in `root`."""


def enter() -> None:
    """Create new namespaces of every kind; the next forked process is the init process in them."""
    syscalls.unshare(syscalls.ALL_NEW)
    syscalls.map_ids(USER, USER)


def mount_all(start: StartSandbox, mounted: Sequence[str], hosts: str, *, image: bool) -> None:
    """Mount scratch directories, /dev/pts, /proc and /etc/hosts.

    With `image`, the image's root file system becomes the root; with a layer, the layer over this system.
    """
    limits = start.limits
    syscalls.mount("none", "/", flags=syscalls.REC | syscalls.PRIVATE)
    size = (
        ""
        if limits.disk_mb is None
        else f",size={limits.disk_mb}m,nr_inodes={limits.disk_mb * INODES_PER_MB}"
    )
    syscalls.mount("sandbox", STAGE, "tmpfs", NO_SUID_NO_DEV, f"mode=755{size}")
    root = ""
    if start.layer:
        root = _layered_root(f"{LAYERS}/{start.layer}", mounted, changes=start.changes)
    elif image:
        root = _image_root(mounted)
    else:
        _cover(LAYERS)
    # One tmpfs for all of them, so that disk_mb limits their sum.
    for number, place in enumerate((*SCRATCH, "/dev/shm")):
        if (
            start.layer
            and place in SCRATCH
            and (start.changes or Path(f"{LAYERS}/{start.layer}{place}").exists())
        ):
            continue
        fresh = f"{STAGE}/{number}"
        Path(fresh).mkdir()
        Path(fresh).chmod(0o1777)
        if not image:
            _bind_mounts_below(place, fresh, mounted)
        _mount_point(f"{root}{place}")
        syscalls.bind(fresh, f"{root}{place}")
    syscalls.mount(
        "devpts",
        f"{root}/dev/pts",
        "devpts",
        syscalls.NO_SUID | syscalls.NO_EXEC,
        f"newinstance,ptmxmode=0666,max={TERMINALS}",
    )
    _mount_proc(f"{root}/proc")
    Path(f"{STAGE}/hosts").write_text(hosts)
    syscalls.bind(f"{STAGE}/hosts", f"{root}/etc/hosts", read_only=True)
    if root:
        syscalls.change_root(root)
    else:
        syscalls.call("umount2", STAGE.encode(), syscalls.DETACH)
    socket.sethostname("sandbox")


def listen_for(allow: Sequence[Address]) -> tuple[str, list[socket.socket]]:
    """Content of /etc/hosts, and a listening socket for each allowed address, in order."""
    syscalls.loopback_up()
    hosts, listening = HOSTS, []
    for number, (host, port) in enumerate(allow):
        address = _address(host, number)
        if address != host:
            hosts += f"{address} {host}\n"
        syscalls.add_address(address, number)
        listening.append(listener(address, port))
    return hosts, listening


def listener(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    fresh = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    fresh.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    fresh.bind((address, port))
    fresh.listen(BACKLOG)
    return fresh


def keep_only(kept: set[int]) -> None:
    """Replace all file descriptors above stderr except `kept`.

    Regular files are reopened read-only, others point to /dev/null. They are not closed, because objects that
    own them would later close unrelated descriptors with the same number.
    """
    devnull = os.open(os.devnull, os.O_RDWR)
    for entry in list(Path("/proc/self/fd").iterdir()):
        fd = int(entry.name)
        if fd <= 2 or fd == devnull or fd in kept:
            continue
        try:
            mode = os.fstat(fd).st_mode
            reopened = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY) if stat.S_ISREG(mode) else devnull
        except OSError:
            # The descriptor of the listing itself, which is closed by now, or one that cannot be reopened.
            continue
        os.dup2(reopened, fd, inheritable=False)
        if reopened != devnull:
            os.close(reopened)
    os.close(devnull)


def _address(host: str, number: int) -> str:
    if host == "localhost":
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return f"127.66.{number // 250}.{number % 250 + 1}"


def _bind_mounts_below(place: str, fresh: str, mounted: Sequence[str]) -> None:
    """Bind mounts below a scratch directory into its fresh replacement."""
    for path in mounted:
        if not Path(path).is_relative_to(place):
            continue
        inner = Path(fresh) / Path(path).relative_to(place)
        inner.parent.mkdir(parents=True, exist_ok=True)
        if Path(path).is_dir():
            inner.mkdir(exist_ok=True)
        else:
            inner.touch()
        syscalls.bind(path, str(inner))


def _mount_proc(place: str) -> None:
    syscalls.mount("proc", place, "proc", NO_SUID_NO_DEV | syscalls.NO_EXEC)
    for name, most in USER_LIMITS.items():
        with contextlib.suppress(FileNotFoundError):
            Path(place, "sys/user", name).write_text(str(most))
    covered, unreadable = sensitive(Path(place))
    for name in covered:
        syscalls.mount(f"{place}/{name}", f"{place}/{name}", flags=syscalls.BIND)
        flags = syscalls.BIND | syscalls.REMOUNT | syscalls.READ_ONLY | NO_SUID_NO_DEV | syscalls.NO_EXEC
        syscalls.mount("none", f"{place}/{name}", flags=flags)
    for name in unreadable:
        syscalls.mount("/dev/null", f"{place}/{name}", flags=syscalls.BIND)


def _image_root(mounted: Sequence[str]) -> str:
    """Root file system from the image: a writable overlay with /dev, basic files in /etc, and the mounts."""
    root, upper, work = f"{STAGE}/root", f"{STAGE}/upper", f"{STAGE}/layer"
    for path in (root, upper, work):
        Path(path).mkdir()
    _overlay(root, IMAGE, upper, work)
    for name in ("dev", "proc", "etc"):
        _mount_point(f"{root}/{name}")
    syscalls.bind("/dev", f"{root}/dev")
    for name, content in (("passwd", PASSWD), ("group", GROUP), ("hosts", "")):
        if not Path(root, "etc", name).exists():
            Path(f"{root}/etc/{name}").write_text(content)
    for path in mounted:
        if Path(path).is_dir():
            _mount_point(f"{root}{path}")
        else:
            _mount_point(f"{root}{Path(path).parent}")
            Path(f"{root}{path}").touch()
        syscalls.bind(path, f"{root}{path}")
    return root


def _layered_root(layer: str, mounted: Sequence[str], *, changes: bool) -> str:
    """Root file system: this system, the layer above it, and a writable layer on top."""
    root, base, upper, usr = f"{STAGE}/root", f"{STAGE}/base", f"{STAGE}/upper", f"{STAGE}/usr"
    for path in (root, base, upper, usr, f"{STAGE}/layer", f"{STAGE}/layer-usr"):
        Path(path).mkdir()
    bound = [str(path) for path in Path("/etc").iterdir() if not os.path.lexists(f"{layer}{path}")]
    bound += ["/dev", *(place for place in LINKED if Path(place).is_dir() and not Path(place).is_symlink())]
    bound += mounted
    # Mount points are in a layer below: the upper one has only what the sandbox writes.
    change_points = (f"{CHANGES}/root", f"{CHANGES}/usr") if changes else ()
    for path in (*SCRATCH, "/proc", "/usr", *change_points):
        _mount_point(f"{base}{path}")
    for path in SCRATCH:
        Path(f"{base}{path}").chmod(0o1777)
    for path in bound:
        if Path(path).is_dir():
            _mount_point(f"{base}{path}")
        else:
            _mount_point(f"{base}{Path(path).parent}")
            Path(f"{base}{path}").touch()
    for path in map(Path, LINKED):
        if path.is_symlink():
            Path(f"{base}{path}").symlink_to(path.readlink())
    _overlay(root, f"{layer}:{base}", upper, f"{STAGE}/layer")
    lower = f"{layer}/usr:/usr" if Path(f"{layer}/usr").is_dir() else "/usr"
    _overlay(f"{root}/usr", lower, usr, f"{STAGE}/layer-usr")
    for path in bound:
        syscalls.bind(path, f"{root}{path}")
    for path, source in zip(change_points, (upper, usr), strict=False):
        syscalls.bind(source, f"{root}{path}", read_only=True)
    return root


def _overlay(place: str, lower: str, upper: str, work: str) -> None:
    options = f"lowerdir={lower},upperdir={upper},workdir={work},userxattr"
    syscalls.mount("overlay", place, "overlay", NO_SUID_NO_DEV, options)


def _cover(place: str) -> None:
    syscalls.mount("none", place, "tmpfs", syscalls.READ_ONLY | NO_SUID_NO_DEV, "size=4k")


def _mount_point(path: str) -> None:
    # Replace symbolic links: a link in an image could lead out of it.
    place = Path(path)
    if place.is_symlink():
        place.unlink()
    place.mkdir(parents=True, exist_ok=True)
