"""Pages in a real browser against a gateway on loopback: what Chromium sends for them is what the gateway looks at."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.browser import MISSING, find
from tests.gateway.fake import FakeBackend
from tests.gateway.support import running
from tests.patience import PATIENCE
from trtforge.core.host_check import HostCheck

LOCAL = HostCheck.of("127.0.0.1", (), with_keys=False)
PAGE = """<script>
const request = new XMLHttpRequest();
request.open("POST", "%s/completions", false);
request.setRequestHeader("Content-Type", "text/plain");
try { request.send('{"model":"ensemble","prompt":"a","max_tokens":1}'); } catch (error) { document.title = error.name; }
</script>"""


@contextmanager
def site(page: str) -> Iterator[int]:
    """The port of a server with one page."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def shown(url: str, profile: Path) -> str:
    """A page as the browser has it when it is loaded. Its DNS says that evil.example is this machine."""
    program = find()
    assert program is not None, MISSING
    options = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--dump-dom")
    resolver = "--host-resolver-rules=MAP evil.example 127.0.0.1"
    done = subprocess.run(
        [program, *options, resolver, url], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    return done.stdout


@pytest.mark.parametrize(("hosts", "reached"), [(None, 1), (LOCAL, 0)])
def test_a_page_of_another_site_makes_no_requests(hosts: HostCheck | None, reached: int, tmp_path: Path) -> None:
    """Nobody asks the gateway first: the content type is a plain one. Without the check the request is answered."""
    fake = FakeBackend()
    with running([fake], hosts=hosts) as gateway, site(PAGE % gateway.url) as port:
        assert "NetworkError" in shown(f"http://evil.example:{port}/", tmp_path)
    assert len(fake.requests) == reached


def test_a_page_whose_name_was_turned_to_this_machine_reads_nothing(tmp_path: Path) -> None:
    with running([FakeBackend()], hosts=LOCAL) as gateway:
        said = shown(f"http://evil.example:{gateway.port}/v1/models", tmp_path)
        assert "the Host 'evil.example' is not allowed" in said
        assert '"id": "ensemble"' in shown(f"http://localhost:{gateway.port}/v1/models", tmp_path)


def test_a_page_of_this_machine_makes_requests(tmp_path: Path) -> None:
    fake = FakeBackend()
    with running([fake], hosts=LOCAL) as gateway, site(PAGE % gateway.url) as port:
        assert "NetworkError" in shown(f"http://localhost:{port}/", tmp_path)  # without CORS it reads no answer
    assert len(fake.requests) == 1
