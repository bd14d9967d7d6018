"""A private Docker daemon that a test may stop."""

from __future__ import annotations

import shutil
import signal
import subprocess
from contextlib import closing, suppress
from pathlib import Path

import docker
import psutil

from fumehood.docker.api import DockerError, open_docker
from support.wait import wait_until

START_DEADLINE_S = 60.0
UNMOUNT = ["umount", "--lazy"]


class OwnDocker:
    """Needs root. Keeps all data in one directory and has no network."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"unix://{self._directory}/docker.sock"

    def __enter__(self) -> OwnDocker:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
        self._kill_below()  # what was being started when it was killed
        mounts = Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
        for line in reversed(mounts):
            target = line.split()[1]
            if target.startswith(f"{self._directory}/"):
                subprocess.run([*UNMOUNT, target], check=False, timeout=120)
        shutil.rmtree(self._directory, ignore_errors=True)

    def start(self) -> None:
        """Start the daemon and wait until it answers."""
        at = self._directory
        with (at / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    # In a network of its own: without a bridge of its own it removes the host's.
                    "unshare", "--net", "dockerd", f"--data-root={at}/data", f"--exec-root={at}/exec",
                    f"--pidfile={at}/pid", f"--host={self.address}", "--bridge=none",
                    "--iptables=false", "--ip-masq=false",
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        wait_until(self._answers, START_DEADLINE_S)

    def stop(self) -> None:
        """Stop the daemon as an operator would; its containers end as well."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=120)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=120)

    def kill(self) -> None:
        """Kill the daemon and everything below it, as the death of the host does."""
        process, self._process = self._process, None
        process.kill()
        process.wait(timeout=120)
        self._kill_below()

    def _kill_below(self) -> None:
        below = [
            one
            for one in psutil.process_iter(["cmdline"])
            if any(str(self._directory) in word for word in one.info["cmdline"] or ())
            and "containerd" in one.info["cmdline"][0]
        ]
        below += [child for one in below for child in one.children(recursive=True)]
        for one in below:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(below, timeout=120)
        for left in ("pid", "exec/containerd/containerd.pid"):
            (self._directory / left).unlink(missing_ok=True)

    def copy_image(self, image_id: str, name: str = "python") -> None:
        """Copy an image from the host's Docker, tagged as by a build."""
        with (
            closing(open_docker(timeout_s=120)) as source,
            closing(self.client()) as target,
        ):
            archive = b"".join(source.get_image(image_id))
            for _ in target.load_image(archive):
                pass
            target.tag(image_id, f"fumehood/{name}", "latest")

    def containers(self) -> list[str]:
        """All of its containers, running or not."""
        with closing(self.client()) as client:
            return [one["Id"] for one in client.containers(all=True)]

    def client(self) -> docker.APIClient:
        """A Docker client; the caller closes it."""
        return docker.APIClient(base_url=self.address, version="auto", timeout=120)

    def _answers(self) -> bool:
        assert self._process.poll() is None, (self._directory / "log").read_text()[-2000:]
        environment = {"DOCKER_HOST": self.address}
        with suppress(DockerError), closing(open_docker(environment, timeout_s=5)):
            return True
        return False
