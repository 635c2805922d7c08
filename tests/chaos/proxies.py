"""The proxies in front of the nodes, in a process of their own: their work must not make the caller's loop late.

The process reads a command a line on standard input, as JSON, and answers each with the counts of requests.
"""

import asyncio
import contextlib
import json
import sys

from tests.faults.proxy import Fault, FaultProxy

# Of the client; raw requests of the load go to other paths.
_CLIENT_PATHS = ("/embeddings", "/inference")


class Proxies:
    """All proxies of a run, at these hosts and one port. Use as `async with`."""

    def __init__(self, hosts, port):
        self._hosts = hosts
        self._port = port
        self._turn = asyncio.Lock()
        self._process = None
        self.requests = [0] * len(hosts)

    async def __aenter__(self):
        command = [sys.executable, "-m", "tests.chaos.proxies", str(self._port), *self._hosts]
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        return self

    async def __aexit__(self, *_):
        self._process.stdin.close()
        await self._process.wait()

    async def tell(self, proxy=0, **command):
        """Have one of the proxies do something (`do`), and learn how many requests of the client each one passed on."""
        async with self._turn:
            self._process.stdin.write(json.dumps({"proxy": proxy, **command}).encode() + b"\n")
            answer = await self._process.stdout.readline()
            self.requests = json.loads(answer)

    async def watch(self):
        while True:
            await self.tell(do="count")
            await asyncio.sleep(0.1)


class Proxy:
    """One of them. All methods return when it has been done."""

    def __init__(self, proxies, index, url):
        self._proxies = proxies
        self._index = index
        self.url = url

    @property
    def requests(self):
        """How many requests of the client it passed on, a tenth of a second ago."""
        return self._proxies.requests[self._index]

    async def listen(self, upstream):
        """Take connections for the server at that port of 127.0.0.1."""
        await self._proxies.tell(self._index, do="listen", upstream=upstream)

    async def stop(self):
        await self._proxies.tell(self._index, do="stop")

    async def set(self, **fault):
        """What happens to replies from now on, as in tests.faults.proxy.Fault; nothing: no fault."""
        await self._proxies.tell(self._index, do="fault", fault=fault)


async def serve(port, hosts):
    """Do what standard input says until it ends."""
    proxies = [FaultProxy("http://127.0.0.1:1", listen_on=(host, port)) for host in hosts]
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        command = json.loads(line)
        proxy = proxies[command["proxy"]]
        if command["do"] == "listen":
            proxy.port = command["upstream"]
            if not proxy.listening:
                await proxy.listen()
        elif command["do"] == "stop":
            await proxy.stop()
        elif command["do"] == "fault":
            proxy.fault = Fault(**command["fault"])
        print(json.dumps([sum(proxy.paths[path] for path in _CLIENT_PATHS) for proxy in proxies]), flush=True)
    for proxy in proxies:
        await proxy.stop()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(int(sys.argv[1]), sys.argv[2:]))
