"""The files of the chat page: what is served, with which headers, to whom, and that nothing in them leads elsewhere."""

import hashlib
import re
from pathlib import Path

import pytest

from nanovllm.entrypoints.cli.main import build_parser
from nanovllm.entrypoints.server.page_files import FIRST, page
from nanovllm.entrypoints.server.settings import Settings
from tests.entrypoints.server.live import Live

ASSETS = Path(__file__).parents[3] / "src/nanovllm/assets/page"
KEYS = (hashlib.sha256(b"right").digest(),)


@pytest.fixture
def without():
    with Live(settings=Settings(shutdown_seconds=1.0, page=False)) as server:
        yield server


def test_the_page_and_all_of_its_files_are_served_under_a_strict_policy(live: Live):
    start = live.get("/")
    assert start.status == 200 and start.headers["content-type"] == "text/html; charset=utf-8"
    assert start.headers["cache-control"] == "no-cache"
    named = set(re.findall(r'(?:href|src)="(page/[^"]+)"', start.body.decode()))
    scripts = {f"page/{page().digest}/{path.relative_to(ASSETS).as_posix()}" for path in ASSETS.rglob("*.js")}
    assert named == {*scripts, f"page/{page().digest}/style.css"}
    for name in named:
        answer = live.get(f"/{name}")
        kind = "text/css" if name.endswith(".css") else "text/javascript"
        assert answer.status == 200 and answer.headers["content-type"] == f"{kind}; charset=utf-8"
        assert "immutable" in answer.headers["cache-control"]
        assert answer.body == (ASSETS / name.split("/", 2)[2]).read_bytes()
    for answer in (start, live.get(f"/{min(named)}")):
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["img-src"] == "'self' data:" and policy["require-trusted-types-for"] == "'script'"
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_other_paths_below_the_page_are_not_found(live: Live):
    for name in ("missing.js", "../../tiny/config.json", "%2e%2e/tiny/config.json", "index.html", "vendor/marked/LICENSE", ""):
        answer = live.get(f"/page/{page().digest}/{name}")
        assert answer.status == 404 and answer.headers["content-type"] == "application/json", name
    assert live.get("/page/0123456789abcdef/main.js").status == 404  # of another version
    assert live.post("/", {}).status == 405


def test_the_page_needs_no_key_and_everything_else_does():
    with Live(settings=Settings(shutdown_seconds=1.0, api_keys=KEYS)) as server:
        assert server.get("/").status == server.get(f"/page/{page().digest}/main.js").status == 200
        for path in ("/v1/models", "/docs", "//", "/page", "/index.html"):
            assert server.get(path).status == 401, path
        assert server.get("/page/../v1/models").status == 404  # paths are taken as they are
        assert server.get("/v1/models", authorization="Bearer right").status == 200


def test_it_can_be_left_out(without: Live):
    for path in ("/", f"/page/{page().digest}/main.js"):
        assert without.get(path).status == 404
    assert without.get("/v1/models").status == 200
    assert build_parser().parse_args(["serve", "--no-page"]).no_page and not build_parser().parse_args(["serve"]).no_page


def test_no_file_of_ours_names_another_host_or_holds_what_the_policy_refuses():
    ours = [path for path in ASSETS.rglob("*") if path.suffix in (".js", ".css", ".html") and "vendor" not in path.parts]
    for path in ours:
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"""["'(]https?://\w""", text), path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), path
    html = (ASSETS / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"\son\w+=|\sstyle=|<style|<script>", html) and FIRST in html
    assert (ASSETS / "vendor/marked/LICENSE").read_text(encoding="utf-8").startswith("# License information")
