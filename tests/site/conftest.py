"""The site, built once for all tests of this folder, and a browser that looks at it."""

from __future__ import annotations

import functools
import http.server
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from site_pages import ROOT, Site

BUILD_S = 120
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Site:
    """The site as `make docs` builds it, which fails at a warning after the build: a test of its own asks for none."""
    for module in ("material", "mkdocs_static_i18n"):
        pytest.importorskip(module, reason="the site needs the extra `docs`: pip install -e .[docs]")
    folder = tmp_path_factory.mktemp("site")
    command = ["make", "--no-print-directory", "docs", f"PY={sys.executable}", f"SITE={folder}"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=BUILD_S)
    log = made.stdout + made.stderr
    if made.returncode:
        log += f"ERROR {' '.join(command)} ended with status {made.returncode}\n"
    assert (folder / "index.html").exists(), log
    return Site(folder, log)


@pytest.fixture(scope="session")
def address(site) -> Iterator[str]:
    """Where the site is served while the tests run."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Says nothing: a test says what is missing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site.folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[object]:
    """A headless Chromium, for one module: meanwhile an event loop runs in this thread, which other tests mind."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on the path: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra `docs`: pip install -e .[docs]")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()
