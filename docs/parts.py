"""Generates the parts of pages that repeat something: errors, alerts, tests, decisions, folders, printed tables."""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from inspect import getdoc
from pathlib import Path

import yaml

from bench.harness.benchmark import markdown
from bench.harness.results import ROOT
from docs.stories import marked, stories
from encoder_contract import errors

DOCS = ROOT / "docs"
SERVICE = ROOT / "encoder_service"
PROMETHEUS = ROOT / "deploy" / "prometheus"
TEST_FILES = sorted((ROOT / "tests").rglob("test_*.py"))
GENERATED = re.compile(r"(<!-- (\w+)(?::(\w+))? -->\n).*?(<!-- /\2 -->)", re.DOTALL)
"""A generated part of a page between its markers, of this or another program."""

PATH = {
    "test_calls_over_the_limit_are_refused_unread_and_health_still_answers": "api/inbound",
    "test_without_tenants_the_host_is_the_holder_under_any_client_name": "api/caller",
    "test_reflection_names_the_services": "api/service",
    "test_a_call_meant_for_another_model_is_refused_with_both_fingerprints": "api/describe",
    "test_a_refused_call_is_counted_and_logged_with_its_status": "api/messages",
    "test_a_stalled_upload_ends_alone_and_frees_its_space": "api/submit",
    "test_golden_addresses_never_change": "keys",
    "test_a_known_image_is_cached_and_its_bytes_are_not_asked_for": "images",
    "test_a_greedy_caller_leaves_a_quarter_to_others": "limits",
    "test_the_holder_with_the_most_bytes_makes_room": "image/sources image/source",
    "test_a_single_node_takes_no_lease_and_starts_no_cluster_task": "cluster/cluster",
    "test_the_job_is_dropped_when_its_last_waiter_cancels": "devices/job_queue",
    "test_random_schedules_agree_with_a_naive_model": "scheduler/scheduler",
    "test_the_least_work_left_comes_first_then_chunk_order": "scheduler/policy",
    "test_each_limit_refuses_and_names_itself": "scheduler/admission",
    "test_images_are_shared_out_to_the_device_with_least_work": "devices/dispatcher devices/device_link",
    "test_no_credit_page_or_job_is_lost_in_any_order_of_events": "devices/messages devices/device_reports",
    "test_a_device_forgets_the_patches_of_withdrawn_images": "devices/device_inbox",
    "test_slow_work_is_not_a_hang_before_its_limit": "devices/workers devices/watchdog",
    "test_a_bad_image_fails_alone_in_its_batch": (
        "image/decoder image/device_decoder image/decoder_pool image/decoder_child image/shared_buffer"
    ),
    "test_a_wrong_number_of_rows_is_refused": "families/model",
    "test_a_resize_has_the_bits_of_pillow": "image/resize",
    "test_float32_rows_equal_transformers_in_one_batch_and_alone": (
        "vision/tower vision/qwen vision/layers vision/attention vision/pointwise"
    ),
    "test_a_pinned_embedding_stays_and_a_full_store_refuses_with_a_hint": "store/tiers store/tier store/pin",
    "test_while_nothing_is_learned_the_least_recently_used_item_goes_first": "store/eviction",
    "test_a_fetch_over_the_callers_share_is_refused_as_a_whole": "api/fetch",
    "test_the_callers_first_usable_transport_is_used": "transport",
    "test_images_calls_bytes_and_stages_are_counted": "metrics",
    "test_describe_tells_model_geometry_and_limits": "app serving",
}
"""The modules of encoder_service that an image passes, in order, by the test that fails if they decide otherwise."""

TREE = (
    *("proto/encoder_contract", "encoder_service", "encoder_service/*", "prefill_client", "prefill_client/*"),
    *("prefill_reference", "bench", "demo", "testing"),
)
"""The packages of the tree, as patterns."""

KERNEL = (
    *(
        "proto/encoder_contract/turns",
        "proto/encoder_contract/backoff",
        "proto/encoder_contract/certificates",
    ),
    *("encoder_service/child", "encoder_service/scheduler/policy", "encoder_service/store/eviction"),
)
"""The modules that keep promises."""

EXPORTS = {
    "clients": "EncoderClient FetchStream KeptImages BlockingClient BlockingFetch BlockingKept Description",
    "TLS and tokens": "Credentials",
    "images": "Image read_images content_digest Geometry Grid Submitted",
    "rows": "RowRequest FetchedRows read TRANSPORTS Handle SharedRows DeviceRows",
    "prompts": "expand_prompt Layout Span plan Chunk Window PrefetchSession ReadyChunk",
    "[videos](videos.md#in-your-own-engine)": "VideoSettings read_videos Video mark_pairs VideoTokens",
    "traces": "Trace traceparent",
    "versions": "__version__",
}
"""The names that `prefill_client` exports besides its errors, by what they are for."""


def errors_table() -> str:
    """Return the errors of the contract, each with its status and whether the client retries it."""
    return markdown(
        ("status", "error", "when", "retried"),
        [
            (f"`{kind.status.name}`", f"`{kind.__name__}`", _line(getdoc(kind)), _yes(kind.retryable))
            for kind in _errors()
        ],
    )


def _errors() -> list[type[errors.EncoderError]]:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    return [
        kind for kind in kinds if issubclass(kind, errors.EncoderError) and kind is not errors.EncoderError
    ]


def exports() -> str:
    """Return a row for each group of names that `prefill_client` exports."""
    kinds = " ".join(sorted(kind.__name__ for kind in _errors()))
    groups = EXPORTS | {"[errors](#errors)": f"EncoderError {kinds}"}
    rows = [(what, ", ".join(f"`{name}`" for name in names.split())) for what, names in groups.items()]
    return markdown(("for", "names"), rows)


def _line(text: str | None) -> str:
    return " ".join((text or "").split())


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def alerts() -> str:
    """Return a section for each alert: its severity and summary, of the rule, and what to do, of remedies.yml."""
    (group,) = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    remedies = yaml.safe_load((PROMETHEUS / "remedies.yml").read_text())
    return "\n".join(_alert(rule, remedies[rule["alert"]]) for rule in group["rules"])


def _alert(rule: Mapping[str, object], remedy: str) -> str:
    labels, annotations = rule["labels"], rule["annotations"]
    assert isinstance(labels, Mapping)
    assert isinstance(annotations, Mapping)
    summary = annotations["summary"].replace("{{ $labels.instance }}", "a replica")
    summary = re.sub(r"\{\{.*?\}\}", "…", summary)
    lasting = f" after {rule['for']}" if "for" in rule else ""
    title = f"### {rule['alert']}\n{labels['severity'].capitalize()}{lasting}: "
    return f"{title}{summary[0].lower()}{summary[1:]}.\n{remedy}"


def attacks() -> str:
    """Return a row for each attack: the text of its marker, and a link to the test that has it."""
    rows = [
        (text, f"[{name}](../{path.relative_to(ROOT)})")
        for path in TEST_FILES
        for name, text in marked(path, "attack")
    ]
    return markdown(("attack", "test"), rows)


def cuda() -> str:
    """Return a row for each file with tests of what must hold on CUDA: what it is about, and links to these tests."""
    rows = []
    for path in TEST_FILES:
        needs_gpu = {test for test, _ in marked(path, "gpu")}
        every = "\npytestmark = [pytest.mark.gpu" in path.read_text()
        links = [
            f"[{test}](../../{path.relative_to(ROOT)}){'†' if every or test in needs_gpu else ''}"
            for test, _ in marked(path, "cuda")
        ]
        if links:
            rows.append((first_line(path), ", ".join(links)))
    return markdown(("file", "tests"), rows)


def decisions() -> str:
    """Return a row for each page of docs/decisions: the question that is its title, and a link."""
    pages = sorted((DOCS / "decisions").glob("*.md"))
    titles = [page.read_text().partition("\n")[0].removeprefix("# ") for page in pages]
    links = [f"[{page.name}](decisions/{page.name})" for page in pages]
    return markdown(("question", "page"), sorted(zip(titles, links, strict=True)))


def path() -> str:
    """Return a row for each module that an image passes: what it is, and a link to its test."""
    folders = (ROOT / "tests" / "encoder_service", ROOT / "tests" / "prefill_client")
    tests = {file: file.read_text() for folder in folders for file in folder.rglob("test_*.py")}
    rows = []
    for test, modules in PATH.items():
        (file,) = (file for file, source in tests.items() if f"def {test}(" in source)
        link = f"[{test}](../{file.relative_to(ROOT)})"
        rows += [(f"`{each}.py`", first_line(SERVICE / f"{each}.py"), link) for each in modules.split()]
    return markdown(("file", "what it is", "test"), rows)


def tree() -> str:
    """Return a line for each package: its folder, and the first line of its docstring."""
    lines = []
    for pattern in TREE:
        for file in sorted(ROOT.glob(f"{pattern}/__init__.py")):
            folder = file.parent
            name = f"  {folder.name}/" if pattern.endswith("*") else f"{folder.relative_to(ROOT)}/"
            lines.append(f"{name:<24} {first_line(file)}")
    return _fenced(lines)


def layers() -> str:
    """Return a line for each layer of encoder_service, from top to bottom, as tests/test_architecture.py has them."""
    source = ast.parse((ROOT / "tests" / "test_architecture.py").read_text())
    (found,) = (
        node.value
        for node in source.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS"
    )
    return _fenced(map("  ".join, ast.literal_eval(found)))


def _fenced(lines: Iterable[str]) -> str:
    return "\n".join(["```", *lines, "```"])


def kernel() -> str:
    """Return a row for each module that keeps promises: its file, and the first line of its docstring."""
    return markdown(
        ("module", "what it is"), [(f"`{name}.py`", first_line(ROOT / f"{name}.py")) for name in KERNEL]
    )


def modules(folder: str) -> str:
    """Return a row for each module of a folder of encoder_service."""
    files = sorted((SERVICE / folder).glob("[!_]*.py"))
    return markdown(("file", "what it is"), [(f"`{file.name}`", first_line(file)) for file in files])


def first_line(file: Path) -> str:
    """Return the first line of the docstring of a module."""
    return (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]


def printed(program: str) -> str:
    """Return what `python -m PROGRAM` prints."""
    done = subprocess.run(
        [sys.executable, "-m", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout


PARTS: dict[str, Callable[[], str]] = {
    "errors": errors_table,
    "alerts": alerts,
    "attacks": attacks,
    "stories": stories,
    "cuda": cuda,
    "tree": tree,
    "kernel": kernel,
    "layers": layers,
    "decisions": decisions,
    "path": path,
    "exports": exports,
    "sizing": partial(printed, "bench.sizing"),
    "predicted": partial(printed, "bench.gpu_parts.predicted"),
}


def filled(page: str) -> str:
    """Return the text of a page with its parts between their markers. Parts of other programs stay as they are."""

    def fill(found: re.Match[str]) -> str:
        if found[2] == "modules":
            return f"{found[1]}{modules(found[3])}\n{found[4]}"
        return f"{found[1]}{PARTS[found[2]]().strip()}\n{found[4]}" if found[2] in PARTS else found[0]

    return GENERATED.sub(fill, page)
