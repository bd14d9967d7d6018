"""The image `host`: the programs and libraries of this host, for hosts where no image can be built.

Host side. The image has only a skeleton of its own: empty directories, links, and the few files of
`/etc` that programs need. The launcher mounts the directories `HOST_FOLDERS` of this host into each
sandbox, read-only. Invariant: neither an archive nor a caller can name another directory.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from pathlib import Path

from fumehood.direct.launcher import host_folders
from fumehood.sandbox.container.spec import PROGRAM_USER, WORKSPACE
from fumehood.sandbox.images.recipe import HOST_PYTHON

PYTHON = str(HOST_PYTHON)

_FILES = ("ld.so.cache", "ld.so.conf", "localtime", "mime.types", "os-release", "services")
_FOLDERS = ("alternatives", "fonts", "ld.so.conf.d")
"""What programs need of `/etc`, as far as it exists: files, and folders with files and links."""

_USER = PROGRAM_USER.partition(":")[0]
_OWN = {
    "etc/passwd": f"root:x:0:0::/:/usr/sbin/nologin\nsandbox:x:{_USER}:{_USER}::{WORKSPACE}:"
    "/usr/sbin/nologin\nnobody:x:65534:65534::/:/usr/sbin/nologin\n",
    "etc/group": f"root:x:0:\nsandbox:x:{_USER}:\nnogroup:x:65534:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files myhostname\n",
    "etc/hostname": "sandbox\n",
    # The working directory is root's, and everything in it somebody else's: git would refuse that.
    "etc/gitconfig": "[safe]\n\tdirectory = *\n",
}
"""Files of the skeleton that do not come from this host."""


def write_skeleton(target: Path) -> None:
    """Write the root file system of the image `host` to the tar file `target`."""
    with tarfile.open(target, "w") as archive:
        for folder in ("etc", "opt", "opt/fumehood", "run", "root", "home", "var"):
            _add_folder(archive, folder)
        for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
            path = Path("/", name)
            if path.is_symlink():
                _add_link(archive, name, path)
        for folder in host_folders():
            _add_folder(archive, folder[1:])
        for name in _FILES:
            _add(archive, Path("/etc", name))
        for name in _FOLDERS:
            for path in sorted(Path("/etc", name).rglob("*")):
                _add(archive, path)
        for name, text in _OWN.items():
            _add_file(archive, name, text.encode())
        manifest = f"python3 {'.'.join(map(str, python_version()))}\n"
        _add_file(archive, "opt/fumehood/manifest.txt", manifest.encode())


def _add(archive: tarfile.TarFile, path: Path) -> None:
    """Add a file or link of `/etc`, if everybody may read it and root has written it."""
    name = str(path)[1:]
    if path.is_symlink():
        _add_link(archive, name, path)
    elif path.is_file():
        found = path.stat()
        if found.st_uid == 0 and found.st_mode & 0o004:
            _add_file(archive, name, path.read_bytes())


def _add_folder(archive: tarfile.TarFile, name: str) -> None:
    member = tarfile.TarInfo(name)
    member.type, member.mode = tarfile.DIRTYPE, 0o755
    archive.addfile(member)


def _add_file(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def _add_link(archive: tarfile.TarFile, name: str, path: Path) -> None:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, str(path.readlink())
    archive.addfile(member)


def python_version() -> tuple[int, ...]:
    """Return the version of this host's own Python, or () if there is none."""
    if shutil.which(PYTHON) is None:
        return ()
    words = "import sys; print(*sys.version_info[:3])"
    command = [PYTHON, "-I", "-S", "-c", words]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60)  # noqa: S603
    return tuple(map(int, said.stdout.split()))
