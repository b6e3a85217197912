"""The site of `make site`: pages and the API reference in a browser (`make test-extras`)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from moecore.cli import main

pytest.importorskip("mkdocstrings", reason="the site's generator, which extra `site` has")
ROOT = Path(__file__).parent.parent
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
OPTIONS += ["--disable-sync", "--disable-background-networking", "--disable-component-update"]
OPTIONS += ["--virtual-time-budget=8000"]


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the site, on a port of this host."""
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True)
    assert "(guide.md)" in (folder / "llms.txt").read_text()
    assert "zero-bubble" in (folder / "search" / "search_index.json").read_text()
    handler = partial(QuietHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def render(url: str, folder: Path) -> str:
    """Return the page's HTML after its scripts have run."""
    assert BROWSER is not None, "install chromium"
    command = [BROWSER, *OPTIONS, f"--user-data-dir={folder}", "--dump-dom", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.parametrize(
    ("page", "texts"),
    [
        ("guide/", ["<h1 id=", "parallelize_moe", 'href="../planning/"']),
        ("findings/", ["<h1 id=", "<table>", 'href="../performance/']),
        ("reference/", ['id="moecore.parallelize_moe"', "Raises", "RouterReplay"]),
    ],
    ids=["guide", "findings", "reference"],
)
def test_pages_in_a_browser(site: str, page: str, texts: list[str], tmp_path: Path) -> None:
    html = render(f"{site}/{page}", tmp_path)
    assert [text for text in texts if text not in html] == []


def test_a_plan_page_in_a_browser(tmp_path: Path) -> None:
    """A file without a server: the given plan first, and another choice when it is selected."""
    page, profile = tmp_path / "plan.html", tmp_path / "profile"
    main(["plan", "--preset", "tiny", "--gpus", "4", "--pp", "2", "--html", str(page)])
    text = page.read_text()
    data = json.loads(text.split('type="application/json">')[1].split("</script>")[0])
    lines = [data["choices"][key]["line"] for key in (data["given"], "8192,2,nothing")]
    html = render(page.as_uri(), profile)
    assert html.count("<select>") == 3 and f"<p>{lines[0]}</p>" in html and "Stages</h2>" in html
    select = "const [a, b] = selects; a.value = 8192; b.value = 2; b.onchange()"
    page.write_text(text.replace("</body>", f"<script>{select}</script></body>"))
    html = render(page.as_uri(), profile)
    assert f"<p>{lines[1]}</p>" in html and "Stages</h2>" not in html
    kinds = [kind for rank in data["choices"]["8192,2,nothing"]["ranks"] for kind in rank]
    assert html.split("</main>")[0].count("<rect") == len(kinds) and lines[0] != lines[1]
