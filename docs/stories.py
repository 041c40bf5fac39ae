"""Generates the table of docs/engines.md: what tests of vLLM and SGLang show, by the stories that these tests name."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bench.harness.benchmark import markdown
from bench.harness.results import ROOT

ENGINES = ("vllm", "sglang")
SHARED = ROOT / "tests" / "engines"
MARKS = "✓◐✗–"
UNTOLD = "◐ not tested"
WHY_NOT = (UNTOLD, "–")
"""How the note of a story begins that no test tells."""


class Story(NamedTuple):
    """Notes of the table beside the links to tests, or why there are none. One without a mark gets a ✓."""

    vllm: str = ""
    sglang: str = ""


VLLM_ALONE = Story(sglang="– of vLLM alone")
STORIES = {
    "Answers": {
        "answers equal those of the own tower": Story(),
        "requests without images": Story(),
        "requests at once": Story(),
        "an image twice in a prompt, and again in the next turn": Story(),
        "an image is encoded once": Story(),
        "other images, or another order, change the answer": Story(),
        "transparent and turned images": Story(),
        "chat completions": Story(),
        "streamed answers, and responses": Story(sglang=UNTOLD),
        "images on every route": Story(sglang=UNTOLD),
        "prefix caching": Story(),
        "prefix caching off": Story(sglang=UNTOLD),
        "a prefill waits only for the images that it reads": Story(sglang='with `"gating": "chunk"`'),
        "one service for engines of both kinds": Story(vllm="– a test of SGLang starts a vLLM too"),
    },
    "Kinds of engines": {
        "no tower in the engine": Story(sglang="✗ with the packages; the gateway feeds such an engine"),
        "tensor parallel, on one host": Story(),
        "one tensor-parallel engine over several hosts": Story(
            "– its workers cannot map the same memory", UNTOLD
        ),
        "pipeline parallel": Story("✗", "✗"),
        "several ranks with `external_launcher`": Story("✗ each has its own scheduler", VLLM_ALONE.sglang),
        "KV blocks shared by engines, or kept over a restart": Story(sglang=UNTOLD),
        "data parallel, each engine on one host": Story(
            "`--headless`, with [one key](vllm.md#names-of-images)", UNTOLD
        ),
        "several API processes": Story(f"{UNTOLD}: each submits by itself", UNTOLD),
        "prefill and decode split": Story(
            "`--kv-transfer-config`, both engines with the three flags", UNTOLD
        ),
        "render servers, and engines that take tokens": VLLM_ALONE,
        "gateways": Story(vllm="– its engine fetches the rows itself"),
        "speculative decoding": Story(f"{UNTOLD}: the connector counts the draft tokens of a step", UNTOLD),
        "LoRA on the language model": Story(sglang=UNTOLD),
        "image settings or adapters that the engine alone has": Story(
            "✗ the service encodes with the checkpoint's own", "✗"
        ),
        "quantised language weights": Story("◐ accepted", UNTOLD),
        "the engine as a class of Python": Story(
            "`LLM`, [rendered first](vllm.md#without-the-middleware)", "`Engine`, with `image_folder`"
        ),
        "image files of an allowed folder": Story(),
    },
    "Models": {
        "Qwen2.5-VL": Story(),
        "Qwen3-VL-MoE": Story(sglang=UNTOLD),
        "Qwen3.5": Story("[in parts](vllm.md#tested)", f"{UNTOLD}: no kernels for linear attention on a CPU"),
        "models of `transformers`": Story(
            "with [stand-ins](vllm.md#every-other-model)", "Qwen2-VL, by the gateway"
        ),
        "the same models without the tower in the engine": Story("✗", "Qwen2-VL, by the gateway"),
    },
    "Videos": {
        "videos of Qwen3-VL": Story(sglang="by the gateway"),
        "the frames of a video": Story(),
        "another video changes the answer": Story(),
        "a damaged video": Story(),
        "videos of Qwen3.5": Story("[in parts](vllm.md#tested)", UNTOLD),
        "videos of Qwen2.5-VL and other families": Story(
            "✗ a 400", "– by SGLang's own tower, or refused by the gateway"
        ),
    },
    "Faults": {
        "an image that cannot be encoded": Story(),
        "callers hang up": Story(),
        "without the service": Story(),
        "the service dies during a prefill": Story(),
        "the service hangs": Story(),
        "rows are lost before the prefill": Story(),
        "services are killed and started again under load": Story(sglang="behind two gateways"),
        "a service of another model": Story(),
        "a configuration that cannot work": Story(),
    },
    "New weights in a running engine": {
        "a frozen tower goes on": Story(),
        "a trained tower gets no rows of the old one": Story(),
        "weights that are written without names": Story(),
    },
    "Rows": {
        "rows arrive to the bit": Story(),
        "rows from another host": Story(sglang=UNTOLD),
        "rows from GPU to GPU": Story("◐ with a memory file instead of a GPU", UNTOLD),
    },
    "Releases": {
        "every name that we use, in every release": Story(),
        "the newest release": Story("its parts, because an engine of it needs a GPU", ""),
    },
}
"""The rows of the tables. A test names its story by `pytest.mark.story`."""

Told = dict[tuple[str, str], list[str]]
"""Links to the tests of an engine that tell a story."""


def marked(path: Path, marker: str) -> Iterator[tuple[str, str]]:
    """Yield each test of a file that has a marker of pytest, and the marker's text; a test may have several."""
    if f"mark.{marker}" not in (source := path.read_text()):
        return
    functions = [
        node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    for node in functions:
        for each in node.decorator_list:
            called, texts = (each.func, each.args) if isinstance(each, ast.Call) else (each, [])
            if ast.unparse(called) == f"pytest.mark.{marker}":
                yield node.name, ast.literal_eval(texts[0]) if texts else ""


def told() -> Told:
    """Return who tells what: tests of an engine's folder, and those of tests/engines that its files import."""
    found: Told = {}
    for engine in ENGINES:
        for path in sorted((ROOT / "tests" / engine).glob("test_*.py")):
            for file in [path, *(each for each in SHARED.glob("*.py") if _imports(path, each))]:
                for test, story in marked(file, "story"):
                    link = f"[{test}](../{file.relative_to(ROOT)})"
                    found.setdefault((engine, story), []).append(link)
    return found


def _imports(path: Path, shared: Path) -> bool:
    """Return whether a file of tests has the tests of a shared one."""
    return f"from tests.engines.{shared.stem} import *" in path.read_text()


def stories() -> str:
    """Return a table for each group of stories: a row for each, with the tests of each engine or why there are none."""
    links = told()
    tables = []
    for group, rows in STORIES.items():
        cells = [
            (
                name,
                *(
                    _cell(note, links.get((engine, name), []))
                    for engine, note in zip(ENGINES, story, strict=True)
                ),
            )
            for name, story in rows.items()
        ]
        tables.append(f"## {group}\n\n{markdown(('', 'vLLM', 'SGLang'), cells)}")
    return "\n\n".join(tables)


def _cell(note: str, tests: list[str]) -> str:
    """Return the mark, the note and the tests."""
    noted = note if note[:1] and note[0] in MARKS else f"✓ {note}".strip()
    if not tests:
        return noted
    return f"{noted}{' ' if len(noted) == 1 else ': '}{', '.join(tests)}"
