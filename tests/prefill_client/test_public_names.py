"""The public API of the client: its names, their documentation, and what importing it loads."""

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import prefill_client
from docs.parts import EXPORTS
from encoder_contract import errors
from encoder_service.app import Server
from testing.clips import clip
from testing.photos import photo
from tests.pages import ROOT
from tests.processes import run

PAGES = (ROOT / "docs/prefill.md").read_text() + (ROOT / "docs/videos.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGES, re.DOTALL)

ERRORS = {
    name
    for name, each in vars(errors).items()
    if isinstance(each, type) and issubclass(each, errors.EncoderError)
}


def test_the_page_lists_the_public_names() -> None:
    """Another test checks that the page has the names of `EXPORTS`."""
    listed = [name for names in EXPORTS.values() for name in names.split()]
    assert sorted(prefill_client.__all__) == sorted([*listed, *ERRORS])
    for name in prefill_client.__all__:
        assert getattr(prefill_client, name) is not None
    assert not hasattr(prefill_client, "Encoder")


def test_every_public_class_and_method_has_a_docstring() -> None:
    public = {name: getattr(prefill_client, name) for name in prefill_client.__all__}
    public |= {
        f"{name}.{member}": value
        for name, each in public.items()
        if inspect.isclass(each) and each.__module__.startswith("prefill_client")
        for member, value in vars(each).items()
        if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property))
    }
    assert [name for name, each in public.items() if callable(each) and not inspect.getdoc(each)] == []


def test_the_examples_import_only_the_client() -> None:
    assert len(EXAMPLES) == 4, "each has a test below"
    imported = {
        node.module
        for block in EXAMPLES
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.ImportFrom)
    }
    assert {module for module in imported if module and "_" in module} == {"prefill_client"}


async def run_example(number: int, namespace: dict[str, Any], endpoint: str = "encoder:50051") -> None:
    """Run an example of the pages over these names, with a server at `endpoint`."""
    example = EXAMPLES[number].replace("encoder:50051", endpoint)
    await eval(compile(example, "example", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), namespace)


async def test_the_example_of_the_page_prefills_a_prompt(server: Server) -> None:
    prefilled = []
    namespace: dict[str, Any] = {
        "files": [photo(128, 96, 3), photo(64, 64, 4)],
        "request": "example",
        "token_ids": [1, 7, 2, 7, 3],
        "image_token": 7,
        "chunk_tokens": 8,
        "tokens_in_kv_cache": 0,
        "embed": lambda chunk, rows: (chunk.rows, sum(map(len, rows))),
        "run": lambda chunk, inputs: prefilled.append((chunk.tokens, *inputs)),
    }
    await run_example(0, namespace, server.endpoint)
    await namespace["client"].close()
    images = namespace["submitted"]
    assert sum(tokens for tokens, _, _ in prefilled) == 3 + sum(image.tokens for image in images)
    assert all(wanted == got for _, wanted, got in prefilled)
    assert sum(got for _, _, got in prefilled) == sum(image.tokens for image in images)


async def test_the_example_of_errors_names_the_image_and_how_long_to_wait(
    client: prefill_client.EncoderClient,
) -> None:
    namespace: dict[str, Any] = {"client": client, "files": [photo(64, 64, 4), b"no image"]}
    await run_example(1, namespace)
    assert (namespace["status"], namespace["headers"]) == (400, {})
    assert namespace["text"].startswith("image 1: not an image of a supported format")
    full = errors.OverloadedError("the queue is full", retry_after_ms=1200)
    assert namespace["answer"](full) == (503, {"Retry-After": "2"}, "the queue is full")
    assert namespace["answer"](errors.InvalidRequestError("a bug of the caller"))[0] == 500


async def test_the_example_of_kept_images_gets_their_rows(client: prefill_client.EncoderClient) -> None:
    used: list[prefill_client.FetchedRows] = []
    namespace: dict[str, Any] = {
        "client": client,
        "files": [photo(128, 96, 5), photo(64, 64, 6)],
        "use": used.append,
        "RowRequest": prefill_client.RowRequest,
    }
    await run_example(2, namespace)
    assert [rows.error for rows in used] == [None] * 2


async def test_the_example_of_videos_lays_out_a_prompt(
    client: prefill_client.EncoderClient, checkpoint: Path
) -> None:
    class Tokenizer:
        def encode(self, text: str) -> list[int]:
            return list(text.encode())

    namespace: dict[str, Any] = {
        "checkpoint": checkpoint,
        "client": client,
        "file": clip("mp4", frames=30, fps=10.0),
        "token_ids": [301, 303, 302, 3],
        "image_token": 300,
        "vision_start": 301,
        "vision_end": 302,
        "video_token": 303,
        "tokenizer": Tokenizer(),
    }
    await run_example(3, namespace)
    layout, video = namespace["layout"], namespace["video"]
    assert len(layout.spans) == len(namespace["images"]) == len(video.images) > 1
    for span, seconds in zip(layout.spans, video.clip.seconds, strict=True):
        text = [*f"<{seconds:.1f} seconds>".encode(), 301]
        assert layout.token_ids[span.begin - len(text) : span.begin].tolist() == text
        assert layout.token_ids[span.end] == 302


def test_importing_the_client_loads_no_heavy_modules() -> None:
    heavy = "{'torch', 'grpc', 'PIL', 'redis', 'encoder_service', 'prefill_reference', 'transformers'}"
    script = f"import sys, prefill_client; print({heavy} & set(sys.modules))"
    assert run("python", "-c", script).stdout == "set()\n"
