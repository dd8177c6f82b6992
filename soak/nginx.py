"""A real nginx with deploy/nginx/deltawire.conf, in front of a bucket. For the soak, tests and benchmarks."""

from __future__ import annotations

import getpass
import json
import shutil
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import boto3

from deltawire_wordle.processes import free_port
from deltawire_wordle.seaweed import SeaweedFS
from soak.certificate import certificate_of

CONF = Path(__file__).parents[1] / "deploy/nginx/deltawire.conf"

_UPSTREAM, _HEAD = "upstream deltawire_bucket {", "proxy_cache_valid 200 1s;"
_SLICES = """        slice 8m;
        proxy_cache_key $uri$slice_range;
"""

WRONG = {
    "stale head": {_HEAD: "proxy_cache_valid 200 1m;"},
    "fixed etag": {
        _HEAD: f"""{_HEAD} proxy_hide_header ETag; add_header ETag '"same"';
        if ($http_if_none_match = '"same"') {{ return 304; }}"""
    },
    "kept 404": {"proxy_cache_valid 200 1m;": "proxy_cache_valid 200 404 3s;"},
    "compressed": {"gzip off;": "gzip on; gzip_types *; gzip_min_length 1; gzip_proxied any;"},
    "no ranges": {"proxy_set_header Range $slice_range;": "max_ranges 0;", "        slice 8m;\n": ""},
    "short ranges": {
        # a tenth of what is asked for
        _UPSTREAM: 'map $http_range $short { "~^(bytes=[0-9]+-[0-9]+)[0-9]$" $1; default $http_range; }\n' + _UPSTREAM,
        "proxy_set_header Range $slice_range;": "proxy_set_header Range $short;",
        _SLICES: "        proxy_cache off;\n",
    },
    "certificate": {"/trusted.conf": "/other.conf"},
    "redirect": {"    if ($request_method": "    return 302 http://elsewhere.invalid$uri;\n    if ($request_method"},
    "unavailable": {
        "    if ($request_method": "    add_header Retry-After 2 always; return 503;\n    if ($request_method"
    },
}
"""Ways to configure it wrongly: what of the configuration becomes what."""


def program() -> str | None:
    """Path of Debian's nginx; None where there is none."""
    return shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin")


def let_read(seaweed: SeaweedFS, bucket: str) -> None:
    """Let everybody who reaches the server read the bucket and list it, as a policy for nginx's address would."""
    client = boto3.client(
        "s3",
        endpoint_url=seaweed.endpoint,
        aws_access_key_id=seaweed.access_key,
        aws_secret_access_key=seaweed.secret_key,
        region_name="us-east-1",
    )
    allowed = [("s3:GetObject", f"arn:aws:s3:::{bucket}/*"), ("s3:ListBucket", f"arn:aws:s3:::{bucket}")]
    rules = [{"Effect": "Allow", "Principal": "*", "Action": [what], "Resource": [where]} for what, where in allowed]
    client.put_bucket_policy(Bucket=bucket, Policy=json.dumps({"Version": "2012-10-17", "Statement": rules}))


@dataclass(frozen=True, slots=True)
class Answer:
    """A request that nginx answered, also for a slice of an object."""

    at: float
    """Seconds since 1970, when the answer was complete."""
    status: int
    origin: str
    """The origin's status; - if the origin was not asked."""
    bytes: int
    """What was sent, with headers."""
    path: str

    @property
    def is_of_origin(self) -> bool:
        """Whether the origin was asked."""
        return self.origin != "-"


class Nginx:
    """An nginx with the configuration that is deployed, but for addresses, folders and what `changes` replaces.

    folder     for its configuration, cache and logs
    origin     port of the bucket on this machine
    tls        whether it is https: clients trust `certificate`
    """

    def __init__(
        self, folder: Path, origin: int, changes: Mapping[str, str] | None = None, *, tls: bool = False
    ) -> None:
        found = program()
        if found is None:
            raise FileNotFoundError("nginx is not here: apt-get install nginx-light")
        self.folder, self.port, self._origin = folder, free_port(), origin
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        folder.mkdir(parents=True, exist_ok=True)
        self.certificate = folder / "trusted.pem"
        self._listen = f"listen 127.0.0.1:{self.port};"
        if tls:
            self._listen = f"listen 127.0.0.1:{self.port} ssl; include {folder}/trusted.conf;"
            for name in ("trusted", "other"):
                pem = certificate_of("127.0.0.1", folder / f"{name}.pem")
                (folder / f"{name}.conf").write_text(f"ssl_certificate {pem}; ssl_certificate_key {pem};\n")
        self._program = found
        self._write(changes or {})
        self.start()

    def start(self) -> None:
        """Start it, also again after `close`, at the same address."""
        with open(self.folder / "said", "wb") as said:
            self._process = subprocess.Popen(
                [self._program, "-c", f"{self.folder}/nginx.conf", "-e", f"{self.folder}/error.log"],
                stdout=said,
                stderr=said,
            )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def configure(self, changes: Mapping[str, str]) -> None:
        """Go on with other changes than those it was started with."""
        self._write(changes)
        self._process.send_signal(signal.SIGHUP)

    def _write(self, changes: Mapping[str, str]) -> None:
        folder, code = self.folder, CONF.read_text()
        for printed, meant in {
            "listen 127.0.0.1:8330;": self._listen,
            "127.0.0.1:8333": f"127.0.0.1:{self._origin}",
            "/var/cache/nginx/deltawire": str(folder / "cache"),
            **changes,
        }.items():
            if code.count(printed) != 1:
                raise ValueError(f"{CONF.name} has {printed!r} {code.count(printed)} times")
            code = code.replace(printed, meant)
        temporary = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        lines = [
            # the folder may be this user's alone
            f"user {getpass.getuser()};",
            "daemon off;",
            f"pid {folder}/nginx.pid;",
            "events { worker_connections 8192; }",
            f"error_log {folder}/error.log notice;",
            "http {",
            "log_format all '$msec\t$status\t$upstream_status\t$bytes_sent\t$uri';",
            "log_subrequest on;",
            f"access_log {folder}/access.log all;",
            *(f"{name}_temp_path {folder}/{name};" for name in temporary),
            code,
            "}",
        ]
        (folder / "nginx.conf").write_text("\n".join(lines))

    def _wait(self) -> None:
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=5):
                return
            if self._process.poll() is not None:
                raise RuntimeError(f"nginx has ended: {(self.folder / 'said').read_text()[-2000:]}")
            time.sleep(0.02)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def answers(self) -> list[Answer]:
        """All requests so far, in their order."""
        rows = (line.split("\t", 4) for line in (self.folder / "access.log").read_text().splitlines())
        return [Answer(float(at), int(status), above, int(sent), path) for at, status, above, sent, path in rows]

    def at_origin(self) -> Counter[str]:
        """Number of requests that the origin got, by path."""
        return Counter(answer.path for answer in self.answers if answer.is_of_origin)

    def close(self) -> None:
        """End it, with its workers."""
        # SIGTERM: the master ends its workers, which a SIGKILL would leave behind
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Nginx:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
