"""A proxy on localhost that can cut, slow, hold and refuse its streams.

Each stream has its own delays, so a message can overtake messages of other streams. A
stream is cut after a number of bytes, possibly in the middle of a message; then both
ends see a reset.
"""

import asyncio
import socket
import struct
import threading
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from random import Random
from typing import Any

CHUNK_BYTES = 1 << 14
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER with a time of 0.


class Gate:
    """Forwards all streams to one port, with faults. Used only on the event loop."""

    def __init__(self, port: int, rng: Random) -> None:
        self.port = port
        self.rng = rng
        self.seen = 0  # Number of accepted streams.
        self.cut = 0  # Number of cuts, each of which resets all streams.
        self.writers: list[asyncio.StreamWriter] = []
        self.passes = asyncio.Event()
        self.heal()

    def heal(self) -> None:
        """End all faults."""
        self.cuts: list[int] = []  # Bytes on all streams until the next cuts.
        self.delay_s, self.refuses = 0.0, False
        self.passes.set()

    def reset(self) -> None:
        """Reset all streams: both ends get a connection error."""
        for writer in self.writers:
            found = writer.get_extra_info("socket")
            with suppress(OSError):
                found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()
        self.writers.clear()

    async def serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Forward one stream in both directions until it ends."""
        self.seen += 1
        self.writers.append(writer)
        if self.refuses:
            return self.reset()
        try:
            there = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return writer.transport.abort()
        self.writers.append(there[1])
        ways = self._pump(reader, there[1]), self._pump(there[0], writer)
        await asyncio.gather(*ways)
        self.writers = [w for w in self.writers if w not in (writer, there[1])]

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                await self.passes.wait()
                if self.delay_s:
                    await asyncio.sleep(self.rng.uniform(0, self.delay_s))
                if self.cuts and self.cuts[0] < len(data):
                    writer.write(data[: self.cuts.pop(0)])
                    self.cut += 1
                    return self.reset()
                if self.cuts:
                    self.cuts[0] -= len(data)
                writer.write(data)
                await writer.drain()
        writer.close()


class Proxy:
    """Runs gates in front of local ports, on an event loop in a separate thread."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._servers: list[asyncio.Server] = []
        self.gates: list[Gate] = []

    def _wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    def before(self, port: int) -> tuple[int, Gate]:
        """Open a gate that forwards to `port`. Returns the gate's port and the gate."""

        async def opened() -> tuple[int, Gate]:
            gate = Gate(port, Random(self._rng.random()))
            server = await asyncio.start_server(gate.serve, "127.0.0.1", 0)
            self._servers.append(server)
            self.gates.append(gate)
            return server.sockets[0].getsockname()[1], gate

        found: tuple[int, Gate] = self._wait(opened())
        return found

    def do(self, gate: Gate, **changes: Any) -> None:
        """Start faults of a gate: `cuts`, `delay_s`, `refuses` or `holds`."""

        async def done() -> None:
            if changes.pop("holds", False):
                gate.passes.clear()
            for name, value in changes.items():
                setattr(gate, name, value)
            if gate.refuses:
                gate.reset()

        self._wait(done())

    def heal(self, gates: Sequence[Gate]) -> None:
        """End all faults of these gates."""

        async def done() -> None:
            for gate in gates:
                gate.heal()

        self._wait(done())

    def close(self) -> None:
        """Reset all streams and stop the thread."""

        async def done() -> None:
            for gate in self.gates:
                gate.heal()
                gate.reset()
            for server in self._servers:
                server.close()
            await asyncio.sleep(0.05)

        self._wait(done())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
