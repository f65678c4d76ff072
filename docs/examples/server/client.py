"""A client of the server, and a demonstration: some requests, then a killed worker.

python client.py
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

SERVER = Path(__file__).with_name("server.py")


class Client:
    """One connection. Requests may overlap; each answer finds its own."""

    def __init__(self, lines: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        self._out = out
        self._asked: dict[int, asyncio.Future[dict]] = {}
        self._listening = asyncio.create_task(self._listen(lines))

    @classmethod
    async def connect(cls, port: int) -> "Client":
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def ask(self, text: str) -> dict[str, int]:
        """How often each letter is in a text. ``RuntimeError``: the server could not do it."""
        if self._listening.done():
            raise RuntimeError("the server closed the connection")
        number = len(self._asked) + 1
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        with contextlib.suppress(ConnectionError):  # _listen sees it too
            self._out.write(json.dumps({"id": number, "text": text}).encode() + b"\n")
            await self._out.drain()  # waits while the server reads no more from us
        said = await answer
        if "error" in said:
            raise RuntimeError(said["error"])
        return said["letters"]

    async def _listen(self, lines: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            async for line in lines:
                said = json.loads(line)
                self._asked[said["id"]].set_result(said)
        for answer in self._asked.values():
            if not answer.done():
                answer.set_result({"error": "the server closed the connection"})

    async def close(self) -> None:
        self._out.close()
        with contextlib.suppress(ConnectionError):
            await self._out.wait_closed()
        await self._listening


@contextlib.asynccontextmanager
async def running(*arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, int, dict[str, int]]]:
    """A server of one's own: its process, its port, its workers' pids."""
    server = await asyncio.create_subprocess_exec(
        sys.executable, str(SERVER), *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        _, _, port, *workers = (await server.stdout.readline()).decode().split()
        yield server, int(port), {name: int(pid) for name, pid in (worker.split("=") for worker in workers)}
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.terminate()
        sys.stdout.write((await server.stdout.read()).decode())
        await server.wait()


async def main() -> None:
    async with running(*sys.argv[1:]) as (_, port, workers):
        clients = [await Client.connect(port) for _ in range(3)]
        answers = await asyncio.gather(*(client.ask("Hello, world" * n) for client in clients for n in range(1, 21)))
        assert all(answer["l"] == 3 * n for answer, n in zip(answers, [*range(1, 21)] * 3, strict=True))
        print(len(answers), "answers, all right")

        os.kill(workers["infer"], signal.SIGSTOP)  # so that the next requests are under way when it dies
        asked = [asyncio.create_task(client.ask("still there?")) for client in clients]
        await asyncio.sleep(0.2)
        os.kill(workers["infer"], signal.SIGKILL)
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            print("an error, at once:", answer)
        for client in clients:
            await client.close()


if __name__ == "__main__":
    asyncio.run(main())
