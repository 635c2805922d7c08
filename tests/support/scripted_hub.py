"""A model hub on loopback that speaks as much of the hub's protocol as huggingface_hub's client asks for.

Faults are scripted per file: cut connections, a stall, other bytes than declared.
"""

import asyncio
import hashlib
import json
import threading
from dataclasses import dataclass, field

from aiohttp import web

COMMIT = "a" * 40


def git_sha1(content):
    """What git, and so the hub, calls the hash of a small file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@dataclass
class Repository:
    """One repository: `files` by path. Files that end in .bin, .gguf or .safetensors are large (LFS)."""

    files: dict[str, bytes]
    gated: bool = False
    card: dict = field(default_factory=dict)
    gguf: dict | None = None
    declared: dict[str, str] = field(default_factory=dict)

    def description(self, repo):
        siblings = []
        for path, content in self.files.items():
            entry = {"rfilename": path, "size": len(content), "blobId": self.declared.get(path, git_sha1(content))}
            if path.endswith((".bin", ".gguf", ".safetensors")):
                sha256 = self.declared.get(path, hashlib.sha256(content).hexdigest())
                entry["lfs"] = {"size": len(content), "sha256": sha256, "pointerSize": 100}
            siblings.append(entry)
        config = json.loads(self.files.get("config.json", b"{}"))
        summary = {name: config[name] for name in ("architectures", "model_type") if name in config}
        described = {"id": repo, "sha": COMMIT, "siblings": siblings, "cardData": self.card, "gguf": self.gguf}
        return described | {"config": summary}


@dataclass
class ScriptedHub:
    """The hub; `cuts` maps a path to the number of bytes after which each of its next answers breaks off.

    `asked` lists (method, path, Range header) of every request. `token` is the only valid token. A path in `stalls`
    sends half of its file and then nothing; `stalled` is set when it does.
    """

    repositories: dict[str, Repository] = field(default_factory=dict)
    token: str = "hf_right"
    members: set[str] = field(default_factory=set)
    cuts: dict[str, list[int]] = field(default_factory=dict)
    statuses: dict[str, list[int]] = field(default_factory=dict)
    stalls: set[str] = field(default_factory=set)
    ignore_ranges: bool = False
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    stalled: threading.Event = field(default_factory=threading.Event)
    endpoint: str = ""

    def large_downloads(self):
        large = (".bin", ".gguf", ".safetensors")
        return [
            (path.rpartition("/")[2], span) for how, path, span in self.asked if how == "GET" and path.endswith(large)
        ]

    def __enter__(self):
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)), name="scripted hub")
        self._thread.start()
        assert started.wait(20)
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        assert not self._thread.is_alive()

    async def _serve(self, started):
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.router.add_get("/api/models/{repo:[^/]+/[^/]+}/revision/{revision:.+}", self._info)
        app.router.add_get("/{repo:[^/]+/[^/]+}/resolve/{revision}/{path:.+}", self._resolve)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _info(self, request):
        repo = request.match_info["repo"]
        found, refusal = self._admit(request, repo, large=False)
        if refusal is not None:
            return refusal
        if request.match_info["revision"] not in {"main", COMMIT}:
            return _error(404, "RevisionNotFound", "Invalid rev id")
        return web.Response(text=json.dumps(found.description(repo)), content_type="application/json")

    async def _resolve(self, request):
        found, refusal = self._admit(request, request.match_info["repo"], large=True)
        if refusal is not None:
            return refusal
        path = request.match_info["path"]
        if path not in found.files:
            return _error(404, "EntryNotFound", "Entry not found")
        content = found.files[path]
        return await self._send(request, path, content, {"X-Repo-Commit": COMMIT})

    def _admit(self, request, repo, *, large):
        self.asked.append((request.method, request.path, request.headers.get("Range")))
        found = self.repositories.get(repo)
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token != self.token and token not in self.members:
            return None, _error(401, None, "Invalid credentials in Authorization header")
        if found is None:
            return None, _error(404 if token else 401, "RepoNotFound", "Repository not found")
        # Anyone may see what a gated repository lists; its files are for those who accepted the licence.
        if large and found.gated and token not in self.members:
            return None, _error(403 if token else 401, "GatedRepo", "Access to this model is restricted")
        return found, None

    async def _send(self, request, path, content, headers):
        if statuses := self.statuses.get(path):
            return web.Response(status=statuses.pop(0))
        first, stop, status = 0, len(content), 200
        span = request.headers.get("Range")
        if span and not self.ignore_ranges and request.method == "GET":
            start, _, last = span.removeprefix("bytes=").partition("-")
            first, stop = int(start), min(int(last) + 1, len(content)) if last else len(content)
            if first >= len(content):
                return web.Response(status=416, headers={"Content-Range": f"bytes */{len(content)}"})
            status = 206
            headers = headers | {"Content-Range": f"bytes {first}-{stop - 1}/{len(content)}"}
        headers = headers | {"ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        response = web.StreamResponse(status=status, headers=headers | {"Accept-Ranges": "bytes"})
        response.content_length = stop - first
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        cuts = self.cuts.get(path)
        end = min(stop, first + cuts.pop(0)) if cuts else stop
        if path in self.stalls:
            await response.write(content[first : len(content) // 2])
            self.stalled.set()
            await self._stop.wait()
        await response.write(content[first:end])
        if end < stop:
            request.transport.abort() if end == first else request.transport.close()
        return response


def _error(status, code, message):
    headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
    return web.Response(status=status, text=json.dumps({"error": message}), headers=headers)
