"""The chat page: alone in its file, and safe with what a model writes."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import vllm_triton.serve

PAGE = (Path(vllm_triton.serve.__file__).parent / "chat.html").read_text(encoding="utf-8")
SCRIPT = re.search(r"<script>(.*)</script>", PAGE, re.DOTALL).group(1)

# Enough of a document for render(): nodes that know their children and their text.
DOCUMENT = """
class Node_ {
  constructor(tag) { this.tag = tag; this.children = []; }
  set textContent(text) { this.children = [text]; }
  replaceChildren() { this.children = []; }
  append(...nodes) { this.children.push(...nodes); }
  appendChild(node) { this.children.push(node); return node; }
  toJSON() { return [this.tag, ...this.children]; }
}
const document = { createElement: (tag) => new Node_(tag) };
"""


def run_script(code):
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node to run the page's script")
    done = subprocess.run([node, "-"], input=code, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def function(name):
    return re.search(rf"^(?:async )?function\*? {name}\(.*?^}}$", SCRIPT, re.DOTALL | re.MULTILINE).group(0)


def test_page_is_served(server):
    response = server.http.get("/")
    assert response.text == PAGE
    assert response.headers["content-type"].startswith("text/html")


def test_page_needs_nothing_from_elsewhere():
    assert not re.search(r"https?://|//cdn|@import|url\(|\bsrc=", PAGE)
    assert re.findall(r"<link[^>]*>", PAGE) == ['<link rel="icon" href="data:,">']


def test_model_text_never_becomes_markup():
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", SCRIPT)


def test_script_has_no_syntax_error():
    run_script("new Function(" + json.dumps(SCRIPT) + ")")


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("plain", '[["p","plain"]]'),
        ("<b>a</b>", '[["p","<b>a</b>"]]'),
        ("use `x` now", '[["p","use ",["code","x"]," now"]]'),
        ("a\n```python\nx = `1`\n```\nb", '[["p","a"],["pre",["code","x = `1`"]],["p","b"]]'),
        ("```\nstill open", '[["pre",["code","still open"]]]'),
    ],
)
def test_rendering(text, nodes):
    code = DOCUMENT + function("render")
    code += f"const target = new Node_('div'); render(target, {json.dumps(text)});"
    assert run_script(code + "console.log(JSON.stringify(target.children));") == nodes


def test_events_may_be_cut_anywhere():
    code = function("readEvents")
    code += """
    const text = 'data: {"a":"é"}\\n\\ndata: {"a":2}\\n\\ndata: [DONE]\\n\\n';
    (async () => {
      for (const size of [1, 3, 7, 1000]) {
        const bytes = new TextEncoder().encode(text), seen = [];
        const pieces = new ReadableStream({ start(control) {
          for (let at = 0; at < bytes.length; at += size) control.enqueue(bytes.slice(at, at + size));
          control.close();
        } });
        for await (const event of readEvents(pieces)) seen.push(event.a);
        console.log(JSON.stringify(seen));
      }
    })();
    """
    assert run_script(code).splitlines() == ['["é",2]'] * 4
