"""Architecture rules, one test each: layers, fences, no cycles, readers of the environment and the wall clock."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from testing import structure

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "encoder_contract": ROOT / "proto",
    "encoder_service": ROOT,
    "prefill_client": ROOT,
    "prefill_reference": ROOT,
}
# Each may import from those before it, except that the client and the reference service never import the server.
FOLDERS = [*PACKAGES, "testing", "demo", "bench", "tests"]

# The service from top to bottom. An entry imports only from layers below its own.
LAYERS = [
    ["cli"],
    ["app"],
    ["serving", "reload"],
    ["api"],
    ["images", "collectors"],
    ["devices", "http", "top"],
    ["families"],
    ["metrics", "vision", "limits"],
    ["cluster", "image", "transport"],
    ["rows_port"],
    ["scheduler", "store", "keys", "config", "logs", "child"],
    ["signals"],
]

# Library -> the only modules and folders that may import it.
FENCES = {
    "grpc": {"encoder_service/api/", "encoder_service/cluster/peers", "prefill_client/"},
    "grpc_health": {"encoder_service/api/server", "prefill_client/"},
    "grpc_reflection": {"encoder_service/api/server"},
    # What computes with tensors: the process of a device. The server's own process has torch for a device tier only.
    "torch": {
        "encoder_service/devices/device_inbox",
        "encoder_service/devices/device_main",
        "encoder_service/devices/model",
        "encoder_service/devices/torch_device",
        "encoder_service/devices/workers",
        "encoder_service/families/check",
        "encoder_service/families/generic",
        "encoder_service/families/model",
        "encoder_service/image/dali",
        "encoder_service/image/device_decoder",
        "encoder_service/image/known_video",
        "encoder_service/image/resize",
        "encoder_service/image/resize_triton",
        "encoder_service/store/registration",
        "encoder_service/store/tensors",
        "encoder_service/vision/",
        "prefill_client/images",
        "prefill_client/plugin/weights",
        "prefill_client/transport/device",  # rows on a GPU are tensors; imported only for the type checker
        "prefill_client/transport/rows",
        "prefill_reference/",
        "prefill_client/vllm/",
        "prefill_client/sglang/",
    },
    "redis": {"encoder_service/cluster/redis/connection"},
    "transformers": {"encoder_service/families/", "prefill_client/sglang/", "prefill_reference/"},
    "torchvision": {"encoder_service/families/"},
    "prometheus_client": {
        "encoder_service/metrics",
        "prefill_client/sglang/",
        "prefill_client/sglang_gateway/http_service",
        "prefill_client/sglang_gateway/metrics",
        "prefill_client/vllm/counts",
    },
    "nvidia": {"encoder_service/image/dali"},
    "PIL": {"encoder_service/image/decoder", "encoder_service/image/pillow", "prefill_client/sglang/"},
    "cv2": set(),
    "rich": {"encoder_service/cli", "encoder_service/top"},
    "fastapi": {"prefill_reference/"},
    "starlette": {"prefill_client/http_server", "prefill_client/sglang_gateway/", "prefill_reference/"},
    "uvicorn": {"prefill_client/http_server", "prefill_client/sglang_gateway/", "prefill_reference/"},
    "zmq": {"prefill_client/sglang_gateway/delivery"},
    "flash_attn": {"encoder_service/vision/"},
    "triton": {"encoder_service/vision/", "encoder_service/image/"},
    "safetensors": {
        "encoder_service/families/generic",
        "encoder_service/vision/load",
        "prefill_client/plugin/weights",
        "prefill_reference/",
    },
    "vllm": {"prefill_client/vllm/"},
    "sglang": {"prefill_client/sglang/"},
    "cuda": {"encoder_contract/device_memory"},
    "pickle": {"encoder_service/devices/messages"},  # between the server and its own devices
}


# Modules that use the environment. Entry points read it; the others set variables that a library reads.
ENVIRONMENT = {
    "encoder_service/cli": "reads settings",
    "prefill_client/sglang_gateway/cli": "reads settings",
    "prefill_reference/cli": "reads settings",
    "prefill_client/sglang/sglang_settings": "reads settings, which SGLang has no flag for",
    "prefill_client/vllm/name_key": "reads a secret, which vLLM has no flag for",
    "encoder_service/devices/environment": "chooses what a device's process gets",
    "encoder_service/image/dali": "sets how much DALI says",
    "encoder_service/image/decoder_child": "sets how its children keep memory",
    "encoder_service/vision/ulysses": "turns off the watchdog of NCCL, which ends all processes of a group",
    "encoder_contract/command_line": "sets how much gRPC says",
    "prefill_client/__init__": "turns off what gRPC does at a fork",
}

# Modules that read the wall clock. It may jump, so all waiting, expiry and order use the monotonic clock.
WALL_CLOCK = {
    "encoder_contract/spans": "puts spans on the clock that collectors expect",
    "encoder_service/api/caller": "refuses signatures of replicas that are a minute old, which may be replayed",
    "encoder_service/serving": "tells the starts of a replica apart",
    "encoder_service/cluster/peers": "says when a call to a replica was signed",
    "encoder_service/top": "shows how old a process is",
    "prefill_reference/http_service": "says when an answer was made",
}


def modules() -> list[Path]:
    return [path for folder in PACKAGES for path in files_in(folder)]


def files_in(folder: str) -> list[Path]:
    return [path for path in (PACKAGES.get(folder, ROOT) / folder).rglob("*.py") if "_pb2" not in path.name]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return "/".join(part for part in relative.with_suffix("").parts if part != "proto")


@cache
def imports(path: Path) -> list[str]:
    """Return the full names of all imported modules, including type-checking imports."""
    return list(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer(entry: str) -> int:
    return next(number for number, entries in enumerate(LAYERS) if entry in entries)


def test_every_entry_of_the_service_belongs_to_a_layer() -> None:
    assert sorted(structure.entries()) == sorted(entry for entries in LAYERS for entry in entries)


def all_imports() -> Iterator[tuple[str, str]]:
    """Yield importer and imported module for every import of our packages."""
    for path in modules():
        for imported in imports(path):
            yield name_of(path), imported


def test_server_and_client_never_import_each_other() -> None:
    server, clients = {"encoder_service"}, {"prefill_client", "prefill_reference"}
    refused = {"encoder_service": clients, **dict.fromkeys(clients, server)}
    assert [
        (name, imported)
        for name, imported in all_imports()
        if imported.split(".")[0] in refused.get(name.split("/")[0], set())
    ] == []


def test_the_contract_imports_neither_package_nor_a_numeric_library() -> None:
    refused = {"torch", "numpy", "encoder_service", "prefill_client", "prefill_reference"}
    assert [
        (name, imported)
        for name, imported in all_imports()
        if name.startswith("encoder_contract/") and imported.split(".")[0] in refused
    ] == []


def test_a_module_of_the_service_imports_only_from_lower_layers() -> None:
    found = []
    for name, imported in all_imports():
        package, *entry = name.split("/")
        top, *inner = imported.split(".")
        if not (package == top == "encoder_service" and inner) or entry[0] in ("__init__", inner[0]):
            continue
        if layer(entry[0]) >= layer(inner[0]):
            found.append((name, imported))
    assert found == []


def test_a_library_is_imported_only_inside_its_fence() -> None:
    assert [
        (name, imported)
        for name, imported in all_imports()
        if (top := imported.split(".")[0]) in FENCES and not name.startswith(tuple(FENCES[top]))
    ] == []


def test_only_decoder_processes_load_ffmpeg() -> None:
    """It parses what strangers send, so the server's process must not."""
    module = "encoder_service.image.open_video"
    importing = {name for name, imported in all_imports() if imported.startswith(module)}
    assert importing == {"encoder_service/image/decoder_process"}


def test_every_module_says_in_its_first_line_what_it_is() -> None:
    paths = [path for folder in FOLDERS for path in files_in(folder)]
    trees = {name_of(path): tree_of(path) for path in paths}
    assert [name for name, tree in trees.items() if tree.body and not ast.get_docstring(tree)] == []


@cache
def graph() -> dict[str, set[str]]:
    """Return which of our modules each module imports, by full names. A package stands for its `__init__`."""
    paths = {
        name_of(path).replace("/", ".").removesuffix(".__init__"): path
        for folder in FOLDERS
        for path in files_in(folder)
    }
    found: dict[str, set[str]] = {}
    for name, path in paths.items():
        named = [each for each in imports(path) if each in paths]
        # `from package import module` names both; only the module counts.
        found[name] = {n for n in named if n != name and not any(m.startswith(f"{n}.") for m in named)}
    return found


def test_no_modules_import_each_other_in_a_circle() -> None:
    in_order = [*TopologicalSorter(graph()).static_order()]  # raises CycleError, naming the circle
    assert set(in_order) == set(graph())


def test_folders_import_only_from_lower_layers() -> None:
    for name, imported in graph().items():
        allowed = set(FOLDERS[: FOLDERS.index(name.split(".")[0]) + 1])
        assert {each.split(".")[0] for each in imported} <= allowed, name


def test_only_entry_points_read_the_environment() -> None:
    touching = {name_of(path) for path in modules() if "environ" in _attributes(path)}
    assert touching == set(ENVIRONMENT)


def _attributes(path: Path) -> set[str]:
    return {node.attr for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)}


def test_nothing_depends_on_the_wall_clock() -> None:
    assert {name_of(path) for path in modules() if _reads_wall_clock(path)} == set(WALL_CLOCK)


def _reads_wall_clock(path: Path) -> bool:
    calls = ("time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today")
    return any(
        (isinstance(node, ast.ImportFrom) and node.module == "time" and _names(node) & {"time", "time_ns"})
        or (isinstance(node, ast.Attribute) and ast.unparse(node).endswith(calls))
        for node in ast.walk(tree_of(path))
    )


def _names(node: ast.ImportFrom) -> set[str]:
    return {alias.name for alias in node.names}


def test_a_file_is_named_for_its_noun() -> None:
    empty = {"util", "utils", "common", "helper", "helpers", "base", "misc", "core"}
    shadowing = {"types", "queue", "signal"}  # modules of the standard library
    assert not {path.stem for path in modules()} & (empty | shadowing)


def test_every_thread_has_its_line_in_the_page() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    _, _, table = page.partition("\n## Threads\n")
    table, _, _ = table.partition("\n## ")
    named = set(re.findall(r"`([^`]+)`", table))
    made = {name.removeprefix("those of ") for names in structure.threads().values() for name in names}
    assert named == made


def test_a_class_name_stands_for_one_class() -> None:
    assert structure.names_defined_twice() == {}
