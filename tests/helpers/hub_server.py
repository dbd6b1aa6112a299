"""A Hub on loopback, for tests: what huggingface_hub asks of it, and faults on demand.

Two servers, because it matters who gets the token: ``hub`` answers the API and redirects large files to
``storage``, which is another origin, as the Hub does with its CDN.
"""

from __future__ import annotations

import base64
import hashlib
import json
import mmap
import os
import threading
from collections import defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from helpers.loopback import Handler, Listener

TOKEN = "hf_SecretTokenThatMustNotLeak"
SIGNATURE = "SecretSignatureThatMustNotLeak"
OURS = "org"
"""Whose repositories the token may write."""


@dataclass
class Content:
    """Bytes in memory, or of a file that is mapped (and may be sparse)."""

    data: bytes | mmap.mmap
    sha256: str

    @classmethod
    def of(cls, data: bytes) -> Content:
        return cls(data, hashlib.sha256(data).hexdigest())

    @classmethod
    def of_file(cls, path: Path, name: str) -> Content:
        """The file, under any name: hashing gigabytes of zeros would show nothing."""
        with path.open("rb") as file:
            return cls(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), name)

    @property
    def git(self) -> str:
        return hashlib.sha1(b"blob %d\0" % len(self.data) + self.data).hexdigest()


@dataclass
class Repo:
    """One repository with one branch."""

    files: dict[str, tuple[Content, bool]] = field(default_factory=dict)
    """Path -> content, whether it is in LFS."""
    commit: str = "c" * 40
    older: dict[str, dict[str, tuple[Content, bool]]] = field(default_factory=dict)
    private: bool = False
    gated: bool = False


@dataclass
class Fault:
    """Something to go wrong with the next ``times`` requests that ``where`` names."""

    where: str  # resolve, storage, put, batch, commit, preupload, create, plain; of a repository: info, tree
    status: int = 0  # answered instead of the real status, with ``headers`` and a body that quotes the token
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None  # the connection closes after so many bytes of the body
    drop: bool = False  # the connection closes with no answer
    times: int = 1
    skip: int = 0  # so many requests go well first


@dataclass(frozen=True)
class Request:
    server: str
    method: str
    path: str
    authorization: str | None
    range: str | None


class HubServer:
    """A running pair of servers."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, Content] = {}
        self.faults: deque[Fault] = deque()
        self.requests: list[Request] = []
        self.sent: dict[str, int] = defaultdict(int)
        """Bytes of bodies sent, by server."""
        self.plain: dict[str, Content] = {}
        """Path -> content of ``hub`` outside any repository."""
        self.linked: dict[str, str] = {}
        """Headers that are sent with the redirect to a large file, in place of the right ones."""
        self.keep = True
        """False: an uploaded file is stored with one bit flipped."""
        self.lock = threading.Lock()
        self._servers = {name: Listener(_Handler, server_name=name, state=self) for name in ("hub", "storage")}
        # The Hub's storage is another host, to which huggingface_hub shows no token.
        self._servers["storage"].url = self._servers["storage"].url.replace("127.0.0.1", "localhost")

    def url(self, name: str = "hub") -> str:
        return self._servers[name].url

    def blob_url(self, oid: str) -> str:
        return f"{self.url('storage')}/blob/{oid}?sig={SIGNATURE}"

    def close(self) -> None:
        for server in self._servers.values():
            server.close()

    def add(self, repo: str, path: str, data: bytes | Content, lfs: bool = True) -> Content:
        content = data if isinstance(data, Content) else Content.of(data)
        self.repos.setdefault(repo, Repo()).files[path] = (content, lfs)
        self.blobs[content.sha256] = content
        return content

    def fault(self, where: str, **what: Any) -> None:
        self.faults.append(Fault(where, **what))

    def take(self, where: str) -> Fault | None:
        """The fault that the present request is to suffer."""
        with self.lock:
            for fault in self.faults:
                if fault.where != where:
                    continue
                if fault.skip:
                    fault.skip -= 1
                    continue
                fault.times -= 1
                if not fault.times:
                    self.faults.remove(fault)
                return fault
        return None

    def tree(self, repo: Repo) -> list[dict[str, Any]]:
        entries = []
        for path, (content, lfs) in repo.files.items():
            size, oid = len(content.data), "f" * 40 if lfs else content.git
            entry: dict[str, Any] = {"type": "file", "path": path, "size": size, "oid": oid}
            entries.append(entry | ({"lfs": {"oid": content.sha256, "size": size, "pointerSize": 134}} if lfs else {}))
        return entries


class _Handler(Handler):
    server_name: str
    state: HubServer
    fault: Fault | None = None

    # --- answers

    def refuse(self, status: int, code: str, message: str = "no") -> None:
        self.json({"error": message}, status, X_Error_Code=code, X_Error_Message=message)

    def faulty(self, where: str) -> bool:
        """Take the fault that is due at ``where``; answer with its status, if it has one."""
        fault = self.fault = self.state.take(where)
        if fault is not None and fault.drop:
            self.close_connection = True
            self.connection.close()
            return True
        if fault is None or not fault.status:
            return False
        quoted = f"refused: {self.headers.get('authorization')}"
        self.json({"error": quoted}, fault.status, **fault.headers)
        return True

    def content(self, content: Content, **headers: str) -> None:
        """As much of it as is asked for, and as the present fault lets through."""
        size = len(content.data)
        begin, end, status = 0, size, 200
        asked = self.headers.get("range")
        if asked:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            begin, end, status = int(first), min(size, int(last) + 1) if last else size, 206
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
            if begin >= size:
                self.answer(416, Content_Range=f"bytes */{size}")
                return
        self.send_response(status)
        for name, value in {"ETag": f'"{content.sha256}"', **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(end - begin))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.fault is not None and self.fault.cut is not None:
            end, self.close_connection = min(end, begin + self.fault.cut), True
        for at in range(begin, end, 1 << 16):
            piece = content.data[at : min(at + (1 << 16), end)]
            # Before it is sent: who has it may look at once.
            self.count(len(piece))
            try:
                self.wfile.write(piece)
            except (BrokenPipeError, ConnectionResetError):
                self.count(-len(piece))
                self.close_connection = True
                return

    def count(self, sent: int) -> None:
        with self.state.lock:
            self.state.sent[self.server_name] += sent

    # --- requests

    def body(self) -> bytes:
        if self.headers.get("transfer-encoding") == "chunked":
            parts = []
            while length := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(length))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("content-length") or 0))

    def handle_any(self) -> None:
        body, parts = self.body(), urlsplit(self.path)
        path = unquote(parts.path)
        if path == "/api/agent-harnesses":  # huggingface_hub asks for it once a day, by itself
            self.json({"standardEnvVars": [], "harnesses": {}})
            return
        self.state.requests.append(
            Request(self.server_name, self.command, path, self.headers.get("authorization"), self.headers.get("range"))
        )
        if self.server_name == "storage":
            self.storage(path, parts.query, body)
        elif path in self.state.plain:
            if not self.faulty("plain"):
                self.content(self.state.plain[path])
        elif "/resolve/" in path:
            self.resolve(path)
        elif path.endswith(".git/info/lfs/objects/batch"):
            self.batch(json.loads(body))
        else:
            self.api(path, body)

    do_GET = do_HEAD = do_POST = do_PUT = handle_any  # noqa: N815 - the names http.server calls

    def storage(self, path: str, query: str, body: bytes) -> None:
        oid = path.rpartition("/")[2]
        if parse_qs(query).get("sig") != [SIGNATURE]:
            self.answer(403)
        elif self.command == "PUT":
            if not self.faulty("put"):
                self.state.blobs[oid] = Content.of(body if self.state.keep else bytes([body[0] ^ 1]) + body[1:])
                self.answer(200)
        elif not self.faulty("storage"):
            self.content(self.state.blobs[oid])

    def reachable(self, name: str) -> Repo | None:
        """The repository, or None after an answer that says why not, as the Hub says it."""
        repo = self.state.repos.get(name)
        token = self.headers.get("authorization")
        if token not in (None, f"Bearer {TOKEN}"):
            self.refuse(401, "", "Invalid credentials in Authorization header")
        elif repo is None or (repo.private and token is None):
            self.refuse(404 if token else 401, "RepoNotFound", "Repository not found")
        elif repo.gated:
            self.refuse(403, "GatedRepo", "Access to model is restricted")
        else:
            return repo
        return None

    def resolve(self, path: str) -> None:
        if self.faulty("resolve"):
            return
        name, _, rest = path.strip("/").partition("/resolve/")
        revision, _, file = rest.partition("/")
        repo = self.reachable(name)
        if repo is None:
            return
        held = repo.files if revision in ("main", repo.commit) else repo.older.get(revision)
        if held is None:
            self.refuse(404, "RevisionNotFound")
        elif file not in held:
            self.refuse(404, "EntryNotFound")
        else:
            content, lfs = held[file]
            headers = {"X-Repo-Commit": revision if revision in repo.older else repo.commit}
            if not lfs:
                self.content(content, ETag=f'"{content.git}"', **headers)
                return
            headers |= {
                "Location": self.state.blob_url(content.sha256),
                "X-Linked-Etag": f'"{content.sha256}"',
                "X-Linked-Size": str(len(content.data)),
            }
            self.answer(302, **headers | self.state.linked)

    def batch(self, asked: dict[str, Any]) -> None:
        if self.faulty("batch"):
            return
        objects = [{"oid": file["oid"], "size": file["size"]} for file in asked["objects"]]
        for entry in objects:
            if entry["oid"] not in self.state.blobs:
                entry["actions"] = {"upload": {"href": self.state.blob_url(entry["oid"])}}
        self.json({"transfer": "basic", "objects": objects})

    def api(self, path: str, body: bytes) -> None:
        parts = path.strip("/").split("/")
        if path == "/api/validate-yaml":
            self.json({"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            self.create(json.loads(body))
        elif parts[:2] != ["api", "models"] or len(parts) < 4:
            self.answer(404)
        else:
            name, what = "/".join(parts[2:4]), parts[4] if len(parts) > 4 else ""
            repo = self.reachable(name)
            if repo is not None:
                self.repo(name, repo, what, body)

    def create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        if self.faulty("create"):
            return
        if self.headers.get("authorization") != f"Bearer {TOKEN}":
            self.refuse(401, "", "Invalid credentials in Authorization header")
        elif asked["organization"] != OURS:
            self.refuse(403, "", "You don't have the rights to create a model under this namespace")
        elif name in self.state.repos:
            self.refuse(409, "", "You already created this model repo")
        else:
            private = asked.get("visibility") == "private" or bool(asked.get("private"))
            attributes = Content.of(b"*.safetensors filter=lfs\n")
            self.state.repos[name] = Repo({".gitattributes": (attributes, False)}, "0" * 40, private=private)
            self.json({"url": f"{self.state.url()}/{name}"})

    def repo(self, name: str, repo: Repo, what: str, body: bytes) -> None:
        asked = urlsplit(self.path)
        if self.faulty("info" if what in ("", "revision") else what):
            return
        if what == "revision" and asked.path.rpartition("/")[2] not in ("main", repo.commit):
            self.refuse(404, "RevisionNotFound")
        elif what in ("", "revision"):
            sized = "blobs" in asked.query
            sizes = {path: {"size": len(held.data)} if sized else {} for path, (held, _) in repo.files.items()}
            listed = [{"rfilename": path, **size} for path, size in sizes.items()]
            self.json({"id": name, "sha": repo.commit, "private": repo.private, "siblings": listed})
        elif what == "tree":
            self.json(self.state.tree(repo))
        elif what == "paths-info":
            wanted = parse_qs(body.decode())["paths"]
            self.json([entry for entry in self.state.tree(repo) if entry["path"] in wanted])
        elif name.partition("/")[0] != OURS:
            self.refuse(403, "", "Forbidden: pass `create_pr=1` as a query parameter to create a Pull Request")
        elif what == "preupload":
            self.json({"files": [self.mode(repo, file) for file in json.loads(body)["files"]]})
        elif what == "commit":
            self.commit(name, repo, [json.loads(line) for line in body.splitlines()])
        else:
            self.answer(404)

    def mode(self, repo: Repo, file: dict[str, Any]) -> dict[str, Any]:
        lfs = file["path"].endswith(".safetensors")
        held = repo.files.get(file["path"])
        oid = None if held is None else held[0].sha256 if lfs else held[0].git
        return {"path": file["path"], "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False, "oid": oid}

    def commit(self, name: str, repo: Repo, lines: list[dict[str, Any]]) -> None:
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "lfsFile":
                repo.files[value["path"]] = (self.state.blobs[value["oid"]], True)
            else:
                repo.files[value["path"]] = (Content.of(base64.b64decode(value["content"])), False)
        repo.commit = hashlib.sha1(repr(sorted(repo.files)).encode() + os.urandom(8)).hexdigest()
        self.json({"commitUrl": f"{self.state.url()}/{name}/commit/{repo.commit}", "commitOid": repo.commit})
