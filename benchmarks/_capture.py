"""What goes over the wires of a network namespace: every packet of every interface but lo, counted by flow.

    python benchmarks/_capture.py [FOLDER]      until SIGTERM and silence; then one line of JSON with what was seen

A flow is one direction of TCP between two addresses and the port of the one that listens. With a folder, the bytes that
a flow carried are kept there, in the order they were seen. Large segments are seen before they are cut for the wire, so
packets are fewer than on one; the payload is the same. Linux and root only.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import struct
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

_EVERYTHING, _IPV4, _ARP, _TCP = 0x0003, 0x0800, 0x0806, 6
_SOL_PACKET, _STATISTICS, _SO_RCVBUFFORCE = 263, 6, 33
_CLIENTS = 32_768
# from here on the kernel gives ports to those who connect; below are those who listen


@dataclass(slots=True)
class Flow:
    source: str
    destination: str
    port: int
    # of the one that listens
    asks: bool
    # from the one that connects to the one that listens
    packets: int = 0
    payload: int = 0


@dataclass(frozen=True, slots=True)
class Segment:
    source: str
    destination: str
    ports: tuple[int, int]
    payload: memoryview


def parse(packet: memoryview) -> Segment | None:
    """A TCP segment in IPv4; None for anything else."""
    if len(packet) < 20 or packet[0] >> 4 != 4 or packet[9] != _TCP:
        return None
    header, total = 4 * (packet[0] & 15), struct.unpack_from("!H", packet, 2)[0]
    if len(packet) < header + 20:
        return None
    ports = struct.unpack_from("!HH", packet, header)
    start = header + 4 * (packet[header + 12] >> 4)
    # 0 where the segment is larger than the field can say
    payload = packet[start : total or len(packet)]
    return Segment(socket.inet_ntoa(packet[12:16]), socket.inet_ntoa(packet[16:20]), ports, payload)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    flows: dict[tuple[str, str, int, bool], Flow] = {}
    files: dict[tuple[str, str, int, bool], BinaryIO] = {}
    others: dict[str, int] = defaultdict(int)
    ended = False

    def end(*_: object) -> None:
        nonlocal ended
        ended = True

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wire = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(_EVERYTHING))
    wire.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 128 << 20)
    wire.settimeout(0.2)
    buffer = bytearray(1 << 18)
    print(json.dumps({"event": "ready"}), flush=True)
    with contextlib.ExitStack() as stack:
        while True:
            try:
                size, (device, protocol, *_) = wire.recvfrom_into(buffer)
            except TimeoutError:
                if ended:
                    break
                continue
            if device == "lo":
                continue
            segment = parse(memoryview(buffer)[:size]) if protocol == _IPV4 else None
            if segment is None:
                others["ARP" if protocol == _ARP else f"{protocol:#06x}"] += 1
                continue
            asks = segment.ports[1] < _CLIENTS
            key = (segment.source, segment.destination, segment.ports[1 if asks else 0], asks)
            if key not in flows:
                flows[key] = Flow(*key)
                if folder is not None:
                    name = f"{key[0]}-{key[1]}-{key[2]}-{'to' if asks else 'from'}"
                    files[key] = stack.enter_context((folder / name).open("wb"))
            flows[key].packets += 1
            flows[key].payload += len(segment.payload)
            if key in files:
                files[key].write(segment.payload)
    _, lost = struct.unpack("II", wire.getsockopt(_SOL_PACKET, _STATISTICS, 8))
    seen = {"event": "seen", "lost": lost, "others": others, "flows": [asdict(flow) for flow in flows.values()]}
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main()
