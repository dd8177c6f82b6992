"""A real nginx with deploy/nginx/deltawire.conf, in front of a real bucket."""

from __future__ import annotations

import getpass
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import boto3

from deltawire_wordle.processes import free_port
from deltawire_wordle.seaweed import SeaweedFS
from servers import Server

CONF = Path(__file__).parents[1] / "deploy/nginx/deltawire.conf"


def program() -> str:
    """Debian's nginx; installed for the slow tests."""
    found = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin")
    assert found, "apt-get install nginx-light"
    return found


def open_to_readers(seaweed: SeaweedFS, bucket: str = "deltawire") -> None:
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


class Nginx(Server):
    """Starts with the configuration that is deployed, but for the addresses, the folder and what `changes` replaces."""

    def __init__(self, folder: Path, origin: str, changes: Mapping[str, str] | None = None) -> None:
        port, code = free_port(), CONF.read_text()
        for printed, meant in {
            "127.0.0.1:8330": f"127.0.0.1:{port}",
            "127.0.0.1:8333": urlsplit(origin).netloc,
            "/var/cache/nginx/deltawire": str(folder / "cache"),
            **(changes or {}),
        }.items():
            assert code.count(printed) == 1, printed
            code = code.replace(printed, meant)
        self.folder = folder
        temporary = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        lines = [
            # the folder may be this user's alone
            f"user {getpass.getuser()};",
            "daemon off;",
            f"pid {folder}/nginx.pid;",
            "events { worker_connections 4096; }",
            f"error_log {folder}/error.log notice;",
            "http {",
            "log_format all '$uri $status $upstream_status';",
            "log_subrequest on;",
            f"access_log {folder}/access.log all;",
            *(f"{name}_temp_path {folder}/{name};" for name in temporary),
            code,
            "}",
        ]
        (folder / "nginx.conf").write_text("\n".join(lines))
        self.error_log = folder / "error.log"
        command = [program(), "-c", str(folder / "nginx.conf"), "-e", str(self.error_log)]
        super().__init__(command, port, log=folder / "said")

    @property
    def answers(self) -> list[tuple[str, str, str]]:
        """Requests, also for slices: path, status, and the origin's status, which is - if the origin was not asked."""
        lines = (self.folder / "access.log").read_text().splitlines()
        return [(path, status, above) for path, status, above in (line.rsplit(" ", 2) for line in lines)]

    def at_origin(self) -> Counter[str]:
        """Number of requests that the origin got, by path."""
        return Counter(path for path, _, above in self.answers if above != "-")


@contextmanager
def in_front_of(origin: str, folder: Path, changes: Mapping[str, str] | None = None) -> Iterator[Nginx]:
    folder.mkdir(parents=True, exist_ok=True)
    with Nginx(folder, origin, changes) as server:
        server.listens()
        yield server
