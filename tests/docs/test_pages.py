"""Checks the pages against the code: the names on pages exist, and pages name what an operator can encounter."""

import ast
import importlib.util
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
import yaml

from bench.harness.benchmark import benchmarks
from bench.harness.results import stored
from docs.parts import filled
from docs.reference import PROGRAMS, pages
from docs.stories import ENGINES, STORIES, WHY_NOT, told
from encoder_contract import errors
from encoder_contract.settings import declared
from encoder_contract.v1 import encoder_pb2
from encoder_service.app import Server
from encoder_service.config import Config
from encoder_service.devices.model import Model
from encoder_service.metrics import PREFIX
from testing.certificates import HOSTS, Authority
from tests.pages import OF_NOW, PAGES, ROOT, code_in, name_of, named, sources
from tests.servers import server_of
from tests.test_architecture import LAYERS

OURS = (
    *("encoder_service", "prefill_client", "prefill_reference", "encoder_contract", "proto"),
    *("bench", "tests", "deploy", "docs"),
)
WRITTEN_BY_THE_READER = {"deploy/.env", "deploy/vllm/.env", "deploy/sglang/.env"}
OF_ENGINES = {
    "/update_weights", "/update_weights_from_disk", "/generate", "/collective_rpc", "/weight_checker",
    "/weights_checker",
    "/start_weight_update", "/finish_weight_update", "/pause", "/reset_prefix_cache",
}  # fmt: skip
OPERATIONS = ROOT / "docs" / "operations.md"
# Names of other projects (transformers, Kubernetes, redis, NCCL), and names of the reader's own in examples.
FOREIGN = {
    *("Qwen2VLImageProcessor", "Qwen2VLImageProcessorPil", "smart_resize", "exif_transpose", "emptyDir"),
    *("ec_connector_module_path", "encoder_cache_manager_cls", "ECExampleConnector", "ECCPUConnector"),
    *("ECMooncakeConnector", "ec_producer", "cross_encoder_cache", "mm_payload", "sparse_nccl", "cpu_shares"),
    *("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_P2P_DISABLE"),
    *("preprocess_kwargs", "max_long_side_pixel", "time_stats_json", "zmq_to_tokenizer", "zmq_to_scheduler"),
    *("SGLANG_ENCODER_MM_RECEIVER_MODE", "SGLANG_ENCODER_RECV_TIMEOUT", "MMReceiverGrpc", "TypeError"),
    *("pillow_heif", "register_heif_opener"),
    *("grpc_read_timeout", "grpc_send_timeout", "client_body_timeout"),  # of nginx
    *("maxUnavailable", "maxSurge", "MovedError", "NoPermissionError", "run_chunk", "tokens_in_kv_cache"),
}


@pytest.fixture(scope="module")
def code() -> str:
    """The text of programs, benchmarks and deployment."""
    return "\n".join(path.read_text() for path in sources())


@pytest.fixture(scope="module")
def words(code: str) -> set[str]:
    variables = {kind.environment_name(name) for _, kind in PROGRAMS for name, *_ in declared(kind)}
    return named(r"\w+", code) | {path.stem for path in sources()} | variables


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_files_exist(page: Path) -> None:
    for target in named(r"\]\((?!https?:)([^)#\s]+)", page.read_text()):
        assert (page.parent / target).exists(), target
    for code in code_in(page) if page in OF_NOW else ():
        for path in named(rf"(?<![\w./-])((?:{'|'.join(OURS)})/[\w./-]*\w/?)", code) - WRITTEN_BY_THE_READER:
            places = [ROOT / path, ROOT / "proto" / path]
            assert any(place.exists() for place in places), path
        for file in named(r"(?<![\w./-])([\w-]+\.(?:py|md|proto|yml))\b", code):
            assert any(any((ROOT / place).rglob(file)) for place in OURS if (ROOT / place).exists()), file
        for module in named(
            r"(?<![\w.])((?:bench|encoder_(?:service|contract)|prefill_(?:client|reference))\.[a-z]\w*(?:\.\w+)*)",
            code,
        ):
            assert file_or_module(module), module


def file_or_module(dotted: str) -> bool:
    """Return whether a dotted name is a module, or a name in a module."""
    parent, _, name = dotted.rpartition(".")
    for module in (dotted, parent):
        try:
            if (spec := importlib.util.find_spec(module)) is not None:
                return module == dotted or bool(
                    spec.origin and re.search(rf"\b{name}\b", Path(spec.origin).read_text())
                )
        except ModuleNotFoundError:
            continue
    return dotted.startswith("encoder_contract.v1")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_anchors_point_to_headings(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", page.read_text()):
        headings = re.findall(
            r"^#+ (.+)$", (page.parent / target if target else page).read_text(), re.MULTILINE
        )
        slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert anchor in slugs, f"{target}#{anchor}"


def test_every_page_and_picture_is_reached_from_the_readme() -> None:
    reached, ahead = set[Path](), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop().resolve()
        if page in reached:
            continue
        reached.add(page)
        if page.suffix == ".md":
            ahead += [
                page.parent / target for target in named(r"\]\((?!https?:)([^)#\s]+)", page.read_text())
            ]
    pictures = {path for path in (ROOT / "docs" / "img").iterdir() if path.suffix in (".svg", ".png")}
    assert pictures.union(PAGES) <= reached


def test_the_code_names_only_pages_that_exist(code: str) -> None:
    for path in named(r"\b(docs/[\w./-]+\.(?:md|svg|png))", code):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_identifier_a_page_names_is_in_the_code(page: Path, words: set[str]) -> None:
    """Checks words in the form of names: `snake_case`, `CamelCase`, `CAPITAL_LETTERS`. Metrics have their own test."""
    looks_like_one = (
        r"(?<![\w/-])([A-Za-z]+(?:_[A-Za-z0-9]+)+|(?:[A-Z][a-z0-9]+){2,}|[a-z]+(?:[A-Z][a-z]+)+)\b"
    )
    for code in code_in(page):
        names = {name for name in named(looks_like_one, code) if not name.startswith(f"{PREFIX}_")}
        assert names - FOREIGN <= words, code


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_http_path_a_page_names_is_served(page: Path, code: str) -> None:
    """By us, or by the engines that a page is about."""
    for span in code_in(page):
        for path in named(
            r"(?:^|[a-z0-9] |:\d+|POST |GET )(/(?!dev|run/|tmp/|v\d\b(?!/))[a-z][\w/-]*)", span
        ):
            assert f'"{path}"' in code or path in OF_ENGINES, path


@pytest.fixture
async def server(config: Config, model: Model, tmp_path: Path) -> AsyncIterator[Server]:
    """A server with TLS, which also tells when its certificates expire."""
    issued = Authority().issue(tmp_path, "server", HOSTS)
    async with server_of(config, model, tls_cert=issued.cert, tls_key=issued.key) as server:
        yield server


def exported(server: Server) -> dict[str, set[str]]:
    """Return all series of the server by their names in Prometheus, with their labels."""
    suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    series: dict[str, set[str]] = {}
    for metric in server.metrics._registry.collect():
        labels = {label for sample in metric.samples for label in sample.labels}
        series |= {f"{metric.name}{suffix}": labels for suffix in suffixes[metric.type]}
    return series


async def test_every_metric_a_page_names_is_exported_with_its_labels(server: Server) -> None:
    series = exported(server)
    for page in PAGES:
        for code in code_in(page):
            for name, selector in re.findall(rf"\b((?:{PREFIX}|process)_\w+)(?:\{{([^}}]*)\}})?", code):
                found = series.get(
                    name, series.get(f"{name}_bucket")
                )  # a histogram has no series with its own name
                assert found is not None, f"{page.name}: {name}"
                assert named(r"(\w+) ?=", selector) <= found, f"{page.name}: {name}{{{selector}}}"


def test_generated_pages_and_parts_match_their_sources() -> None:
    differing = [page.name for page, text in pages().items() if text != page.read_text()]
    assert differing == [], "run `python -m docs.reference`"


def test_a_changed_part_is_written_again_and_other_text_stays() -> None:
    page = (ROOT / "docs/contract.md").read_text()
    assert filled(page.replace("| no |", "| perhaps |")) == page
    other = "before\n<!-- bench:store -->\nits table\n<!-- /bench -->\nafter\n"
    assert filled(other) == other


async def test_the_metrics_page_has_what_a_server_exports(server: Server) -> None:
    page = (ROOT / "docs/metrics.md").read_text()
    rows = re.findall(rf"^\| `({PREFIX}_\w+)` \| (\w+) \| (.*?) \|", page, re.MULTILINE)
    families = {family.name: family for family in server.metrics._registry.collect()}
    ours = {name for name in families if name.startswith(PREFIX)}
    optional = {f"{PREFIX}_device_peak_flops"}
    assert {name.removesuffix("_total") for name, _, _ in rows} - optional == ours - optional
    for name, kind, labels in rows:
        if (family := families.get(name.removesuffix("_total"))) is not None:
            assert family.type == kind, name
            found = {label for sample in family.samples for label in sample.labels} - {"le"}
            assert not family.samples or found == named(r"`(\w+)`", labels), name


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_status_and_state_on_a_page_is_in_the_contract(page: Path, words: set[str]) -> None:
    """A word in capitals must be a gRPC code that we use, a state, or a name in the code."""
    ours = {status.name for status in errors.Status} | {"OK"}
    unused = {code.name for code in grpc.StatusCode} - ours
    states = {name.removeprefix("STATE_") for name in encoder_pb2.State.keys()}  # noqa: SIM118 - an enum, no dict
    for code in code_in(page):
        capitals = named(r"(?<![\w=./:-])([A-Z]{4,}(?:_[A-Z]+)*)\b(?![/.-])", code)
        assert not capitals & unused, code
        if " " not in code:
            assert capitals <= ours | states | words | FOREIGN, code


def test_the_contract_page_names_every_state() -> None:
    states = {name.removeprefix("STATE_") for name in encoder_pb2.State.keys()} - {"UNSPECIFIED"}  # noqa: SIM118
    assert states <= set(code_in(ROOT / "docs" / "contract.md"))


def test_every_alert_and_panel_that_the_operators_page_names_exists() -> None:
    page = OPERATIONS.read_text()
    rules = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())["groups"]
    alerts = {rule["alert"] for group in rules for rule in group["rules"]}
    assert named(r"\b(Encoder[A-Z][A-Za-z]+)\b", page) - {"EncoderClient"} == alerts
    rows = yaml.safe_load((ROOT / "deploy/grafana/panels.yml").read_text())
    panels = {panel["title"] for row in rows for panel in row["panels"]}
    elsewhere = named(r"(?m)^#+ (.+)$", page) | named(r"\*\*([A-Z][^*]+)\*\*", page)
    assert named(r"(?<!\*)\*([A-Z][^*\n]+)\*(?!\*)", page) <= panels | elsewhere


def test_the_tree_has_a_line_for_every_package_and_the_layers_are_those_of_the_code() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    tree, drawn = re.findall(r"^```\w*\n(.*?)^```", page, re.M | re.S)
    layers = [line.split("│")[0].split() for line in drawn.splitlines()]
    assert [sorted(layer) for layer in layers] == [sorted(layer) for layer in LAYERS]
    shown, top = set[str](), ""
    for line in tree.splitlines():
        indent, names = re.fullmatch(r"( *)((?:[\w/]+/ +)+)\S.*", line).groups()  # type: ignore[union-attr]
        top = top if indent else names.split()[0]
        shown |= {(top if indent else "") + name for name in names.split()}
    packages = {
        f"{path.parent.relative_to(ROOT)}/"
        for package in OURS[:5]
        for path in (ROOT / package).rglob("__init__.py")
        if len(path.relative_to(ROOT).parts) <= 3
    }
    assert packages <= shown
    assert all((ROOT / path).is_dir() for path in shown)
    assert len(tree.splitlines()) <= 30, "it is read on one screen"


def test_every_file_on_an_images_path_and_every_change_names_a_test() -> None:
    """The test that fails if the file decides otherwise; another test checks that these tests exist."""
    page = (ROOT / "docs/architecture.md").read_text()
    for heads in ("| file | what it is | test |", "| to add | edit | files | a test that notices |"):
        rows = re.findall(r"^\| .+", page.split(heads, 1)[1].split("\n\n", 1)[0], re.MULTILINE)
        assert len(rows) >= 10
        for row in rows:
            assert re.search(r" \| \[test_\w+\]\(\.\./tests/[\w/]+\.py\) \|$", row), row


def test_every_benchmark_has_a_command_that_exists() -> None:
    for each in benchmarks():
        source = (ROOT / each.typed.split()[0].replace(".", "/")).with_suffix(".py").read_text()
        given = {flag for flag in (*each.dry_run, *each.arguments) if flag[:2] == "--"}
        assert given <= named(r'"(--[a-z-]+)"', source), each.name
        assert "command_line(__doc__" in source, f"{each.name} takes --json"


def test_the_readme_is_short_and_shows_its_commands_first() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 130
    assert {line.split("#")[0].strip() for line in lines[:12]} >= {"make demo", "make test"}


def test_every_marked_attack_is_a_row_of_the_threat_model() -> None:
    """The markers of the source, counted without the generator: an attack on a method would be missed."""
    tests = (ROOT / "tests").rglob("test_*.py")
    marked = sum(len(re.findall(r"^ *@pytest\.mark\.attack\(", each.read_text(), re.M)) for each in tests)
    rows = re.findall(
        r"^\| .+ \| \[test_\w+\]\(\.\./tests/.+\) \|$",
        (ROOT / "docs/threat-model.md").read_text(),
        re.MULTILINE,
    )
    assert len(rows) == marked >= 60


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_test_a_page_links_to_exists(page: Path) -> None:
    for name, path in re.findall(r"\[(test_\w+)\]\(([\w./]+\.py)\)", page.read_text()):
        assert f"def {name}(" in (page.parent / path).read_text(), name


def test_every_test_of_what_must_hold_on_cuda_is_linked_by_the_review() -> None:
    """The markers of the source, counted without the generator."""
    tests = (ROOT / "tests").rglob("test_*.py")
    marked = sum(len(re.findall(r"^ *@pytest\.mark\.cuda$", each.read_text(), re.M)) for each in tests)
    page = (ROOT / "docs/decisions/cuda-review.md").read_text()
    assert len(named(r"\[(test_\w+)\]\(\.\./\.\./tests/", page)) == marked >= 60


def test_issue_forms_have_unique_and_required_fields() -> None:
    forms = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml"))
    assert len(forms) == 3
    for form in forms:
        asked = yaml.safe_load(form.read_text())
        assert asked["name"], form.name
        assert asked["description"], form.name
        fields = [each for each in asked["body"] if each["type"] != "markdown"]
        assert len({each["id"] for each in fields}) == len(fields) > 0
        assert any(each["validations"]["required"] for each in fields if "validations" in each)
        assert all(each["attributes"]["label"] for each in fields)


def test_every_story_of_the_engines_has_a_test_or_says_why_not() -> None:
    known = {name: notes for rows in STORIES.values() for name, notes in rows.items()}
    links = told()
    assert {name for _, name in links} <= known.keys(), "a test names a story that docs/stories.py lacks"
    for name, notes in known.items():
        for engine, note in zip(ENGINES, notes, strict=True):
            assert ((engine, name) in links) != note.startswith(WHY_NOT), f"{engine}: {name}"


def test_the_pictures_are_few_and_small() -> None:
    pictures = {path.name: path.stat().st_size for path in (ROOT / "docs/img").iterdir()}
    measured = {result.benchmark for result in stored()}
    drawn = {*("dashboard", "demo-real", "demo-timeline", "eviction", "processes", "top", "trace")}
    drawn |= {"engines"} & measured
    assert pictures.keys() == {f"{name}.svg" for name in drawn} | {"docs-site.png", "status-page.png"}
    assert {name: size for name, size in pictures.items() if size > 200_000} == {}


def literals(source: str) -> Iterator[str]:
    """Yield each string of a source as it reads at run time: implicit joins joined, values as `…`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = (each.value if isinstance(each, ast.Constant) else "…" for each in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%(?:s|d|g|\.\d[fg])", "…", node.value)


def test_every_message_on_the_troubleshooting_page_is_one_of_the_code() -> None:
    """A message may be the beginning, the middle or the end of the code's; `…` stands for any value."""
    page = (ROOT / "docs/troubleshooting.md").read_text()
    said = [
        text
        for path in (ROOT / package for package in ("encoder_service", "prefill_client", "proto"))
        for file in path.rglob("*.py")
        for text in literals(file.read_text())
    ]
    rows = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| ")]
    messages = {span for row in rows for span in re.findall(r"`([^`]{15,})`", row)}
    assert len(messages) >= 30
    for message in messages - {"encsvc_transfer_bytes_total"}:
        pattern = re.compile(".*".join(re.escape(piece) for piece in message.split("…")), re.DOTALL)
        assert any(pattern.search(text) for text in said), message
