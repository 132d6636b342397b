"""Two network namespaces, as two machines, joined by a link with latency that can be cut.

The link is a pair of TUN devices and a process that carries packets between them, each after a delay: not every kernel
has ``netem``.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import shutil
import struct
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runs import kill, start

DEVICE = "dwindle0"
ADDRESSES = ("10.213.77.1", "10.213.77.2")
_DELAY_S = 0.002
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000


class Machines:
    """Numbers 0 and 1; their link is up."""

    def __init__(self) -> None:
        self._names = [f"dwindle-{os.getpid()}-{number}" for number in (0, 1)]

    def enter(self, number: int) -> None:
        """Put this process onto a machine; gloo and the store then use the link."""
        with Path("/var/run/netns", self._names[number]).open() as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")

    def set_link(self, state: str) -> None:
        """``up`` or ``down``, at both ends."""
        for name in self._names:
            _ip("-n", name, "link", "set", DEVICE, state)

    def received_bytes(self, number: int) -> int:
        """What has arrived at a machine over the link."""
        shown = _ip("netns", "exec", self._names[number], "cat", f"/sys/class/net/{DEVICE}/statistics/rx_bytes")
        return int(shown)

    @contextmanager
    def linked(self) -> Iterator[Machines]:
        try:
            for name in self._names:
                _ip("netns", "add", name)
            ready, told = os.pipe()
            carrier = start(lambda: self._carry(told))
            try:
                os.read(ready, 1)  # both devices exist
                for name, own, other in zip(self._names, ADDRESSES, ADDRESSES[::-1], strict=True):
                    _ip("-n", name, "address", "add", own, "peer", other, "dev", DEVICE)
                    _ip("-n", name, "link", "set", "lo", "up")
                self.set_link("up")
                yield self
            finally:
                kill(carrier)
        finally:
            for name in self._names:
                subprocess.run(["ip", "netns", "delete", name], check=False, stderr=subprocess.DEVNULL)

    def _carry(self, told: int) -> None:
        ends = []
        for number in (0, 1):
            self.enter(number)
            ends.append(os.open("/dev/net/tun", os.O_RDWR))
            fcntl.ioctl(ends[-1], _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
        os.write(told, b".")
        under_way: deque[tuple[float, int, bytes]] = deque()
        while True:
            wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
            for end in select.select(ends, [], [], wait)[0]:
                under_way.append((time.monotonic() + _DELAY_S, ends[end == ends[0]], os.read(end, 65536)))
            while under_way and under_way[0][0] <= time.monotonic():
                _, end, packet = under_way.popleft()
                try:
                    os.write(end, packet)
                except OSError:  # the link is cut: the packet is lost
                    continue


@contextmanager
def two_machines() -> Iterator[Machines]:
    """Skips the test where this user or this kernel cannot make them."""
    if os.geteuid() or shutil.which("ip") is None or not Path("/dev/net/tun").exists():
        pytest.skip("needs root, the ip command and /dev/net/tun")
    probe = f"dwindle-{os.getpid()}-probe"
    if subprocess.run(["ip", "netns", "add", probe], check=False, capture_output=True).returncode:
        pytest.skip("network namespaces cannot be made here")
    _ip("netns", "delete", probe)
    with Machines().linked() as machines:
        yield machines


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
