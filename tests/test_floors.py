"""The structure: imports only downward, rooms are strangers, and fences around libraries."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"encoder_contract": ROOT / "proto", "encoder_service": ROOT, "prefill_client": ROOT}

# From the top down; a module imports only from floors below its own. Rooms share a floor: strangers.
FLOORS = [
    ["cli"],
    ["top", "operator_client"],
    ["server"],
    ["listener"],
    ["service", "admin", "description", "watch", "readings", "scrape"],
    ["submitting", "fetching"],
    ["wire", "calls", "peers", "model"],
    ["encoder"],
    ["pipeline", "fleet", "hand_over"],
    ["announcer", "stages"],
    ["desk"],
    [
        "decode",
        "preprocess",
        "vision",
        "store",
        "index",
        "scheduler",
        "sources",
        "refusals",
        "intake",
        "arrivals",
        "uploads",
        "lanes",
        "ports",
    ],
    ["processor", "address", "config", "logs", "metrics", "landing", "loop_lag", "incidents", "allocator"],
]

# Library -> the only places that may import it.
FENCES = {
    "grpc": {
        "encoder_service/listener",
        "encoder_service/service",
        "encoder_service/wire",
        "encoder_service/peers",
        "encoder_service/admin",
        "encoder_service/operator_client",
        "prefill_client/",
    },
    "grpc_health": {"encoder_service/listener", "prefill_client/"},
    "redis": {"encoder_service/index/"},
    "transformers": {"prefill_client/reference/"},
    "prometheus_client": {
        "encoder_service/metrics",
        "encoder_service/scrape",
        "prefill_client/reference/",
    },
    "nvidia": {"encoder_service/decode"},
    "flash_attn": {"encoder_service/vision/"},
    "safetensors": {"encoder_service/vision/", "prefill_client/reference/"},
    "pickle": set(),
}


def modules() -> list[Path]:
    files = [path for package, root in PACKAGES.items() for path in (root / package).rglob("*.py")]
    return [path for path in files if "_pb2" not in path.name]


def name_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return "/".join(part for part in relative.with_suffix("").parts if part != "proto")


def imports(path: Path) -> Iterator[str]:
    """Every imported module by its full name; type-checking imports count too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def floor(room: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if room in rooms)


def test_every_module_of_the_server_stands_on_a_floor() -> None:
    rooms = {
        name_of(path).split("/")[1] for path in modules() if name_of(path).startswith("encoder_service/")
    }
    assert rooms - {"__init__", "__main__"} == {room for rooms in FLOORS for room in rooms}


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_a_module_imports_only_from_lower_floors_and_inside_the_fences(path: Path) -> None:
    package, *rest = name_of(path).split("/")
    for imported in imports(path):
        top, *inner = imported.split(".")
        if top in ("encoder_service", "prefill_client") and top != package:
            raise AssertionError(f"{name_of(path)} imports {imported}: server and client never meet")
        if package == "encoder_contract":
            assert top not in ("torch", "numpy", "encoder_service", "prefill_client"), imported
        if package == top == "encoder_service" and inner and rest[0] != "__init__" and inner[0] != rest[0]:
            assert floor(rest[0]) < floor(inner[0]), (
                f"{name_of(path)} imports {imported} of the same floor or above"
            )
        if top in FENCES:
            assert any(name_of(path).startswith(allowed) for allowed in FENCES[top]), (
                f"{name_of(path)} imports {imported}: outside its fence"
            )


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_every_module_says_in_its_first_line_what_it_is(path: Path) -> None:
    text = path.read_text()
    assert not text.strip() or ast.get_docstring(ast.parse(text)), name_of(path)
